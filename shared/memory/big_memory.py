"""The large part of a model in memory: private to its process, or in a file that outlives it (named memory).

A named memory is one file per kind in a directory of a memory file system, ``colibri-<uid>-<run id>+<kind>``, mode 0600; a warm
set that was kept is called ``colibri-<uid>-warm+<fingerprint>+<kind>``. Each belongs to one process at a time, which holds its
lock (flock) while it is mapped. Layout::

    0       header: magic, layout version, kind, fingerprint, content, sizes, checksum of these; generation; complete
    4096    directory, u64 per slot (kind "slab" alone): 0 nothing; READING | key: being read; FULL | key: that expert
    data    from byte 4096, a slab's slots from the next multiple of 2 MiB

Every state is one aligned store of 8 bytes, made before the bytes below it change and after they are whole; so whatever moment
a process dies at, its successor finds what it may believe. ``content`` is a hash over the checksums of what lies here.
A header that does not fit in every particular is no reason to fail: the file is dropped and made anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.library import NativeError
from native.memory import HUGE_PAGE, HugeBuffer, MappedFile, hash64
from shared.awake import Countdown
from shared.errors import CapacityError
from shared.locks import try_lock
from shared.log import Log
from shared.run.config import GroupConfig
from shared.wire.endpoints import ATTENTION, DRAFTER, EXPERT_IO, ROUTER

SLAB, SHARED_EXPERTS, DENSE, MTP, GATES = "slab", "shared", "dense", "mtp", "gates"
OWNERS = {SLAB: EXPERT_IO, SHARED_EXPERTS: EXPERT_IO, DENSE: ATTENTION, MTP: DRAFTER, GATES: ROUTER}
"""Kind -> the service that maps it."""
KINDS = tuple(OWNERS)

MAGIC = b"COLIBRI\0"
LAYOUT_VERSION = 1
PAGE_BYTES = 4096
_HEAD = struct.Struct("<8sI4x16s64sQQQQ")
_CHECKSUM_AT, _GENERATION_AT, _COMPLETE_AT, _KEPT_AT, _LABEL_AT = 1024, 1032, 1040, 1048, 1056
_LABEL_BYTES = 256
_COMPLETE = 0x434F4D504C455445
LOCK_WAIT_S = 2.0
FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")
_NAME = re.compile(rf"colibri-(\d+)-(?:warm\+([0-9a-f]{{8,64}})|([0-9a-z]+))\+({'|'.join(KINDS)})")


class Unfit(Exception):
    """A file that is there can't be used; the text is why."""


