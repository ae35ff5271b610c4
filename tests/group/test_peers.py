"""The comparison with llama.cpp from end to end at tiny sizes, where the extra `peers` is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.group, pytest.mark.slow]


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.peers", "--shape", "tiny", "--prompt", "64", "--tokens", "40", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="the extra `peers` is not installed")
def test_both_engines_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    done = compare("--dir", str(tmp_path), "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["engines"]) == {"colibri", "llama.cpp mmap", "llama.cpp repack"}
    for engine in found["engines"].values():
        assert all(rate > 0 for rate in engine["prefill_tok_s"] + engine["decode_tok_s"])
    assert len(found["engines"]["colibri"]["decode_tok_s"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_missing_peer_is_said_in_a_sentence_before_anything_is_written(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'No module named llama_cpp' >&2\nexit 1\n")
    bare.chmod(0o755)
    models = tmp_path / "models"
    done = compare("--dir", str(models), "--llama-python", str(bare), "--repeats", "1")
    assert done.returncode == 78
    assert "--llama-python" in done.stderr
    assert "No module named llama_cpp" in done.stderr
    assert "Traceback" not in done.stderr
    assert not models.exists()


def test_a_peer_that_breaks_off_does_not_count(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\n[ \"$1\" = -c ] && exit 0\necho 'assertion failed' >&2\nexit 6\n")
    broken.chmod(0o755)
    models = tmp_path / "models"
    done = compare("--dir", str(models), "--llama-python", str(broken), "--repeats", "1")
    assert done.returncode == 70
    assert "none of the settings mmap, repack" in done.stderr
    assert "assertion failed" in done.stderr
    assert not list(models.iterdir())


def test_a_group_that_does_not_start_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nexit 6\n')
    broken.chmod(0o755)
    done = compare("--dir", str(tmp_path / "models"), "--llama-python", str(broken), "--ram", "1M")
    assert done.returncode == 70
    assert "colibri-up ended with 78" in done.stderr
    assert "our group answered in no turn" in done.stderr


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    done = compare("--dir", str(tmp_path), "--dense", "9")
    assert done.returncode == 78
    assert "--dense 9 of --layers 4" in done.stderr
    assert "expected some of mmap" in compare("--dir", str(tmp_path), "--modes", "fast").stderr
    assert not list(tmp_path.iterdir())
