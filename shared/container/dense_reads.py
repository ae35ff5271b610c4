"""Brings tensors of the dense part from their files into one buffer, past the page cache where that is worth it.

Tensors that follow each other in a file form a *run*. A run lies in the buffer as it lies in the file, at the same distance
from a multiple of 4096, so that direct reads bring it in large pieces straight to its place. Checksums are taken as tensors are
complete, while the next ones are on their way. ``place`` decides (pure), ``read_runs`` reads.
"""

from __future__ import annotations

import errno
import os
import select
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from native.reader import SECTOR, ReadDone, Reader, open_direct
from shared.container.checksum import checksum
from shared.errors import ChecksumMismatch, ContainerError, ShortRead
from shared.files import open_file

ALIGN = 64
"""Where a tensor begins in the buffer."""
DIRECT_FROM_BYTES = 128 << 20
"""Less than this is read through the page cache: a small model's next start finds it there."""
_CHUNK_BYTES = 16 << 20
_PIECE_BYTES, _DEPTH = 2 << 20, 4
_N_HASHERS = 2


class Part(msgspec.Struct, frozen=True):
    """A range of a file with its checksum ("": not known): a tensor's weight or scales."""

    what: str
    file: Path
    offset: int
    n_bytes: int
    checksum: str


class Run(msgspec.Struct, frozen=True):
    """Parts that follow each other in a file. Byte ``offset`` of the file lies at ``at`` of the buffer."""

    file: Path
    offset: int
    at: int
    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        return self.parts[-1].offset + self.parts[-1].n_bytes - self.offset

    @property
    def is_in_step(self) -> bool:
        """Buffer and file have the same distance from a multiple of 4096."""
        return (self.at - self.offset) % SECTOR == 0

    def place_of(self, part: Part) -> int:
        """Where ``part`` begins in the buffer."""
        return self.at + part.offset - self.offset


def place(parts: Sequence[Part]) -> tuple[list[Run], int]:
    """(the runs, bytes of buffer). No two runs share a sector of the buffer; every part begins at a multiple of 64.

    The buffer's own start must be a multiple of 4096 for direct reads. A part that lies at no multiple of 64 in its file is
    a run of its own, out of step with the file.
    """
    runs: list[Run] = []
    open_run: list[Part] = []
    end = 0

    def close() -> None:
        nonlocal end
        if open_run:
            first = open_run[0]
            at = end + (first.offset % SECTOR if first.offset % ALIGN == 0 else 0)
            runs.append(Run(first.file, first.offset, at, tuple(open_run)))
            end = _up(at + runs[-1].n_bytes)
            open_run.clear()

    for part in sorted(parts, key=lambda part: (part.file, part.offset)):
        if open_run:
            last = open_run[-1]
            follows = (last.file, last.offset + last.n_bytes) == (part.file, part.offset)
            if not follows or part.offset % ALIGN or last.offset % ALIGN:
                close()
        open_run.append(part)
    close()
    return runs, max(end, SECTOR)


def read_runs(runs: Sequence[Run], buffer: npt.NDArray[np.uint8], *, may_be_direct: bool = True) -> None:
    """Fills u8 ``buffer`` and compares every checksum. ShortRead, ChecksumMismatch, ContainerError name file and offset."""
    is_large = sum(run.n_bytes for run in runs) >= DIRECT_FROM_BYTES
    is_direct = may_be_direct and is_large and buffer.ctypes.data % SECTOR == 0
    with (
        _Files(is_direct) as files,
        Reader(_DEPTH, _PIECE_BYTES) as reader,
        ThreadPoolExecutor(_N_HASHERS) as hashers,
    ):
        reading = _Reading(reader, buffer, hashers)
        for chunk in _chunks(runs, files):
            reading.submit(chunk)
        reading.finish()


class _Chunk(msgspec.Struct, frozen=True):
    """One read of the pool, and the parts that are complete when it and all before it are there."""

    fd: int
    offset: int
    n_bytes: int
    at: int
    run: Run
    completes: tuple[tuple[Part, int], ...]
    """With their places in the buffer."""


def _chunks(runs: Sequence[Run], files: _Files) -> Iterator[_Chunk]:
    for run in runs:
        fd, size = files.open(run.file, is_direct=run.is_in_step)
        is_direct = files.is_direct(fd)
        begin, end = run.offset, run.offset + run.n_bytes
        if is_direct:
            begin -= begin % SECTOR
        left = deque(run.parts)
        while begin < end:
            stop = min(begin + _CHUNK_BYTES, end)
            chunk_fd = fd
            if is_direct and stop == end:
                stop = _up(end)
                if stop > size:  # the file's last, partial sector can't be read directly
                    stop = size - size % SECTOR
                    if stop <= begin:
                        stop, chunk_fd = end, files.open(run.file, is_direct=False)[0]
            completes = []
            while left and left[0].offset + left[0].n_bytes <= stop:
                part = left.popleft()
                completes.append((part, run.place_of(part)))
            yield _Chunk(chunk_fd, begin, stop - begin, run.at + begin - run.offset, run, tuple(completes))
            begin = stop


