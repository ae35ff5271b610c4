"""Cases of grouped-query attention: whole layers as they decode, and the walk over the keys by itself."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import numpy as np

from bench.attention import KV_ITEM, blocks_of, filled, keys_seen
from bench.measure import Case
from bench.roofline import Work
from bench.sizes import Sizes
from bench.weights import Weights, matrix_bytes
from native.attention import KV_BLOCK, AttnStep
from native.gqa import GqaLayer, gqa_forward
from native.library import Pool
from native.memory import HugeBuffer

NARROW = 64
"""Hidden width at which projections cost nearly nothing."""


def projections(hidden: int, n_heads: int, n_kv_heads: int, dim: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each int4 matrix."""
    return {
        "q": (n_heads * dim, hidden),
        "k": (n_kv_heads * dim, hidden),
        "v": (n_kv_heads * dim, hidden),
        "o": (hidden, n_heads * dim),
    }


def gqa_work(hidden: int, n_heads: int, n_kv_heads: int, dim: int, context: int, n_rows: int) -> Work:
    """Weights, keys and values once; per key and query head one product with the key and one with the value."""
    shapes = projections(hidden, n_heads, n_kv_heads, dim).values()
    cache = (context + n_rows) * 2 * n_kv_heads * dim * KV_ITEM
    return Work(
        sum(matrix_bytes("q4", out, in_) for out, in_ in shapes) + cache + 2 * n_rows * hidden * 4,
        {
            "int4": sum(2 * out * in_ * n_rows for out, in_ in shapes),
            "f32": 2 * keys_seen(context, n_rows) * n_heads * 2 * dim,
        },
    )


def make_layer(hidden: int, n_heads: int, n_kv_heads: int, dim: int, weights: Weights) -> GqaLayer:
    """One layer of random weights, with a norm for each head."""
    matrices = {
        name: weights.matrix("q4", out, in_)
        for name, (out, in_) in projections(hidden, n_heads, n_kv_heads, dim).items()
    }
    return GqaLayer(
        hidden=hidden, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=dim, rope=dim, qk_norm="head", rms_eps=1e-6,
        softmax_scale=dim**-0.5, rope_amplitude=1.0,
        inv_freq=(1e6 ** (-np.arange(dim // 2) * 2 / dim)).astype(np.float32),
        input_norm=np.ones(hidden, np.float32), post_norm=np.ones(hidden, np.float32),
        q_norm=np.ones(dim, np.float32), k_norm=np.ones(dim, np.float32), **matrices,
    )  # fmt: skip


class GqaCall:
    """One layer over one sequence's rows; every call takes the next layer and the next sequence."""

    def __init__(
        self, pool: Pool, layers: list[GqaLayer], cache: HugeBuffer, n_sequences: int, context: int, n_rows: int
    ) -> None:
        self.pool, self.layers = pool, itertools.cycle(layers)
        blocks = blocks_of(context, n_rows)
        x = np.random.default_rng(6).standard_normal((n_rows, layers[0].hidden)).astype(np.float32)
        self.step = AttnStep(
            kv=cache.array.view(np.uint16), index_k=None, kv_format="bf16", n_blocks=blocks * n_sequences,
            selected=None, n_selected=None, x=x,
        )  # fmt: skip
        tables = np.arange(blocks * n_sequences, dtype=np.int32).reshape(n_sequences, 1, blocks)
        self.tables = itertools.cycle(list(tables))
        self.position = np.arange(context, context + n_rows, dtype=np.int32)
        self.seq, self.hidden = np.zeros(n_rows, np.int32), np.empty_like(x)

    def __call__(self) -> None:
        self.step.set_rows(len(self.position), self.position, self.seq, next(self.tables), self.hidden)
        gqa_forward(self.pool, next(self.layers), self.step)


def gqa_cases(pool: Pool, sizes: Sizes, cold_bytes: int) -> Generator[Case, None, None]:
    """Decode of whole layers, of the keys alone; prefill of the keys alone."""
    hidden, n_heads, n_kv_heads, dim = sizes.gqa
    decode = [(context - 1, 1) for context in sizes.decode_contexts]
    prefill = [(sizes.prefill_context, sizes.prefill_rows)]
    for family, width, rows in (
        ("gqa_decode", hidden, decode),
        ("gqa_keys", NARROW, decode),
        ("gqa_prefill", NARROW, prefill),
    ):
        shape = (width, n_heads, n_kv_heads, dim)
        one = sum(matrix_bytes("q4", out, in_) for out, in_ in projections(*shape).values())
        n_layers = 2 + cold_bytes // one if width == hidden else 1
        with Weights(n_layers * one) as weights:
            layers = [make_layer(*shape, weights) for _ in range(n_layers)]
            for context, n_rows in rows:
                block_bytes = KV_BLOCK * 2 * n_kv_heads * dim * KV_ITEM
                n_bytes = blocks_of(context, n_rows) * block_bytes
                n_sequences = 2 + cold_bytes // n_bytes if n_rows == 1 else 1
                name = f"1 row, {context + 1} positions" if n_rows == 1 else f"{n_rows} rows behind {context}"
                with filled(n_bytes * n_sequences) as cache:
                    call = GqaCall(pool, layers, cache, n_sequences, context, n_rows)
                    memory = (weights.buffer.array, cache.array)
                    yield Case(family, name, gqa_work(*shape, context, n_rows), call, memory)