@dataclass(frozen=True)
class Head:
    """What a named memory holds, as its header says it. ``content`` tells the bytes, ``n_entries`` the directory's room."""

    kind: str
    fingerprint: str
    content: int
    data_bytes: int
    """Bytes of data; 0 for the slab, whose number of slots may change: there it follows from the file's size."""
    n_entries: int = 0
    slot_bytes: int = 0

    @property
    def data_offset(self) -> int:
        return -(-(PAGE_BYTES + 8 * self.n_entries) // HUGE_PAGE) * HUGE_PAGE if self.n_entries else PAGE_BYTES

    def packed(self) -> bytes:
        kind, fingerprint = self.kind.encode(), self.fingerprint.encode()
        sizes = (self.content, self.data_bytes, self.n_entries, self.slot_bytes)
        return _HEAD.pack(MAGIC, LAYOUT_VERSION, kind, fingerprint, *sizes)


@dataclass(frozen=True)
class Found:
    """The header of a file. ``generation``: how many processes have had it; ``is_complete``: all data is there and right.

    ``kept_at`` (seconds of the epoch, 0: never) and ``label`` (the model's name): written when a warm set is kept.
    """

    head: Head
    generation: int
    is_complete: bool
    kept_at: int = 0
    label: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether a successor could adopt it; of a slab, whatever is whole in it."""
        return self.is_complete or bool(self.head.n_entries)


def parse_header(page: bytes) -> Found:
    """The first page of a file. Raises Unfit for anything that this version did not write."""
    if len(page) < PAGE_BYTES:
        raise Unfit(f"it has {len(page)} bytes, not even a header")
    magic, version, kind, fingerprint, content, data_bytes, n_entries, slot_bytes = _HEAD.unpack_from(page)
    if magic != MAGIC:
        raise Unfit("it has no header")
    if version != LAYOUT_VERSION:
        raise Unfit(f"its layout is version {version}, this program's is {LAYOUT_VERSION}")
    checksum, generation, complete, kept_at = (
        struct.unpack_from("<Q", page, at)[0] for at in (_CHECKSUM_AT, _GENERATION_AT, _COMPLETE_AT, _KEPT_AT)
    )
    if checksum != hash64(page[: _HEAD.size]):
        raise Unfit("its header is damaged")
    try:
        names = kind.rstrip(b"\0").decode("ascii"), fingerprint.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise Unfit("its header is damaged") from None
    label = page[_LABEL_AT : _LABEL_AT + _LABEL_BYTES].rstrip(b"\0").decode(errors="replace")
    label = "".join(c for c in label if c.isprintable())
    return Found(
        Head(*names, content, data_bytes, n_entries, slot_bytes), generation, complete == _COMPLETE, kept_at, label
    )


def open_own_file(path: Path, flags: int = os.O_RDWR) -> int:
    """A descriptor of a regular file that belongs to this user alone. Raises Unfit, FileNotFoundError."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unfit(f"it can't be opened ({error.strerror})") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        problem = "it is not a file"
    elif found.st_uid != os.getuid():
        problem = f"it belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        problem = "others may use it"
    else:
        return fd
    os.close(fd)
    raise Unfit(problem)


def write_label(path: Path, label: str, kept_at: int) -> None:
    """Says in a file's header what it is kept for and since when. Raises Unfit, OSError, NativeError."""
    fd = open_own_file(path)
    try:
        first = MappedFile(fd, PAGE_BYTES)
        try:
            text = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")
            first.array[_LABEL_AT : _LABEL_AT + _LABEL_BYTES] = np.frombuffer(text, np.uint8)
            first.array[_KEPT_AT : _KEPT_AT + 8].view(np.uint64)[0] = kept_at
        finally:
            first.close()
    finally:
        os.close(fd)


def read_found(path: Path) -> Found:
    """The header of a file of this user. Raises Unfit, FileNotFoundError."""
    fd = open_own_file(path, os.O_RDONLY)
    try:
        return parse_header(os.pread(fd, PAGE_BYTES, 0))
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Name:
    """A file's name taken apart: ``run_id`` of a run, or ``fingerprint`` of a warm set; the other is empty."""

    uid: int
    fingerprint: str
    run_id: str
    kind: str


def parse_name(name: str) -> Name | None:
    """None for a file that is no named memory."""
    match = _NAME.fullmatch(name)
    return Name(int(match[1]), match[2] or "", match[3] or "", match[4]) if match else None


def run_path(directory: Path, run_id: str, kind: str) -> Path:
    return directory / f"colibri-{os.getuid()}-{run_id}+{kind}"


def warm_path(directory: Path, fingerprint: str, kind: str) -> Path:
    return directory / f"colibri-{os.getuid()}-warm+{fingerprint}+{kind}"


def named_bytes(config: GroupConfig) -> dict[str, int]:
    """Service -> bytes of named memory it holds, holes not counted; empty when the group's memory is private."""
    held: dict[str, int] = {}
    if config.huge_dir is not None:
        for kind, owner in OWNERS.items():
            with contextlib.suppress(OSError):
                found = run_path(Path(config.huge_dir), config.run_id, kind).stat()
                held[owner] = held.get(owner, 0) + found.st_blocks * 512
    return held


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
            os.ftruncate(fd, _file_bytes(head, n_bytes))
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
                raise Unfit(_difference(found.head, head))
            size = os.fstat(fd).st_size
            if not head.n_entries:
                if size < _file_bytes(head, n_bytes):
                    raise Unfit(f"it has {size:,} bytes, {_file_bytes(head, n_bytes):,} were expected")
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
        self._store(_COMPLETE_AT, _COMPLETE)
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
        self._store(_GENERATION_AT, self.generation)
        self._store(_CHECKSUM_AT, hash64(packed))

    def _store(self, at: int, value: int) -> None:
        self._map.array[at : at + 8].view(np.uint64)[0] = value


class PrivateMemory(HugeBuffer):
    """The same for memory that goes with its process."""

    is_named = False


def content_of(parts: Any) -> int:
    """The hash of what identifies some data: names, sizes and checksums as strings."""
    return hash64("\n".join(parts).encode() + b"\n")


def _file_bytes(head: Head, n_bytes: int) -> int:
    return -(-(head.data_offset + n_bytes) // HUGE_PAGE) * HUGE_PAGE


def _lock(fd: int, path: Path) -> None:
    """A predecessor that was killed gives its lock back with its last thread."""
    limit = Countdown(LOCK_WAIT_S)
    while not try_lock(fd, path):
        if limit.is_over:
            raise CapacityError("another process holds it")
        time.sleep(0.01)


def is_in_use(path: Path) -> bool:
    """Whether a process has this file of ours mapped."""
    with contextlib.suppress(Unfit, FileNotFoundError):
        fd = open_own_file(path, os.O_RDONLY)
        try:
            return not try_lock(fd, path, is_shared=True)
        finally:
            os.close(fd)
    return False


def _take_over(fd: int, found: Found, n_bytes: int) -> Found:
    """Counts the new user; brings a slab to its new number of slots: entries of slots that go, or never were, are emptied."""
    head, generation = found.head, found.generation + 1
    size = os.fstat(fd).st_size
    first = MappedFile(fd, head.data_offset if head.n_entries else PAGE_BYTES)
    try:
        first.array[_GENERATION_AT : _GENERATION_AT + 8].view(np.uint64)[0] = generation & 0xFFFFFFFF
        if head.n_entries:
            keeps = min(size - head.data_offset, n_bytes) // head.slot_bytes
            first.array[PAGE_BYTES + 8 * keeps : PAGE_BYTES + 8 * head.n_entries] = 0
    finally:
        first.close()
    if head.n_entries and size != _file_bytes(head, n_bytes):
        os.ftruncate(fd, _file_bytes(head, n_bytes))
    return Found(head, generation, found.is_complete)


def _difference(found: Head, wanted: Head) -> str:
    for what, a, b in (
        ("kind", found.kind, wanted.kind),
        ("model", found.fingerprint, wanted.fingerprint),
        ("content", f"{found.content:016x}", f"{wanted.content:016x}"),
        ("size", found.data_bytes, wanted.data_bytes),
        ("slot size", found.slot_bytes, wanted.slot_bytes),
        ("number of experts", found.n_entries, wanted.n_entries),
    ):
        if a != b:
            return f"its {what} is {a}, {b} is wanted"
    return "it differs"
