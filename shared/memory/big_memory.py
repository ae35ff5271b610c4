"""The large part of a model in memory: private to its process, or in a file that outlives it (named memory, ``named_file``).

``Home`` says where a group's named memory lies and opens it. What a predecessor left is taken over as it is where its header
fits in every particular; otherwise the file is dropped and made anew: that is no reason to fail.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.library import NativeError
from native.memory import HugeBuffer, MappedFile, hash64
from shared.awake import Countdown
from shared.errors import CapacityError
from shared.locks import try_lock
from shared.log import Log
from shared.memory.named_file import (
    CHECKSUM_AT,
    COMPLETE,
    COMPLETE_AT,
    GENERATION_AT,
    PAGE_BYTES,
    Found,
    Head,
    Unfit,
    difference,
    file_bytes,
    open_own_file,
    parse_header,
    read_found,
    run_path,
)
from shared.run.config import GroupConfig

LOCK_WAIT_S = 2.0


@dataclass(frozen=True)
class Home:
    """Where a group's named memory lies."""

    directory: Path
    run_id: str
    fingerprint: str
    log: Log

    @staticmethod
    def of(config: GroupConfig, log: Log) -> Home | None:
        """None: this group's memory is private."""
        if config.huge_dir is None:
            return None
        return Home(Path(config.huge_dir), config.run_id, config.fingerprint, log)

    def open(
        self, kind: str, content: int, n_bytes: int, n_entries: int = 0, slot_bytes: int = 0
    ) -> NamedMemory | None:
        """The run's memory of this kind with ``n_bytes`` of data: adopted as it is where it fits, else new and zeroed.

        ``n_entries`` and ``slot_bytes``: for a slab. None, with a line in the log, when there is no room for it here;
        private memory is the way then.
        """
        head = Head(kind, self.fingerprint, content, 0 if n_entries else n_bytes, n_entries, slot_bytes)
        path = run_path(self.directory, self.run_id, kind)
        try:
            memory = self._adopted(path, head, n_bytes)
            if memory is None:
                memory = NamedMemory.create(path, head, n_bytes)
        except (OSError, CapacityError, NativeError, Unfit) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            self.log.warning("named_memory_off", kind=kind, path=path, reason=reason)
            return None
        return memory

    def has_complete(self, kind: str, content: int) -> bool:
        """Whether a predecessor left all of this."""
        try:
            found = read_found(run_path(self.directory, self.run_id, kind))
        except (Unfit, OSError):
            return False
        head = found.head
        return found.is_complete and (head.kind, head.fingerprint, head.content) == (kind, self.fingerprint, content)

    def _adopted(self, path: Path, head: Head, n_bytes: int) -> NamedMemory | None:
        try:
            memory = NamedMemory.adopt(path, head, n_bytes)
        except FileNotFoundError:
            return None
        except Unfit as error:
            if path.lstat().st_uid != os.getuid():
                raise
            self.log.info("memory_dropped", kind=head.kind, path=path, reason=str(error))
            path.unlink()
            return None
        if memory.is_complete or head.n_entries:
            self.log.info("memory_adopted", kind=head.kind, path=path, generation=memory.generation)
        return memory


