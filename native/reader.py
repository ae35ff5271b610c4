"""The read pool: aligned reads into slots, demand before speculation, completion through a file descriptor."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from native.library import OK, NativeError, check_struct, declare, fail, lib
from native.matrix import RepackMatrix

_TAKE = 64
SECTOR = 4096
"""What offsets, sizes and addresses of direct reads are multiples of."""
ENGINES = ("threads", "uring")
"""Who asks the system: threads in pread(2), or one thread with an io_uring. In the order of the C enumeration."""


class _ReadDone(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        ("start_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("cancelled", ctypes.c_int32),
        ("checksum", ctypes.c_uint64),
    )


class _ReadCounters(ctypes.Structure):
    _fields_ = (
        ("bytes_demand", ctypes.c_int64),
        ("bytes_speculative", ctypes.c_int64),
        ("n_reads", ctypes.c_int64),
        ("n_retries", ctypes.c_int64),
        ("n_short", ctypes.c_int64),
        ("busy_ns", ctypes.c_int64),
    )


class ReadExtent(ctypes.Structure):
    """cb_read_extent: bytes of a file, and where they come to in a stage."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("fd", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


check_struct(ReadExtent, "cb_read_extent")
check_struct(_ReadDone, "cb_read_done")
check_struct(_ReadCounters, "cb_read_counters")

_handle, _int, _i64, _u64, _ptr = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
STARTING_FN = ctypes.CFUNCTYPE(None, _i64, _i64)
ENDED_FN = ctypes.CFUNCTYPE(_i64, _i64, _i64, _ptr, _i64)
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "cb_reader_new": (_handle, [_int, _int, _i64, _i64]),
    "cb_reader_engine": (_int, [_handle]),
    "cb_uring_refusal": (_int, []),
    "cb_reader_fd": (_int, [_handle]),
    "cb_reader_submit": (_int, [_handle, _u64, _int, _i64, _i64, _ptr, _int, _int]),
    "cb_reader_stages": (_int, [_handle, _ptr, _int, _i64]),
    "cb_reader_submit_extents": (
        _int,
        [_handle, _u64, ctypes.POINTER(ReadExtent), _int, ctypes.POINTER(RepackMatrix), _int, _ptr, _int],
    ),
    "cb_reader_promote": (_int, [_handle, _u64]),
    "cb_reader_cancel": (_int, [_handle, _u64]),
    "cb_reader_take": (_i64, [_handle, ctypes.POINTER(_ReadDone), _i64]),
    "cb_reader_counters": (None, [_handle, ctypes.POINTER(_ReadCounters)]),
    "cb_reader_free": (None, [_handle]),
    "cb_reader_hooks_for_test": (None, [_ptr, _ptr]),
}
for _name, (_restype, _argtypes) in PROTOTYPES.items():
    declare(_name, _restype, _argtypes)


def uring_refusal() -> str:
    """Why io_uring can't be used here, in the system's words; '' when it can."""
    error = lib.cb_uring_refusal()
    return os.strerror(error) if error else ""


