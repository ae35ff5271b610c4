"""The pure parts of ``colibri quality``: distances, formats, sums of errors, selection and cutting of texts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cli.quality.compare import Comparison
from cli.quality.errors import ErrorReport, tensor_error
from cli.quality.schemes import SCHEMES, candidate_lanes, round_activations
from cli.quality.text import cut, default_text, read_documents
from native.kernels import linear
from native.library import Pool
from native.matrix import ACT_F32, ACT_Q8, matrix, scale_bytes, weight_bytes
from shared.container.pack import pack_matrix, unpack_matrix
from shared.container.reader import aligned_buffer
from shared.errors import ConfigError
from shared.model.attention.latent import select


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def compare(p: np.ndarray, q: np.ndarray, targets: np.ndarray, widths: tuple[int, ...]) -> Comparison:
    comparison = Comparison(targets, 1)
    at = 0
    for width in widths:
        comparison.add(p[:, at : at + width], [q[:, at : at + width]])
        at += width
    assert at == p.shape[1]
    return comparison


@pytest.mark.parametrize("widths", [(60,), (1, 59), (20, 20, 20), (59, 1)])
def test_distances_equal_the_textbook_in_any_pieces(widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    z = (rng.normal(size=(40, 60)) * 6).astype(np.float32)
    y = (z + rng.normal(size=z.shape)).astype(np.float32)
    targets = rng.integers(0, 60, 40)
    targets[[7, 39]] = -1
    scores = compare(z, y, targets, widths).scores(0)
    p, q = softmax(z.astype(np.float64)), softmax(y.astype(np.float64))
    kl = np.sum(p * np.log(p / q), axis=1)
    rows = np.flatnonzero(targets >= 0)
    losses = [-np.log(d[rows, targets[rows]]) for d in (p, q)]
    assert scores.kl_mean == pytest.approx(kl.mean(), rel=1e-9)
    assert scores.kl_error == pytest.approx(kl.std(ddof=1) / math.sqrt(40), rel=1e-9)
    assert scores.kl_max == pytest.approx(kl.max(), rel=1e-9)
    assert scores.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    assert scores.top1 == (z.argmax(1) == y.argmax(1)).mean() < 1
    assert scores.perplexity_of_source == pytest.approx(math.exp(losses[0].mean()), rel=1e-9)
    assert scores.perplexity == pytest.approx(math.exp(losses[1].mean()), rel=1e-9)
    assert scores.loss_change == pytest.approx((losses[1] - losses[0]).mean(), rel=1e-9)
    assert scores.n_rows == 40


def test_a_distribution_is_at_no_distance_from_itself() -> None:
    z = (np.random.default_rng(2).normal(size=(9, 30)) * 50).astype(np.float32)
    scores = compare(z, z, np.full(9, 3), (11, 19)).scores(0)
    assert (scores.kl_mean, scores.kl_max, scores.top1, scores.loss_change) == (0.0, 0.0, 1.0, 0.0)
    shifted = compare(z, z + np.float32(8), np.full(9, 3), (11, 19)).scores(0)
    assert shifted.kl_max < 1e-6, "a constant added to all logits changes nothing"


def test_a_distance_that_is_not_a_number_is_not_hidden() -> None:
    z = np.zeros((2, 4), np.float32)
    y = z.copy()
    y[1, 2] = np.nan
    with np.errstate(invalid="ignore"):
        scores = compare(z, y, np.zeros(2, np.int64), (4,)).scores(0)
    assert math.isnan(scores.kl_mean)
    assert math.isnan(scores.perplexity)


def test_perplexity_of_ignorance_is_the_vocabulary() -> None:
    z = np.zeros((5, 64), np.float32)
    assert compare(z, z, np.arange(5), (64,)).scores(0).perplexity == pytest.approx(64)


@pytest.mark.parametrize(("scheme", "fmt"), [("f32", "f32"), ("bf16", "bf16"), ("int8", "q8"), ("int4-gs64", "q4")])
@pytest.mark.parametrize("in_", [64, 100, 192])
def test_a_scheme_gives_what_a_container_gives_back(scheme: str, fmt: str, in_: int) -> None:
    w = np.random.default_rng(3).normal(size=(32, in_)).astype(np.float32)
    weight, scale = pack_matrix(w, fmt)
    assert np.array_equal(SCHEMES[scheme].round(w), unpack_matrix(weight, scale, fmt, 32, in_))
    stored = (weight_bytes(fmt, 32, in_) + scale_bytes(fmt, 32, in_)) / w.size
    if in_ % 64 == 0:
        assert SCHEMES[scheme].bytes_per_weight(in_) == pytest.approx(stored)


def test_smaller_groups_shield_from_outliers() -> None:
    """A few large inputs spoil the scale of all that share it: the whole row, 64 or 32 neighbours."""
    w = np.random.default_rng(4).normal(size=(16, 256)).astype(np.float32)
    w[:, 5] *= 20
    error = {name: np.abs(scheme.round(w) - w)[:, np.arange(256) != 5].mean() for name, scheme in SCHEMES.items()}
    assert error["int4-row"] > 2 * error["int4-gs64"] > 2 * error["int4-gs32"] > error["int8"] > error["bf16"] > 0
    # the row's other groups are as if the outlier were not there
    gs32 = SCHEMES["int4-gs32"].round(w)
    calm = w.copy()
    calm[:, 5] = 0
    assert np.array_equal(gs32[:, 32:], SCHEMES["int4-gs32"].round(calm)[:, 32:])
    assert not np.array_equal(SCHEMES["int4-row"].round(w)[:, 32:], SCHEMES["int4-row"].round(calm)[:, 32:])


def test_the_containers_scale_uses_all_sixteen_steps() -> None:
    w = np.random.default_rng(8).normal(size=(64, 200)).astype(np.float32)
    w[3, :64] = 0
    w[4, 10] = -9

    def error(name: str) -> float:
        return float(np.square(SCHEMES[name].round(w) - w).sum())

    assert error("int4-gs64-fitted") < error("int4-gs64") < 0.9 * error("int4-gs64-max7")
    for name in ("int4-gs64-fitted", "int4-gs64-max7"):
        assert SCHEMES[name].bytes_per_weight(128) == SCHEMES["int4-gs64"].bytes_per_weight(128)
    symmetric = SCHEMES["int4-gs64-max7"].round(w)
    assert np.array_equal(symmetric, -SCHEMES["int4-gs64-max7"].round(-w))
    assert symmetric.max(axis=1) == pytest.approx(w.max(axis=1), rel=0.15), "nothing is clipped"
    rounded = SCHEMES["int4-gs64"].round(w)
    assert not rounded[3, :64].any()
    assert rounded[4, 10] == -9, "9 / 8 is an f16, so the largest value is met exactly"
    steps = np.abs(np.diff(np.unique(rounded[5, 64:128])))
    assert len(np.unique(rounded[5, 64:128])) <= 16 and steps.min() > 0


def test_kernels_read_negative_scales_as_they_are() -> None:
    w = np.random.default_rng(9).normal(size=(32, 128)).astype(np.float32)
    x = np.random.default_rng(10).normal(size=(5, 128)).astype(np.float32)
    weight, scale = pack_matrix(w, "q4")
    assert scale is not None and (scale.view(np.float16) < 0).any()
    rounded = unpack_matrix(weight, scale, "q4", 32, 128)
    out = np.empty((5, 32), np.float32)
    aligned = [aligned_buffer(part.nbytes) for part in (weight, scale)]
    for buffer, part in zip(aligned, (weight, scale)):
        buffer[:] = part
    pool = Pool(1)
    for act, inputs in ((ACT_F32, x), (ACT_Q8, round_activations(x))):
        linear(pool, matrix(*aligned, "q4", 32, 128, act), x, out)
        np.testing.assert_allclose(out, inputs @ rounded.T, atol=2e-5)
    pool.close()


def test_bytes_per_weight_count_scales() -> None:
    found = {name: scheme.bytes_per_weight(128) for name, scheme in SCHEMES.items() if "gs64-" not in name}
    assert found == {
        "f32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 128, "int4-gs32": 0.5625, "int4-gs64": 0.53125, "int4-row": 0.5 + 2 / 128,
        "int8-gs32": 1.0625, "mxfp4": 0.53125,
    }  # fmt: skip


def test_activations_follow_the_written_definition() -> None:
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(3, 2, 100)) * 10 ** rng.uniform(-3, 3, (3, 2, 1))).astype(np.float32)
    x[1, 0] = 0
    x[2, 1, 64:] = np.float32(1e-41)
    got = round_activations(x)
    for row in np.ndindex(3, 2):
        for start in (0, 64):
            group = x[row][start : start + 64]
            m = np.abs(group).max()
            with np.errstate(over="ignore", divide="ignore"):
                i = np.float32(127) / m if m > 0 else np.float32(0)
            if not np.isfinite(i):
                expected = np.zeros_like(group)
            else:
                expected = np.clip(np.rint(group * i), -127, 127) * (m / np.float32(127))
            assert np.array_equal(got[row][start : start + 64], expected)
    assert 0 < np.abs(got - x).max() / np.abs(x).max() < 0.01


def test_selection_keeps_the_best_and_the_earlier_of_equals() -> None:
    rng = np.random.default_rng(6)
    q, k = rng.normal(size=(30, 3, 8)).astype(np.float32), rng.normal(size=(30, 8)).astype(np.float32)
    g = rng.normal(size=(30, 3)).astype(np.float32)
    k[4] = k[9]
    allowed = select(q, k, g, 6)
    for row in range(30):
        scores = [(-float(g[row] @ np.maximum(q[row] @ k[p], 0)), p) for p in range(row + 1)]
        assert set(np.flatnonzero(allowed[row])) == {p for _, p in sorted(scores)[:6]}


def test_the_perturbed_tensor_is_the_worst_and_a_nan_is_worse() -> None:
    rng = np.random.default_rng(7)
    report = ErrorReport(n_worst=3)
    for i in range(6):
        w = rng.normal(size=(8, 16)).astype(np.float32)
        found = w + np.float32(0.01 * i)
        report.add(tensor_error(f"t{i}", "expert", "q4", [(w[:3], found[:3]), (w[3:], found[3:])]))
    assert [e.name for e in report.worst] == ["t5", "t4", "t3"]
    sums = report.roles["expert", "q4"]
    assert sums.n_tensors == 6 and sums.n_values == 6 * 128
    assert sums.largest_error == pytest.approx(0.05, rel=1e-4)
    assert report.worst[0].sums.rms == pytest.approx(0.05, rel=1e-4)
    bad = np.ones((8, 16), np.float32)
    report.add(tensor_error("bad", "expert", "q4", [(bad, bad), (bad, bad * np.nan), (bad, bad)]))
    assert report.worst[0].name == "bad"
    assert math.isnan(report.roles["expert", "q4"].largest_error)


def test_exact_tensors_are_not_listed() -> None:
    report = ErrorReport()
    zero = np.zeros((2, 2), np.float32)
    report.add(tensor_error("zero", "exact", "f32", [(zero, zero)]))
    assert report.worst == []
    report.add(tensor_error("from nothing", "exact", "f32", [(zero, zero + 1)]))
    assert report.worst[0].sums.relative == math.inf


def test_texts_are_cut_into_sequences() -> None:
    documents = [list(range(10)), [1], list(range(5))]
    assert cut(documents, 100, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert cut(documents, 6, 4) == [[0, 1, 2, 3], [4, 5]]
    assert cut(documents, 5, 4) == [[0, 1, 2, 3]], "a single token predicts nothing"
    assert cut([[7]], 5, 4) == []


def test_documents_of_a_file(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\ntwo\n")
    lines.write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    assert read_documents(plain) == ["one\ntwo\n"]
    assert read_documents(lines) == ["one", "two"]
    lines.write_text('{"text": "one"}\n["two"]\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_documents(lines)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_documents(plain)
    with pytest.raises(ConfigError, match="No such file"):
        read_documents(tmp_path / "none.txt")


def test_the_shipped_text_is_there() -> None:
    documents = read_documents(default_text())
    assert len(documents) >= 40
    assert len(set(documents)) == len(documents)


def test_lanes_have_names_of_their_own_within_a_table() -> None:
    keys = [(lane.table, lane.name, lane.activations) for lane in candidate_lanes()]
    assert len(set(keys)) == len(keys)
    assert {scheme for lane in candidate_lanes() for scheme in lane.formats.values()} <= set(SCHEMES)
