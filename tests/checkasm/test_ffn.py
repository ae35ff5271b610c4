"""Experts: the batched kernel equals its parts, whatever the batch, the rung, the threads."""

from __future__ import annotations

import numpy as np
import pytest

from native import kernels
from native.kernels import ExpertJobs, Ffn, expert_reduce, ffn_forward, linear
from native.library import NativeError
from tests.checkasm.kit import (
    FORMAT_ACTS,
    Output,
    Packed,
    Rung,
    activations,
    assert_same,
    guarded_copy,
    random_matrix,
    same_bits,
)

SEED = 20250103
NAMES = [f"{f}-{'q8' if a else 'f32'}" for f, a in FORMAT_ACTS]
each_format = pytest.mark.parametrize(("fmt", "act"), FORMAT_ACTS, ids=NAMES)


class Expert:
    """Three random matrices, scaled so that results stay of ordinary size."""

    def __init__(self, rng: np.random.Generator, fmt: str, act: int, hidden: int, inner: int) -> None:
        self.parts = [
            random_matrix(rng, fmt, act, out, in_) for out, in_ in ((inner, hidden), (inner, hidden), (hidden, inner))
        ]
        for packed in self.parts:
            shrink(packed)
        self.gate, self.up, self.down = self.parts

    @property
    def ffn(self) -> Ffn:
        return kernels.ffn(self.gate.matrix, self.up.matrix, self.down.matrix)

    def by_parts(self, rung: Rung, h: np.ndarray) -> np.ndarray:
        """down(silu(gate h) * up h) from single products; SiLU from a feed-forward whose parts are identities."""
        n = len(h)
        g, u = np.zeros((n, self.gate.out), np.float32), np.zeros((n, self.gate.out), np.float32)
        y = np.zeros((n, self.down.out), np.float32)
        with rung.use() as pool:
            linear(pool, self.gate.matrix, h, g)
            linear(pool, self.up.matrix, h, u)
            a = silu(g) * u
            linear(pool, self.down.matrix, a, y)
        return y


def shrink(packed: Packed) -> None:
    size = np.float32(1 / np.sqrt(packed.in_))
    if packed.fmt == "f32":
        packed.weight.view(np.float32)[:] *= size
    elif packed.fmt == "bf16":
        wide = packed.weight.view(np.uint16).astype(np.uint32) << 16
        packed.weight.view(np.uint16)[:] = (wide.view(np.float32) * size).view(np.uint32) >> 16
    elif packed.fmt == "q8" and packed.scale is not None:
        packed.scale.view(np.float32)[:] *= size / 64
    elif packed.fmt == "mxfp4" and packed.scale is not None:
        packed.scale[:] -= np.uint8(np.rint(np.log2(4 / size)))
    elif packed.scale is not None:
        packed.scale.view(np.float16)[:] *= np.float16(size / (64 if packed.fmt == "q8g32" else 4))


def exp(x: np.ndarray) -> np.ndarray:
    """docs/numerics.md's exp in numpy: f64 holds each product exactly, so one rounding makes a fused multiply-add.

    (The sum of an exact product and an f32 can need more than 53 bits; where that could matter the caller compares with
    a tolerance.)
    """

    def fma(a: np.ndarray, b: float, c: object) -> np.ndarray:
        return (a.astype(np.float64) * float(np.float32(b)) + c).astype(np.float32)

    x = np.clip(x, np.float32(-87.5), np.float32(88.5))
    n = np.rint(x * np.float32(1.44269504088896341))
    r = fma(n, -0.693359375, x)
    r = fma(n, 2.12194442e-4, r)
    p = np.full_like(x, np.float32(float.fromhex("0x1.6a23c8p-10")))
    for c in ("0x1.123a20p-7", "0x1.5558f4p-5", "0x1.555492p-3", "0x1.fffffcp-2", "1", "1"):
        p = (p.astype(np.float64) * r + float(np.float32(float.fromhex(c)))).astype(np.float32)
    return np.ldexp(p, n.astype(np.int32))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (np.float32(1) + exp(-x))


