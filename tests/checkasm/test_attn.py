"""Attention: the library against a plain float64 model, and every rung, thread count and chunking against the same bits."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from cli.quality.schemes import round_activations
from native.attention import KV_BLOCK, AttnStep, attn_forward
from native.library import PHASES, NativeError, Pool
from native.matrix import ACT_F32, ACT_Q8, matrix
from shared.container.pack import pack_matrix, unpack_matrix
from tests.checkasm.attn_cases import (
    Cache,
    Dims,
    Layer,
    Result,
    aligned,
    keep_of,
    model_attention,
    model_index_scores,
    model_state,
    rotate,
    run,
    to_bf16,
)
from tests.checkasm.kit import Rung, guarded_copy

# Largest errors seen over all cases: 1.3e-6 on cached values, 1.1e-5 on x (whose values reach 10), 4e-6 on hidden.
CACHE_BOUND, X_BOUND, HIDDEN_BOUND, SCORE_BOUND = 5e-6, 4e-5, 1.5e-5, 1e-5
BF16_BOUND = 2.0**-8  # half a unit of the last place, relative

ORACLE = Dims()  # the oracle checkpoint's odd sizes: hidden 136, 4 heads, rank 32 + 16
CASES = {
    "oracle": ORACLE,
    "dense": Dims(index_kind="none"),
    "no_q_a_half_split": Dims(q_rank=0, rope_interleave=False, index_rope_interleave=False, rope_amplitude=1.3),
    "interleaved_but_index": Dims(index_rope_interleave=False),
    "odd_rank_many_heads": Dims(n_heads=37, kv_rank=41, nope=7, v_dim=5, index_heads=19, index_dim=17, index_topk=65),
    "two_head_blocks": Dims(n_heads=70, kv_rank=48, index_kind="none", hidden=64),
    "no_rope": Dims(rope=0, index_kind="none"),
    "bf16_weights": Dims(weights="bf16", index_topk=90),
    "one_head": Dims(n_heads=1, index_heads=1, index_topk=1),
}


@pytest.fixture
def attn_rung(rung: Rung) -> Rung:
    """Every rung has inner loops of an int8 cache, if not of the others, of its own."""
    return rung


def rows_of(dims: Dims, n: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dims.hidden)).astype(np.float32)


def assert_same_bits(found: Result, expected: Result, what: str, selects: bool = True) -> None:
    for name in ("x", "hidden", *(("n_selected", "selected") if selects else ())):
        a, b = getattr(found, name).view(np.uint32), getattr(expected, name).view(np.uint32)
        if not np.array_equal(a, b):
            at = tuple(np.argwhere(a != b)[0])
            raise AssertionError(
                f"{what}: {name}{list(at)} is {getattr(found, name)[at]!r}, expected {getattr(expected, name)[at]!r}; "
                f"{(a != b).any(-1).sum()} of {len(a)} rows differ"
            )


def errors_against_model(
    layer: Layer, x: np.ndarray, position: np.ndarray, cache: Cache, found: Result
) -> dict[str, float]:
    """Each error as a multiple of its bound: all at most 1 when the library does what the model does."""
    d, n = layer.dims, len(x)
    state = model_state(layer, x, position)
    errors: dict[str, float] = {}

    def cached(which: np.ndarray, expected: np.ndarray, name: str) -> np.ndarray:
        got = cache.entries(which, 0, n).astype(np.float64)
        tolerance = CACHE_BOUND + (np.abs(expected) * BF16_BOUND if cache.kv_format == "bf16" else 0)
        errors[name] = float((np.abs(got - expected) / tolerance).max())
        return got

    kv = cached(cache.kv, np.concatenate([state.c, state.k_pe], -1), "kv")
    # From here on the model works with what was really cached, else the rounding of bf16 would hide everything else.
    state.c, state.k_pe = kv[:, : d.kv_rank], kv[:, d.kv_rank :]
    if d.index_kind == "full":
        state.ki = cached(cache.index_k, state.ki, "index_k")
        scores = model_index_scores(layer, state, position)
        worst = 0.0
        for t in range(n):
            if t + 1 <= d.index_topk:
                assert found.n_selected[t] == -1
                continue
            chosen = found.selected[t]
            assert found.n_selected[t] == d.index_topk
            assert (np.diff(chosen) > 0).all()
            assert 0 <= chosen[0] <= chosen[-1] <= t
            others = np.setdiff1d(np.arange(t + 1), chosen)
            worst = max(worst, float(scores[t, others].max() - scores[t, chosen].min()))
        errors["selection"] = worst / SCORE_BOUND
        keep = keep_of(found, position)
    else:
        keep = np.tril(np.ones((n, n), bool))
    after, hidden, _ = model_attention(layer, x, position, state, keep)
    errors["x"] = float(np.abs(after - found.x).max() / X_BOUND)
    errors["hidden"] = float(np.abs(hidden - found.hidden).max() / HIDDEN_BOUND)
    assert not np.isnan(list(errors.values())).any()
    return errors


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_expanded_float64_model(case: str, kv_format: str) -> None:
    layer, n = Layer.random(CASES[case], seed=1), 150
    x, position = rows_of(layer.dims, n), np.arange(n)
    cache = Cache(layer.dims, kv_format, 1, n)
    with Pool(2) as pool:
        found = run(pool, layer.struct(), cache, x, position)
    errors = errors_against_model(layer, x, position, cache, found)
    assert max(errors.values()) <= 1, f"{case} {kv_format}: {errors}"


def int8_model(layer: Layer, x: np.ndarray, position: np.ndarray, cache: Cache, keep: np.ndarray) -> np.ndarray:
    """x after attention as docs/numerics.md defines it for an int8 cache, float64 but for what is rounded."""
    d, n, w = layer.dims, len(x), {name: value.astype(np.float64) for name, value in layer.w.items()}
    state = model_state(layer, x, position)
    values, scales = cache.int8_entries(cache.kv, 0, n)
    q = (state.q_lat @ w["q_b"].T).reshape(n, d.n_heads, d.nope + d.rope)
    folded = (q[..., : d.nope].transpose(1, 0, 2) @ w["k_b"].transpose(0, 2, 1)).transpose(1, 0, 2)
    turned = rotate(q[..., d.nope :], position, layer, d.rope_interleave)
    queries = round_activations((np.concatenate([folded, turned], -1) * layer.softmax_scale).astype(np.float32))
    kv = values * np.repeat(scales, 64, axis=1)[:, : values.shape[1]].astype(np.float64)
    a = np.where(keep[None], queries.astype(np.float64).transpose(1, 0, 2) @ kv.T, -np.inf)
    p = np.exp(a - a.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = (p @ kv[:, : d.kv_rank] @ w["v_b"].transpose(0, 2, 1)).transpose(1, 0, 2).reshape(n, -1)
    return x.astype(np.float64) + o @ w["o"].T


def int8_index_scores(layer: Layer, x: np.ndarray, position: np.ndarray, cache: Cache) -> np.ndarray:
    """[S, S] float64: what the indexer's rounded queries make of the cached keys."""
    d, w, state, n = layer.dims, layer.w, model_state(layer, x, position), len(x)
    values, scales = cache.int8_entries(cache.index_k, 0, n)
    keys = values * np.repeat(scales, 64, axis=1)[:, : values.shape[1]].astype(np.float64)
    q = (state.q_lat @ w["index_wq_b"].astype(np.float64).T).reshape(n, d.index_heads, d.index_dim)
    q[..., : d.rope] = rotate(q[..., : d.rope], position, layer, d.index_rope_interleave)
    dots = np.maximum(np.einsum("shd,td->sht", round_activations(q.astype(np.float32)).astype(np.float64), keys), 0)
    gains = state.h @ w["index_weights"].astype(np.float64).T
    return np.einsum("sh,sht->st", gains, dots) * d.index_heads**-0.5 * d.index_dim**-0.5


