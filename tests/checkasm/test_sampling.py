"""Random numbers, sampling, log-softmax, embedding rows and top-k against plain Python and NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from native.attention import embed, topk
from native.library import NativeError
from native.sampling import log_softmax, philox4x32, sample, uniform
from tests.checkasm.attn_cases import from_bf16, to_bf16
from tests.checkasm.kit import guarded_copy

# ---- Philox-4x32-10 ------------------------------------------------------------------------------------------

ONES = 0xFFFFFFFF
# The generator's published known answers: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_the_block_of_seed_and_position() -> None:
    for seed, position in ((0, 0), (1, 2), (2**64 - 1, 2**64 - 1), (0x299F31D0A4093822, 5)):
        low, high, *_ = philox4x32(
            (position & ONES, position >> 32, 0, 0),
            (seed & ONES, seed >> 32),
        )
        assert uniform(seed, position) == ((high << 32 | low) >> 11) * 2.0**-53


def test_uniform_is_uniform_in_both_arguments() -> None:
    for values in ([uniform(7, p) for p in range(20000)], [uniform(s, 7) for s in range(20000)]):
        assert 0 <= min(values) <= max(values) < 1
        counts, _ = np.histogram(values, 20, (0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-squared, 19 degrees of freedom: p = 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


# ---- sampling ------------------------------------------------------------------------------------------------


def plain_sample(logits: np.ndarray, temperature: float, top_p: float, u: float) -> int:
    """The header's definition, a whole sort and plain sums."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0]
    wide = logits.astype(np.float64)
    p = np.exp((wide - wide.max()) / temperature)
    total = 0.0
    for value in p:
        total += value
    kept, prefix = total, len(order)
    if top_p < 1:
        kept, prefix = 0.0, 0
        for i in order:
            kept += p[i]
            prefix += 1
            if kept >= top_p * total:
                break
    running = 0.0
    for i in order[:prefix]:
        running += p[i]
        if running > u * kept:
            return i
    return [i for i in order[:prefix] if p[i] > 0][-1]