def run_jobs(
    rung: Rung, h: np.ndarray, jobs: list[tuple[Expert, list[int], list[int]]], n_parts: int, n_threads: int = 1
) -> np.ndarray:
    parts = Output(n_parts, h.shape[1])
    table = ExpertJobs(len(jobs), sum(len(rows) for _, rows, _ in jobs))
    experts = [expert.ffn for expert, _, _ in jobs]
    for ffn, (_, rows, out) in zip(experts, jobs):
        table.add(ffn, np.array(rows, np.int32), np.array(out, np.int32))
    with rung.use(n_threads) as pool:
        table.run(pool, h, parts.array)
    return parts.check()


@each_format
def test_reference_equals_its_parts(ref: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED)
    expert = Expert(rng, fmt, act, 72, 40)
    h = activations(rng, 5, 72)
    got = run_jobs(ref, h, [(expert, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])], 5)
    want = expert.by_parts(ref, h)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert (got == want).mean() > 0.9  # the model's exp above may differ in a last bit, rarely


@each_format
def test_bits_equal_reference(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED + 1)
    for hidden, inner in ((16, 16), (136, 72), (65, 17)):
        experts = [Expert(rng, fmt, act, hidden, inner) for _ in range(3)]
        h = activations(rng, 11, hidden)
        jobs = [
            (experts[0], [0, 3, 10], [4, 0, 7]),
            (experts[1], [3], [1]),
            (experts[2], list(range(11)), list(range(8, 19))),
        ]
        want = run_jobs(ref, h, jobs, 20)
        got = run_jobs(rung, h, jobs, 20)
        assert_same(got, want, f"{rung} experts {fmt} act {act} [{hidden}, {inner}] seed {SEED + 1}")
        untouched = [2, 3, 5, 6, 19]
        assert np.isnan(got[untouched]).all(), "rows of parts that no job names"
        assert np.isfinite(np.delete(got, untouched, 0)).all()