def open_direct(path: str | os.PathLike[str]) -> int:
    """A descriptor for direct reads, tried once: some file systems open and then refuse. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        room = np.empty(2 * SECTOR, np.uint8)
        start = -room.ctypes.data % SECTOR
        os.preadv(fd, [room.data[start : start + SECTOR]], 0)
    except OSError:
        os.close(fd)
        raise
    return fd


@dataclass(frozen=True, slots=True)
class ReadDone:
    """How one read ended. `error` is an errno (ENODATA: the file is too short), 0 when all `wanted` bytes are there."""

    tag: int
    bytes: int
    wanted: int
    start_ns: int
    end_ns: int
    error: int
    cancelled: bool
    checksum: int


@dataclass(frozen=True, slots=True)
class ReadCounters:
    """Growing totals. Bytes are those the system delivered; busy_ns is the time with a piece in flight."""

    bytes_demand: int
    bytes_speculative: int
    n_reads: int
    n_retries: int
    n_short: int
    busy_ns: int


class Reader:
    """Reads in pieces, at most `depth` (1..64) in flight.

    `piece_bytes`, `speculative_piece_bytes`: multiples of 4096; 0 means 2 MiB, and at most 1 MiB for speculation. `engine`:
    one of ENGINES; where io_uring is refused the threads read, and the attribute `engine` says so. `fd` is readable while
    finished reads wait for `take`. Descriptors and targets belong to the caller and must live until the read has come
    back. One read per tag may be pending.
    """

    def __init__(
        self, depth: int, piece_bytes: int, speculative_piece_bytes: int = 0, *, engine: str = "threads"
    ) -> None:
        handle = lib.cb_reader_new(ENGINES.index(engine), depth, piece_bytes, speculative_piece_bytes)
        if not handle:
            raise NativeError(
                f"cb_reader_new: cannot start {engine} for {depth} pieces at a time (1..64) of {piece_bytes} bytes "
                f"({speculative_piece_bytes} for speculation; multiples of 4096, at most 1 GiB)"
            )
        self._handle: int | None = handle
        self._room = (_ReadDone * _TAKE)()
        self.fd: int = lib.cb_reader_fd(handle)
        self.engine = ENGINES[lib.cb_reader_engine(handle)]

    def submit(
        self,
        tag: int,
        fd: int,
        offset: int,
        n_bytes: int,
        target_address: int,
        speculative: bool = False,
        checksum: bool = False,
    ) -> None:
        """Read n_bytes of fd at offset to target_address. With a direct fd all three are multiples of 4096."""
        status = lib.cb_reader_submit(
            self._open_handle(), tag, fd, offset, n_bytes, target_address, int(speculative), int(checksum)
        )
        if status != OK:
            raise fail(
                "cb_reader_submit",
                status,
                f"tag {tag} (pending already?), fd {fd}, {n_bytes} bytes at {offset} to {target_address:#x}",
            )

    def stages(self, address: int, n: int, n_bytes: int) -> None:
        """Memory for `n` (1..64) reads of several ranges at a time, n * n_bytes from `address` on; both multiples of 4096.

        Once, before the first `submit_extents`. The memory belongs to the caller and must live as long as the pool.
        """
        status = lib.cb_reader_stages(self._open_handle(), address, n, n_bytes)
        if status != OK:
            raise fail("cb_reader_stages", status, f"{n} stages of {n_bytes} bytes at {address:#x}")

    def submit_extents(
        self,
        tag: int,
        extents: Sequence[ReadExtent],
        matrices: Sequence[RepackMatrix],
        target_address: int,
        speculative: bool = False,
    ) -> None:
        """Read ranges to a stage and repack the matrices from there to target_address. At most 16 of each.

        With direct descriptors the pool widens ranges to sectors: `at` and `offset` have the same distance from a multiple of
        4096, and no two ranges share a sector of the stage. A scale that can't be is the error EILSEQ.
        """
        ranges = (ReadExtent * len(extents))(*extents)
        parts = (RepackMatrix * len(matrices))(*matrices)
        status = lib.cb_reader_submit_extents(
            self._open_handle(), tag, ranges, len(extents), parts, len(matrices), target_address, int(speculative)
        )
        if status != OK:
            raise fail("cb_reader_submit_extents", status, f"tag {tag} (pending already?), {len(extents)} ranges")

    def promote(self, tag: int) -> bool:
        """Make a speculative read a demand read. False when no read of this tag is pending."""
        return bool(lib.cb_reader_promote(self._open_handle(), tag) == OK)

    def cancel(self, tag: int) -> bool:
        """Start no further piece; the read still comes back, cancelled. False when no read of this tag is pending."""
        return bool(lib.cb_reader_cancel(self._open_handle(), tag) == OK)

    def take(self) -> list[ReadDone]:
        """All finished reads, in the order in which they finished; never waits."""
        done: list[ReadDone] = []
        while True:
            n = lib.cb_reader_take(self._open_handle(), self._room, _TAKE)
            done += [
                ReadDone(r.tag, r.bytes, r.wanted, r.start_ns, r.end_ns, r.error, bool(r.cancelled), r.checksum)
                for r in self._room[:n]
            ]
            if n < _TAKE:
                return done

    def counters(self) -> ReadCounters:
        """Totals so far."""
        found = _ReadCounters()
        lib.cb_reader_counters(self._open_handle(), ctypes.byref(found))
        return ReadCounters(*(getattr(found, name) for name, _ in _ReadCounters._fields_))

    def close(self) -> None:
        """Wait for the pieces in flight and stop; reads not yet taken are forgotten. Calling it again does nothing."""
        if self._handle:
            lib.cb_reader_free(self._handle)
            self._handle = None

    def _open_handle(self) -> int:
        if not self._handle:
            raise NativeError("Reader: used after close")
        return self._handle

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
