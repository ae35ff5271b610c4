"""The forward pass behind ``colibri quality`` is the engine's: logits against the oracles and against recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli.quality.forward import Forward
from cli.quality.measure import STORED
from cli.quality.schemes import INT8_INPUTS, SOURCE_LANE, Lane, stored_lane
from cli.quality.tensors import LaneWeights, Pair
from tests.oracle import ORACLES, oracle_array, oracle_dir
from tests.support.ring import Ring, read_record

Converted = Callable[[str, str], Path]
PIECE = 4
"""Rounding of activations is discontinuous: where a sum that the engine adds in another order falls on the other side of
a half, the row and those after it move for good. Short sequences keep such a row from spoiling all others."""


def lane_logits(pair: Pair, lanes: list[Lane], sequences: list[list[int]]) -> list[np.ndarray]:
    forward = Forward(pair.spec, LaneWeights(pair, lanes), lanes, sequences)
    return [np.concatenate(pieces, axis=1) for pieces in zip(*forward.logits(), strict=True)]


def engine_logits(model: Path, tmp: Path, sequences: list[list[int]], kv_dtype: str) -> np.ndarray:
    """f32[T, V] of the prompts' rows, recorded in the real services."""
    record = tmp / "record"
    record.unlink(missing_ok=True)
    with Ring(model, tmp, record_logits=str(record), kv_dtype=kv_dtype) as ring:
        for i, prompt in enumerate(sequences):
            ring.submit(f"r{i}", prompt, max_tokens=1, ignore_eos=True)
        ring.run()
    found = {(row["request"], row["position"]): row["logits"] for row in read_record(record)}
    return np.stack([found[f"r{i}", p] for i, prompt in enumerate(sequences) for p in range(len(prompt))])


def pieces_of(name: str) -> list[list[int]]:
    prompt = oracle_array(name, "prompt_ids").tolist()
    return [prompt[at : at + PIECE] for at in range(0, len(prompt), PIECE)]


@pytest.mark.parametrize("name", ORACLES)
def test_unrounded_it_gives_the_oracles_logits(name: str, converted: Converted) -> None:
    pair = Pair(converted(name, "f32"), oracle_dir(name))
    prompt = oracle_array(name, "prompt_ids").tolist()
    lanes = [SOURCE_LANE, stored_lane(pair.container.precision, "f32")]
    source, stored = lane_logits(pair, lanes, [prompt])
    np.testing.assert_allclose(source, oracle_array(name, "logits"), atol=2e-3, rtol=0)
    assert np.array_equal(source, stored), "an f32 container holds the checkpoint's own values"


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", ORACLES)
def test_with_f32_activations_every_row_is_the_engines(
    name: str, precision: str, converted: Converted, tmp_path: Path
) -> None:
    pair = Pair(converted(name, precision), oracle_dir(name))
    sequences = [oracle_array(name, "prompt_ids").tolist(), *pieces_of(name)]
    [got] = lane_logits(pair, [stored_lane(pair.container.precision, "f32")], sequences)
    expected = engine_logits(pair.container.path, tmp_path, sequences, "f32")
    np.testing.assert_allclose(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("precision", "kv_dtype"), [("int8", "f32"), ("int4", "bf16"), ("int4", "int8")])
def test_with_int8_activations_rows_are_the_engines(
    precision: str, kv_dtype: str, converted: Converted, tmp_path: Path
) -> None:
    """Most rows agree as closely as with f32; the others have met a half (PIECE). A wrong group or clamp leaves none."""
    n_close, n_blind, n = 0, 0, 0
    for name in ORACLES:
        pair = Pair(converted(name, precision), oracle_dir(name))
        stored = stored_lane(pair.container.precision, kv_dtype)
        formats = {role: STORED[fmt] for role, fmt in pair.container.precision.items() if role != "mtp"}
        rounded = Lane("rounded", "", formats, INT8_INPUTS, kv_dtype)
        blind = Lane("f32 activations", "", formats, frozenset(), kv_dtype)
        if kv_dtype == "int8":
            blind = Lane("another cache", "", formats, INT8_INPUTS, "bf16")
        got, again, other = lane_logits(pair, [stored, rounded, blind], pieces_of(name))
        assert np.array_equal(got, again), "what the container holds is what rounding the checkpoint gives"
        expected = engine_logits(pair.container.path, tmp_path, pieces_of(name), kv_dtype)
        n_close += int((np.abs(got - expected).max(axis=1) < 1e-3).sum())
        n_blind += int((np.abs(other - expected).max(axis=1) < 1e-3).sum())
        n += len(got)
    # An int8 cache rounds queries and entries, too: more that can meet a half.
    assert n_close > (0.5 if kv_dtype == "int8" else 0.7) * n, f"{n_close} of {n} rows"
    assert n_blind == 0, "without this rounding no row may agree: otherwise this test sees nothing"
