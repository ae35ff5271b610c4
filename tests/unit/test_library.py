"""A compiled library that is missing, cut off, foreign or old: one sentence that says what to do, never a crash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from native.library import LIBRARY_NAME, find_library
from shared.errors import EXIT_CONFIG

ROOT = Path(__file__).parents[2]
Damage = Callable[[Path], None]
_RUN = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)  # before the finder of an editable installation
sys.path.insert(0, sys.argv[2])
import shared.run.first  # now, because it puts our packages first
sys.path.insert(0, sys.argv[1])
main = import_module(sys.argv[3]).main
del sys.argv[1:4]
main()
"""


def run(packages: Path, module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A command with the package ``native`` of ``packages`` instead of ours."""
    command = [sys.executable, "-c", _RUN, str(packages), str(ROOT), module, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A copy of the bindings with their library, which a test may damage."""
    native = tmp_path / "native"
    native.mkdir()
    for module in (ROOT / "native").glob("*.py"):
        shutil.copy(module, native)
    shutil.copy(find_library(), native)
    return tmp_path


def cut(share: float) -> Damage:
    def damage(path: Path) -> None:
        with open(path, "r+b") as file:
            file.truncate(int(path.stat().st_size * share))

    return damage


def lose_last_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def rename_function(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"cb_huge_alloc\0", b"cb_huge_older\0"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "is not there"),
        (cut(0), "is incomplete"),
        (cut(0.001), "is incomplete"),
        (cut(0.4), "is incomplete"),
        (cut(0.9), "is incomplete"),
        (lose_last_byte, "is incomplete"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), "cannot be loaded"),
        (lambda path: path.write_text("int main(void) { return 0; }\n" * 9), "cannot be loaded"),
        (rename_function, "cb_huge_alloc"),
    ],
    ids=["missing", "empty", "header", "cut-40", "cut-90", "cut-one", "zeros", "text", "old"],
)
def test_a_bad_library_is_one_sentence(packages: Path, damage: Damage, said: str) -> None:
    damage(packages / "native" / LIBRARY_NAME)
    done = run(packages, "cli.main", "verify", str(ROOT / "models" / "fledgling"))
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert said in line and LIBRARY_NAME in line and "`make kernels`" in line


def test_the_group_does_not_start_without(packages: Path, tmp_path: Path) -> None:
    (packages / "native" / LIBRARY_NAME).unlink()
    done = run(packages, "deploy.up", "--run-dir", str(tmp_path / "run"), "--port", "0")
    assert done.returncode == EXIT_CONFIG, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("colibri-up: ") and "is not there" in line and "`make kernels`" in line


def test_commands_that_need_no_library_work_without(packages: Path) -> None:
    (packages / "native" / LIBRARY_NAME).unlink()
    done = run(packages, "cli.main", "--help")
    assert done.returncode == 0, done.stderr


def test_the_undamaged_copy_works(packages: Path) -> None:
    """Otherwise the tests above would fail for another reason than the damage."""
    done = run(packages, "cli.main", "verify", str(ROOT / "models" / "fledgling"))
    assert done.returncode == 0, done.stderr
    assert "all checksums agree" in done.stdout
