"""Cases of latent attention: whole layers as they decode, and the walk over the keys and the indexer by themselves.

With 64 heads a cached position of 1,152 bytes costs 70,000 multiply-adds, so on most processors attention over the cache
is bound by arithmetic and only the projections by memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator

import numpy as np

from bench.measure import Case
from bench.roofline import Work
from bench.sizes import Sizes
from bench.weights import Weights, aligned, matrix_bytes
from native.attention import KV_BLOCK, AttnLayer, AttnStep, attn_forward, kv_row_bytes
from native.library import Pool
from native.matrix import ACT_F32, Matrix
from native.memory import HugeBuffer

KV_ITEM = 2
"""Bytes of a bf16 cache value."""
_SCALE = 0x3C10
"""bf16, 0.0088: an int8 group of random bytes is as large as random numbers are."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which matrices a layer has: (name, format, out, in, how many in the stack)."""

    matrices: tuple[tuple[str, str, int, int, int], ...]

    @property
    def n_bytes(self) -> int:
        return sum(matrix_bytes(fmt, out, in_, stack) for _, fmt, out, in_, stack in self.matrices)

    def ops(self, n_rows: int) -> dict[str, int]:
        """Operations of the projections: int4 for q4, f32 for f32."""
        found = {"int4": 0, "f32": 0}
        for _, fmt, out, in_, stack in self.matrices:
            found["int4" if fmt == "q4" else "f32"] += 2 * out * in_ * stack * n_rows
        return found


def layout_of(sizes: Sizes, index_kind: str) -> Layout:
    """The int4 matrices of one layer; the indexer's own only where it has them."""
    s = sizes
    found = [
        ("q_a", "q4", s.q_rank, s.hidden, 1),
        ("q_b", "q4", s.n_heads * (s.nope + s.rope), s.q_rank, 1),
        ("kv_a", "q4", s.kv_rank + s.rope, s.hidden, 1),
        ("k_b", "q4", s.kv_rank, s.nope, s.n_heads),
        ("v_b", "q4", s.v_dim, s.kv_rank, s.n_heads),
        ("o", "q4", s.hidden, s.n_heads * s.v_dim, 1),
    ]
    if index_kind == "full":
        found += [
            ("index_wq_b", "q4", s.index_heads * s.index_dim, s.q_rank, 1),
            ("index_wk", "q4", s.index_dim, s.hidden, 1),
            ("index_weights", "f32", s.index_heads, s.hidden, 1),
        ]
    return Layout(tuple(found))