@each_format
def test_many_gathered_and_scattered_rows(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    """More rows than any kernel takes at once, read and written through indices in an order of their own."""
    rng = np.random.default_rng(SEED + 8)
    hidden, inner, n = 130, 40, 150
    experts = [Expert(rng, fmt, act, hidden, inner) for _ in range(2)]
    h = activations(rng, n, hidden)
    target = rng.permutation(2 * n)
    first = sorted(rng.choice(n, 137, replace=False).tolist())
    jobs = [(experts[0], first, target[:137].tolist()), (experts[1], list(range(0, n, 3)), target[137:187].tolist())]
    want, got = run_jobs(ref, h, jobs, 2 * n), run_jobs(rung, h, jobs, 2 * n, n_threads=2)
    assert_same(got, want, f"{rung} experts {fmt} act {act}")
    assert np.isnan(got[target[187:]]).all()


def test_grouping_threads_and_order_change_nothing(rung: Rung) -> None:
    rng = np.random.default_rng(SEED + 2)
    hidden, inner, n = 96, 48, 12
    experts = [Expert(rng, "q4", 1, hidden, inner) for _ in range(4)]
    h = activations(rng, n, hidden)
    jobs = [
        (e, sorted(rng.choice(n, 5, replace=False).tolist()), list(range(5 * i, 5 * i + 5)))
        for i, e in enumerate(experts)
    ]
    alone = np.concatenate([run_jobs(rung, h, [(e, [row], [0])], 1) for e, rows, _ in jobs for row in rows])
    for n_threads in (1, 2, 4):
        assert_same(run_jobs(rung, h, jobs, 20, n_threads), alone, f"{rung} threads {n_threads}")
        assert_same(run_jobs(rung, h, jobs[::-1], 20, n_threads), alone, f"{rung} reversed, threads {n_threads}")


def test_many_rows_in_segments_and_waves(rung: Rung, ref: Rung) -> None:
    """More rows than a segment (128) and a wave (256) hold."""
    rng = np.random.default_rng(SEED + 3)
    experts = [Expert(rng, "q8", 1, 64, 32) for _ in range(3)]
    h = activations(rng, 300, 64)
    jobs = [
        (experts[0], list(range(300)), list(range(300))),
        (experts[1], list(range(0, 260, 2)), list(range(300, 430))),
        (experts[2], [299], [430]),
    ]
    got = run_jobs(rung, h, jobs, 431, 2)
    assert_same(got, run_jobs(ref, h, jobs, 431), f"{rung} waves")
    assert np.isfinite(got).all()


@each_format
def test_dense_layer_adds_or_writes(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED + 4)
    expert = Expert(rng, fmt, act, 80, 50)
    for rows in (1, 3, 140):
        h, x = activations(rng, rows, 80), activations(rng, rows, 80)
        as_job = run_jobs(rung, h, [(expert, list(range(rows)), list(range(rows)))], rows)
        written, added = Output(rows, 80), Output(rows, 80)
        added.array[:] = x
        with rung.use(2) as pool:
            ffn_forward(pool, expert.ffn, h, written.array, False)
            ffn_forward(pool, expert.ffn, h, added.array, True)
        assert_same(written.check(), as_job, f"{rung} dense {fmt}")
        assert_same(added.check(), x + as_job, f"{rung} dense, added {fmt}")
        if rows < 10:
            reference = Output(rows, 80)
            with ref.use() as pool:
                ffn_forward(pool, expert.ffn, h, reference.array, False)
            assert_same(written.array, reference.check(), f"{rung} dense {fmt} against reference")


def test_formats_may_differ_within_an_expert(rung: Rung, ref: Rung) -> None:
    rng = np.random.default_rng(SEED + 5)
    a, b = Expert(rng, "q4", 1, 64, 64), Expert(rng, "bf16", 0, 64, 64)
    mixed = [
        kernels.ffn(a.gate.matrix, b.up.matrix, a.down.matrix),
        kernels.ffn(b.gate.matrix, a.up.matrix, b.down.matrix),
    ]
    h = activations(rng, 2, 64)
    results = []
    for r in (ref, rung):
        parts = Output(4, 64)
        jobs = ExpertJobs(2, 4)
        for i, one in enumerate(mixed):
            jobs.add(one, np.array([0, 1], np.int32), np.array([2 * i, 2 * i + 1], np.int32))
        with r.use() as pool:
            jobs.run(pool, h, parts.array)
        results.append(parts.check())
    assert_same(results[1], results[0], f"{rung} mixed formats")


def test_non_finite_row_stays_alone(rung: Rung) -> None:
    rng = np.random.default_rng(SEED + 6)
    expert = Expert(rng, "q4", 1, 128, 64)
    clean = activations(rng, 4, 128)
    h = guarded_copy(clean)
    h[2, 70] = np.nan
    jobs = [(expert, [0, 1, 2, 3], [0, 1, 2, 3])]
    got, want = run_jobs(rung, h, jobs, 4), run_jobs(rung, clean, jobs, 4)
    assert np.isnan(got[2]).all()
    assert_same(got[[0, 1, 3]], want[[0, 1, 3]], "rows beside it")


def test_wrong_jobs_are_refused(ref: Rung) -> None:
    rng = np.random.default_rng(SEED + 7)
    expert, other = Expert(rng, "q4", 1, 64, 32), Expert(rng, "q4", 1, 64, 48)
    h = activations(rng, 2, 64)
    for rows, out in (([2], [0]), ([-1], [0]), ([0], [3]), ([0], [-1])):
        with pytest.raises(NativeError, match="cb_expert_ffn: a size, index or pointer is outside the contract"):
            run_jobs(ref, h, [(expert, rows, out)], 3)
    with pytest.raises(NativeError, match="cb_expert_ffn"):
        run_jobs(ref, h, [(expert, [0], [0]), (other, [0], [1])], 2)
    jobs = ExpertJobs(1, 2)
    rows = np.zeros(3, np.int32)
    with pytest.raises(NativeError, match="capacity is 1 jobs and 2 rows"):
        jobs.add(expert.ffn, rows, rows)
    jobs.add(expert.ffn, rows[:1], rows[:1])
    with pytest.raises(NativeError, match="capacity"):
        jobs.add(expert.ffn, rows[:1], rows[:1])
    jobs.clear()
    jobs.add(expert.ffn, rows[:2], rows[:2])
    assert jobs.n_jobs == 1


# ---- sum over experts ------------------------------------------------------------------------------------------------


def run_reduce(
    rung: Rung, parts: np.ndarray, weight: np.ndarray, order: np.ndarray, shared: np.ndarray | None, n_threads: int = 1
) -> tuple[np.ndarray, int]:
    mixed = Output(len(weight), parts.shape[1])
    with rung.use(n_threads) as pool:
        bad = expert_reduce(pool, parts, weight, order, shared, mixed.array)
    return mixed.check(), bad


@pytest.mark.parametrize("hidden", [1, 8, 15, 16, 17, 24, 100, 2048])
def test_reduce_bits(rung: Rung, ref: Rung, hidden: int) -> None:
    rng = np.random.default_rng(SEED + 8)
    for k in (1, 2, 8):
        for rows in (1, 5):
            parts, shared = activations(rng, rows * k, hidden), activations(rng, rows, hidden)
            weight = rng.random((rows, k)).astype(np.float32)
            order = np.stack([rng.permutation(k) for _ in range(rows)]).astype(np.int32)
            for add in (None, shared):
                want, bad = run_reduce(ref, parts, weight, order, add)
                assert bad == -1
                for n_threads in (1, 2):
                    got, bad = run_reduce(rung, parts, weight, order, add, n_threads)
                    assert bad == -1
                    assert_same(got, want, f"{rung} reduce k {k} rows {rows} hidden {hidden}")


def test_reduce_sums_in_the_given_order(ref: Rung) -> None:
    """fma(w, p, acc) in `order`: f64 holds a product of f32 exactly, so each step here rounds once, like an fma."""
    rng = np.random.default_rng(SEED + 9)
    parts = (rng.standard_normal((8, 50)) * 10.0 ** rng.integers(-3, 4, (8, 1))).astype(np.float32)
    weight = rng.random((1, 8)).astype(np.float32)
    order = rng.permutation(8).astype(np.int32)
    acc = np.zeros(50, np.float32)
    for k in order:
        acc = (parts[k].astype(np.float64) * float(weight[0, k]) + acc).astype(np.float32)
    got, _ = run_reduce(ref, parts, weight, order[None], None)
    assert (got[0] == acc).mean() > 0.95  # double rounding in the model is rare but possible
    assert np.abs(got[0] - acc).max() <= np.spacing(np.abs(acc)).max()
    backwards, _ = run_reduce(ref, parts, weight, np.ascontiguousarray(order[None, ::-1]), None)
    assert not same_bits(got, backwards), "the order must matter, else this test says nothing"


def test_reduce_names_the_first_bad_row(rung: Rung) -> None:
    rng = np.random.default_rng(SEED + 10)
    rows, k, hidden = 9, 3, 37
    for where in (0, 15, 16, 36):
        for value in (np.nan, np.inf, -np.inf):
            parts, weight = activations(rng, rows * k, hidden), np.ones((rows, k), np.float32)
            order = np.tile(np.arange(k, dtype=np.int32), (rows, 1))
            clean, bad = run_reduce(rung, parts, weight, order, None)
            assert bad == -1
            parts[4 * k + 1, where] = value
            parts[7 * k, where] = value
            got, bad = run_reduce(rung, parts, weight, order, None, 2)
            assert bad == 4
            others = [0, 1, 2, 3, 5, 6, 8]
            assert_same(got[others], clean[others], "rows beside bad ones")
    weight[2, 0] = np.nan
    assert run_reduce(rung, activations(rng, rows * k, hidden), weight, order, None)[1] == 2
    with pytest.raises(NativeError, match="cb_expert_reduce"):
        run_reduce(rung, parts, weight, order + 1, None)
    with pytest.raises(NativeError, match="expected at least"):
        run_reduce(rung, parts[:5], weight, order, None)


def test_one_job_table_runs_again(rung: Rung) -> None:
    """The table is filled anew for each layer, without leftovers."""
    rng = np.random.default_rng(SEED + 11)
    a, b = Expert(rng, "q4", 1, 64, 32), Expert(rng, "q4", 1, 64, 32)
    h = activations(rng, 3, 64)
    jobs, parts = ExpertJobs(2, 4), Output(3, 64)
    ffn_a, ffn_b = a.ffn, b.ffn
    zero = np.array([0], np.int32)
    with rung.use() as pool:
        jobs.add(ffn_a, zero, zero)
        jobs.add(ffn_b, zero, zero + 1)
        jobs.run(pool, h, parts.array)
        jobs.clear()
        jobs.run(pool, h, parts.array)
        jobs.add(ffn_b, zero, zero + 2)
        jobs.run(pool, h, parts.array)
    assert_same(parts.check()[2:], parts.array[1:2], "the same expert, twice")


@pytest.mark.parametrize("act_rows", [0, 1])
def test_no_rows(rung: Rung, act_rows: int) -> None:
    rng = np.random.default_rng(SEED + 12)
    expert = Expert(rng, "q4", 1, 64, 32)
    h = np.zeros((act_rows, 64), np.float32)
    assert np.isnan(run_jobs(rung, h, [(expert, [], [])], 1)).all()
    with rung.use() as pool:
        ffn_forward(pool, expert.ffn, h[:0], h[:0], False)


FUNCTIONS = ["silu", "clamped", "swiglu", "gelu"]


def textbook(function: str, limit: float, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    if function in ("clamped", "swiglu"):
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    if function == "swiglu":
        return g / (1 + np.exp(-1.702 * g)) * (u + 1)
    if function == "gelu":
        return g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    return g / (1 + np.exp(-g)) * u


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inner_functions_and_biases(rung: Rung, ref: Rung, function: str) -> None:
    """Against float64; the bits of the lowest rung with any threads, split and mode; every bias must matter."""
    rng = np.random.default_rng(SEED + 9)
    expert = Expert(rng, "f32", 0, 72, 600)
    biases = [guarded_copy(rng.standard_normal(n).astype(np.float32)) for n in (600, 600, 72)]
    limit = 0.7 if function in ("clamped", "swiglu") else 0.0
    h = activations(rng, 37, 72)

    def run(rung: Rung, biases: list[np.ndarray], n_threads: int, cut: int) -> np.ndarray:
        made = kernels.ffn(expert.gate.matrix, expert.up.matrix, expert.down.matrix, function, limit, biases)
        parts, jobs = Output(37, 72), ExpertJobs(2, 37)
        rows = np.arange(37, dtype=np.int32)
        for part in (rows[:cut], rows[cut:]):
            jobs.add(made, part, np.ascontiguousarray(36 - part))
        with rung.use(n_threads) as pool:
            jobs.run(pool, h, parts.array)
        return parts.check()[::-1]

    found = run(rung, biases, 3, 5)
    assert same_bits(found, run(ref, biases, 1, 30))
    with rung.use() as pool:
        whole = np.zeros((37, 72), np.float32)
        made = kernels.ffn(expert.gate.matrix, expert.up.matrix, expert.down.matrix, function, limit, biases)
        ffn_forward(pool, made, h, whole, add=False)
    assert same_bits(found, whole)
    g, u = (h.astype(np.float64) @ part.codes().T + bias for part, bias in zip((expert.gate, expert.up), biases))
    expected = textbook(function, limit, g, u) @ expert.down.codes().T + biases[2]
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    if limit:
        assert (np.abs(u) > limit).any()
        assert (g > limit).any()
    for i in range(3):
        without = [np.zeros_like(bias) if i == j else bias for j, bias in enumerate(biases)]
        assert np.abs(run(rung, without, 1, 5) - found).max() > 0.1


def test_functions_that_are_none_are_refused() -> None:
    rng = np.random.default_rng(SEED)
    expert = Expert(rng, "f32", 0, 32, 32)
    parts = (expert.gate.matrix, expert.up.matrix, expert.down.matrix)
    with pytest.raises(NativeError, match="relu"):
        kernels.ffn(*parts, "relu")
    with pytest.raises(NativeError, match="limit"):
        kernels.ffn(*parts, "swiglu")
    with pytest.raises(NativeError, match="up_bias"):
        kernels.ffn(*parts, "gelu", 0.0, [np.zeros(32, np.float32), np.zeros(31, np.float32), np.zeros(32, np.float32)])