class _Reading:
    """Chunks on their way, and tensors whose checksum is being taken."""

    def __init__(self, reader: Reader, buffer: npt.NDArray[np.uint8], hashers: ThreadPoolExecutor) -> None:
        self._reader, self._buffer, self._hashers = reader, buffer, hashers
        self._waiting: deque[tuple[int, _Chunk]] = deque()  # in order of submission
        self._landed: set[int] = set()
        self._hashing: deque[Future[None]] = deque()
        self._n_submitted = self._bytes_waiting = 0

    def submit(self, chunk: _Chunk) -> None:
        """Waits while enough is on its way."""
        while self._bytes_waiting > _CHUNK_BYTES:
            self._wait()
        address = self._buffer.ctypes.data + chunk.at
        self._reader.submit(self._n_submitted, chunk.fd, chunk.offset, chunk.n_bytes, address)
        self._waiting.append((self._n_submitted, chunk))
        self._n_submitted += 1
        self._bytes_waiting += chunk.n_bytes

    def finish(self) -> None:
        while self._waiting:
            self._wait()
        while self._hashing:
            self._hashing.popleft().result()

    def _wait(self) -> None:
        select.select([self._reader.fd], [], [])
        for done in self._reader.take():
            chunk = next(chunk for tag, chunk in self._waiting if tag == done.tag)
            if done.error:
                raise _fault(chunk, done)
            self._landed.add(done.tag)
        while self._waiting and self._waiting[0][0] in self._landed:
            tag, chunk = self._waiting.popleft()
            self._landed.discard(tag)
            self._bytes_waiting -= chunk.n_bytes
            for part, at in chunk.completes:
                self._hashing.append(self._hashers.submit(check, part, self._buffer[at : at + part.n_bytes]))
        while self._hashing and self._hashing[0].done():
            self._hashing.popleft().result()


def _fault(chunk: _Chunk, done: ReadDone) -> Exception:
    """What went wrong with a chunk, and which tensor lacks bytes because of it."""
    size = os.fstat(chunk.fd).st_size
    part = next((part for part in chunk.run.parts if part.offset + part.n_bytes > size), None)
    if done.error == errno.ENODATA and part:
        return ShortRead(
            f"{part.file}: {part.what} needs {part.n_bytes:,} bytes at offset {part.offset:,}, the file ends after "
            f"{max(0, size - part.offset):,}. Copy the container again."
        )
    at = chunk.offset + done.bytes
    part = next((part for part in chunk.run.parts if part.offset + part.n_bytes > at), chunk.run.parts[-1])
    return ContainerError(
        f"{part.file}: {part.what} can't be read at offset {part.offset:,}: {os.strerror(done.error)} (expected "
        f"{chunk.n_bytes:,} bytes at {chunk.offset:,}, received {done.bytes:,})."
    )


def check(part: Part, found_bytes: npt.NDArray[np.uint8]) -> None:
    """ChecksumMismatch unless these are the bytes that were written, as far as anybody noted what those were."""
    if not part.checksum:
        return
    found = checksum(found_bytes)
    if found != part.checksum:
        raise ChecksumMismatch(
            f"{part.file}: {part.what} at offset {part.offset:,} has checksum {found}, expected {part.checksum}: the bytes "
            "on disk are not those that were written. Copy the container again; `colibri verify` lists everything that "
            "is damaged."
        )


class _Files:
    """The files of one pass, opened once in each way."""

    def __init__(self, may_be_direct: bool) -> None:
        self._may_be_direct = may_be_direct
        self._open: dict[tuple[Path, bool], tuple[int, int]] = {}
        self._direct: set[int] = set()

    def open(self, path: Path, *, is_direct: bool) -> tuple[int, int]:
        """(descriptor, size), direct where asked for and possible."""
        key = (path, is_direct and self._may_be_direct)
        if key not in self._open:
            try:
                self._open[key] = self._opened(path, key[1])
            except OSError as error:
                raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
        return self._open[key]

    def _opened(self, path: Path, is_direct: bool) -> tuple[int, int]:
        fd = -1
        if is_direct:
            try:
                fd = open_direct(path)
                self._direct.add(fd)
            except OSError:
                self._may_be_direct = False  # this file system has none
        if fd < 0:
            fd = open_file(path)
        return fd, os.fstat(fd).st_size

    def is_direct(self, fd: int) -> bool:
        return fd in self._direct

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd, _size in self._open.values():
            os.close(fd)


def _up(n_bytes: int) -> int:
    return -(-n_bytes // SECTOR) * SECTOR