def make_layer(sizes: Sizes, index_kind: str, weights: Weights) -> AttnLayer:
    """One layer of random weights and plain norms."""
    s = sizes
    matrices: dict[str, Matrix] = {
        name: weights.matrix(fmt, out, in_, ACT_F32 if fmt == "f32" else None, stack)
        for name, fmt, out, in_, stack in layout_of(s, index_kind).matrices
    }
    norms = {"input_norm": s.hidden, "q_a_norm": s.q_rank, "kv_a_norm": s.kv_rank, "post_norm": s.hidden}
    vectors = {name: np.ones(width, np.float32) for name, width in norms.items()}
    if index_kind == "full":
        vectors |= {
            "index_k_norm_w": np.ones(s.index_dim, np.float32),
            "index_k_norm_b": np.zeros(s.index_dim, np.float32),
        }
    return AttnLayer(
        hidden=s.hidden, n_heads=s.n_heads, q_rank=s.q_rank, kv_rank=s.kv_rank, nope=s.nope, rope=s.rope, v_dim=s.v_dim,
        rope_interleave=1, rms_eps=1e-5, latent_eps=1e-5, softmax_scale=(s.nope + s.rope) ** -0.5, index_kind=index_kind,
        index_heads=s.index_heads, index_dim=s.index_dim, index_topk=s.index_topk, index_rope_interleave=1,
        index_norm_eps=1e-6, rope_amplitude=1.0,
        inv_freq=(8e6 ** (-np.arange(s.rope // 2) * 2 / s.rope)).astype(np.float32), **vectors, **matrices,
    )  # fmt: skip


class Cache:
    """KV caches of several sequences, each with `context` positions in front of `n_rows` new rows; filled."""

    def __init__(
        self, sizes: Sizes, index_kind: str, context: int, n_rows: int, n_sequences: int, kv_format: str
    ) -> None:
        self.context, self.n_rows, self.kv_format = context, n_rows, kv_format
        blocks = blocks_of(context, n_rows)
        self.n_blocks = blocks * n_sequences
        widths = (sizes.kv_rank + sizes.rope, sizes.index_dim)
        parts = [self.n_blocks * KV_BLOCK * kv_row_bytes(kv_format, width) for width in widths]
        self.buffer = filled(sum(parts))
        self.kv, index_k = self.buffer.array[: parts[0]], self.buffer.array[parts[0] : sum(parts)]
        self.index_k = index_k if index_kind == "full" else None
        if kv_format == "int8":
            for cache, width in zip((self.kv, index_k), widths):
                cache.reshape(self.n_blocks, -1)[:, KV_BLOCK * width :].view(np.uint16)[:] = _SCALE
        self.tables = np.arange(self.n_blocks, dtype=np.int32).reshape(n_sequences, 1, blocks)

    def close(self) -> None:
        self.buffer.close()


def filled(n_bytes: int) -> HugeBuffer:
    """Memory full of random bf16 numbers."""
    buffer = HugeBuffer(n_bytes)
    values = np.random.default_rng(4).standard_normal(1 << 16).astype(np.float32).view(np.uint32) >> 16
    flat = buffer.array.view(np.uint16)
    for begin in range(0, flat.size, values.size):
        part = flat[begin : begin + values.size]
        part[:] = values[: part.size]
    return buffer


def blocks_of(context: int, n_rows: int) -> int:
    return -(-(context + n_rows) // KV_BLOCK)


class AttentionCall:
    """One layer over one sequence's rows; every call takes the next layer and the next sequence."""

    def __init__(self, pool: Pool, sizes: Sizes, layers: list[AttnLayer], cache: Cache) -> None:
        self.pool, self.layers = pool, itertools.cycle(layers)
        n = cache.n_rows
        x = np.random.default_rng(5).standard_normal((n, sizes.hidden)).astype(np.float32)
        selected, n_selected = np.zeros((n, sizes.index_topk), np.int32), np.full(n, -1, np.int32)
        self.step = AttnStep(
            kv=cache.kv, index_k=cache.index_k, kv_format=cache.kv_format, n_blocks=cache.n_blocks, selected=selected,
            n_selected=n_selected, x=x,
        )  # fmt: skip
        self.position = np.arange(cache.context, cache.context + n, dtype=np.int32)
        self.seq, self.hidden = np.zeros(n, np.int32), np.empty_like(x)
        self.tables = itertools.cycle(list(cache.tables))

    def __call__(self) -> None:
        self.step.set_rows(len(self.position), self.position, self.seq, next(self.tables), self.hidden)
        attn_forward(self.pool, next(self.layers), self.step)


def keys_seen(context: int, n_rows: int) -> int:
    """Positions that `n_rows` rows behind `context` attend to, their own included."""
    return n_rows * context + n_rows * (n_rows + 1) // 2


def attention_work(sizes: Sizes, context: int, n_rows: int, kv_format: str = "bf16") -> Work:
    """A dense layer: weights and cache once; per key and head two products of the latent and one of the rope part."""
    layout = layout_of(sizes, "none")
    ops = layout.ops(n_rows)
    _add_keys(ops, sizes, keys_seen(context, n_rows), kv_format)
    cache = (context + n_rows) * kv_row_bytes(kv_format, sizes.kv_rank + sizes.rope)
    return Work(layout.n_bytes + cache + 2 * n_rows * sizes.hidden * 4, ops)


def _add_keys(ops: dict[str, int], sizes: Sizes, n_keys: int, kv_format: str) -> None:
    """Scores and weighted sums. Over an int8 cache a sum's 16-bit probabilities cost two int8 products each."""
    latent = 2 * sizes.kv_rank + sizes.rope + (sizes.kv_rank if kv_format == "int8" else 0)
    kind = "int8" if kv_format == "int8" else "f32"
    ops[kind] = ops.get(kind, 0) + 2 * n_keys * sizes.n_heads * latent


def index_work(sizes: Sizes, context: int, kv_format: str = "bf16") -> Work:
    """One row of an indexer layer: every cached key scored, the best attended to."""
    layout = layout_of(sizes, "full")
    ops = layout.ops(1)
    chosen = min(sizes.index_topk, context + 1)
    kind = "int8" if kv_format == "int8" else "f32"
    ops[kind] = ops.get(kind, 0) + 2 * (context + 1) * sizes.index_heads * sizes.index_dim
    _add_keys(ops, sizes, chosen, kv_format)
    cache = (context + 1) * kv_row_bytes(kv_format, sizes.index_dim)
    cache += chosen * kv_row_bytes(kv_format, sizes.kv_rank + sizes.rope)
    return Work(layout.n_bytes + cache + 2 * sizes.hidden * 4, ops)


def only_keys(sizes: Sizes) -> Sizes:
    """The same heads and the same cache behind projections that cost nearly nothing."""
    return dataclasses.replace(sizes, hidden=64, q_rank=64, nope=16, v_dim=16)


def only_index(sizes: Sizes) -> Sizes:
    """The same indexer in front of attention that costs nearly nothing."""
    return dataclasses.replace(sizes, hidden=64, q_rank=64, n_heads=1, kv_rank=16, nope=16, rope=16, v_dim=16)


def _cases(
    pool: Pool,
    family: str,
    kind: str,
    sizes: Sizes,
    works: list[tuple[int, int, str, Work]],
    cold_bytes: int,
    kv_format: str = "bf16",
) -> Generator[Case, None, None]:
    """One case per (context, rows, name, work), all on the same layers."""
    layer_bytes = layout_of(sizes, kind).n_bytes
    n_layers = 2 + cold_bytes // layer_bytes if layer_bytes > 1 << 20 else 1
    with Weights(n_layers * aligned(layer_bytes)) as weights:
        layers = [make_layer(sizes, kind, weights) for _ in range(n_layers)]
        for context, n_rows, name, work in works:
            width = sizes.index_dim if kind == "full" else sizes.kv_rank + sizes.rope
            cache_bytes = (context + n_rows) * kv_row_bytes(kv_format, width)
            n_sequences = 2 + cold_bytes // cache_bytes if n_rows == 1 else 1
            cache = Cache(sizes, kind, context, n_rows, n_sequences, kv_format)
            memory = (weights.buffer.array, cache.buffer.array)
            yield Case(family, name, work, AttentionCall(pool, sizes, layers, cache), memory)
            cache.close()


def attention_cases(pool: Pool, sizes: Sizes, cold_bytes: int) -> Generator[Case, None, None]:
    """Decode of whole layers; of the keys alone, prefill of the keys alone and the indexer, over both kinds of cache."""
    decode = [
        (context - 1, 1, f"1 row, {context} positions", attention_work(sizes, context - 1, 1))
        for context in sizes.decode_contexts
    ]
    yield from _cases(pool, "mla_decode", "none", sizes, decode, cold_bytes)
    keys, index = only_keys(sizes), only_index(sizes)
    n, far = sizes.prefill_rows, sizes.index_context
    for kv_format in ("bf16", "int8"):
        of_cache = "" if kv_format == "bf16" else f", {kv_format} cache"
        alone = [
            (context - 1, 1, f"1 row, {context} positions{of_cache}", attention_work(keys, context - 1, 1, kv_format))
            for context in sizes.decode_contexts
        ]
        yield from _cases(pool, "mla_keys", "none", keys, alone, cold_bytes, kv_format)
        prefill = [
            (context, n, f"{n} rows behind {context}{of_cache}", attention_work(keys, context, n, kv_format))
            for context in (sizes.prefill_context, max(sizes.decode_contexts))
        ]
        yield from _cases(pool, "mla_prefill", "none", keys, prefill, cold_bytes, kv_format)
        name = f"1 row, best {sizes.index_topk} of {far}{of_cache}"
        scored = [(far - 1, 1, name, index_work(index, far - 1, kv_format))]
        yield from _cases(pool, "indexer", "full", index, scored, cold_bytes, kv_format)
