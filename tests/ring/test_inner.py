"""Inner functions and biases of experts, from a checkpoint through the container and the services: the numpy form agrees."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cli.quality.forward import Forward
from cli.quality.schemes import stored_lane
from cli.quality.tensors import LaneWeights, Pair
from conversion.convert import Conversion
from native.library import Pool
from services.router.gates import GateSet
from shared.container.plain import expert_biases
from shared.container.reader import Container
from shared.model.config_reader import ConfigReader
from shared.model.inner import Inner
from shared.model.spec import ModelSpec
from tests.oracle import oracle_array, oracle_config, oracle_dir, read_tensors, write_checkpoint
from tests.ring.test_quality_forward import engine_logits

NAME = "qwen3_moe"


def changed_family(monkeypatch: pytest.MonkeyPatch, inner: Inner) -> None:
    """The family as if its experts had this inner function."""
    module = importlib.import_module(f"shared.model.families.{NAME}")
    plain = module.spec

    def spec(read: ConfigReader) -> ModelSpec:
        return msgspec.structs.replace(plain(read), inner=inner)

    monkeypatch.setattr(module, "spec", spec)


def with_biases(directory: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The oracle's checkpoint with a bias on every projection of every expert."""
    tensors, rng = read_tensors(oracle_dir(NAME)), np.random.default_rng(3)
    biases = {}
    for name, (_, shape, _) in list(tensors.items()):
        if ".experts." in name:
            bias = rng.standard_normal(shape[0]).astype(np.float32)
            biases[name.replace(".weight", ".bias")] = bias
            tensors[name.replace(".weight", ".bias")] = ("F32", (shape[0],), bias.tobytes())
    return write_checkpoint(directory, oracle_config(NAME), {"model.safetensors": tensors}), biases


@pytest.mark.parametrize("function", ["clamped", "swiglu", "gelu"])
def test_the_services_compute_what_numpy_computes(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.5 if function != "gelu" else 0.0
    changed_family(monkeypatch, Inner(function=function, limit=limit, has_biases=True))
    source, biases = with_biases(tmp_path / "source")
    model = tmp_path / "model"
    Conversion(source, "f32").run(model)
    container = Container.open(model)
    stored = expert_biases(container.read_expert(2, 5), container.experts[2].layout)
    for part, found in zip(("gate", "up", "down"), stored, strict=True):
        assert np.array_equal(found, biases[f"model.layers.2.mlp.experts.5.{part}_proj.bias"])
    pair, prompt = Pair(model, source), oracle_array(NAME, "prompt_ids").tolist()
    lanes = [stored_lane(container.precision, "f32")]
    [logits] = [
        np.concatenate(p, axis=1) for p in zip(*Forward(pair.spec, LaneWeights(pair, lanes), lanes, [prompt]).logits())
    ]
    np.testing.assert_allclose(engine_logits(model, tmp_path, [prompt], "f32"), logits, atol=1e-3, rtol=0)
    assert np.abs(logits - oracle_array(NAME, "logits")).max() > 0.5, "the function and the biases must matter"
    assert all((a == b).all() for *_, pieces in pair.all_tensors() for a, b in pieces)


def test_a_missing_bias_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.errors import ContainerError

    changed_family(monkeypatch, Inner(has_biases=True))
    with pytest.raises(ContainerError, match=r"experts\.0\.gate_proj\.bias"):
        Conversion(oracle_dir(NAME), "f32")


def test_a_gate_that_norms_by_itself_is_guessed_from_the_residual_stream(
    converted: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Of a row that no layer changes a guess is the choice itself."""
    container = Container.open(converted("gemma4", "f32"))
    x = np.random.default_rng(4).standard_normal((1, container.spec.hidden)).astype(np.float32)
    ids, weights = np.empty((1, container.spec.gate_k), np.int32), np.empty((1, container.spec.gate_k), np.float32)
    with Pool(1) as pool:
        gates = GateSet(container, pool, "on", 8)
        assert gates.choose(3, x, ids, weights) == []
        assert sorted(gates.guess_own(3, x)) == ids[0].tolist()
        assert gates.guess_own(3, 7 * x) == gates.guess_own(3, x)
        after = gates.guess_next(2, x)
        assert after is not None and (after[0], sorted(after[1])) == (3, ids[0].tolist())