@pytest.mark.parametrize("case", ["dense", "odd_rank_many_heads", "two_head_blocks", "no_rope", "oracle"])
def test_an_int8_cache_agrees_with_its_definition(case: str) -> None:
    """The cache within half a step of what the model caches; nearly all rows as closely as f32 rows are, where no query
    fell on the other side of a half. With any weight a percent off hardly a row does."""
    layer, n = Layer.random(CASES[case], seed=1), 150
    x, position = rows_of(layer.dims, n), np.arange(n)
    cache, state = Cache(layer.dims, "int8", 1, n), model_state(layer, x, position)
    with Pool(2) as pool:
        found = run(pool, layer.struct(), cache, x, position)
    caches = [(cache.kv, np.concatenate([state.c, state.k_pe], -1))]
    if layer.dims.index_kind == "full":
        caches.append((cache.index_k, state.ki))
    for which, exact in caches:
        values, scales = cache.int8_entries(which, 0, n)
        step = np.repeat(scales, 64, axis=1)[:, : values.shape[1]]
        assert (np.abs(values * step - exact) <= 0.51 * step).all()
        groups = np.add.reduceat(np.abs(values) >= 126, np.arange(0, values.shape[1], 64), axis=1)
        assert (groups > 0).all(), "every group uses its whole range"
    keep = keep_of(found, position) if layer.dims.index_kind == "full" else np.tril(np.ones((n, n), bool))
    if layer.dims.index_kind == "full":
        d, scores = layer.dims, int8_index_scores(layer, x, position, cache)
        seen = np.tril(np.ones((n, n), bool)) & ~keep
        worst = [scores[t, seen[t]].max() - scores[t, keep[t]].min() for t in range(d.index_topk, n)]
        assert np.median(worst) < 0
        assert (np.array(worst) < SCORE_BOUND).mean() > 0.9, "but where a query fell on the other side of a half"

    def error(of: Layer) -> float:
        return float(np.median(np.abs(int8_model(of, x, position, cache, keep) - found.x).max(axis=1)))

    good = error(layer)
    assert good < 2 * X_BOUND + 2e-3 * float(np.abs(found.x - x).max())
    for name in ("q_b", "k_b", "v_b", "o"):
        assert error(layer.perturbed(name)) > 2 * good, name


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize("index_kind", ["full", "none"])
def test_a_pool_knows_what_attention_spent_its_time_on(index_kind: str, kv_format: str) -> None:
    dims = replace(ORACLE, index_kind=index_kind)
    layer, n = Layer.random(dims, seed=1), ORACLE.index_topk + 70
    with Pool(2) as pool:
        begin = time.monotonic_ns()
        run(pool, layer.struct(), Cache(dims, kv_format, 1, n), rows_of(dims, n), np.arange(n))
        wall = time.monotonic_ns() - begin
        found = dict(zip(PHASES, pool.take_phases(), strict=True))
        again = pool.take_phases()
    assert 0 < sum(found.values()) <= wall
    spent = {name for name, ns in found.items() if ns > 0}
    assert spent - {"indexer"} == {"projections", "scores", "values"}
    assert index_kind == "none" or found["indexer"] > 0
    assert again == [0, 0, 0, 0], "taken once"


