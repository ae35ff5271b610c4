"""``colibri quality`` over whole containers: what it names, what it refuses, what it prints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cli.quality.forward as forward
import conversion.convert as convert
from cli.main import cli
from cli.quality.measure import compare_lanes, tensor_errors
from cli.quality.schemes import INT8_INPUTS, Lane
from cli.quality.tensors import Pair
from cli.quality.text import random_tokens
from shared.errors import ContainerError
from tests.oracle import ORACLES, oracle_array, oracle_config, oracle_dir, read_tensors, write_checkpoint

Converted = Callable[[str, str], Path]


def changed_source(name: str, out: Path, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A copy of an oracle's checkpoint in which one bf16 tensor has other values."""
    tensors = read_tensors(oracle_dir(name))
    dtype, shape, data = tensors[tensor]
    assert dtype == "BF16"
    values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    bits = (change(values.copy()).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensors[tensor] = (dtype, shape, bits.tobytes())
    return write_checkpoint(out, oracle_config(name), {"model.safetensors": tensors})


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["quality", *map(str, arguments)])


def fails(*arguments: object) -> str:
    """The sentence of a command that is refused."""
    result = run(*arguments)
    assert result.exit_code, result.output
    return str(result.exception) if not isinstance(result.exception, SystemExit) else result.output


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("model.layers.2.mlp.experts.5.up_proj.weight", ["model.layers.2.mlp.experts.5.up_proj.weight"]),
        ("model.layers.1.self_attn.kv_b_proj.weight", ["model.layers.1.self_attn.k_b.weight"]),
        ("model.layers.0.mlp.down_proj.weight", ["model.layers.0.mlp.down_proj.weight"]),
    ],
)
def test_the_tensor_that_differs_is_named(
    tensor: str, expected: list[str], converted: Converted, tmp_path: Path
) -> None:
    def double_first_row(w: np.ndarray) -> np.ndarray:
        w[0] *= 2
        return w

    source = changed_source("deepseek_v3", tmp_path / "changed", tensor, double_first_row)
    errors = tensor_errors(Pair(converted("deepseek_v3", "bf16"), source), 10, lambda _: None)
    assert [e.name for e in errors.worst] == expected


@pytest.mark.parametrize("name", ORACLES)
def test_all_values_are_compared_and_an_f32_container_is_exact(name: str, converted: Converted) -> None:
    pair = Pair(converted(name, "f32"), oracle_dir(name))
    done: list[int] = []
    errors = tensor_errors(pair, 10, done.append)
    assert sum(done) == pair.n_values
    assert errors.worst == []
    assert pair.bytes_per_weight() == pytest.approx(4, rel=0.1)
    [same] = compare_lanes(pair, [Lane("same", "model", is_stored=True)], random_tokens(40, 256, 20, 1), lambda _: None)
    assert same.scores.kl_max == 0.0
    assert same.scores.top1 == 1.0
    assert same.bytes_per_weight == 4.0


