"""The C engine's containers: every tensor is what the description of the format says, wherever it lies; nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conversion.convert import Conversion
from shared.container.c_engine import is_c_engine
from shared.container.plain import dense_values, expert_values
from shared.container.reader import Container, aligned_buffer
from shared.errors import ConfigError, ContainerError
from shared.model.attention.latent import Latent
from shared.planning.ledger import N_STAGES, make_ledger
from shared.run.config import Settings
from tests.oracle import Raw, oracle_config, oracle_dir, write_shard
from tests.support.c_container import read_one, write_c_container

VARIANTS = {
    "gs64": {},
    "per row": {"precision": "row"},
    "int8": {"precision": "int8"},
    "scattered": {"shuffle": 5},
    "f16 scales": {"scale_dtype": "F16"},
    "scattered int8": {"precision": "int8", "shuffle": 6},
    "without an indexer": {"oracle": "deepseek_v3"},
}


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_values(tmp_path: Path, variant: str) -> None:
    plain = write_c_container(tmp_path / "model", **VARIANTS[variant])  # type: ignore[arg-type]
    before = snapshot(tmp_path / "model")
    container = Container.open(tmp_path / "model")
    spec = container.spec
    for layer, file in container.experts.items():
        for expert in range(file.n_experts):
            found = expert_values(container.read_expert(layer, expert), file.layout)
            for part, values in zip(("gate", "up", "down"), found, strict=True):
                assert np.array_equal(values, plain[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"])
    tensors = container.read_dense(lambda entry: True, aligned_buffer)
    assert len(tensors) == len(container.dense)
    for name, tensor in tensors.items():
        values = np.concatenate(list(dense_values(tensor)))
        if name.endswith((".k_b.weight", ".v_b.weight")):
            stem, _, which = name.rpartition(".weight")[0].rpartition(".")
            a = spec.attention[int(name.split(".")[2])]
            assert isinstance(a, Latent)
            blocks = plain[f"{stem}.kv_b_proj.weight"].reshape(a.n_heads, a.nope + a.v_dim, a.kv_rank)
            if which == "v_b":
                assert np.array_equal(values, blocks[:, a.nope :].reshape(-1, a.kv_rank))
            else:  # the other way round: rounded once more, to int8
                wanted = blocks[:, : a.nope].transpose(0, 2, 1).reshape(-1, a.nope)
                step = np.abs(wanted).max(axis=1, keepdims=True) / 127
                assert (np.abs(values - wanted) <= 0.5001 * step + np.abs(wanted) / 1024).all()
            continue
        assert np.array_equal(values, plain[name]), name
    assert snapshot(tmp_path / "model") == before
    facts = container.facts()
    ledger = make_ledger(container.spec_for("auto"), facts, Settings(), 2 << 30)
    (line,) = [line for line in ledger.lines if line.what == "records that are put together"]
    assert line.bytes == N_STAGES * facts.stage_bytes > 0


def test_ranges_of_a_record(tmp_path: Path) -> None:
    """As the C engine writes: the three weights of an expert in one range, its scales in another; scattered: six."""
    write_c_container(tmp_path / "a")
    for file in Container.open(tmp_path / "a").experts.values():
        assert {len(file.extents(expert)) for expert in range(file.n_experts)} <= {2, 3, 4}
        assert min(len(file.extents(expert)) for expert in range(file.n_experts)) == 2
    write_c_container(tmp_path / "b", shuffle=1)
    container = Container.open(tmp_path / "b")
    assert max(len(file.extents(e)) for file in container.experts.values() for e in range(file.n_experts)) == 6
    for file in container.experts.values():
        for expert in range(file.n_experts):
            ends = 0
            for extent in file.extents(expert):
                assert (extent.at - extent.offset) % 4096 == 0 and extent.at // 4096 * 4096 >= ends
                ends = -(-(extent.at + extent.n_bytes) // 4096) * 4096
            assert file.raw is not None and ends <= file.raw.stage_bytes
        path, offsets, n_bytes = file.probe_reads
        assert all(offset % 4096 == 0 and offset + n_bytes <= path.stat().st_size for offset in offsets)


def test_what_follows_from_a_missing_indexer(tmp_path: Path) -> None:
    write_c_container(tmp_path / "model")
    topk = oracle_config("glm_moe_dsa")["index_topk"]
    container = Container.open(tmp_path / "model")
    assert container.spec_for("auto").max_context == topk
    assert container.spec_for("dense").max_context == container.spec.max_context > topk
    assert any("sparse indexer is not there" in note and "--attention dense" in note for note in container.notes)
    assert any("no checksums" in note for note in container.notes)
    assert container.spec.n_selected == 0
    with pytest.raises(ConfigError, match=f"at most {topk} tokens"):
        make_ledger(container.spec_for("auto"), container.facts(), Settings(max_context=topk + 1), 2 << 30)
    write_c_container(tmp_path / "whole", has_indexer=True)
    whole = Container.open(tmp_path / "whole")
    assert whole.spec.n_selected == topk and whole.spec_for("auto") == whole.spec
    assert whole.spec.mtp_attention[0].n_selected == 0
    assert whole.read_dense(lambda entry: "indexer" in entry.name, aligned_buffer)
    with pytest.raises(ConfigError, match="has the sparse indexer"):
        whole.spec_for("dense")


def test_without_an_mtp_layer(tmp_path: Path) -> None:
    write_c_container(tmp_path / "model", has_mtp=False)
    container = Container.open(tmp_path / "model")
    assert container.spec.n_mtp == 0
    assert any("MTP layer is not there" in note for note in container.notes)


def test_the_fingerprint_stands_for_the_content(tmp_path: Path) -> None:
    write_c_container(tmp_path / "a")
    first = Container.open(tmp_path / "a").fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / ".coli_usage").write_text("another history")
    assert Container.open(tmp_path / "b").fingerprint == first
    write_c_container(tmp_path / "c", precision="row")
    assert Container.open(tmp_path / "c").fingerprint != first


def test_what_own_containers_have_and_these_lack(tmp_path: Path) -> None:
    write_c_container(tmp_path / "model")
    with pytest.raises(ContainerError, match=r"not converted .* but opened as it lies: colibri-up"):
        Conversion(tmp_path / "model", "int4")
    container = Container.open(tmp_path / "model")
    assert not container.has_checksums and container.fingerprint_complaint() is None
    with pytest.raises(ContainerError, match=r"has no colibri\.json: .* no checksums"):
        container.index  # noqa: B018
    with pytest.raises(ContainerError, match="not read from mirrors"):
        Container.open(tmp_path / "model", [tmp_path])
    assert all(complaint is None for _, _, complaint in container.verify())
    assert not is_c_engine(oracle_dir("glm_moe_dsa")) and not is_c_engine(tmp_path)


# ---- damage and other formats ---------------------------------------------------------------------------------------

MATRIX = "model.layers.0.self_attn.q_a_proj.weight"
EXPERT = "model.layers.3.mlp.experts.1.up_proj.weight"


def rewritten(directory: Path, change: Callable[[dict[str, Raw]], None]) -> None:
    """The first file that holds the tensors in question, changed."""
    path = directory / "out-00000.safetensors"
    tensors = read_one(path)
    change(tensors)
    write_shard(path, tensors)


def swap(name: str, dtype: str | None = None, cut: int = 0) -> Callable[[dict[str, Raw]], None]:
    def change(tensors: dict[str, Raw]) -> None:
        old, _, data = tensors[name]
        data = data[: len(data) - cut]
        width = {"F32": 4, "F16": 2}.get(dtype or old, 1)
        tensors[name] = (dtype or old, (len(data) // width,), data)

    return change


def drop(name: str) -> Callable[[dict[str, Raw]], None]:
    return lambda tensors: tensors.pop(name) and None


def add(name: str) -> Callable[[dict[str, Raw]], None]:
    return lambda tensors: tensors.update({name: ("F32", (2,), bytes(8))})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (drop(MATRIX), f"has no tensor '{MATRIX}', which its config.json calls for"),
        (drop(f"{MATRIX}.qs"), "has no scales"),
        (swap(MATRIX, cut=2), r"a \[48, 136\] matrix has 6,528 in int8 and 3,264 in int4"),
        (swap(f"{MATRIX}.qs", cut=4), r"one for 64, 128, 192 or 256 inputs are read"),
        (swap(EXPERT, "F32"), "flat bytes of a"),
        (drop(EXPERT), f"has no tensor '{EXPERT}'"),
        (add("model.layers.0.surprise.weight"), "has no place in a glm_moe_dsa model"),
        (add("model.layers.3.mlp.experts.1.merged_weight"), "has no place"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: Callable[[dict[str, Raw]], None], sentence: str) -> None:
    write_c_container(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ContainerError, match=sentence):
        Container.open(tmp_path)


def test_twice_the_same_tensor_and_a_truncated_file(tmp_path: Path) -> None:
    write_c_container(tmp_path)
    shutil.copy(tmp_path / "out-00000.safetensors", tmp_path / "out-00009.safetensors")
    with pytest.raises(ContainerError, match=r"is in both out-00000\.safetensors and out-00009\.safetensors"):
        Container.open(tmp_path)
    (tmp_path / "out-00009.safetensors").unlink()
    with open(tmp_path / "out-00001.safetensors", "r+b") as file:
        file.truncate(10_000)
    with pytest.raises(ContainerError, match=r"out-00001\.safetensors is truncated"):
        Container.open(tmp_path)


def test_experts_of_two_precisions_and_bad_scales(tmp_path: Path) -> None:
    write_c_container(tmp_path)
    write_c_container(tmp_path / "int8", precision="int8")
    other = read_one(tmp_path / "int8" / "out-00000.safetensors")
    rewritten(tmp_path, lambda t: t.update({name: other[name] for name in (EXPERT, f"{EXPERT}.qs")}))
    shutil.rmtree(tmp_path / "int8")
    with pytest.raises(ContainerError, match=r"expert 1 of layer 3 has q4 gs64, q8 per row"):
        Container.open(tmp_path)
    write_c_container(tmp_path)

    def spoil(tensors: dict[str, Raw]) -> None:
        for name in (f"{MATRIX}.qs", f"{EXPERT}.qs"):
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, np.float32([np.nan]).tobytes() + data[4:])

    rewritten(tmp_path, spoil)
    container = Container.open(tmp_path)
    with pytest.raises(ContainerError, match="layer 3 expert 1 can't be used: a scale is NaN"):
        container.read_expert(3, 1)
    with pytest.raises(ContainerError, match=r"q_a_proj\.weight can't be used: a scale is NaN"):
        container.read_dense({MATRIX}, aligned_buffer)


def test_the_commands(tmp_path: Path) -> None:
    """``inspect``, ``verify`` and ``plan`` know it; what needs checksums says so."""
    from click.testing import CliRunner, Result

    from cli.main import cli

    write_c_container(tmp_path / "model")

    def run(*words: object) -> Result:
        return CliRunner().invoke(cli, list(map(str, words)))

    found = run("inspect", tmp_path / "model")
    assert "container of the C engine (q4 gs64" in found.output and "expert q4" in found.output
    facts = json.loads(run("inspect", tmp_path / "model", "--json").output)
    assert facts["converter"]["version"] == "C engine" and facts["notes"]
    found = run("verify", tmp_path / "model")
    assert "there are no checksums" in found.output
    found = run("plan", tmp_path / "model", "--disk", 2, "--memory", 20)
    assert "context 8," in found.output and "put together" in found.output
    found = run("plan", tmp_path / "model", "--disk", 2, "--memory", 20, "--attention", "dense", "--context", 64)
    assert "context 64," in found.output
