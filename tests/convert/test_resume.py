"""Interrupted at any moment, a conversion goes on and ends with the same bytes; nothing finished is ever overwritten."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conversion import convert
from conversion.convert import VERSION, Conversion
from conversion.writer import ContainerWriter
from shared.container.reader import Container
from shared.errors import CapacityError, ContainerError
from tests.oracle import oracle_dir

Converted = Callable[[str, str], Path]
NAME, PRECISION = "glm_moe_dsa", "int4"
ROOT = Path(__file__).parents[2]

KILLED_AT = """
import os, signal, sys
from pathlib import Path
from conversion.convert import Conversion
left = int(sys.argv[3])
def progress(n):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
Conversion(Path(sys.argv[1]), sys.argv[4]).run(Path(sys.argv[2]), progress)
"""


def assert_same(out: Path, reference: Path) -> None:
    names = sorted(path.name for path in reference.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name


def killed_run(out: Path, after: int) -> int:
    """A conversion that kills itself at its ``after``-th progress report; the exit status."""
    command = [sys.executable, "-c", KILLED_AT, str(oracle_dir(NAME)), str(out), str(after), PRECISION]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def test_killed_again_and_again(converted: Converted, tmp_path: Path) -> None:
    """Each run gets a little further before kill -9; what it wrote is kept, the result is the same."""
    out = tmp_path / "out"
    rng = random.Random(5)
    n_kills = 0
    while n_kills < 50:
        # Progress also reports what is kept, so a growing number moves the kill through all files.
        status = killed_run(out, n_kills * 24 + rng.randrange(24))
        if status == 0:
            break
        assert status == -9
        assert not (out / "colibri.json").exists()
        with pytest.raises(ContainerError, match="unfinished"):
            Container.open(out)
        n_kills += 1
    assert n_kills >= 8
    Conversion(oracle_dir(NAME), PRECISION).run(out) if not (out / "colibri.json").exists() else None
    assert_same(out, converted(NAME, PRECISION))


@pytest.mark.slow
def test_killed_at_random_moments(converted: Converted, tmp_path: Path) -> None:
    """The command itself, kill -9 by the clock, ten times, each followed by a run to the end."""
    rng = random.Random(7)
    command = [sys.executable, "-m", "cli.main", "convert", str(oracle_dir(NAME)), "OUT", "--precision", PRECISION]
    started = time.monotonic()
    subprocess.run(
        [*command[:5], str(tmp_path / "whole"), *command[6:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    duration = time.monotonic() - started
    n_killed = 0
    for i in range(10):
        command[5] = str(tmp_path / f"out{i}")
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.3, 1.0) * duration)
        except subprocess.TimeoutExpired:
            process.kill()
            n_killed += process.wait() == -9
        if i % 4 == 0:
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        else:
            conversion = Conversion(oracle_dir(NAME), PRECISION)
            if not (Path(command[5]) / "colibri.json").exists():
                conversion.run(Path(command[5]))
        assert_same(Path(command[5]), converted(NAME, PRECISION))
    assert n_killed >= 2


def partial_conversion(out: Path, after: int = 400) -> None:
    assert killed_run(out, after) == -9


def test_finished_work_is_kept(converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    partial_conversion(out)
    kept = []
    original = ContainerWriter.finish

    def finish(self: ContainerWriter, *args: object) -> object:
        kept.append(self.groups_kept)
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ContainerWriter, "finish", finish)
    Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert kept[0] > 100
    assert_same(out, converted(NAME, PRECISION))


@pytest.mark.parametrize(
    "damage", ["flip", "shorter", "longer", "header", "journal torn", "journal foreign", "final shorter"]
)
def test_damaged_leftovers_are_made_again(converted: Converted, tmp_path: Path, damage: str) -> None:
    """After a power cut a leftover may hold anything: only what still has its checksum is kept."""
    out = tmp_path / "out"
    partial_conversion(out)
    partial = next(out.glob("*.partial"))
    journal = out / ".unfinished" / f"{partial.name.removesuffix('.partial')}.journal"
    data = bytearray(partial.read_bytes())
    if damage == "flip":
        data[5000] ^= 1
        partial.write_bytes(data)
    elif damage == "shorter":
        partial.write_bytes(data[: len(data) // 2])
    elif damage == "longer":
        partial.write_bytes(data + bytes(100_000))
    elif damage == "header":
        data[20] ^= 1
        partial.write_bytes(data)
    elif damage == "journal torn":
        journal.write_bytes(journal.read_bytes()[:-5])
    elif damage == "journal foreign":
        journal.write_bytes(b"[1,2]\nnonsense\n")
    else:
        final = out / "dense-00000.safetensors"
        final.write_bytes(final.read_bytes()[:-1])
    Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert_same(out, converted(NAME, PRECISION))


def test_another_converter_does_not_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quantisers may be other ones: half of the experts would be rounded in one way and half in another."""
    out = tmp_path / "out"
    partial_conversion(out)
    monkeypatch.setattr(convert, "VERSION", "0.0.1")
    with pytest.raises(ContainerError, match=rf"unfinished work.*version: '{VERSION}' then, '0.0.1' now"):
        Conversion(oracle_dir(NAME), PRECISION).run(out)