def test_pieces_of_tensors_change_nothing(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(converted("glm_moe_dsa", "int4"), oracle_dir("glm_moe_dsa"))
    tokens = random_tokens(12, pair.spec.vocab, 6, 2)
    lanes = [Lane("stored", "", int8_inputs=INT8_INPUTS, is_stored=True), Lane("rows", "", {"head": "int4-row"})]

    def measure() -> tuple[Any, Any]:
        errors = tensor_errors(pair, 3, lambda _: None)
        return errors, [result.scores for result in compare_lanes(pair, lanes, tokens, lambda _: None)]

    whole = measure()
    monkeypatch.setattr(convert, "_CHUNK_VALUES", 1)
    monkeypatch.setattr(forward, "_LOGITS_AT_ONCE", 100)
    head = pair.items["lm_head.weight"]
    pieces = list(pair.source.dense_pieces(head))
    assert len(pieces) > 1, "the vocabulary must come in several pieces"
    assert [len(p) for p in pair.stored_pieces(head)] == [len(p) for p in pieces]
    errors, scores = measure()
    assert [e.name for e in errors.worst] == [e.name for e in whole[0].worst]
    for key, sums in errors.roles.items():
        assert sums.relative == pytest.approx(whole[0].roles[key].relative, rel=1e-9)
    assert scores[1].kl_mean == pytest.approx(whole[1][1].kl_mean, rel=1e-3)


def test_every_lane_reaches_the_report(converted: Converted) -> None:
    prompt = ",".join(map(str, oracle_array("glm_moe_dsa_fp8", "prompt_ids")[:6]))
    result = run(
        converted("glm_moe_dsa_fp8", "int4"), "--against", oracle_dir("glm_moe_dsa_fp8"), "--ids", prompt,
        "--formats", "--json", "--worst", 3,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["errors"]["worst"]) == 3
    assert {row["role"] for row in found["errors"]["roles"]} == {
        "expert", "shared", "attention", "embed", "head", "mtp", "exact",
    }  # fmt: skip
    assert found["text"] == {"what": "given ids", "n_tokens": 6, "n_sequences": 1}
    tables: dict[str, list[Any]] = {}
    for lane in found["lanes"]:
        tables.setdefault(lane["table"], []).append(lane)
        assert lane["n_rows"] == 6
        # each lane must have been rounded somewhere, and where it says
        assert lane["kl_mean"] > 0 or lane["name"].endswith("int8"), lane
    assert set(tables) == {"model", "formats", "roles", "changes"}
    model, default = tables["model"][0], tables["changes"][0]
    assert model["kv_dtype"] == "bf16" and default["kv_dtype"] == "f32"
    assert model["bytes_per_weight"] == default["bytes_per_weight"]
    by_name = {lane["name"]: lane["bytes_per_weight"] for lane in tables["formats"]}
    assert by_name["int4-gs64"] < by_name["int4-gs32"] < by_name["int8"] < by_name["weights f32"]


def test_the_text_report_names_both_sides(converted: Converted) -> None:
    model = converted("deepseek_v32", "int8")
    result = run(model, "--against", oracle_dir("deepseek_v32"), "--random", 8)
    assert result.exit_code == 0, result.output
    assert str(model) in result.stdout and str(oracle_dir("deepseek_v32")) in result.stdout
    assert "worst tensors" in result.stdout
    assert "random ids, seed 0" in result.stdout
    assert "no language" not in result.stdout
    only_errors = run(model, "--against", oracle_dir("deepseek_v32"), "--no-logits", "--worst", 0).stdout
    assert "KL" not in only_errors and "worst" not in only_errors and "exact." not in only_errors
    exact = run(converted("deepseek_v32", "f32"), "--against", oracle_dir("deepseek_v32"), "--no-logits").stdout
    assert "All tensors are exact." in exact
    assert (
        "worst tensors" not in run(model, "--against", oracle_dir("deepseek_v32"), "--random", 8, "--no-errors").stdout
    )


def test_another_model_is_refused_with_both_names(converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v3", "int8")
    text = fails(model, "--against", oracle_dir("glm_moe_dsa"))
    for part in ("deepseek_v3", "glm_moe_dsa", "family", str(model), str(oracle_dir("glm_moe_dsa"))):
        assert part in text
    wider = tmp_path / "wider"
    shutil.copytree(oracle_dir("deepseek_v3"), wider)
    config = oracle_config("deepseek_v3")
    config["rope_theta"] = 12345.0
    config.pop("rope_parameters", None)
    (wider / "config.json").write_text(json.dumps(config))
    assert "rope.theta" in fails(model, "--against", wider)


def test_what_can_not_be_compared_is_said_in_a_sentence(converted: Converted, tmp_path: Path) -> None:
    model, source = converted("deepseek_v3", "int8"), oracle_dir("deepseek_v3")
    assert "tokenizer.json" in fails(model, "--against", source)
    assert "no token id" in fails(model, "--against", source, "--ids", "1,2,99999")
    assert "at least two" in fails(model, "--against", source, "--ids", "1")
    assert "one of" in fails(model, "--against", source, "--ids", "1,2", "--random", 4)
    assert "nothing to do" in fails(model, "--against", source, "--no-errors", "--no-logits")
    assert "already a container" in fails(model, "--against", model)
    assert "not a container" in fails(source, "--against", source)
    assert "does not exist" in fails(model, "--against", tmp_path / "nowhere")


def test_a_source_with_a_nan_is_named(converted: Converted, tmp_path: Path) -> None:
    def spoil(w: np.ndarray) -> np.ndarray:
        w[1, 2] = np.nan
        return w

    name = "model.layers.0.mlp.up_proj.weight"
    source = changed_source("deepseek_v3", tmp_path / "changed", name, spoil)
    pair = Pair(converted("deepseek_v3", "bf16"), source)
    assert tensor_errors(pair, 1, lambda _: None).worst[0].name == name
    with pytest.raises(ContainerError, match=r"layers\.0\.mlp\.up_proj"):
        compare_lanes(pair, [Lane("any", "", {})], random_tokens(4, 256, 4, 0), lambda _: None)
