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

import msgspec
import pytest

from conversion import checkpoint, convert
from conversion.convert import VERSION, Conversion
from conversion.provenance import compare_sources
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
    "damage",
    [
        "flip",
        "shorter",
        "longer",
        "header",
        "journal torn",
        "journal foreign",
        "final shorter",
        "final flip",
        "final pipe",
    ],
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
        content = bytearray(final.read_bytes())
        content[-5000] ^= 1
        final.unlink()
        if damage == "final pipe":
            os.mkfifo(final)
            with pytest.raises(ContainerError, match=r"dense-00000\.safetensors can't be written: it is a named pipe"):
                Conversion(oracle_dir(NAME), PRECISION).run(out)
            (out / "dense-00000.safetensors.partial").unlink()
        else:
            final.write_bytes(content if damage == "final flip" else content[:-1])
    Conversion(oracle_dir(NAME), PRECISION).run(out)
    assert_same(out, converted(NAME, PRECISION))


# ---- the source changes between two runs ----------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupted_run(source: Path, out: Path, after: int = 400) -> None:
    """A conversion that ends with its ``after``-th progress report."""
    left = after

    def progress(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Interrupted

    with pytest.raises(Interrupted):
        Conversion(source, PRECISION).run(out, progress)


def damaged(data: bytes) -> bytes:
    """The same header and size, other weights: the lowest bit of a value in every 200 is flipped."""
    changed = bytearray(data)
    begin = 8 + int.from_bytes(data[:8], "little")
    for at in range(begin + begin % 2, len(data), 400):
        changed[at] ^= 1
    return bytes(changed)


def copy_source(target: Path) -> Path:
    target.mkdir()
    for path in oracle_dir(NAME).iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy2(path, target)
    return target


def write_in_place(path: Path, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


@pytest.mark.parametrize("put", [write_in_place, replace])
@pytest.mark.parametrize("grain_s", [0, 2])
def test_a_damaged_shard_that_is_replaced(
    converted: Converted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    put: Callable[[Path, bytes], None],
    grain_s: int,
) -> None:
    """Same size, same header, same time of modification: what was made from the damaged one is made again."""
    monkeypatch.setattr(checkpoint, "_CLOCK_GRAIN_NS", grain_s * 10**9)
    source, out = copy_source(tmp_path / "in"), tmp_path / "out"
    shards = sorted(source.glob("*.safetensors"))
    good = {shard: (shard.read_bytes(), shard.stat()) for shard in shards}
    for shard in shards:
        shard.write_bytes(damaged(shard.read_bytes()))
        os.utime(shard, ns=(good[shard][1].st_atime_ns, good[shard][1].st_mtime_ns))
    interrupted_run(source, out)
    for shard, (data, stat) in good.items():
        put(shard, data)
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    Conversion(source, PRECISION).run(out)
    assert_same(out, converted(NAME, PRECISION))


def test_a_moved_source_is_compared_and_an_untouched_one_is_not_read_again(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    original = checkpoint.Checkpoint.digest
    monkeypatch.setattr(
        checkpoint.Checkpoint, "digest", lambda self, names: digests.append(names) or original(self, names)
    )
    monkeypatch.setattr(checkpoint, "_CLOCK_GRAIN_NS", 0)
    source = copy_source(tmp_path / "in")
    interrupted_run(source, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    n_groups = len(digests)
    Conversion(source, PRECISION).run(tmp_path / "a")
    n_all = len(digests)  # each group once, over both runs
    shutil.copytree(source, tmp_path / "moved")
    Conversion(tmp_path / "moved", PRECISION).run(tmp_path / "b")
    assert n_groups > 100
    assert len(digests) - n_all == n_all  # those that were kept have been compared, the others made
    for out in ("a", "b"):
        assert_same(tmp_path / out, converted(NAME, PRECISION))


def test_a_shard_that_is_replaced_while_it_is_converted(converted: Converted, tmp_path: Path) -> None:
    """The run that began with the old file does not end as if nothing had been; the next one has the new bytes."""
    source, out = copy_source(tmp_path / "in"), tmp_path / "out"
    shard = sorted(source.glob("*.safetensors"))[1]
    good = shard.read_bytes()
    shard.write_bytes(damaged(good))
    left = [300]

    def progress(_: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            replace(shard, good)

    with pytest.raises(ContainerError, match=rf"{shard.name} has changed .* run the same command again"):
        Conversion(source, PRECISION).run(out, progress)
    assert left[0] <= 0 and not (out / "colibri.json").exists()
    Conversion(source, PRECISION).run(out)
    assert_same(out, converted(NAME, PRECISION))


def test_verify_against_the_source(converted: Converted, tmp_path: Path) -> None:
    """A finished container of a damaged shard is sound in itself; the checkpoint shows it."""
    source = copy_source(tmp_path / "in")
    container = Container.open(converted(NAME, PRECISION))
    assert [words for _, words in compare_sources(container, source) if words] == []
    shard = sorted(source.glob("*.safetensors"))[2]
    shard.write_bytes(damaged(shard.read_bytes()))
    words = [words for _, words in compare_sources(container, source) if words]
    assert words and all("was made from other bytes" in text for text in words)
    assert len(words) < len(list(compare_sources(container, source)))
    with pytest.raises(ContainerError, match="not made from"):
        list(compare_sources(container, oracle_dir("deepseek_v32")))
    container.index.dense["model.norm.weight"] = msgspec.structs.replace(
        container.index.dense["model.norm.weight"], source=None
    )
    with pytest.raises(ContainerError, match="does not say which bytes it was made from"):
        list(compare_sources(container, source))


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
    (tmp_path / "new").mkdir()
    os.mkfifo(tmp_path / "new" / ".unfinished")
    with pytest.raises(ContainerError, match=r"\.unfinished can't be used as a directory"):
        Conversion(oracle_dir(NAME), PRECISION).run(tmp_path / "new")


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
