"""The file of a named memory: its name, its header, and what of it may be believed.

One file per kind in a directory of a memory file system, ``colibri-<uid>-<run id>+<kind>``, mode 0600; a warm set that was kept
is called ``colibri-<uid>-warm+<fingerprint>+<kind>``. Each belongs to one process at a time, which holds its lock (flock) while
it is mapped. Layout::

    0       header: magic, layout version, kind, fingerprint, content, sizes, checksum of these; generation; complete
    4096    directory, u64 per slot (kind "slab" alone): 0 nothing; READING | key: being read; FULL | key: that expert
    data    from byte 4096, a slab's slots from the next multiple of 2 MiB

Every state is one aligned store of 8 bytes, made before the bytes below it change and after they are whole; so whatever moment
a process dies at, its successor finds what it may believe. ``content`` is a hash over the checksums of what lies here.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from native.memory import HUGE_PAGE, MappedFile, hash64
from shared.locks import try_lock
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
CHECKSUM_AT, GENERATION_AT, COMPLETE_AT, _KEPT_AT, _LABEL_AT = 1024, 1032, 1040, 1048, 1056
_LABEL_BYTES = 256
COMPLETE = 0x434F4D504C455445
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
        struct.unpack_from("<Q", page, at)[0] for at in (CHECKSUM_AT, GENERATION_AT, COMPLETE_AT, _KEPT_AT)
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
        Head(*names, content, data_bytes, n_entries, slot_bytes), generation, complete == COMPLETE, kept_at, label
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


def file_bytes(head: Head, n_bytes: int) -> int:
    return -(-(head.data_offset + n_bytes) // HUGE_PAGE) * HUGE_PAGE


def is_in_use(path: Path) -> bool:
    """Whether a process has this file of ours mapped."""
    with contextlib.suppress(Unfit, FileNotFoundError):
        fd = open_own_file(path, os.O_RDONLY)
        try:
            return not try_lock(fd, path, is_shared=True)
        finally:
            os.close(fd)
    return False


def difference(found: Head, wanted: Head) -> str:
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
