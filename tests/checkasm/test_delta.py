"""The gated delta rule: the library against a plain float64 model, and every rung, thread count, chunking, draft and repetition
against the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from native.attention import KV_BLOCK, AttnStep
from native.delta import DeltaLayer, delta_forward, state_values
from native.kernels import gate_rows
from native.library import NativeError, Pool
from native.matrix import ACT_F32, ACT_Q8
from tests.checkasm.attn_cases import packed
from tests.checkasm.kit import Rung, assert_same, random_matrix
from tests.reference import delta as plain

TAPS, EPS = 4, 1e-6
X_BOUND, STATE_BOUND = 1.6e-5, 6e-6  # largest seen: 3.9e-6 on x (values reach 5), 1.4e-6 on the state (2.5)
N = 300  # more than two tiles of rows


@dataclass(frozen=True)
class Dims:
    hidden: int = 72
    n_key_heads: int = 2
    n_value_heads: int = 6
    key_dim: int = 32
    value_dim: int = 80  # a whole piece of columns and a part of one


CASES = {
    "heads_share_keys": Dims(),
    "as_many": Dims(hidden=41, n_key_heads=3, n_value_heads=3, key_dim=16, value_dim=16),
    "wide": Dims(hidden=64, n_key_heads=1, n_value_heads=2, key_dim=128, value_dim=128),
}


def random_layer(d: Dims, seed: int = 1) -> plain.DeltaLayer:
    """Weights exact in f32. Some heads remember a few tokens, some hundreds."""
    rng = np.random.default_rng(seed)
    keys, values = d.n_key_heads * d.key_dim, d.n_value_heads * d.value_dim
    channels = 2 * keys + values
    w = {
        "input_norm": 1 + 0.2 * rng.normal(size=d.hidden),
        "post_norm": 1 + 0.2 * rng.normal(size=d.hidden),
        "norm": 1 + 0.2 * rng.normal(size=d.value_dim),
        "a_log": np.linspace(-4, 1, d.n_value_heads),
        "dt_bias": rng.normal(size=d.n_value_heads),
        "conv": 0.6 * rng.normal(size=(channels, TAPS)),
    }
    shapes = {"qkv": (channels, d.hidden), "z": (values, d.hidden), "out": (d.hidden, values)}
    shapes |= {"a": (d.n_value_heads, d.hidden), "b": (d.n_value_heads, d.hidden)}
    w |= {name: rng.normal(size=shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    exact = {name: value.astype(np.float32).astype(np.float64) for name, value in w.items()}
    return plain.DeltaLayer(d.n_key_heads, d.n_value_heads, d.key_dim, d.value_dim, EPS, exact)


def struct(layer: plain.DeltaLayer, **matrices: object) -> DeltaLayer:
    """The library's layer, matrices in f32 unless given."""
    w: dict[str, object] = {
        name: value.astype(np.float32) if value.ndim == 1 else packed(value.astype(np.float32), "f32")
        for name, value in layer.w.items()
    }
    return DeltaLayer(
        hidden=layer.w["out"].shape[0], n_key_heads=layer.n_key_heads, n_value_heads=layer.n_value_heads,
        key_dim=layer.key_dim, value_dim=layer.value_dim, taps=TAPS, rms_eps=layer.eps, **(w | matrices),
    )  # fmt: skip


@dataclass
class Memory:
    """States of a layer, in slots full of what nobody wrote but for the heads, which are zeroes as in a new segment."""

    layer: plain.DeltaLayer
    n_states: int = 1
    n_drafts: int = 0
    slots: np.ndarray = field(init=False)
    records: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        y = self.layer
        slot, record = state_values(y.n_key_heads, y.n_value_heads, y.key_dim, y.value_dim, TAPS)
        self.slots = np.full((2 * self.n_states, slot), np.nan, np.float32)
        self.slots[:, :16] = 0
        self.records = np.full((2 * self.n_states, self.n_drafts, record), np.nan, np.float32)

    def newest(self, state: int = 0) -> tuple[int, np.ndarray, np.ndarray]:
        """(position, inputs [taps - 1, C], S [V, dk, dv]) of the slot that is furthest on."""
        pair = self.slots[2 * state : 2 * state + 2]
        at = int(pair[:, :2].copy().view(np.int64)[:, 0].argmax())
        y, position = self.layer, int(pair[at, :2].copy().view(np.int64)[0])
        n_inputs = (TAPS - 1) * len(y.w["qkv"])
        inputs = pair[at, 16 : 16 + n_inputs].reshape(TAPS - 1, -1)
        return position, inputs, pair[at, 16 + n_inputs :].reshape(y.n_value_heads, y.key_dim, y.value_dim)


