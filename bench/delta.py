"""Cases of the gated delta rule: whole layers as they decode, and the walk through the state by itself."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import numpy as np

from bench.measure import Case
from bench.roofline import Work
from bench.sizes import Sizes
from bench.weights import Weights, matrix_bytes
from native.attention import AttnStep
from native.delta import DeltaLayer, delta_forward, state_values
from native.library import Pool
from native.matrix import ACT_F32, Matrix
from native.memory import HugeBuffer

NARROW = 64
"""Hidden width at which projections cost nearly nothing."""
TAPS = 4
F32_OPS = 8
"""Of a token, per value of its state: decayed twice, and three multiply-adds."""

Shape = tuple[int, int, int, int, int]
"""Hidden width, key heads, value heads, components of a key, of a value."""


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each int4 matrix."""
    hidden, n_key_heads, n_value_heads, dk, dv = shape
    width = n_value_heads * dv
    return {"qkv": (2 * n_key_heads * dk + width, hidden), "z": (width, hidden), "out": (hidden, width)}


def delta_work(shape: Shape, n_rows: int) -> Work:
    """Weights once; a state read from one slot and written to the other."""
    hidden, _, n_value_heads, dk, dv = shape
    slot, _ = state_values(*shape[1:], TAPS)
    exact = 2 * matrix_bytes("f32", n_value_heads, hidden)
    matrices = projections(shape).values()
    return Work(
        sum(matrix_bytes("q4", out, in_) for out, in_ in matrices) + exact + 2 * 4 * slot + 2 * n_rows * hidden * 4,
        {
            "int4": sum(2 * out * in_ * n_rows for out, in_ in matrices),
            "f32": n_rows * (F32_OPS * n_value_heads * dk * dv + 4 * n_value_heads * hidden),
        },
    )


def make_layer(shape: Shape, weights: Weights, conv: Matrix, gates: Matrix) -> DeltaLayer:
    """One layer of random weights whose heads forget slowly."""
    hidden, n_key_heads, n_value_heads, dk, dv = shape
    matrices = {name: weights.matrix("q4", out, in_) for name, (out, in_) in projections(shape).items()}
    return DeltaLayer(
        hidden=hidden, n_key_heads=n_key_heads, n_value_heads=n_value_heads, key_dim=dk, value_dim=dv, taps=TAPS, rms_eps=1e-6,
        input_norm=np.ones(hidden, np.float32), post_norm=np.ones(hidden, np.float32), norm=np.ones(dv, np.float32),
        a_log=np.full(n_value_heads, -4, np.float32), dt_bias=np.zeros(n_value_heads, np.float32), a=gates, b=gates, conv=conv,
        **matrices,
    )  # fmt: skip


class DeltaCall:
    """One layer over one sequence's rows; every call takes the next layer and the next sequence."""

    def __init__(self, pool: Pool, layers: list[DeltaLayer], states: HugeBuffer, n_states: int, n_rows: int) -> None:
        self.pool, self.layers, self.n_rows, self.n_states = pool, itertools.cycle(layers), n_rows, n_states
        x = np.random.default_rng(6).standard_normal((n_rows, layers[0].hidden)).astype(np.float32)
        self.step = AttnStep(
            kv=states.array, index_k=None, kv_format="f32", n_blocks=1, selected=None, n_selected=None, x=x
        )
        self.step.state = states.array.ctypes.data
        self.states = itertools.cycle(np.arange(n_states, dtype=np.int32).reshape(-1, 1))
        self.at = [0] * n_states
        self.seq, self.hidden = np.zeros(n_rows, np.int32), np.empty_like(x)

    def __call__(self) -> None:
        state = next(self.states)
        at = self.at[int(state[0])] % (1 << 20)  # from there on anew
        self.at[int(state[0])] = at + self.n_rows
        position = np.arange(at, at + self.n_rows, dtype=np.int32)
        table = np.zeros((1, (at + self.n_rows) // 64 + 1), np.int32)
        self.step.set_rows(self.n_rows, position, self.seq, table, self.hidden)
        self.step.set_states(state, self.n_states, 0)
        delta_forward(self.pool, next(self.layers), self.step)


def delta_cases(pool: Pool, sizes: Sizes, cold_bytes: int) -> Generator[Case, None, None]:
    """Decode of whole layers, of the state alone; prefill of the state alone."""
    slot, _ = state_values(*sizes.delta[1:], TAPS)
    for family, width, n_rows in (
        ("delta_decode", sizes.delta[0], 1),
        ("delta_state", NARROW, 1),
        ("delta_prefill", NARROW, sizes.many_rows),
    ):
        shape: Shape = (width, *sizes.delta[1:])
        one = sum(matrix_bytes("q4", out, in_) for out, in_ in projections(shape).values())
        n_layers = 2 + cold_bytes // one if width != NARROW else 1
        n_channels = projections(shape)["qkv"][0]
        exact = matrix_bytes("f32", n_channels, TAPS) + matrix_bytes("f32", shape[2], width)
        n_states = 2 + cold_bytes // (8 * slot) if n_rows == 1 else 1
        with Weights(exact) as few, Weights(n_layers * one) as weights, HugeBuffer(n_states * 8 * slot) as states:
            states.array[:] = 0
            conv = few.matrix("f32", n_channels, TAPS, ACT_F32)
            gates = few.matrix("f32", shape[2], width, ACT_F32)
            layers = [make_layer(shape, weights, conv, gates) for _ in range(n_layers)]
            call = DeltaCall(pool, layers, states, n_states, n_rows)
            name = f"{n_rows} row{'s' if n_rows > 1 else ''}, {shape[2]} heads of {shape[3]} x {shape[4]}"
            yield Case(family, name, delta_work(shape, n_rows), call, (weights.buffer.array, states.array))
