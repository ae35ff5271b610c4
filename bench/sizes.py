"""The sizes that kernels are measured at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A model's widths, and how much of each to measure."""

    hidden: int
    inner: int
    n_experts: int
    """That the gate chooses among."""
    k: int
    head: int
    """Outputs of the piece of the head that stands for it."""
    out: int
    """Outputs of the single matrices."""
    n_heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    decode_contexts: tuple[int, ...]
    index_context: int
    prefill_rows: int
    prefill_context: int
    expert_rows: tuple[int, ...]
    """Rows per expert of the many-row cases."""
    many_rows: int
    gqa: tuple[int, int, int, int]
    """Hidden width, query heads, key heads, components of a head: of a family with grouped queries."""
    delta: tuple[int, int, int, int, int]
    """Hidden width, key heads, value heads, components of a key and of a value: of a family with a gated delta rule."""


SIZES: Mapping[str, Sizes] = {
    "glm-5.2": Sizes(
        hidden=6144, inner=2048, n_experts=256, k=8, head=8192, out=2048,
        n_heads=64, q_rank=2048, kv_rank=512, nope=192, rope=64, v_dim=256,
        index_heads=32, index_dim=128, index_topk=2048,
        decode_contexts=(512, 4096), index_context=16384, prefill_rows=64, prefill_context=1024,
        expert_rows=(16, 64, 256), many_rows=128,
        gqa=(2048, 32, 4, 128), delta=(2048, 16, 32, 128, 128),
    ),
    "tiny": Sizes(
        hidden=128, inner=64, n_experts=16, k=4, head=256, out=64,
        n_heads=4, q_rank=64, kv_rank=64, nope=32, rope=16, v_dim=32,
        index_heads=4, index_dim=32, index_topk=64,
        decode_contexts=(64, 200), index_context=256, prefill_rows=8, prefill_context=64,
        expert_rows=(4, 16), many_rows=16,
        gqa=(64, 4, 2, 32), delta=(64, 2, 4, 16, 16),
    ),
}  # fmt: skip
"""Name -> sizes: GLM-5.2's own (gqa: Qwen3-30B-A3B's, delta: Qwen3.5-35B-A3B's), and small ones: whether everything works."""