def call(
    pool: Pool, layer: DeltaLayer, memory: Memory, rows: np.ndarray, position: Sequence[int], seq: Sequence[int],
    states: Sequence[int] = (0,),
) -> np.ndarray:  # fmt: skip
    """x and hidden f32[2, T, D] of one step. Outputs start as NaN."""
    x, hidden = rows.copy(), np.full_like(rows, np.nan)
    step = AttnStep(kv=64, index_k=None, kv_format="f32", n_blocks=1, selected=None, n_selected=None, x=x)
    table = np.zeros((len(states), max(position, default=0) // KV_BLOCK + 1), np.int32)
    step.set_rows(len(x), np.array(position, np.int32), np.array(seq, np.int32), table, hidden)
    step.set_states(np.array(states, np.int32), memory.n_states, memory.n_drafts)
    step.state, step.records = memory.slots.ctypes.data, memory.records.ctypes.data
    delta_forward(pool, layer, step)
    return np.stack([x, hidden])


def run(pool: Pool, layer: DeltaLayer, memory: Memory, rows: np.ndarray, chunk: int = 0, first: int = 0) -> np.ndarray:
    """One sequence in calls of ``chunk`` rows (0: one call)."""
    parts = []
    for at in range(0, len(rows), chunk or len(rows)):
        part = rows[at : at + (chunk or len(rows))]
        parts.append(call(pool, layer, memory, part, range(first + at, first + at + len(part)), [0] * len(part)))
    return np.concatenate(parts, axis=1)


@cache
def rows_of(hidden: int, n: int = N, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, hidden)).astype(np.float32)


@pytest.fixture
def delta_rung(rung: Rung) -> Rung:
    """Rungs that have an inner loop of their own."""
    if rung.isa not in ("avx2", "avx512", "neon"):
        pytest.skip(f"the delta rule on {rung.isa} is a lower rung's")
    return rung


# ---- against the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_row_and_the_state_are_the_models(case: str, ref: Rung) -> None:
    layer = random_layer(CASES[case])
    rows, memory = rows_of(CASES[case].hidden), Memory(layer)
    with ref.use() as pool:
        x, hidden = run(pool, struct(layer), memory, rows)
    expected, state = plain.mixer(layer, rows.astype(np.float64))
    expected += rows
    assert np.abs(x - expected).max() < X_BOUND
    root = np.sqrt(np.mean(expected**2, axis=1, keepdims=True) + EPS)
    assert np.abs(hidden - expected / root * layer.w["post_norm"]).max() < X_BOUND
    position, inputs, s = memory.newest()
    assert position == N
    assert np.abs(inputs - state.inputs).max() < STATE_BOUND
    assert np.abs(s - state.s).max() < STATE_BOUND


@pytest.mark.parametrize("name", ["qkv", "z", "a", "b", "out", "conv", "a_log", "dt_bias", "norm", "input_norm"])
def test_every_weight_counts(name: str, ref: Rung) -> None:
    layer = random_layer(CASES["heads_share_keys"])
    changed = layer.w[name].copy()
    changed[::2] *= 1.03
    rows = rows_of(72, 40)
    wrong, _ = plain.mixer(replace(layer, w={**layer.w, name: changed}), rows.astype(np.float64))
    with ref.use() as pool:
        x, _ = run(pool, struct(layer), Memory(layer), rows)
    assert np.abs(x - rows - wrong).max() > 20 * X_BOUND


# ---- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_rungs_threads_and_chunks_do_not_move_a_bit(case: str, delta_rung: Rung, ref: Rung) -> None:
    layer = random_layer(CASES[case])
    made, rows, first = struct(layer), rows_of(CASES[case].hidden), Memory(layer)
    with ref.use() as pool:
        expected = run(pool, made, first, rows)
    for n_threads, chunk, n_drafts in ((1, 0, 0), (3, 1, 0), (2, 129, 0), (3, 0, 3), (2, 7, 2), (1, 130, 64)):
        memory = Memory(layer, n_drafts=n_drafts)
        with delta_rung.use(n_threads) as pool:
            found = run(pool, made, memory, rows, chunk)
        assert_same(found, expected, f"{delta_rung}, {n_threads} threads, chunks of {chunk}, {n_drafts} drafts")
        if not n_drafts:
            for got, want in zip(memory.newest()[1:], first.newest()[1:], strict=True):
                assert_same(np.ascontiguousarray(got), np.ascontiguousarray(want), "state")


@pytest.mark.parametrize(("fmt", "act"), [("bf16", ACT_F32), ("q8", ACT_Q8), ("q4", ACT_Q8), ("q4", ACT_F32)])
def test_packed_weights_do_not_move_a_bit(fmt: str, act: int, rung: Rung, ref: Rung) -> None:
    d = CASES["heads_share_keys"]
    layer, rng, rows = random_layer(d), np.random.default_rng(5), rows_of(d.hidden, 40)
    kept = {name: random_matrix(rng, fmt, act, *layer.w[name].shape) for name in ("qkv", "z", "out")}
    made = struct(layer, **{name: matrix.matrix for name, matrix in kept.items()})
    with ref.use() as pool:
        expected = run(pool, made, Memory(layer), rows)
    assert np.isfinite(expected).all()
    with rung.use(3) as pool:
        assert_same(run(pool, made, Memory(layer), rows, 11), expected, f"{fmt} {rung}")


def decode(
    pool: Pool, made: DeltaLayer, memory: Memory, rows: np.ndarray, accepted: Callable[[int], int], *, is_torn: bool = False
) -> np.ndarray:  # fmt: skip
    """After a prompt of 37 rows: steps of a row and its drafts, of which ``accepted(step)`` are right, the others noise."""
    noise, m = np.random.default_rng(9), memory.n_drafts
    parts, at, n_step = [run(pool, made, memory, rows[:37], 10)], 37, 0
    while at < len(rows):
        n_right = 1 + min(accepted(n_step), m, len(rows) - at - 1)
        given = np.concatenate([rows[at : at + n_right], noise.normal(size=(1 + m - n_right, rows.shape[1]))])
        given, position = given.astype(np.float32), range(at, at + 1 + m)
        if is_torn:  # a step that comes to nothing: with drafts, without, and one that leaves a slot half written
            call(pool, made, memory, given, position, [0] * (1 + m))
            call(pool, made, memory, given[:1], position[:1], [0])
            ahead = memory.newest()[0]
            for slot in memory.slots:
                if slot[:2].copy().view(np.int64)[0] == ahead:
                    slot[:2] = np.array([-1], np.int64).view(np.float32)
                    slot[16:] = np.nan
        parts.append(call(pool, made, memory, given, position, [0] * (1 + m))[:, :n_right])
        at += n_right
        n_step += 1
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("n_drafts", [1, 3])
def test_drafts_and_steps_done_again_leave_no_trace(n_drafts: int, is_torn: bool) -> None:
    layer = random_layer(CASES["heads_share_keys"])
    made, rows = struct(layer), rows_of(72, 90)
    with Pool(2) as pool:
        expected = run(pool, made, Memory(layer), rows)
        for accepted in (lambda _: 0, lambda _: n_drafts, lambda n: n % (n_drafts + 1)):
            found = decode(pool, made, Memory(layer, n_drafts=n_drafts), rows, accepted, is_torn=is_torn)
            assert_same(found, expected, f"{n_drafts} drafts")


def test_sequences_in_one_step_and_after_one_another_do_not_meet() -> None:
    """Three with states in any order, each at its own position; then others begin where they were."""
    layer = random_layer(CASES["as_many"])
    made, memory = struct(layer), Memory(layer, n_states=4, n_drafts=2)
    all_rows = [rows_of(41, n, seed) for n, seed in ((200, 1), (31, 2), (140, 3))]
    with Pool(3) as pool:
        expected = [run(pool, made, Memory(layer), rows) for rows in all_rows]
        for states in ([2, 0, 3], [0, 3, 2]):
            found: list[list[np.ndarray]] = [[], [], []]
            at = [0, 0, 0]
            for sizes in ((5, 3, 130), (90, 1, 5), (1, 27, 1), (104, 0, 4)):
                seq = [s for s, n in enumerate(sizes) for _ in range(n)]
                position = [at[s] + i for s, n in enumerate(sizes) for i in range(n)]
                rows = np.concatenate([all_rows[s][at[s] : at[s] + n] for s, n in enumerate(sizes)])
                got = call(pool, made, memory, rows, position, seq, states)
                for s, n in enumerate(sizes):
                    found[s].append(got[:, [i for i, owner in enumerate(seq) if owner == s]])
                    at[s] += n
            for s in range(3):
                assert_same(np.concatenate(found[s], axis=1), expected[s], f"sequence {s}")


# ---- contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "position", "seq", "states"),
    [
        ("a gap", [0, 2], [0, 0], [0]),
        ("a position that no slot belongs to", [5], [0], [0]),
        ("a state that is none", [0], [0], [2]),
        ("a negative state", [0], [0], [-1]),
        ("a state of two sequences", [0, 0], [0, 1], [1, 1]),
        ("a sequence beyond the table", [0], [1], [0]),
    ],
)
def test_rows_outside_the_contract_are_refused(
    what: str, position: list[int], seq: list[int], states: list[int]
) -> None:
    layer = random_layer(CASES["as_many"])
    with Pool(1) as pool, pytest.raises(NativeError, match="follow each other"):
        call(pool, struct(layer), Memory(layer, n_states=2), rows_of(41, len(position)), position, seq, states)