@pytest.mark.parametrize("vocab", [1, 2, 17, 300, 4096])
def test_draws_what_the_definition_draws(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for trial in range(12 if vocab == 4096 else 60):
        logits = (rng.normal(size=vocab) * rng.choice([0.1, 2, 8])).astype(np.float32)
        if trial % 3 == 0:
            logits = np.round(logits)  # many ties
        if trial % 4 == 0:
            logits[rng.random(vocab) < 0.5] = -np.inf
            logits[rng.integers(vocab)] = 1
        for u in (0.0, rng.random(), np.nextafter(1, 0)):
            args = (float(rng.choice([0.0, 0.3, 1.0, 1.7])), float(rng.choice([0.0, 0.1, 0.5, 0.95, 1.0])), float(u))
            assert sample(logits, *args) == plain_sample(logits, *args), f"vocabulary {vocab}, trial {trial}, {args}"


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    drawn = np.bincount([sample(logits, 1.0, 1.0, uniform(3, p)) for p in range(40000)], minlength=4) / 40000
    assert np.abs(drawn - [0.5, 0.25, 0.125, 0.125]).max() < 0.012
    cut = np.bincount([sample(logits, 1.0, 0.7, uniform(3, p)) for p in range(40000)], minlength=4) / 40000
    assert np.abs(cut - [2 / 3, 1 / 3, 0, 0]).max() < 0.012


def test_ties_take_the_lower_id() -> None:
    logits = np.array([1, 5, 5, 5, 0], np.float32)
    assert sample(logits, 0.0, 1.0, 0.9) == 1
    assert sample(logits, 1.0, 0.0, 0.9) == 1
    assert [sample(logits, 0.01, 1.0, u) for u in (0.1, 0.5, 0.9)] == [1, 2, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_reported(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[4] = bad
    out = np.zeros(10, np.float32)
    for temperature in (0.0, 1.0):
        assert sample(logits, temperature, 1.0, 0.5) < 0
    log_softmax(logits, out)
    assert np.isnan(out).all()
    masked = np.full(10, -np.inf, np.float32)
    assert sample(masked, 1.0, 1.0, 0.5) < 0


def test_minus_infinity_is_a_mask() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[7, 30]] = [1, 2]
    assert {sample(logits, 5.0, 1.0, u) for u in np.linspace(0, 0.999999, 200)} == {7, 30}
    assert sample(logits, 0.0, 1.0, 0.5) == 30


@pytest.mark.parametrize(
    "args", [(-1.0, 1.0, 0.5), (1.0, 1.5, 0.5), (1.0, -0.1, 0.5), (1.0, 1.0, 1.0), (math.nan, 1, 0)]
)
def test_arguments_outside_the_contract_are_refused(args: tuple[float, float, float]) -> None:
    with pytest.raises(NativeError):
        sample(np.zeros(4, np.float32), *args)


def test_log_softmax_to_the_last_bit_but_one() -> None:
    rng = np.random.default_rng(5)
    for vocab in (1, 3, 1000):
        logits = (rng.normal(size=vocab) * 10).astype(np.float32)
        logits[rng.random(vocab) < 0.1] = -np.inf
        logits[0] = 1
        out = np.full(vocab, np.nan, np.float32)
        log_softmax(guarded_copy(logits), out)
        wide = logits.astype(np.float64)
        expected = (wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())).astype(np.float32)
        near = out.view(np.int32).astype(np.int64) - expected.view(np.int32)
        assert np.abs(near).max() <= 1
        assert abs(np.exp(out.astype(np.float64)).sum() - 1) < 1e-6


# ---- embedding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["f32", "bf16", "q8"])
def test_embedding_rows(fmt: str) -> None:
    rng = np.random.default_rng(6)
    vocab, hidden = 19, 37
    scale = rng.random(vocab).astype(np.float32) if fmt == "q8" else None
    if fmt == "q8":
        table = rng.integers(-128, 128, (vocab, hidden), dtype=np.int8)
        wide = table.astype(np.float32) * scale[:, None]
    else:
        wide = rng.normal(size=(vocab, hidden)).astype(np.float32)
        table = wide if fmt == "f32" else to_bf16(wide)
        wide = wide if fmt == "f32" else from_bf16(table)
    ids = np.array([0, 18, 3, 3], np.int32)
    out = np.full((4, hidden), np.nan, np.float32)
    embed(guarded_copy(table), scale, fmt, ids, out)
    assert np.array_equal(out, wide[ids])
    embed(guarded_copy(table).view(np.uint8).reshape(-1), scale, fmt, ids, out)
    assert np.array_equal(out, wide[ids])
    for bad in (-1, vocab):
        with pytest.raises(NativeError, match=f"{vocab}"):
            embed(table, scale, fmt, np.array([bad], np.int32), out[:1])


# ---- top-k ---------------------------------------------------------------------------------------------------


def plain_topk(scores: np.ndarray, k: int) -> np.ndarray:
    """A whole sort; NaN below everything, 0 and -0 equal, ties to the lower position."""
    keys = np.where(np.isnan(scores), -np.inf, scores + np.float32(0))
    order = np.lexsort((np.arange(len(scores)), np.isnan(scores), -keys))
    return np.sort(order[:k])


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 2047, 2049, 9000])
def test_topk_is_the_sorts_prefix(n: int) -> None:
    rng = np.random.default_rng(n)
    kinds = {
        "normal": rng.normal(size=n),
        "one value": np.full(n, 0.25),
        "few values": rng.integers(-2, 3, n) * 0.5,
        "one binade": 1 + rng.random(n) * 1e-3,
        "tiny": rng.normal(size=n) * 1e-41,
        "zeros of both signs": rng.choice([0.0, -0.0], n),
        "infinities": rng.choice([np.inf, -np.inf, 1.0, 2.0], n),
        "some NaN": np.where(rng.random(n) < 0.3, np.nan, rng.normal(size=n)),
        "all NaN": np.full(n, np.nan),
        "rising": np.arange(n),
        "falling": -np.arange(n),
    }
    for kind, values in kinds.items():
        scores = values.astype(np.float32)
        for k in sorted({1, 2, n // 3, n - 1, n, n + 5} - {0}):
            found = topk(guarded_copy(scores), k)
            assert np.array_equal(found, plain_topk(scores, k)), f"{kind}, n {n}, k {k}"


def test_topk_of_nothing() -> None:
    assert len(topk(np.zeros(5, np.float32), 0)) == 0
    assert len(topk(np.zeros(0, np.float32), 5)) == 0


def test_topk_takes_linear_time() -> None:
    """All values in one bin of the first pass must not cost more than spread ones."""
    import time

    rng = np.random.default_rng(8)
    spread, narrow = rng.normal(size=1 << 19).astype(np.float32), (1 + rng.random(1 << 19) * 1e-4).astype(np.float32)

    def seconds(scores: np.ndarray) -> float:
        best = math.inf
        for _ in range(3):
            start = time.thread_time()
            topk(scores, 2048)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(narrow) < 4 * seconds(spread) + 1e-3
    assert seconds(spread) < 0.05