def test_other_arguments_do_not_continue(tmp_path: Path) -> None:
    out = tmp_path / "out"
    partial_conversion(out)
    with pytest.raises(ContainerError, match=r"unfinished work.*precision: 'int4' then, 'int8' now"):
        Conversion(oracle_dir(NAME), "int8").run(out)
    with pytest.raises(ContainerError, match="another source"):
        Conversion(oracle_dir("deepseek_v3"), PRECISION).run(out)
    Conversion(oracle_dir(NAME), PRECISION).run(out)  # a refusal leaves no lock behind


def test_finished_container_is_never_overwritten(converted: Converted, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(converted(NAME, PRECISION), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for precision in (PRECISION, "int8"):
        with pytest.raises(ContainerError, match="never overwritten"):
            Conversion(oracle_dir(NAME), precision).run(out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ContainerError, match=r"thesis\.tex"):
        Conversion(oracle_dir(NAME), PRECISION).run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ContainerError, match="output directory"):
        Conversion(oracle_dir(NAME), PRECISION).run(tmp_path / "out")


def test_two_converters_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fd = os.open(out, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ContainerError, match="Another process is writing"):
        Conversion(oracle_dir(NAME), PRECISION).run(out)
    os.close(fd)
    Conversion(oracle_dir(NAME), PRECISION).run(out)


# ---- space --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; the container needs 1.9."""
    target = tmp_path / "disk"
    target.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield target
    subprocess.run(["umount", "-l", str(target)], check=True)


def test_refused_beforehand_when_it_does_not_fit(small_disk: Path) -> None:
    out = small_disk / "out"
    with pytest.raises(CapacityError, match=r"needs [\d,]+ more bytes .* has [\d,]+ free"):
        Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert not list(out.glob("*.safetensors*"))


def test_disk_fills_while_writing(converted: Converted, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the space: a sentence, no half file counted as done, and the same command goes on later."""
    out = small_disk / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ContainerWriter, "require_space", lambda self: None)
        with pytest.raises(CapacityError, match=r"No space left while writing .*run the same command again"):
            Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert not (out / "colibri.json").exists()
    assert list(out.glob("*.partial"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert_same(out, converted(NAME, PRECISION))


def test_file_size_limit_while_writing(converted: Converted, tmp_path: Path) -> None:
    """The same through a resource limit, which needs no root."""
    out = tmp_path / "out"
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000));"
        "sys.argv[1:] = ['convert', *sys.argv[1:]]; from cli.main import main; main()"
    )
    command = [sys.executable, "-c", script, str(oracle_dir(NAME)), str(out), "--precision", PRECISION]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 78, run.stderr
    assert "No space left while writing" in run.stderr
    assert "Traceback" not in run.stderr
    Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert_same(out, converted(NAME, PRECISION))
