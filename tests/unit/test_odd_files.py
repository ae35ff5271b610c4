"""Named pipes, devices, folders and dangling links in the place of files that a running product reads: a sentence at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cli.options import write_result
from conversion.presets import preset_config
from conversion.staging import plan_staging, stage
from conversion.synth import Synthesis
from deploy import launch
from deploy.launch import spawn_keeper
from deploy.rundir import take_lock
from services.router.pieces import has_tokenizer
from services.router.tokenizer import ModelTokenizer
from shared.container.mirror import MANIFEST_NAME
from shared.container.reader import Container
from shared.errors import ColibriError, ConfigError
from shared.experts.traces import TraceHeader, TraceReader, TraceWriter
from shared.experts.usage import load_usage
from shared.machine.drive import Mount, load_kept
from shared.run.config import GroupConfig, load_settings, read_budget
from shared.run.last_words import next_incarnation, read_last_words

pytestmark = pytest.mark.timeout(60)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def looped(path: Path) -> None:
    path.symlink_to(path.name)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "named pipe"),
    "device": (endless, "device"),
    "folder": (Path.mkdir, "directory"),
    "dangling": (dangling, "which does not exist"),
    "loop": (looped, "symbolic links"),
}
odd = pytest.mark.parametrize("what", ODD)


def put(what: str, path: Path) -> str:
    """Something odd in the place of the file at ``path``; the words for it."""
    if path.is_file():
        path.unlink()
    make, words = ODD[what]
    make(path)
    return words


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("odd") / "model"
    Synthesis(preset_config("tiny", 2), "int4").run(out)
    (out / "tokenizer.json").write_text("{}")
    return out


@pytest.fixture
def model(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "model"))


@odd
@pytest.mark.parametrize(
    "name",
    [
        "colibri.json", "config.json", "generation_config.json", "tokenizer.json", "dense-00000.safetensors",
        "experts-001.safetensors",
    ],
)  # fmt: skip
def test_container(model: Path, name: str, what: str) -> None:
    words = put(what, model / name)
    with pytest.raises(ColibriError) as caught:
        Container.open(model).facts()
    assert str(model / name) in str(caught.value) and words in str(caught.value)


@odd
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizer(tmp_path: Path, name: str, what: str) -> None:
    fledgling = Path(__file__).parents[2] / "models" / "fledgling"
    for path in fledgling.glob("*token*"):
        shutil.copy(path, tmp_path)
    words = put(what, tmp_path / name)
    with pytest.raises(ColibriError) as caught:
        ModelTokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and words in str(caught.value)
    if name == "tokenizer.json":  # nor is that a model without one
        with pytest.raises(ColibriError, match=words):
            has_tokenizer(tmp_path)


@odd
@pytest.mark.parametrize("name", [MANIFEST_NAME, "experts-001.safetensors"])
def test_mirror(model: Path, tmp_path: Path, name: str, what: str) -> None:
    mirror = tmp_path / "mirror"
    container = Container.open(model)
    stage(container, plan_staging(container, mirror, None, {}))
    words = put(what, mirror / name)
    with pytest.raises(ColibriError) as caught:
        Container.open(model, (mirror,))
    assert str(mirror / name) in str(caught.value) and words in str(caught.value)


@odd
def test_what_is_kept_counts_as_none_and_says_why(tmp_path: Path, what: str) -> None:
    path = tmp_path / "kept"
    words = put(what, path)
    history, why_empty = load_usage(path, "f" * 16, (1, 2), 4)
    assert words in why_empty and history.layers == (1, 2)
    profile, why_none = load_kept(path, Mount("8:1", "ext4", "/data", 1), 4096, 0.0)
    assert words in why_none and profile is None


@odd
def test_settings_and_traces(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file"
    words = put(what, path)
    header = TraceHeader(model="m", fingerprint="f", n_experts=4, gate_k=2, record_bytes={1: 4096})
    for use in (load_settings, TraceReader, lambda p: TraceWriter(p, header)):
        with pytest.raises(ConfigError) as caught:
            use(path)
        assert str(path) in str(caught.value) and words in str(caught.value)


@odd
def test_run_directory(tmp_path: Path, what: str) -> None:
    """What only informs counts as absent; what must be written is refused before a process is started."""
    words = put(what, tmp_path / "lock")
    with pytest.raises(OSError, match=words):
        take_lock(tmp_path)
    for name in ("log", "failed", "incarnation"):
        (tmp_path / name).mkdir()
    for name in ("keeper.log", "gateway.log"):
        put(what, tmp_path / "log" / name)
        with pytest.raises(OSError, match=words):
            spawn_keeper(tmp_path, -1)
        assert launch.tail(tmp_path / "log" / name) == "(no log)"
        odd_path = tmp_path / "log" / name
        odd_path.rmdir() if what == "folder" else odd_path.unlink()
    put(what, tmp_path / "failed" / "router.json")
    assert read_last_words(tmp_path, "router") is None
    put(what, tmp_path / "budget")
    config = SimpleNamespace(run_dir=str(tmp_path), ram_bytes=5)
    assert read_budget(cast(GroupConfig, config)) == 5
    if what != "folder":  # can't be replaced by a file
        (tmp_path / "failed" / "router.json").unlink()
        put(what, tmp_path / "incarnation" / "router")
        assert next_incarnation(tmp_path, "router") == 1


def test_a_result_is_not_kept_waiting_by_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="nobody reads"):
        write_result(tmp_path / "pipe", "text")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_result(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    write_result(tmp_path / "file", "longer")
    write_result(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
