"""Times attention at GLM-5.2's sizes beside the arithmetic this machine delivers: ``python -m bench.attention [--quick]``.

With 64 heads a cached position of 1,152 bytes costs 70,000 multiply-adds, so attention is bound by arithmetic, not by
memory. The yardstick is NumPy's f32 matrix product in the same run. Times are CPU seconds (attention runs on one thread),
so that other work on the machine disturbs them less. "rest" is everything but the keys: projections, norms, cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from native.attention import KV_BLOCK, AttnLayer, AttnStep, attn_forward
from native.library import Pool, dispatch_text
from native.matrix import ACT_F32, Matrix, matrix, scale_bytes, weight_bytes
from native.memory import HugeBuffer

HIDDEN, HEADS, Q_RANK, RANK, NOPE, ROPE, V_DIM = 6144, 64, 2048, 512, 192, 64, 256
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 32, 128, 2048
MACS_PER_KEY = HEADS * (2 * RANK + ROPE)
MACS_PER_CANDIDATE = INDEX_HEADS * INDEX_DIM


def random_matrix(fmt: str, out: int, in_: int, stack: int = 1) -> Matrix:
    """Random weights with harmless scales, f32 activations only for f32."""
    rng = np.random.default_rng(1)
    n_weight, n_scale = weight_bytes(fmt, out, in_) * stack, scale_bytes(fmt, out, in_) * stack
    weight = HugeBuffer(n_weight)
    if fmt == "f32":
        weight.array.view(np.float32)[:] = rng.standard_normal(n_weight // 4) * 0.02
        made = matrix(weight.array, None, fmt, out, in_, ACT_F32)
    else:
        weight.array[:] = rng.integers(0, 256, n_weight, np.uint8)
        scale = HugeBuffer(n_scale)
        scale.array.view(np.float16)[:] = 0.002
        made = matrix(weight.array, scale.array, fmt, out, in_)
        made.keep = (*made.keep, scale)
    made.keep = (*made.keep, weight)
    return made


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


def glm_layer(kind: str) -> AttnLayer:
    """One layer with int4 projections."""
    index = {}
    if kind == "full":
        index = {
            "index_wq_b": random_matrix("q4", INDEX_HEADS * INDEX_DIM, Q_RANK),
            "index_wk": random_matrix("q4", INDEX_DIM, HIDDEN),
            "index_weights": random_matrix("f32", INDEX_HEADS, HIDDEN),
            "index_k_norm_w": ones(INDEX_DIM),
            "index_k_norm_b": ones(INDEX_DIM),
        }
    return AttnLayer(
        hidden=HIDDEN, n_heads=HEADS, q_rank=Q_RANK, kv_rank=RANK, nope=NOPE, rope=ROPE, v_dim=V_DIM, rope_interleave=1,
        rms_eps=1e-5, latent_eps=1e-5, softmax_scale=0.0625, index_kind=kind, index_heads=INDEX_HEADS,
        index_dim=INDEX_DIM, index_topk=INDEX_TOPK, index_rope_interleave=1, index_norm_eps=1e-6, rope_amplitude=1.0,
        inv_freq=(8e6 ** (-np.arange(ROPE // 2) * 2 / ROPE)).astype(np.float32),
        input_norm=ones(HIDDEN), q_a_norm=ones(Q_RANK), kv_a_norm=ones(RANK), post_norm=ones(HIDDEN),
        q_a=random_matrix("q4", Q_RANK, HIDDEN), q_b=random_matrix("q4", HEADS * (NOPE + ROPE), Q_RANK),
        kv_a=random_matrix("q4", RANK + ROPE, HIDDEN), k_b=random_matrix("q4", RANK, NOPE, HEADS),
        v_b=random_matrix("q4", V_DIM, RANK, HEADS), o=random_matrix("q4", HIDDEN, HEADS * V_DIM), **index,
    )  # fmt: skip


def best_of(run: Callable[[], object], seconds: float) -> float:
    """Shortest CPU time of at least three runs and about `seconds` of them."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def yardstick(seconds: float) -> float:
    """Multiply-adds per CPU second of NumPy's f32 product, sizes that stay in the second-level cache."""
    a = np.random.default_rng(2).standard_normal((192, 512)).astype(np.float32)
    b = np.random.default_rng(3).standard_normal((512, 192)).astype(np.float32)
    out = np.empty((192, 192), np.float32)

    def run() -> None:
        for _ in range(20):
            np.matmul(a, b, out)

    return 20 * 192 * 512 * 192 / best_of(run, seconds)


class Case:
    """`n_rows` rows of one sequence behind `context` cached positions (bf16)."""

    def __init__(self, layer: AttnLayer, context: int, n_rows: int) -> None:
        rng = np.random.default_rng(4)
        self.layer = layer
        n_blocks = -(-(context + n_rows) // KV_BLOCK)
        block = (rng.standard_normal((KV_BLOCK, RANK + ROPE)).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        kv = np.tile(block, (n_blocks, 1, 1))
        index_k = np.tile(block[:, :INDEX_DIM], (n_blocks, 1, 1))
        x = rng.standard_normal((n_rows, HIDDEN)).astype(np.float32)
        selected = np.zeros((n_rows, INDEX_TOPK), np.int32)
        n_selected = np.full(n_rows, -1, np.int32)
        if context >= INDEX_TOPK:
            for t in range(n_rows):
                selected[t] = np.sort(rng.choice(context, INDEX_TOPK, replace=False))
            n_selected[:] = INDEX_TOPK
        self.step = AttnStep(
            kv=kv, index_k=index_k, kv_format="bf16", n_blocks=n_blocks, selected=selected, n_selected=n_selected, x=x
        )
        position = np.arange(context, context + n_rows, dtype=np.int32)
        table = np.arange(n_blocks, dtype=np.int32)[None]
        self.step.set_rows(n_rows, position, np.zeros(n_rows, np.int32), table, np.empty_like(x))

    def seconds_per_row(self, pool: Pool, seconds: float) -> float:
        attn_forward(pool, self.layer, self.step)
        return best_of(lambda: attn_forward(pool, self.layer, self.step), seconds) / self.step.n_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    seconds = 0.2 if parser.parse_args().quick else 1.0
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read once, when NumPy is loaded
    if not one_thread.items() <= os.environ.items():
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.attention", *sys.argv[1:]], {**os.environ, **one_thread}
        )
    print(dispatch_text())
    peak = yardstick(seconds)
    print(f"f32 product: {peak / 1e9:.1f} G multiply-adds per CPU second\n")
    print(f"{'layer':8} {'context':>8} {'rows':>5} {'ms/row':>8} {'rest':>8} {'keys':>8} {'of the product':>15}")
    layers = {kind: glm_layer(kind) for kind in ("none", "shared", "full")}
    with Pool(1) as pool:
        for n_rows in (1, 16):
            rest = Case(layers["none"], 0, n_rows).seconds_per_row(pool, seconds)
            for kind, context in (("none", 2047), ("none", 16384), ("shared", 16384), ("full", 16384)):
                took = Case(layers[kind], context, n_rows).seconds_per_row(pool, seconds)
                keys = INDEX_TOPK if kind != "none" else context + n_rows / 2
                macs = keys * MACS_PER_KEY + (context * MACS_PER_CANDIDATE if kind == "full" else 0)
                share = macs / max(took - rest, 1e-9) / peak
                print(
                    f"{kind:8} {context:8} {n_rows:5} {took * 1e3:8.2f} {rest * 1e3:8.2f} {(took - rest) * 1e3:8.2f} "
                    f"{share:14.0%}"
                )


if __name__ == "__main__":
    main()
