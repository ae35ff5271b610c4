"""What is given as MODEL or HF_DIR and is neither: one sentence that says what it is, and the command for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.convert import Conversion
from conversion.presets import preset_config
from conversion.synth import Synthesis
from deploy.launch import make_plan, model_dir_of
from shared.container.reader import Container
from shared.container.recognise import shard_names, why_no_checkpoint, why_no_container
from shared.errors import ConfigError, ContainerError
from shared.run.config import Settings
from tests.oracle import oracle_dir


def with_files(**content: str | bytes) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.mkdir()
        for name, data in content.items():
            (path / name.replace("__", ".")).write_bytes(data if isinstance(data, bytes) else data.encode())

    return make


def cache(path: Path) -> None:
    (path / "snapshots" / "0a1b").mkdir(parents=True)
    (path / "refs").mkdir()


GIVEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a directory of GGUF": (
        with_files(model__gguf=b"GGUF", config__json="{}"),
        ("GGUF", "colibri convert", "model.gguf OUT"),
    ),
    "PyTorch files": (with_files(pytorch_model__bin=b"", config__json="{}"), ("PyTorch", "safetensors")),
    "the hub's cache": (cache, ("cache", "colibri convert", "snapshots/0a1b OUT")),
    "files named like the hub's cache": (with_files(refs="", snapshots=""), ("neither colibri.json nor config.json",)),
    "an adapter": (with_files(adapter_config__json="{}"), ("LoRA", "Merge")),
    "weights alone": (with_files(model__safetensors=b""), ("model.safetensors", "no config.json")),
    "nothing": (Path.mkdir, ("neither colibri.json nor config.json",)),
    "other programs' files": (with_files(**{".DS_Store": b"", "._model__safetensors": b""}), ("neither",)),
    "a pipe": (os.mkfifo, ("not a directory",)),
    "a link to itself": (lambda p: p.symlink_to(p.name), ("not a directory",)),
    "nothing at all": (lambda p: None, ("not a directory", "does not exist", "colibri convert")),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", GIVEN)
def test_what_was_given(tmp_path: Path, what: str) -> None:
    make, words = GIVEN[what]
    path = tmp_path / "given"
    make(path)
    for word in (str(path), *words):
        assert word in why_no_container(path)
    with pytest.raises(ContainerError) as caught:
        Container.open(path)
    assert str(caught.value) == why_no_container(path)
    with pytest.raises(ContainerError) as caught:
        Conversion(path, "int4")
    assert str(caught.value) == why_no_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_known_by_its_begin_or_its_name(tmp_path: Path) -> None:
    """No container, and the command that makes one of it; whether it is whole is the converter's to say."""
    for name, data in (("model.gguf", b""), ("model", b"GGUF\3\0\0\0")):
        path = tmp_path / name
        path.write_bytes(data)
        said = why_no_container(path)
        assert f"{path} is a GGUF file" in said and f"colibri convert {path} OUT" in said
        assert why_no_checkpoint(path) is None
        with pytest.raises(ContainerError, match="truncated or damaged"):
            Conversion(path, "f32")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("zai-org/GLM-5.2", "zai-org/GLM-5.2"),
        ("https://huggingface.co/zai-org/GLM-5.2", "zai-org/GLM-5.2"),
        ("https:/huggingface.co/zai-org/GLM-5.2", "zai-org/GLM-5.2"),  # what a path makes of the address
        ("hf.co/unsloth/GLM-5.2-GGUF:Q4_K_M", "unsloth/GLM-5.2-GGUF"),
    ],
)
def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for said in (why_no_container(text), why_no_checkpoint(text)):
        assert said is not None
        assert f"run: colibri convert hf:{name} OUT" in said


def test_a_checkpoint_is_checked_for_its_family_first(tmp_path: Path) -> None:
    assert why_no_container(oracle_dir("glm_moe_dsa")).endswith(f"colibri convert {oracle_dir('glm_moe_dsa')} OUT")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    said = why_no_container(tmp_path)
    assert "can't be converted" in said and "'mystery'" in said and "glm_moe_dsa" in said
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert "named pipe" in why_no_container(tmp_path)


def test_hidden_files_are_no_shards() -> None:
    names = ["b.safetensors", "._a.safetensors", ".DS_Store", "lost+found", "a.safetensors", "a.safetensors.index.json"]
    assert shard_names(names) == ["a.safetensors", "b.safetensors"]


def test_a_start_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("zai-org/GLM-5.2", "~no-such-user/model"):
        with pytest.raises(ConfigError, match="is not a directory"):
            model_dir_of(Settings(model=text))
    with pytest.raises(ConfigError, match=r"a file that is not there\. .*colibri convert FILE\.gguf OUT"):
        model_dir_of(Settings(model="model.gguf"))
    with pytest.raises(ConfigError, match=r"colibri convert hf:zai-org/GLM-5\.2 OUT"):
        model_dir_of(Settings(model="zai-org/GLM-5.2"))


def test_a_start_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    Synthesis(preset_config("tiny", 2), "int4").run(tmp_path / "model")
    settings = Settings(model=str(tmp_path / "model"), huge_dir="off")
    assert any("has no tokenizer.json" in note for note in make_plan(settings, tmp_path, 0).notes)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert not any("tokenizer" in note for note in make_plan(settings, tmp_path, 0).notes)