def test_an_int8_cache_keeps_what_is_not_finite_and_what_is_tiny() -> None:
    dims = replace(ORACLE, index_kind="none")
    layer, n = Layer.random(dims, seed=1), 4
    struct, x = layer.struct(), rows_of(dims, 4)
    cache = Cache(dims, "int8", 1, n)
    x[2] = np.nan
    with Pool(1) as pool:
        found = run(pool, struct, cache, x, np.arange(n))
    values, scales = cache.int8_entries(cache.kv, 0, n)
    assert np.isnan(scales[2]).all() and not values[2].any()
    assert np.isfinite(scales[[0, 1, 3]]).all()
    assert np.isfinite(found.x[:2]).all() and np.isnan(found.x[2:]).all(), "rows that see it notice"
    zero = replace(layer, w={**layer.w, "kv_a": np.zeros_like(layer.w["kv_a"])})
    with Pool(1) as pool:
        found = run(pool, zero.struct(), cache, rows_of(dims, n), np.arange(n))
    values, scales = cache.int8_entries(cache.kv, 0, n)
    assert not values.any() and not scales.any()
    assert np.array_equal(found.x, rows_of(dims, n)), "nothing is added"


def test_softmax_is_far_from_uniform() -> None:
    """Otherwise the comparison above would be blind to its inputs."""
    layer, n = Layer.random(CASES["dense"], seed=1), 150
    x, position = rows_of(layer.dims, n), np.arange(n)
    _, _, p = model_attention(layer, x, position, model_state(layer, x, position), np.tril(np.ones((n, n), bool)))
    assert np.median(p[:, n // 2 :].max(-1)) > 0.2


@pytest.mark.parametrize("case", ["oracle", "no_q_a_half_split"])
def test_one_percent_in_any_weight_fails_the_comparison(case: str) -> None:
    layer, n = Layer.random(CASES[case], seed=1), 80
    x, position = rows_of(layer.dims, n), np.arange(n)
    cache = Cache(layer.dims, "f32", 1, n)
    with Pool(1) as pool:
        found = run(pool, layer.struct(), cache, x, position)
    for name, value in layer.w.items():
        changed = (
            layer.perturbed(name) if value.ndim > 1 else replace(layer, w={**layer.w, name: value * np.float32(1.01)})
        )
        errors = errors_against_model(changed, x, position, cache, found)
        assert max(errors.values()) > 2, f"a change of 1 % in {name} stays unseen: {errors}"


def test_wrong_convention_or_scale_fails_the_comparison() -> None:
    layer, n = Layer.random(ORACLE, seed=1), 150
    x, position = rows_of(layer.dims, n), np.arange(n)
    cache = Cache(layer.dims, "f32", 1, n)
    with Pool(1) as pool:
        found = run(pool, layer.struct(), cache, x, position)
    for changed in (
        replace(layer, dims=replace(ORACLE, rope_interleave=False)),
        replace(layer, dims=replace(ORACLE, index_rope_interleave=False)),
        replace(layer, dims=replace(ORACLE, rope_amplitude=1.001)),
        replace(layer, softmax_scale=layer.softmax_scale * 1.001),
        replace(layer, latent_eps=1e-3),
        replace(layer, rms_eps=1e-3),
    ):
        assert max(errors_against_model(changed, x, position, cache, found).values()) > 2


N_BITS = 75
_reference: dict[tuple[str, str], Result] = {}


def reference_bits(ref: Rung, case: str, kv_format: str) -> Result:
    """One call, one thread, the reference rung; computed once."""
    if (case, kv_format) not in _reference:
        layer = Layer.random(CASES[case], seed=3)
        x, blocks = rows_of(layer.dims, N_BITS), Cache(layer.dims, kv_format, 1, N_BITS)
        with ref.use() as pool:
            found = run(pool, layer.struct(), blocks, x, np.arange(N_BITS))
        assert np.isfinite(np.stack([found.x, found.hidden])).all()
        _reference[case, kv_format] = found
    return _reference[case, kv_format]


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", ["oracle", "odd_rank_many_heads", "two_head_blocks", "no_q_a_half_split"])
def test_rungs_threads_and_chunks_give_the_same_bits(attn_rung: Rung, ref: Rung, case: str, kv_format: str) -> None:
    layer = Layer.random(CASES[case], seed=3)
    expected = reference_bits(ref, case, kv_format)
    x, position, struct = rows_of(layer.dims, N_BITS), np.arange(N_BITS), layer.struct()
    ways = [(attn_rung, 1, 0), (attn_rung, 2, 7), (ref, 4, 50)]
    if not attn_rung.emulated:
        ways += [(attn_rung, 2, 0), (attn_rung, 4, 0), (attn_rung, 1, 1), (attn_rung, 16, 0)]
    for rung, n_threads, chunk in ways:
        blocks = Cache(layer.dims, kv_format, 1, N_BITS, seed=n_threads + chunk)  # in another order, too
        with rung.use(n_threads) as pool:
            found = run(pool, struct, blocks, x, position, chunk=chunk)
        what = f"{case} {kv_format} {rung}, {n_threads} threads, chunk {chunk}"
        assert_same_bits(found, expected, what, layer.dims.index_kind == "full")


def quantised(layer: Layer, fmt: str, act: int) -> tuple[Layer, object]:
    """The layer with every matrix in `fmt`, dequantised for the model and packed for the library."""
    w, packed = dict(layer.w), {}
    for name, value in layer.w.items():
        if value.ndim == 1 or name == "index_weights":
            continue
        stack = value if value.ndim == 3 else value[None]
        parts = [pack_matrix(m, fmt) for m in stack]
        out, in_ = stack.shape[1:]
        w[name] = np.stack([unpack_matrix(a, b, fmt, out, in_) for a, b in parts]).reshape(value.shape)
        weights = aligned(np.concatenate([np.frombuffer(np.ascontiguousarray(a), np.uint8) for a, _ in parts]))
        scales = aligned(np.concatenate([np.frombuffer(np.ascontiguousarray(b), np.uint8) for _, b in parts]))
        packed[name] = matrix(weights, scales, fmt, out, in_, act)
    struct = layer.struct()
    for name, m in packed.items():
        setattr(struct, name, m)
    struct.keep = (*struct.keep, *(m.keep for m in packed.values()))
    return replace(layer, w=w), struct


@pytest.mark.parametrize("fmt", ["q8", "q4"])
def test_quantised_stacks_agree_with_their_dequantised_values(fmt: str) -> None:
    dims = Dims(n_heads=5, nope=70, kv_rank=130, v_dim=36, hidden=192, q_rank=80)
    layer, struct = quantised(Layer.random(dims, seed=4), fmt, ACT_F32)
    n = 120
    x, position = rows_of(dims, n), np.arange(n)
    cache = Cache(dims, "f32", 1, n)
    with Pool(2) as pool:
        found = run(pool, struct, cache, x, position)  # type: ignore[arg-type]
    errors = errors_against_model(layer, x, position, cache, found)
    assert max(errors.values()) <= 2, errors


@pytest.mark.parametrize("fmt", ["q8", "q4"])
def test_int8_activations_change_no_bit_over_rungs_and_chunks(rung: Rung, ref: Rung, fmt: str) -> None:
    dims = Dims(n_heads=5, nope=70, kv_rank=130, v_dim=36, hidden=192, q_rank=80)
    _, struct = quantised(Layer.random(dims, seed=4), fmt, ACT_Q8)
    n = 25
    x, position = rows_of(dims, n), np.arange(n)
    with ref.use() as pool:
        expected = run(pool, struct, Cache(dims, "bf16", 1, n), x, position)  # type: ignore[arg-type]
    for n_threads, chunk in ((1, 0), (3, 1), (2, 11)):
        with rung.use(n_threads) as pool:
            found = run(pool, struct, Cache(dims, "bf16", 1, n, seed=chunk), x, position, chunk=chunk)  # type: ignore[arg-type]
        assert_same_bits(found, expected, f"{fmt} {rung}, {n_threads} threads, chunk {chunk}")


def test_sequences_do_not_see_each_other() -> None:
    """Rows of three sequences in one call equal three calls, also when a neighbour's row is NaN."""
    dims = replace(ORACLE, index_topk=40)
    layer = Layer.random(dims, seed=5)
    struct, lengths = layer.struct(), (70, 129, 5)
    alone = []
    for s, n in enumerate(lengths):
        with Pool(1) as pool:
            alone.append(run(pool, struct, Cache(dims, "bf16", 1, 192), rows_of(dims, n, seed=s), np.arange(n)))
    x = np.concatenate([rows_of(dims, n, seed=s) for s, n in enumerate(lengths)])
    seq = np.repeat(np.arange(3), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    for poison in (False, True):
        rows = x.copy()
        if poison:
            rows[75] = np.nan  # of the second sequence, position 5
        with Pool(4) as pool:
            together = run(pool, struct, Cache(dims, "bf16", 3, 192), rows, position, seq)
        for s, n in enumerate(lengths):
            part = slice(sum(lengths[:s]), sum(lengths[:s]) + (5 if poison and s == 1 else n))
            got = Result(*(getattr(together, f)[part] for f in ("x", "hidden", "selected", "n_selected")))
            want = Result(
                *(getattr(alone[s], f)[: part.stop - part.start] for f in ("x", "hidden", "selected", "n_selected"))
            )
            assert_same_bits(got, want, f"sequence {s} among three, poison {poison}")
        assert not poison or np.isnan(together.hidden[75]).all()


def test_shared_layers_use_the_selection_they_are_given() -> None:
    full = Layer.random(ORACLE, seed=6)
    shared = Layer.random(replace(ORACLE, index_kind="shared"), seed=7)
    n = 100
    x, position = rows_of(ORACLE, n), np.arange(n)
    cache = Cache(shared.dims, "f32", 1, n)
    with Pool(2) as pool:
        first = run(pool, full.struct(), Cache(ORACLE, "f32", 1, n), x, position)
        second = run(pool, shared.struct(), cache, x, position, selection=first)
        by_one = run(pool, shared.struct(), Cache(shared.dims, "f32", 1, n), x, position, chunk=1, selection=first)
    assert np.array_equal(second.selected, first.selected)
    assert np.array_equal(second.n_selected, first.n_selected)
    assert_same_bits(by_one, second, "chunks of one")
    after, hidden, _ = model_attention(shared, x, position, model_state(shared, x, position), keep_of(first, position))
    assert np.abs(after - second.x).max() < X_BOUND
    assert np.abs(hidden - second.hidden).max() < HIDDEN_BOUND
    everything, _, _ = model_attention(
        shared, x, position, model_state(shared, x, position), np.tril(np.ones((n, n), bool))
    )
    assert np.abs(everything - second.x).max() > 0.1, "the selection must matter here"


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["full", "none"])
def test_a_few_rows_at_the_end_of_a_long_context(kind: str, kv_format: str) -> None:
    """Spans of the indexer, blocks of the sum, and more threads than (row, head) tasks."""
    dims = replace(ORACLE, index_kind=kind, index_topk=300, n_heads=20)
    layer = Layer.random(dims, seed=8)
    context, n = 4500, 5
    rng = np.random.default_rng(9)
    x, position = rows_of(dims, n), np.arange(context, context + n)
    past = rng.normal(size=(context, dims.kv_rank + dims.rope + dims.index_dim)).astype(np.float32)

    def filled(seed: int) -> Cache:
        cache = Cache(dims, kv_format, 1, context + n, seed=seed)
        for which, values in (
            (cache.kv, past[:, : dims.kv_rank + dims.rope]),
            (cache.index_k, past[:, -dims.index_dim :]),
        ):
            for p in range(context):
                row = values[p] if kv_format == "f32" else to_bf16(values[p])
                which[cache.table[0, p // KV_BLOCK], p % KV_BLOCK] = row
        return cache

    cache = filled(0)
    struct = layer.struct()
    with Pool(1) as pool:
        expected = run(pool, struct, cache, x, position)
    for n_threads, chunk in ((3, 0), (16, 0), (16, 1), (2, 2)):
        with Pool(n_threads) as pool:
            found = run(pool, struct, filled(n_threads), x, position, chunk=chunk)
        assert_same_bits(found, expected, f"{n_threads} threads, chunk {chunk}", kind == "full")

    state = model_state(layer, x, position)
    kv = cache.entries(cache.kv, 0, context + n).astype(np.float64)
    d = dims
    q = (state.q_lat @ layer.w["q_b"].astype(np.float64).T).reshape(n, d.n_heads, -1)
    q_pe = rotate(q[..., d.nope :], position, layer, d.rope_interleave)
    a = np.einsum(
        "she,hre,tr->hst", q[..., : d.nope], layer.w["k_b"].astype(np.float64), kv[:, : d.kv_rank], optimize=True
    )
    a = (a + np.einsum("shp,tp->hst", q_pe, kv[:, d.kv_rank :])) * layer.softmax_scale
    for t in range(n):
        if kind == "full":
            assert expected.n_selected[t] == d.index_topk
            keys = expected.selected[t]
            state.ki = cache.entries(cache.index_k, 0, context + n).astype(np.float64)
            scores = model_index_scores(layer, state, position)[t, : context + t + 1]
            others = np.setdiff1d(np.arange(context + t + 1), keys)
            assert scores[keys].min() >= scores[others].max() - SCORE_BOUND
        else:
            keys = np.arange(context + t + 1)
        p = np.exp(a[:, t, keys] - a[:, t, keys].max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        z = np.einsum("hk,kr->hr", p, kv[keys, : d.kv_rank])
        o = np.einsum("hr,hvr->hv", z, layer.w["v_b"].astype(np.float64)).reshape(-1)
        after = x[t] + o @ layer.w["o"].astype(np.float64).T
        assert np.abs(after - expected.x[t]).max() < X_BOUND


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", ["oracle", "odd_rank_many_heads", "no_rope"])
def test_touches_nothing_behind_its_arrays(attn_rung: Rung, ref: Rung, case: str, kv_format: str) -> None:
    dims, n = CASES[case], 64 if attn_rung.emulated else 128  # the last row is the last of its block
    layer = Layer.random(dims, seed=10)
    x, position = rows_of(dims, n), np.arange(n, dtype=np.int32)
    with ref.use() as pool:
        expected = run(pool, layer.struct(), Cache(dims, kv_format, 1, n), x, position)
    cache = Cache(dims, kv_format, 1, n)
    cache.table = np.arange(cache.n_blocks - n // KV_BLOCK, cache.n_blocks, dtype=np.int32)[None]
    kv, index_k = guarded_copy(cache.kv), guarded_copy(cache.index_k)
    found = Result(
        guarded_copy(x), guarded_copy(np.full_like(x, np.nan)), guarded_copy(np.full((n, dims.index_topk), -7, np.int32)),
        guarded_copy(np.full(n, -7, np.int32)),
    )  # fmt: skip
    step = AttnStep(
        kv=kv, index_k=index_k if dims.index_kind == "full" else None, kv_format=kv_format, n_blocks=cache.n_blocks,
        selected=found.selected, n_selected=found.n_selected, x=found.x,
    )  # fmt: skip
    step.set_rows(
        n, guarded_copy(position), guarded_copy(np.zeros(n, np.int32)), guarded_copy(cache.table), found.hidden
    )
    with attn_rung.use(2) as pool:
        attn_forward(pool, layer.struct(), step)
    assert_same_bits(found, expected, f"{case} {kv_format} {attn_rung}", dims.index_kind == "full")


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
def test_blocks_computed_apart_join_to_the_same_bits(attn_rung: Rung, ref: Rung, kv_format: str) -> None:
    """Two rows and sixteen threads: more threads than heads' worth of tasks."""
    dims, n = replace(ORACLE, index_kind="none", n_heads=18, kv_rank=41), 330
    struct, x, position = Layer.random(dims, seed=12).struct(), rows_of(dims, n), np.arange(n)
    results = []
    for rung, n_threads in ((ref, 1), (attn_rung, 16)):
        with rung.use(n_threads) as pool:
            cache = Cache(dims, kv_format, 1, n)
            cache.fill(np.random.default_rng(13).normal(size=(n, dims.kv_rank + dims.rope)).astype(np.float32))
            results.append(run(pool, struct, cache, x[-2:], position[-2:]))
    assert_same_bits(results[1], results[0], f"{kv_format} {attn_rung}", selects=False)
    # Not blind: the far end of the context matters.
    with ref.use() as pool:
        cache.kv[cache.table[0, 0]] = cache.kv[cache.table[0, 1]]
        other = run(pool, struct, cache, x[-2:], position[-2:])
    assert not np.array_equal(other.x, results[0].x)


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_the_indexer_finds_a_needle_in_four_times_what_it_keeps(kv_format: str) -> None:
    """One key among 256 turns to where the row's index queries point, at any place; the row attends to 64."""
    dims = replace(ORACLE, index_topk=64)
    layer, context = Layer.random(dims, seed=21), 4 * 64
    struct, x, position = layer.struct(), rows_of(dims, 1), np.array([context])
    rng, state, d = np.random.default_rng(22), model_state(layer, x, position), dims
    q = (state.q_lat @ layer.w["index_wq_b"].astype(np.float64).T).reshape(1, d.index_heads, d.index_dim)
    q[..., : d.rope] = rotate(q[..., : d.rope], position, layer, d.index_rope_interleave)
    gains = (state.h @ layer.w["index_weights"].astype(np.float64).T)[0]
    needle = np.maximum(gains, 0) @ q[0]
    needle *= 1.5 * np.sqrt(d.index_dim) / np.linalg.norm(needle)
    keys = rng.normal(size=(context, d.index_dim)).astype(np.float32)
    latents = rng.normal(size=(context, d.kv_rank + d.rope)).astype(np.float32)
    for place in (0, 1, 63, 64, 130, 191, 254, 255):
        for planted in (True, False):
            cache, hay = Cache(dims, kv_format, 1, context + 1), keys.copy()
            hay[place] = needle if planted else -needle
            cache.fill(latents)
            cache.fill_index(hay)
            with Pool(2) as pool:
                found = run(pool, struct, cache, x, position)
            assert (place in found.selected[0]) == planted


def test_only_the_rows_own_entries_are_written() -> None:
    layer = Layer.random(ORACLE, seed=11)
    cache = Cache(ORACLE, "f32", 1, 128)
    with Pool(1) as pool:
        run(pool, layer.struct(), cache, rows_of(ORACLE, 70), np.arange(70))
        before = cache.kv.copy(), cache.index_k.copy()
        run(pool, layer.struct(), cache, rows_of(ORACLE, 3, seed=4), np.arange(70, 73))
    for was, now in zip(before, (cache.kv, cache.index_k), strict=True):
        changed = {tuple(at) for at in np.argwhere((was.view(np.uint32) != now.view(np.uint32)).any(-1))}
        assert changed == {(cache.table[0, 1], p - 64) for p in (70, 71, 72)}


def test_zero_rows_do_nothing() -> None:
    layer, cache = Layer.random(ORACLE, seed=11), Cache(ORACLE, "f32", 1, 64)
    with Pool(1) as pool:
        step = AttnStep(
            kv=cache.kv, index_k=cache.index_k, kv_format="f32", n_blocks=cache.n_blocks,
            selected=np.zeros((4, 8), np.int32), n_selected=np.zeros(4, np.int32), x=np.zeros((4, 136), np.float32),
        )  # fmt: skip
        none = np.zeros(0, np.int32)
        step.set_rows(0, none, none, cache.table, np.zeros((0, 136), np.float32))
        attn_forward(pool, layer.struct(), step)


@pytest.mark.parametrize(
    ("what", "position", "seq", "table"),
    [
        ("a negative position", [-1], [0], None),
        ("a position beyond the table", [128], [0], None),
        ("positions that do not rise", [5, 5], [0, 0], None),
        ("a block beyond the cache", [70], [0], [[0, 99]]),
        ("a negative block", [3], [0], [[-1, 0]]),
        ("a sequence beyond the table", [0], [1], None),
        ("a negative sequence", [0], [-1], None),
    ],
)
def test_rows_outside_the_contract_are_refused(
    what: str, position: list[int], seq: list[int], table: list[list[int]] | None
) -> None:
    layer, cache = Layer.random(ORACLE, seed=11), Cache(ORACLE, "f32", 1, 128)
    if table:
        cache.table = np.array(table, np.int32)
    with Pool(1) as pool, pytest.raises(NativeError):
        run(pool, layer.struct(), cache, rows_of(ORACLE, len(position)), np.array(position), np.array(seq))


@pytest.mark.parametrize("selected", [[3, 2, 1, 0], [0, 1, 2, 6], [0, 1, 1, 2], [-1, 0, 1, 2]])
def test_selections_outside_the_contract_are_refused(selected: list[int]) -> None:
    dims = replace(ORACLE, index_kind="shared", index_topk=4)
    given = Result(
        np.zeros(0, np.float32), np.zeros(0, np.float32), np.array([selected], np.int32), np.array([4], np.int32)
    )
    cache, struct, x = Cache(dims, "f32", 1, 64), Layer.random(dims, seed=1).struct(), rows_of(dims, 1)
    with Pool(1) as pool, pytest.raises(NativeError):
        run(pool, struct, cache, x, np.array([5]), selection=given)


def test_wrong_shapes_are_named() -> None:
    layer = Layer.random(ORACLE, seed=1)
    smaller = replace(layer, w={**layer.w, "k_b": layer.w["k_b"][:, :31]})
    with pytest.raises(NativeError, match=r"k_b: expected \[32, 24\], found \[31, 24\]"):
        smaller.struct()
    cache = Cache(ORACLE, "f32", 1, 64)
    cache.kv = cache.kv[:-1]
    with Pool(1) as pool, pytest.raises(NativeError, match="kv has"):
        run(pool, layer.struct(), cache, rows_of(ORACLE, 1), np.array([0]))
