"""Starts that must fail: at once, with the words of whoever knows the reason, and without leftovers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.group.harness import run_up

pytestmark = pytest.mark.group


@pytest.fixture
def model(converted: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(converted("glm_moe_dsa", "int8"), tmp_path / "model"))


def flip(path: Path, tensor: str) -> None:
    """Changes one byte of a tensor's data."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    data[8 + length + (begin + end) // 2] ^= 0xFF
    path.write_bytes(data)


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"colibri-{os.getuid()}-*")}


def check_failed(run_dir: Path, *argv: str, code: int = 78) -> str:
    """The start fails with ``code``; returns the last thing it said. Nothing is left, no traceback was shown."""
    done = run_up("--run-dir", str(run_dir), "--port", "0", *argv)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    if run_dir.exists():
        assert {path.name for path in run_dir.iterdir()} <= {"lock", "log"}
        run_id = (
            json.loads((run_dir / "lock").read_text() or "{}").get("run_id", "nothing")
            if (run_dir / "lock").exists()
            else ""
        )
        assert not {name for name in segments() if run_id and run_id in name}
    return done.stderr.strip()


def test_damage_that_only_one_service_can_see_ends_the_start_with_its_words(model: Path, run_dir: Path) -> None:
    """B19: the service that fails while loading names the file; nobody waits for a time-out."""
    flip(model / "dense-00000.safetensors", "model.norm.weight")
    begin = time.monotonic()
    words = check_failed(run_dir, str(model))
    assert time.monotonic() - begin < 30
    assert words.startswith("colibri-up: attention: ")
    assert "model.norm.weight" in words
    assert "dense-00000.safetensors" in words


def test_service_that_dies_without_a_word_shows_the_end_of_its_log(
    model: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service killed by the system (no memory, say) leaves no last words."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, runpy, sys\n"
        "run = runpy.run_module\n"
        "def run_module(name, **more):\n"
        "    if name == 'services.expert_io':\n"
        "        sys.stderr.write('nothing but this line\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)\n"
        "    return run(name, **more)\n"
        "runpy.run_module = run_module\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = check_failed(run_dir, str(model), code=70)
    assert "expert_io ended while starting" in words
    assert "nothing but this line" in words


def test_missing_file_is_found_before_anything_starts(model: Path, run_dir: Path) -> None:
    (model / "experts-004.safetensors").unlink()
    assert "experts-004.safetensors" in check_failed(run_dir, str(model))
    assert not list((run_dir / "log").glob("router*")), "no service was started for it"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ram", "100M"), "does not fit"),
        (("--slots", "2"), "slots = 2: at least 5 are needed"),
        (("--host", "no.such.host.invalid"), "host 'no.such.host.invalid'"),
        (("--host", "203.0.113.1"), "can't be used"),
        (("--max-context", "100000000"), "max_context"),
    ],
)
def test_settings_that_can_not_be_met(model: Path, run_dir: Path, argv: tuple[str, ...], words: str) -> None:
    assert words in check_failed(run_dir, str(model), *argv)


def test_unknown_setting_in_the_file_is_named_with_the_allowed_ones(model: Path, run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "colibri.toml"
    path.write_text('slotz = 7\nkv_dtype = "f32"\n')
    words = check_failed(run_dir, str(model), "--config", str(path))
    assert "unknown setting 'slotz'" in words
    assert "slots" in words


def test_no_model_directory(run_dir: Path, tmp_path: Path) -> None:
    assert "does not exist" in check_failed(run_dir, str(tmp_path / "absent"))


def test_run_directory_that_others_may_write_is_refused(model: Path, run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o777)
    done = run_up(str(model), "--run-dir", str(run_dir), "--port", "0")
    assert done.returncode == 78
    assert "can be written by others" in done.stderr


@pytest.mark.parametrize("name", ["lock", "log"])
def test_run_directory_that_can_not_be_used_is_a_sentence(model: Path, run_dir: Path, name: str) -> None:
    run_dir.mkdir()
    path = run_dir / name
    path.mkdir() if name == "lock" else path.touch()
    done = run_up(str(model), "--run-dir", str(run_dir), "--port", "0")
    assert done.returncode == 78
    assert done.stderr.startswith(f"colibri-up: {path}: ")
    assert done.stderr.count("\n") == 1


def test_stop_and_status_without_a_group(run_dir: Path) -> None:
    for flag in ("--stop", "--status"):
        done = run_up("--run-dir", str(run_dir), flag)
        assert done.returncode == 78
        assert done.stderr.startswith(f"colibri-up: no group runs in {run_dir}")


def test_modules_of_the_current_directory_are_not_taken_for_ours(run_dir: Path, tmp_path: Path) -> None:
    """Nor for those of others: neither by the commands nor by any process they start, not even where PYTHONPATH names it."""
    for name in ("shared", "services", "deploy", "models", "zmq", "numpy", "random", "json", "click", "supervisor"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')\n")
    colibri = Path(sys.executable).with_name("colibri")
    command = [str(colibri), "run", "--run-dir", str(run_dir), "--max-tokens", "3", "hi"]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stranger" not in done.stdout + done.stderr
