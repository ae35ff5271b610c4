"""Presets have the published models' sizes, whole and short."""

from __future__ import annotations

import pytest

from conversion.presets import PRESETS, preset_config
from conversion.synth import Synthesis
from shared.errors import ConfigError
from shared.model.family import names, spec_of

PARAMETERS = {
    "glm-5.2": 743.6,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.4,
    "glm-4.7": 353.0,
    "glm-4.5-air": 106.9,
    "glm-4.7-flash": 29.9,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "olmoe-1b-7b": 6.92,
    "mixtral-8x7b": 46.7,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "gemma-4-26b-a4b": 26.0,
}
"""Published, in 10^9, without the MTP layer."""
NAMED = {"qwen3.5-35b-a3b": 35, "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 397}
"""As their names say it, with an image tower that is left out here."""


@pytest.mark.parametrize("preset", PARAMETERS)
def test_whole_models_have_their_published_number_of_parameters(preset: str) -> None:
    weights = Synthesis(preset_config(preset, PRESETS[preset].n_layers), "f32").n_bytes / 4
    assert weights / 1e9 == pytest.approx(PARAMETERS[preset], rel=0.005)


def test_every_preset_is_known_above() -> None:
    assert set(PRESETS) - set(PARAMETERS) - set(NAMED) == {"tiny"}


@pytest.mark.parametrize("preset", NAMED)
def test_whole_models_have_about_as_many_parameters_as_their_names_say(preset: str) -> None:
    weights = Synthesis(preset_config(preset, PRESETS[preset].n_layers), "f32").n_bytes / 4
    assert weights / 1e9 == pytest.approx(NAMED[preset], rel=0.015)


def test_families_without_a_preset() -> None:
    """deepseek_v32 is deepseek_v3 with GLM's indexer: no sizes of its own worth a measurement."""
    assert set(names()) - {spec_of(preset_config(preset)).family for preset in PRESETS} == {"deepseek_v32"}


@pytest.mark.parametrize("preset", PRESETS)
def test_short_forms_are_mostly_moe_and_small(preset: str) -> None:
    short = Synthesis(preset_config(preset), "int4")
    assert short.n_bytes < 31e9
    assert len(short.spec.moe_layers) >= short.spec.n_layers - 1


def test_a_cut_pattern_ends_like_the_whole_model() -> None:
    kinds = preset_config("gemma-4-26b-a4b", 8)["text_config"]["layer_types"]
    assert [kind[0] for kind in kinds] == list("sssssfsf")


def test_mtp_where_there_is_none() -> None:
    assert preset_config("glm-4.5-air", 3, has_mtp=True)["num_nextn_predict_layers"] == 1
    assert spec_of(preset_config("qwen3.5-35b-a3b", 4, has_mtp=True)).n_mtp == 1
    with pytest.raises(ConfigError, match="mixtral-8x7b has no MTP layer"):
        preset_config("mixtral-8x7b", 3, has_mtp=True)