def test_what_a_slot_left_behind_is_not_taken_for_anothers() -> None:
    """A sequence that begins makes both slots of its state its own."""
    layer = random_layer(CASES["as_many"])
    made, memory = struct(layer), Memory(layer)
    with Pool(1) as pool:
        run(pool, made, memory, rows_of(41, 20), 10)
        run(pool, made, memory, rows_of(41, 3))
        for position in (10, 20):
            with pytest.raises(NativeError):
                call(pool, made, memory, rows_of(41, 1), [position], [0])


@pytest.mark.parametrize(
    "change",
    [
        {"n_value_heads": 4},
        {"key_dim": 24},
        {"value_dim": 8},
        {"taps": 0},
        {"taps": 17},
        {"n_key_heads": 0},
        {"hidden": 0},
    ],
)
def test_layers_outside_the_contract_are_refused(change: dict[str, int]) -> None:
    layer = random_layer(CASES["as_many"])
    made = struct(layer)
    for name, value in change.items():
        setattr(made, name, value)
    with Pool(1) as pool, pytest.raises(NativeError):
        call(pool, made, Memory(layer), rows_of(made.hidden or 41, 1), [0], [0])


def test_wrong_shapes_are_named() -> None:
    layer = random_layer(CASES["as_many"])
    with pytest.raises(NativeError, match=r"z: expected \[48, 41\], found \[47, 41\]"):
        struct(replace(layer, w={**layer.w, "z": layer.w["z"][:47]}))
    with pytest.raises(NativeError, match="a_log"):
        struct(replace(layer, w={**layer.w, "a_log": layer.w["a_log"][:2]}))
    with pytest.raises(NativeError, match="multiples of 16"):
        state_values(2, 4, 24, 16, 4)


def test_zero_rows_do_nothing() -> None:
    layer = random_layer(CASES["as_many"])
    with Pool(1) as pool:
        call(pool, struct(layer), Memory(layer), rows_of(41, 1)[:0], [], [])


# ---- a gate per row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 17, 200])
def test_a_gate_per_row(n: int, rung: Rung, ref: Rung) -> None:
    rng = np.random.default_rng(3)
    gate = random_matrix(rng, "f32", ACT_F32, 1, n)
    h, y = (rng.normal(size=(33, n)).astype(np.float32) for _ in range(2))
    results = []
    for each, threads in ((ref, 1), (rung, 3)):
        out = y.copy()
        with each.use(threads) as pool:
            gate_rows(pool, gate.matrix, h, out)
        results.append(out)
    assert_same(results[1], results[0], str(rung))
    expected = y / (1 + np.exp(-(h.astype(np.float64) @ gate.dense().T)))
    assert np.abs(results[0] - expected).max() < 2e-6 * np.abs(y).max()
    with ref.use() as pool, pytest.raises(NativeError):
        gate_rows(pool, random_matrix(rng, "f32", ACT_F32, 2, n).matrix, h, y)