class NamedMemory:
    """One mapped file. ``array`` u8[n_bytes] is its data, ``address`` where that begins."""

    is_named = True

    def __init__(self, fd: int, path: Path, found: Found, n_bytes: int, *, is_writable: bool) -> None:
        head = found.head
        self.path = path
        self.head = head
        self.n_bytes = n_bytes
        self.generation = found.generation
        self.is_complete = found.is_complete
        self._fd = fd
        self._map = MappedFile(fd, head.data_offset + n_bytes, is_writable=is_writable)
        self.address = self._map.address + head.data_offset
        self.array: NDArray[np.uint8] = self._map.array[head.data_offset :]

    @classmethod
    def create(cls, path: Path, head: Head, n_bytes: int) -> NamedMemory:
        """A new file. Raises OSError (FileExistsError when somebody's lies there), CapacityError, NativeError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(fd, path)
            os.ftruncate(fd, file_bytes(head, n_bytes))
            memory = cls(fd, path, Found(head, 1, False), n_bytes, is_writable=True)
            try:
                # A slab is filled by reads, which say when there is no room; the rest is written by this process, which
                # would be ended by a signal.
                memory.reserve(head.data_offset if head.n_entries else head.data_offset + n_bytes)
                memory._write_head()
            except BaseException:
                memory._map.close()
                raise
            return memory
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, path: Path, head: Head, n_bytes: int) -> NamedMemory:
        """The file that is there. Raises Unfit when it is not exactly what is wanted, FileNotFoundError."""
        fd = open_own_file(path)
        try:
            found = parse_header(os.pread(fd, PAGE_BYTES, 0))
            if found.head != head:
                raise Unfit(difference(found.head, head))
            size = os.fstat(fd).st_size
            if not head.n_entries:
                if size < file_bytes(head, n_bytes):
                    raise Unfit(f"it has {size:,} bytes, {file_bytes(head, n_bytes):,} were expected")
                if not found.is_complete:
                    raise Unfit("it was not completely filled")
            elif size < head.data_offset:
                raise Unfit(f"it has {size:,} bytes, less than its directory")
            _lock(fd, path)
            found = _take_over(fd, found, n_bytes)
            memory = cls(fd, path, found, n_bytes, is_writable=bool(head.n_entries))
            if not head.n_entries:
                memory._map.populate(0, head.data_offset + n_bytes)
            return memory
        except OSError as error:
            os.close(fd)
            raise Unfit(error.strerror or str(error)) from None
        except BaseException:
            os.close(fd)
            raise

    @property
    def directory(self) -> memoryview:
        """The slots' states, u64 each; a store into it is one instruction."""
        count = self.head.n_entries
        return memoryview(self._map.array[PAGE_BYTES : PAGE_BYTES + 8 * count]).cast("B").cast("Q")  # type: ignore[arg-type]

    def reserve(self, n_bytes: int) -> None:
        """The first bytes of the file are there from now on. Raises CapacityError."""
        if not self._map.populate(0, n_bytes):
            raise CapacityError(f"{self.path.parent} has no room for {n_bytes:,} bytes more")

    def set_complete(self) -> None:
        """All data is there and right."""
        self._store(COMPLETE_AT, COMPLETE)
        self.is_complete = True

    def release(self, offset: int, n_bytes: int) -> None:
        """Gives whole pages of the data back to the system."""
        self._map.release(self.head.data_offset + offset, n_bytes)

    def present(self, offset: int, n_bytes: int) -> bool:
        """Maps pages that are there already; False when that failed."""
        return self._map.populate(self.head.data_offset + offset, n_bytes)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_head(self) -> None:
        packed = self.head.packed()
        self._map.array[: len(packed)] = np.frombuffer(packed, np.uint8)
        self._store(GENERATION_AT, self.generation)
        self._store(CHECKSUM_AT, hash64(packed))

    def _store(self, at: int, value: int) -> None:
        self._map.array[at : at + 8].view(np.uint64)[0] = value


class PrivateMemory(HugeBuffer):
    """The same for memory that goes with its process."""

    is_named = False


def content_of(parts: Any) -> int:
    """The hash of what identifies some data: names, sizes and checksums as strings."""
    return hash64("\n".join(parts).encode() + b"\n")


def _lock(fd: int, path: Path) -> None:
    """A predecessor that was killed gives its lock back with its last thread."""
    limit = Countdown(LOCK_WAIT_S)
    while not try_lock(fd, path):
        if limit.is_over:
            raise CapacityError("another process holds it")
        time.sleep(0.01)


def _take_over(fd: int, found: Found, n_bytes: int) -> Found:
    """Counts the new user; brings a slab to its new number of slots: entries of slots that go, or never were, are emptied."""
    head, generation = found.head, found.generation + 1
    size = os.fstat(fd).st_size
    first = MappedFile(fd, head.data_offset if head.n_entries else PAGE_BYTES)
    try:
        first.array[GENERATION_AT : GENERATION_AT + 8].view(np.uint64)[0] = generation & 0xFFFFFFFF
        if head.n_entries:
            keeps = min(size - head.data_offset, n_bytes) // head.slot_bytes
            first.array[PAGE_BYTES + 8 * keeps : PAGE_BYTES + 8 * head.n_entries] = 0
    finally:
        first.close()
    if head.n_entries and size != file_bytes(head, n_bytes):
        os.ftruncate(fd, file_bytes(head, n_bytes))
    return Found(head, generation, found.is_complete)
