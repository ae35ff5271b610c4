"""Grouped-query attention: the library against a plain float64 model, and every rung, thread count and chunking against
the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cli.quality.schemes import round_activations
from native.attention import KV_BLOCK, AttnStep
from native.gqa import GqaLayer, gqa_forward
from native.library import NativeError, Pool
from native.matrix import ACT_F32, ACT_Q8, matrix
from shared.container.pack import pack_matrix, unpack_matrix
from tests.checkasm.attn_cases import aligned
from tests.checkasm.gqa_cases import Cache, Dims, Result, perturbed, random_layer, run, struct
from tests.checkasm.kit import Rung, assert_same, guarded_copy
from tests.reference.gqa_moe import Attention, attend, finish, queries_keys_values

# Largest errors seen over all cases: 1.7e-6 on cached values, 8e-6 on x (whose values reach 16), 3.7e-6 on hidden.
CACHE_BOUND, X_BOUND, HIDDEN_BOUND = 7e-6, 3e-5, 1.5e-5
BF16_BOUND = 2.0**-8  # half a unit of the last place, relative

CASES = {
    "plain": Dims(),
    "one_query_head_per_key_head": Dims(n_heads=4, n_kv_heads=4, qk_norm="whole"),
    "head_norms": Dims(qk_norm="head"),
    "bias_partial_rope": Dims(n_heads=6, rope=16, bias=True, qk_norm="head"),
    "window_sinks_bias": Dims(window=24, sinks=True, bias=True, amplitude=1.35),
    "window_of_two_blocks": Dims(window=100, n_heads=14),
    "window_of_one": Dims(window=1),
    "sinks": Dims(sinks=True),
    "keys_are_values": Dims(n_heads=4, n_kv_heads=1, head_dim=48, rope=48, has_v=False, value_norm=True, qk_norm="head",
                            out_norm=True),
    "interleaved_clipped": Dims(interleave=True, rope=20, clip=1.5, qk_norm="whole"),
    "odd_sizes": Dims(hidden=41, n_heads=33, n_kv_heads=3, head_dim=21, rope=6, bias=True),
    "gated": Dims(qk_norm="head", rope=8, gate=True),
    "no_rope": Dims(rope=0, n_heads=2, n_kv_heads=1),
}  # fmt: skip
N = 150


@pytest.fixture
def gqa_rung(rung: Rung) -> Rung:
    """Every rung has inner loops of an int8 cache, if not of the others, of its own."""
    return rung


def rows_of(layer: Attention, n: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, layer.w["o"].shape[0])).astype(np.float32)


def deinterleaved(layer: Attention, keys: np.ndarray) -> np.ndarray:
    """Keys as the cache holds them: of interleaved pairs, first all firsts."""
    if not layer.interleave:
        return keys
    r = layer.rope
    return np.concatenate([keys[..., 0:r:2], keys[..., 1:r:2], keys[..., r:]], -1)


def assert_same_result(found: Result, expected: Result, what: str) -> None:
    assert_same(found.x, expected.x, f"{what}: x")
    assert_same(found.hidden, expected.hidden, f"{what}: hidden")


def errors_against_model(
    layer: Attention, x: np.ndarray, position: np.ndarray, cache: Cache, found: Result
) -> dict[str, float]:
    """Each error as a multiple of its bound: all at most 1 when the library does what the model does."""
    x64, n = x.astype(np.float64), len(x)
    q, k, v = queries_keys_values(layer, x64, position)
    cached_k, cached_v = cache.entries(0, n)
    errors = {}
    for name, got, expected in (("keys", cached_k, deinterleaved(layer, k)), ("values", cached_v, v)):
        tolerance = CACHE_BOUND + (np.abs(expected) * BF16_BOUND if cache.kv_format == "bf16" else 0)
        errors[name] = float((np.abs(got - expected) / tolerance).max())
    # From here on the model works with what was really cached, else the rounding of bf16 would hide everything else.
    heads, _ = attend(layer, deinterleaved(layer, q), cached_k, cached_v, position)
    after, hidden = finish(layer, x64, heads)
    errors["x"] = float(np.abs(after - found.x).max() / X_BOUND)
    errors["hidden"] = float(np.abs(hidden - found.hidden).max() / HIDDEN_BOUND)
    assert not np.isnan(list(errors.values())).any()
    return errors


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_float64_model(case: str, kv_format: str) -> None:
    layer = random_layer(CASES[case], seed=1)
    x, position = rows_of(layer, N), np.arange(N)
    cache = Cache(layer, kv_format, 1, N)
    with Pool(2) as pool:
        found = run(pool, struct(layer), cache, x, position)
    errors = errors_against_model(layer, x, position, cache, found)
    assert max(errors.values()) <= 1, f"{case} {kv_format}: {errors}"


def int8_queries(layer: Attention, q: np.ndarray) -> tuple[Attention, np.ndarray]:
    """Queries as they meet an int8 cache, and a layer that takes them so."""
    scaled = (q * np.float32(layer.scale)).astype(np.float32)
    return replace(layer, scale=1.0), round_activations(scaled).astype(np.float64)


@pytest.mark.parametrize("case", CASES)
def test_an_int8_cache_agrees_with_its_definition(case: str) -> None:
    """The cache within half a step of what the model caches; half of the rows as closely as f32 rows are, where no query fell
    on the other side of a half. With any weight a percent off hardly a row does."""
    layer = random_layer(CASES[case], seed=1)
    x, position = rows_of(layer, N), np.arange(N)
    cache = Cache(layer, "int8", 1, N)
    with Pool(2) as pool:
        found = run(pool, struct(layer), cache, x, position)
    _, k, v = queries_keys_values(layer, x.astype(np.float64), position)
    for (values, step), exact in zip(cache.int8_entries(0, N), (deinterleaved(layer, k), v), strict=True):
        assert (np.abs(values * step - exact) <= 0.51 * step + 1e-9).all()

    def error(of: Attention) -> float:
        q, _, _ = queries_keys_values(of, x.astype(np.float64), position)
        heads, _ = attend(*int8_queries(of, deinterleaved(of, q)), *cache.entries(0, N), position)
        after, _ = finish(of, x.astype(np.float64), heads)
        return float(np.median(np.abs(after - found.x).max(axis=1)))

    good = error(layer)
    assert good < 2 * X_BOUND + 2e-3 * float(np.abs(found.x - x).max())
    for name in ("q", "o") if layer.window != 1 else ("o",):  # one key has all the weight, whatever the query
        assert error(perturbed(layer, name)) > 2 * good, name


def test_softmax_is_far_from_uniform() -> None:
    """Otherwise the comparison above would be blind to its inputs."""
    for case in ("plain", "head_norms"):
        layer, position = random_layer(CASES[case], seed=1), np.arange(N)
        q, k, v = queries_keys_values(layer, rows_of(layer, N).astype(np.float64), position)
        _, share = attend(layer, q, k, v, position)
        assert np.median(share[:, N // 2 :].max(-1)) > 0.2


@pytest.mark.parametrize("case", ["window_sinks_bias", "keys_are_values", "interleaved_clipped", "bias_partial_rope"])
def test_one_percent_in_any_weight_fails_the_comparison(case: str) -> None:
    layer, n = random_layer(CASES[case], seed=1), 80
    x, position = rows_of(layer, n), np.arange(n)
    for name in layer.w:
        cache = Cache(layer, "f32", 1, n)
        with Pool(1) as pool:
            found = run(pool, struct(perturbed(layer, name)), cache, x, position)
        errors = errors_against_model(layer, x, position, cache, found)
        assert max(errors.values()) > 2, f"{case}: {name} changed by 1 % and nobody noticed: {errors}"


@pytest.mark.parametrize(
    "change",
    [{"window": 23}, {"window": 25}, {"clip": 1.6}, {"amplitude": 1.36}, {"scale": 0.178}, {"interleave": True},
     {"qk_norm": "none"}, {"value_norm": True}],
)  # fmt: skip
def test_every_setting_matters(change: dict[str, object]) -> None:
    layer, n = random_layer(Dims(window=24, clip=1.5, qk_norm="head"), seed=1), 80
    x, position = rows_of(layer, n), np.arange(n)
    cache = Cache(layer, "f32", 1, n)
    with Pool(1) as pool:
        found = run(pool, struct(replace(layer, **change)), cache, x, position)  # type: ignore[arg-type]
    assert max(errors_against_model(layer, x, position, cache, found).values()) > 2


_reference: dict[tuple[str, str, int], Result] = {}


def reference_bits(ref: Rung, case: str, kv_format: str, n: int) -> Result:
    key = (case, kv_format, n)
    if key not in _reference:
        layer = random_layer(CASES[case], seed=3)
        with ref.use() as pool:
            _reference[key] = run(pool, struct(layer), Cache(layer, kv_format, 1, n), rows_of(layer, n), np.arange(n))
    return _reference[key]


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_rungs_threads_and_chunks_give_the_same_bits(gqa_rung: Rung, ref: Rung, case: str, kv_format: str) -> None:
    layer = random_layer(CASES[case], seed=3)
    n = 80 if gqa_rung.emulated else N
    expected = reference_bits(ref, case, kv_format, n)
    x, position, made = rows_of(layer, n), np.arange(n), struct(layer)
    ways = [(gqa_rung, 1, 0), (gqa_rung, 2, 7), (ref, 4, 50)]
    if not gqa_rung.emulated:
        ways += [(gqa_rung, 2, 0), (gqa_rung, 4, 0), (gqa_rung, 1, 1), (gqa_rung, 16, 0)]
    for rung, n_threads, chunk in ways:
        blocks = Cache(layer, kv_format, 1, n, seed=n_threads + chunk)  # in another order, too
        with rung.use(n_threads) as pool:
            found = run(pool, made, blocks, x, position, chunk=chunk)
        assert_same_result(found, expected, f"{case} {kv_format} {rung}, {n_threads} threads, chunk {chunk}")


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", ["plain", "window_sinks_bias", "window_of_two_blocks", "sinks"])
def test_blocks_computed_apart_join_to_the_same_bits(gqa_rung: Rung, ref: Rung, case: str, kv_format: str) -> None:
    """A few rows at the end of a context, and far more threads than key heads."""
    dims = replace(CASES[case], window=CASES[case].window and CASES[case].window + 300)
    layer, context, n = random_layer(dims, seed=4), 700, 2
    x, position, made = rows_of(layer, n), np.arange(context, context + n), struct(layer)
    rng = np.random.default_rng(5)
    shape = (context, layer.n_kv_heads, layer.head_dim)
    keys, values = (rng.normal(size=shape).astype(np.float32) for _ in range(2))

    def filled(seed: int) -> Cache:
        cache = Cache(layer, kv_format, 1, context + n, seed=seed)
        cache.fill(0, keys, values)
        return cache

    first = filled(0)
    with ref.use() as pool:
        expected = run(pool, made, first, x, position)
    for rung, n_threads, chunk in ((gqa_rung, 16, 0), (gqa_rung, 16, 1), (gqa_rung, 2, 0), (ref, 5, 1)):
        with rung.use(n_threads) as pool:
            found = run(pool, made, filled(n_threads), x, position, chunk=chunk)
        assert_same_result(found, expected, f"{case} {kv_format} {rung}, {n_threads} threads, chunk {chunk}")
    q, _, _ = queries_keys_values(layer, x.astype(np.float64), position)
    rounded, q = int8_queries(layer, q) if kv_format == "int8" else (layer, q)
    heads, _ = attend(rounded, q, *first.entries(0, context + n), position)
    after, _ = finish(layer, x.astype(np.float64), heads)
    off = 2e-3 * np.abs(expected.x - x).max() if kv_format == "int8" else 0  # a query on the other side of a half
    assert np.abs(after - expected.x).max() < X_BOUND + off


def test_sequences_do_not_see_each_other_nor_rows_their_future() -> None:
    """Rows of three sequences in one call equal three calls; a NaN row spoils no row before it."""
    layer = random_layer(CASES["bias_partial_rope"], seed=5)
    made, lengths = struct(layer), (70, 129, 5)
    alone = []
    for s, n in enumerate(lengths):
        with Pool(1) as pool:
            alone.append(run(pool, made, Cache(layer, "bf16", 1, 192), rows_of(layer, n, seed=s), np.arange(n)))
    x = np.concatenate([rows_of(layer, n, seed=s) for s, n in enumerate(lengths)])
    seq, position = np.repeat(np.arange(3), lengths), np.concatenate([np.arange(n) for n in lengths])
    for poison in (False, True):
        rows = x.copy()
        if poison:
            rows[75] = np.nan  # of the second sequence, position 5
        with Pool(4) as pool:
            together = run(pool, made, Cache(layer, "bf16", 3, 192), rows, position, seq)
        for s, n in enumerate(lengths):
            first, stop = sum(lengths[:s]), 5 if poison and s == 1 else n
            got = Result(together.x[first : first + stop], together.hidden[first : first + stop])
            want = Result(alone[s].x[:stop], alone[s].hidden[:stop])
            assert_same_result(got, want, f"sequence {s} among three, poison {poison}")
        assert not poison or np.isnan(together.hidden[75:199]).all()


@pytest.mark.parametrize("where", ["key", "value"])
def test_what_lies_outside_the_window_is_never_read_into_a_sum(gqa_rung: Rung, where: str) -> None:
    """Not even times zero: the cache there holds NaN."""
    layer, context = random_layer(CASES["window_sinks_bias"], seed=6), 100
    rng = np.random.default_rng(7)
    keys, values = (rng.normal(size=(context, layer.n_kv_heads, layer.head_dim)).astype(np.float32) for _ in range(2))
    (keys if where == "key" else values)[: context - layer.window + 1] = np.nan
    for n_threads in (1, 8):
        cache = Cache(layer, "f32", 1, context + 1)
        cache.fill(0, keys, values)
        with gqa_rung.use(n_threads) as pool:
            found = run(pool, struct(layer), cache, rows_of(layer, 1), np.array([context]))
        assert np.isfinite(found.x).all()
        cache.fill(0, keys[:0], values[:0])
        (keys if where == "key" else values)[context - layer.window + 1] = np.nan
        cache.fill(0, keys, values)
        with gqa_rung.use(n_threads) as pool:
            spoilt = run(pool, struct(layer), cache, rows_of(layer, 1), np.array([context]))
        assert np.isnan(spoilt.x).all(), "the first key of the window must matter"
        (keys if where == "key" else values)[context - layer.window + 1] = 1.0


def test_blocks_behind_the_window_need_not_exist() -> None:
    layer = random_layer(CASES["window_sinks_bias"], seed=6)
    cache = Cache(layer, "f32", 1, 256)
    cache.fill(0, *(np.zeros((200, layer.n_kv_heads, layer.head_dim), np.float32) for _ in range(2)))
    cache.table[0, :2] = -1
    with Pool(1) as pool:
        run(pool, struct(layer), cache, rows_of(layer, 2), np.array([200, 201]))
    with Pool(1) as pool, pytest.raises(NativeError, match="block numbers"):
        run(pool, struct(replace(layer, window=100)), cache, rows_of(layer, 2), np.array([200, 201]))


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", ["bias_partial_rope", "window_sinks_bias", "odd_sizes", "keys_are_values"])
def test_touches_nothing_behind_its_arrays(gqa_rung: Rung, ref: Rung, case: str, kv_format: str) -> None:
    layer, n = random_layer(CASES[case], seed=10), 64  # the last row is the last of its block
    x, position, made = rows_of(layer, n), np.arange(n, dtype=np.int32), struct(layer)
    with ref.use() as pool:
        expected = run(pool, made, Cache(layer, kv_format, 1, n), x, position)
    cache = Cache(layer, kv_format, 1, n)
    cache.table = np.array([[cache.n_blocks - 1]], np.int32)
    found = Result(guarded_copy(x), guarded_copy(np.full_like(x, np.nan)))
    step = AttnStep(
        kv=guarded_copy(cache.kv), index_k=None, kv_format=kv_format, n_blocks=cache.n_blocks, selected=None,
        n_selected=None, x=found.x,
    )  # fmt: skip
    step.set_rows(
        n, guarded_copy(position), guarded_copy(np.zeros(n, np.int32)), guarded_copy(cache.table), found.hidden
    )
    with gqa_rung.use(2) as pool:
        gqa_forward(pool, made, step)
    assert_same_result(found, expected, f"{case} {kv_format} {gqa_rung}")


def test_only_the_rows_own_entries_are_written() -> None:
    layer = random_layer(CASES["plain"], seed=11)
    cache = Cache(layer, "f32", 1, 128)
    with Pool(1) as pool:
        run(pool, struct(layer), cache, rows_of(layer, 70), np.arange(70))
        before = cache.entries(0, 128)
        whole = cache.kv.copy()
        run(pool, struct(layer), cache, rows_of(layer, 3, seed=4), np.arange(70, 73))
    for was, now in zip(before, cache.entries(0, 128), strict=True):
        same = ((was == now) | (np.isnan(was) & np.isnan(now))).all((1, 2))
        assert list(np.nonzero(~same)[0]) == [70, 71, 72]
    changed = (whole.view(np.uint32) != cache.kv.view(np.uint32)).sum()
    assert changed == 3 * 2 * layer.n_kv_heads * layer.head_dim


@pytest.mark.parametrize(("fmt", "act"), [("q8", ACT_Q8), ("q4", ACT_Q8), ("q4", ACT_F32)])
def test_quantised_projections_change_no_bit_over_rungs_and_chunks(
    gqa_rung: Rung, ref: Rung, fmt: str, act: int
) -> None:
    layer = random_layer(Dims(hidden=136, head_dim=40, rope=40, qk_norm="head"), seed=4)
    made = struct(layer)
    for name in "qkvo":
        out, in_ = layer.w[name].shape
        weight, scale = pack_matrix(layer.w[name].astype(np.float32), fmt)
        layer.w[name] = unpack_matrix(weight, scale, fmt, out, in_).astype(np.float64)
        weight, scale = (aligned(np.frombuffer(np.ascontiguousarray(part), np.uint8)) for part in (weight, scale))
        setattr(made, name, matrix(weight, scale, fmt, out, in_, act))
        made.keep = (*made.keep, weight, scale)
    n = 25
    x, position, first = rows_of(layer, n), np.arange(n), Cache(layer, "bf16", 1, n)
    with ref.use() as pool:
        expected = run(pool, made, first, x, position)
    for n_threads, chunk in ((1, 0), (3, 1), (2, 11)):
        with gqa_rung.use(n_threads) as pool:
            found = run(pool, made, Cache(layer, "bf16", 1, n, seed=chunk), x, position, chunk=chunk)
        assert_same_result(found, expected, f"{fmt} {gqa_rung}, {n_threads} threads, chunk {chunk}")
    if act == ACT_F32:
        assert max(errors_against_model(layer, x, position, first, expected).values()) <= 2


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
    layer = random_layer(CASES["plain"], seed=11)
    cache = Cache(layer, "f32", 1, 128)
    if table:
        cache.table = np.array(table, np.int32)
    with Pool(1) as pool, pytest.raises(NativeError):
        run(pool, struct(layer), cache, rows_of(layer, len(position)), np.array(position), np.array(seq))


@pytest.mark.parametrize(
    "change",
    [{"n_heads": 7, "n_kv_heads": 2}, {"rope": 34}, {"rope": 7}, {"window": -1}, {"head_dim": 0}, {"n_kv_heads": 0}],
)
def test_layers_outside_the_contract_are_refused(change: dict[str, int]) -> None:
    layer = random_layer(CASES["plain"], seed=11)
    made = struct(layer)
    for name, value in change.items():
        setattr(made, name, value)
    with Pool(1) as pool, pytest.raises(NativeError):
        run(pool, made, Cache(layer, "f32", 1, 128), rows_of(layer, 1), np.array([0]))


def test_wrong_shapes_are_named() -> None:
    layer = random_layer(CASES["head_norms"], seed=1)
    with pytest.raises(NativeError, match=r"k: expected \[64, 72\], found \[63, 72\]"):
        struct(replace(layer, w={**layer.w, "k": layer.w["k"][:63]}))
    with pytest.raises(NativeError, match="q_norm"):
        struct(replace(layer, w={**layer.w, "q_norm": layer.w["q_norm"][:31]}))
    with pytest.raises(NativeError, match="qk_norm 'row'"):
        GqaLayer(qk_norm="row")
    cache = Cache(layer, "f32", 1, KV_BLOCK)
    cache.kv = cache.kv[:-1]
    with Pool(1) as pool, pytest.raises(NativeError, match="kv has"):
        run(pool, struct(layer), cache, rows_of(layer, 1), np.array([0]))


def test_zero_rows_do_nothing() -> None:
    layer = random_layer(CASES["plain"], seed=1)
    cache, none = Cache(layer, "f32", 1, KV_BLOCK), np.zeros(0, np.int32)
    step = AttnStep(
        kv=cache.kv, index_k=None, kv_format="f32", n_blocks=cache.n_blocks, selected=None, n_selected=None,
        x=np.zeros((4, 72), np.float32),
    )  # fmt: skip
    step.set_rows(0, none, none, cache.table, np.zeros((0, 72), np.float32))
    with Pool(1) as pool:
        gqa_forward(pool, struct(layer), step)
