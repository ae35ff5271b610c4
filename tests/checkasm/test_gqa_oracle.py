"""Grouped-query attention against traces of the reference implementation: every layer from the reference's own input, and
whole models whose other half is plain NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from native.library import Pool
from tests.checkasm.gqa_cases import Cache, run, struct
from tests.reference.gqa_moe import Model, attention

ORACLES = Path(__file__).parents[1] / "oracles"
FAMILIES = ("qwen3_moe", "glm4_moe", "mixtral", "olmoe", "gpt_oss", "gemma4")
ATTENTION_BOUND = 1.2e-5  # against the float64 model; largest seen 3.1e-6
LAYER_BOUND = 3e-5  # the traces are f32 themselves; largest seen 7.4e-6, values reach 11
LOGIT_BOUND = 1e-3  # largest seen 2.2e-4 (gemma4), 2.7e-5 in the others


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_the_trace(family: str) -> None:
    model, trace = Model(ORACLES / family), dict(np.load(ORACLES / family / "trace.npz"))
    position = np.arange(len(trace["resid_00"]))
    for i, layer in enumerate(model.layers):
        x = trace[f"resid_{i:02d}"].astype(np.float32)
        expected, _ = attention(layer, x.astype(np.float64), position)
        for chunk in (0, 5):
            with Pool(2) as pool:
                found = run(pool, struct(layer), Cache(layer, "f32", 1, len(x)), x, position, chunk=chunk)
            assert np.abs(found.x - expected).max() < ATTENTION_BOUND, f"{family} layer {i}, chunk {chunk}"
        after = model.ffn(i, found.x.astype(np.float64), found.hidden.astype(np.float64))
        error = np.abs(after - trace[f"resid_{i + 1:02d}"]).max()
        assert error < LAYER_BOUND, f"{family} layer {i}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_the_whole_model(family: str) -> None:
    model = Model(ORACLES / family)
    ids, expected = np.load(ORACLES / family / "prompt_ids.npy"), np.load(ORACLES / family / "logits.npy")
    position = np.arange(len(ids))
    x = model.embed(ids).astype(np.float32)
    for i, layer in enumerate(model.layers):
        with Pool(2) as pool:
            found = run(pool, struct(layer), Cache(layer, "f32", 1, len(ids)), x, position, chunk=9)
        x = model.ffn(i, found.x.astype(np.float64), found.hidden.astype(np.float64)).astype(np.float32)
    error = np.abs(model.logits(x.astype(np.float64)) - expected).max()
    assert error < LOGIT_BOUND, f"{family}: {error}"


@pytest.mark.parametrize(
    ("family", "change"),
    [("gpt_oss", {"window": 9}), ("gpt_oss", {"amplitude": 1.0}), ("gemma4", {"value_norm": False}),
     ("glm4_moe", {"qk_norm": "none"}), ("qwen3_moe", {"interleave": True}), ("mixtral", {"scale": 0.18})],
)  # fmt: skip
def test_a_wrong_setting_shows_in_the_trace(family: str, change: dict[str, object]) -> None:
    model, trace = Model(ORACLES / family), dict(np.load(ORACLES / family / "trace.npz"))
    layer, x = model.layers[0], trace["resid_00"].astype(np.float32)
    wrong = struct(replace(layer, **change))  # type: ignore[arg-type]
    with Pool(1) as pool:
        found = run(pool, wrong, Cache(layer, "f32", 1, len(x)), x, np.arange(len(x)))
    after = model.ffn(0, found.x.astype(np.float64), found.hidden.astype(np.float64))
    assert np.abs(after - trace["resid_01"]).max() > 0.1
