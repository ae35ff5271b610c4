"""Reading the dense part: every tensor at its place with the bytes of its file, directly or not, wherever it begins."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from native.memory import HugeBuffer
from native.reader import SECTOR
from shared.container import dense_reads
from shared.container.checksum import checksum
from shared.container.dense_reads import ALIGN, Part, place, read_runs
from shared.errors import ChecksumMismatch, ContainerError, ShortRead


def parts_in(path: Path, sizes: list[int], begin: int) -> list[Part]:
    """A file of tensors that follow each other from ``begin`` on."""
    data = np.random.default_rng(len(sizes)).integers(0, 256, begin + sum(sizes), np.uint8)
    path.write_bytes(data.tobytes())
    parts, at = [], begin
    for i, n in enumerate(sizes):
        parts.append(Part(f"{path.name}.{i}", path, at, n, checksum(data[at : at + n])))
        at += n
    return parts


def same(parts: list[Part], wanted: list[Part], *, is_direct: bool) -> None:
    runs, n_bytes = place(wanted)
    with HugeBuffer(n_bytes) as buffer:
        read_runs(runs, buffer.array, may_be_direct=is_direct)
        seen = set()
        for run in runs:
            for part in run.parts:
                at = run.place_of(part)
                assert at % ALIGN == 0 and at + part.n_bytes <= n_bytes
                with part.file.open("rb") as file:
                    file.seek(part.offset)
                    assert buffer.array[at : at + part.n_bytes].tobytes() == file.read(part.n_bytes)
                seen.add(part.what)
        assert seen == {part.what for part in wanted}


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("chunk", [SECTOR, 3 * SECTOR, 16 << 20])
def test_every_tensor_comes_to_its_place(
    is_direct: bool, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_reads, "DIRECT_FROM_BYTES", 0)
    monkeypatch.setattr(dense_reads, "_CHUNK_BYTES", chunk)
    rng = random.Random(chunk)
    for case in range(12):
        sizes = [rng.choice([64, 128, 4096, 8192 + 64, 40960, 100, 4]) for _ in range(rng.randint(1, 30))]
        begin = rng.choice([0, 64, 4096, 20480, 1000])
        a = parts_in(tmp_path / f"a{case}", sizes, begin)
        b = parts_in(tmp_path / f"b{case}", [640, 64, 4096], 64)
        wanted = [part for part in a if rng.random() < 0.8] or a
        same(a, [*wanted, *b], is_direct=is_direct)


def test_tensors_that_follow_each_other_are_one_run_in_step_with_the_file(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "f", [640, 64, 4096, 4096], 64 * 3)
    runs, n_bytes = place(parts[::-1])
    assert [run.parts for run in runs] == [tuple(parts)] and runs[0].is_in_step
    assert n_bytes <= 640 + 64 + 2 * 4096 + 2 * SECTOR
    runs, _ = place([parts[0], parts[2], parts[3]])
    assert [len(run.parts) for run in runs] == [1, 2]
    spans = sorted((run.at // SECTOR, -(-(run.at + run.n_bytes) // SECTOR)) for run in runs)
    assert spans[0][1] <= spans[1][0], "direct reads write whole sectors"
    odd = [Part("x", tmp_path / "f", 100, 50, ""), Part("y", tmp_path / "f", 150, 64, "")]
    assert [run.is_in_step for run in place(odd)[0]] == [False, False]


def test_large_parts_are_read_directly_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_in(tmp_path / "f", [1 << 20, 100 * 64], 64)
    opened: list[Path] = []
    is_refused = False

    def open_direct(path: Path) -> int:
        opened.append(path)
        if is_refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.open(path, os.O_RDONLY | os.O_DIRECT)

    monkeypatch.setattr(dense_reads, "open_direct", open_direct)
    same(parts, parts, is_direct=True)
    assert not opened, "small parts come through the page cache"
    monkeypatch.setattr(dense_reads, "DIRECT_FROM_BYTES", 1 << 20)
    same(parts, parts, is_direct=True)
    assert opened == [tmp_path / "f"]
    is_refused = True
    same(parts, parts, is_direct=True)
    assert len(opened) == 2


@pytest.mark.parametrize("is_direct", [True, False])
def test_what_is_wrong_names_the_tensor(is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_reads, "DIRECT_FROM_BYTES", 0)
    path = tmp_path / "f"
    parts = parts_in(path, [8192, 12288, 4096], 64)
    runs, n_bytes = place(parts)
    with HugeBuffer(n_bytes) as buffer:
        with path.open("r+b") as file:
            file.seek(parts[1].offset + 5000)
            file.write(b"\0\1\2\3")
        with pytest.raises(ChecksumMismatch, match=r"f\.1 at offset 8,256"):
            read_runs(runs, buffer.array, may_be_direct=is_direct)
        os.truncate(path, parts[2].offset + 10)
        with pytest.raises((ShortRead, ChecksumMismatch), match=r"f\.[12]"):
            read_runs(runs, buffer.array, may_be_direct=is_direct)
        path.unlink()
        with pytest.raises(ContainerError, match="can't be read: No such file"):
            read_runs(runs, buffer.array, may_be_direct=is_direct)
