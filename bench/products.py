"""Cases of the matrix products: experts, single matrices, the gate. Each generator's memory lives until the next case."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator

import numpy as np

from bench.measure import Case
from bench.roofline import Work
from bench.sizes import Sizes
from bench.weights import Weights, matrix_bytes
from native.kernels import ExpertJobs, Ffn, Gate, ffn, linear
from native.library import Pool
from native.matrix import ACT_F32, ACT_Q8, Matrix

F32_BYTES = 4
MATRICES = (
    ("q4", ACT_Q8, "int4"),
    ("q8", ACT_Q8, "int8"),
    ("mxfp4", ACT_Q8, "int4"),
    ("q4g32", ACT_Q8, "int4"),
    ("q8g32", ACT_Q8, "int8"),
    ("q8", ACT_F32, "f32"),
    ("bf16", ACT_F32, "f32"),
    ("f32", ACT_F32, "f32"),
)
"""(weights, activations, kind of arithmetic) of the products that are measured."""


def _rows(n_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((n_rows, width)).astype(np.float32)


def _traffic(weight_bytes: int, n_rows: int, in_: int, out: int) -> int:
    """Weights once, activations once in and once out."""
    return weight_bytes + n_rows * (in_ + out) * F32_BYTES


def expert_bytes(sizes: Sizes) -> int:
    """Bytes of one expert's packed matrices."""
    return 2 * matrix_bytes("q4", sizes.inner, sizes.hidden) + matrix_bytes("q4", sizes.hidden, sizes.inner)


def make_experts(sizes: Sizes, n: int, weights: Weights) -> list[Ffn]:
    """`n` int4 experts that lie one after another."""
    made = []
    for _ in range(n):
        gate, up = (weights.matrix("q4", sizes.inner, sizes.hidden) for _ in range(2))
        made.append(ffn(gate, up, weights.matrix("q4", sizes.hidden, sizes.inner)))
    return made


class ExpertCall:
    """Calls `n_active` experts with `n_rows` rows each; every call takes the next ones, so that they come from memory."""

    def __init__(self, pool: Pool, experts: list[Ffn], n_active: int, n_rows: int) -> None:
        hidden = experts[0].gate.in_
        self.pool, self.n_active = pool, n_active
        self.turn = itertools.cycle(experts)
        self.h = _rows(n_rows, hidden)
        self.parts = np.zeros((n_active * n_rows, hidden), np.float32)
        self.jobs = ExpertJobs(n_active, n_active * n_rows)
        self.rows = np.arange(n_rows, dtype=np.int32)

    def __call__(self) -> None:
        self.jobs.clear()
        for i in range(self.n_active):
            self.jobs.add(next(self.turn), self.rows, self.rows + np.int32(i * len(self.rows)))
        self.jobs.run(self.pool, self.h, self.parts)


def expert_cases(pool: Pool, sizes: Sizes, cold_bytes: int) -> Generator[Case, None, None]:
    """One row through k experts (decode); many rows through fewer (prefill)."""
    record = expert_bytes(sizes)
    n_experts = sizes.k + -(-cold_bytes // record)
    macs = 3 * sizes.inner * sizes.hidden
    with Weights(n_experts * record) as weights:
        experts = make_experts(sizes, n_experts, weights)
        for n_active, n_rows in ((sizes.k, 1), *((2, n) for n in sizes.expert_rows)):
            call = ExpertCall(pool, experts, n_active, n_rows)
            traffic = n_active * (record + n_rows * sizes.hidden * F32_BYTES) + n_rows * sizes.hidden * F32_BYTES
            work = Work(traffic, {"int4": 2 * macs * n_active * n_rows})
            yield Case("expert_ffn", f"{n_active} experts x {n_rows} rows", work, call, (weights.buffer.array,))


def linear_cases(pool: Pool, sizes: Sizes, cold_bytes: int) -> Generator[Case, None, None]:
    """One matrix of every kind, one row and many; the head's piece is larger than a cache by itself."""
    shapes = [(fmt, act, kind, sizes.out) for fmt, act, kind in MATRICES]
    for fmt, act, kind, out in [*shapes, ("q8", ACT_Q8, "int8", sizes.head)]:
        one = matrix_bytes(fmt, out, sizes.hidden)
        n = 1 + -(-cold_bytes // one)
        family = "head" if out == sizes.head else "linear"
        with Weights(n * one) as weights:
            turn = itertools.cycle([weights.matrix(fmt, out, sizes.hidden, act) for _ in range(n)])
            # Only the last row of a prompt meets the head, and the rows that verify drafts.
            for n_rows in (1, 2, 4, 8) if family == "head" else (1, sizes.many_rows):
                x, y = _rows(n_rows, sizes.hidden), np.zeros((n_rows, out), np.float32)

                def call(turn: Iterator[Matrix] = turn, x: np.ndarray = x, y: np.ndarray = y) -> None:
                    linear(pool, next(turn), x, y)

                work = Work(_traffic(one, n_rows, sizes.hidden, out), {kind: 2 * out * sizes.hidden * n_rows})
                name = f"{fmt} x {'f32' if act == ACT_F32 else 'int8'} [{out}, {sizes.hidden}] x {n_rows} rows"
                yield Case(family, name, work, call, (weights.buffer.array,))


def gate_cases(pool: Pool, sizes: Sizes, cold_bytes: int) -> Generator[Case, None, None]:
    """The f32 gate of one layer, choice included."""
    one = matrix_bytes("f32", sizes.n_experts, sizes.hidden)
    n = 1 + -(-cold_bytes // one)
    with Weights(n * one) as weights:
        gates = [
            Gate(weights.matrix("f32", sizes.n_experts, sizes.hidden), None, sizes.k, 1, 1, True, 2.5) for _ in range(n)
        ]
        turn = itertools.cycle(gates)
        for n_rows in (1, sizes.many_rows):
            h = _rows(n_rows, sizes.hidden)
            ids, chosen = np.zeros((n_rows, sizes.k), np.int32), np.zeros((n_rows, sizes.k), np.float32)

            def call(h: np.ndarray = h, ids: np.ndarray = ids, chosen: np.ndarray = chosen) -> None:
                next(turn).forward(pool, h, ids, chosen)

            work = Work(
                _traffic(one, n_rows, sizes.hidden, sizes.k), {"f32": 2 * sizes.n_experts * sizes.hidden * n_rows}
            )
            yield Case(
                "gate", f"{sizes.n_experts} of {sizes.hidden} x {n_rows} rows", work, call, (weights.buffer.array,)
            )
