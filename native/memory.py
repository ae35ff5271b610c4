"""Memory in huge pages, private or of a file that outlives the process; the checksum of containers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from native.library import OK, NativeError, declare, fail, lib

declare("cb_huge_alloc", ctypes.c_void_p, [ctypes.c_int64])
declare("cb_huge_free", None, [ctypes.c_void_p, ctypes.c_int64])
declare("cb_huge_map", ctypes.c_void_p, [ctypes.c_int, ctypes.c_int64, ctypes.c_int])
declare("cb_huge_populate", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int])
declare("cb_huge_release", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int])
declare("cb_hash64", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64])


HUGE_PAGE = 2 << 20


class HugeBuffer:
    """`n_bytes` of private zeroed memory, 2 MiB aligned, in huge pages where the system grants them.

    `array` is u8[n_bytes] over the memory and becomes unusable with `close`; nothing may look at it afterwards.
    """

    def __init__(self, n_bytes: int) -> None:
        found = lib.cb_huge_alloc(n_bytes)
        if not found:
            raise NativeError(f"cb_huge_alloc: no {n_bytes} bytes of memory to be had; lower the budget")
        self.address: int = found
        self.n_bytes = n_bytes
        self.array: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(found))

    def release(self, offset: int, n_bytes: int) -> None:
        """Give back a part of the memory (whole 4096-byte pages); it reads as zeroes until it is written again."""
        _release(self.address, offset, n_bytes, is_shared=False)

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        if self.address:
            self.array = np.empty(0, np.uint8)
            lib.cb_huge_free(self.address, self.n_bytes)
            self.address = 0

    def __enter__(self) -> HugeBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MappedFile:
    """The file `fd` of a memory file system, mapped shared and 2 MiB aligned, in huge pages where the system grants them.

    The file has `n_bytes` rounded up to 2 MiB. Otherwise as `HugeBuffer`; the file stays after `close`. `fd` is the caller's.
    """

    def __init__(self, fd: int, n_bytes: int, *, is_writable: bool = True) -> None:
        found = lib.cb_huge_map(fd, n_bytes, int(is_writable))
        if not found:
            raise NativeError(f"cb_huge_map: {n_bytes} bytes of the file cannot be mapped; is there memory for it?")
        self.address: int = found
        self.n_bytes = n_bytes
        self._is_writable = is_writable
        self.array: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(found))
        self.array.flags.writeable = is_writable

    def populate(self, offset: int, n_bytes: int) -> bool:
        """Makes every page of a range present; False when there is no room for them. Touching them then may end the process."""
        status = lib.cb_huge_populate(self.address + offset, n_bytes, int(self._is_writable))
        return bool(status == OK)

    def release(self, offset: int, n_bytes: int) -> None:
        """Give back a part of the memory (whole 4096-byte pages): the file has a hole there, which reads as zeroes."""
        _release(self.address, offset, n_bytes, is_shared=True)

    def close(self) -> None:
        """Unmap. Calling it again does nothing."""
        if self.address:
            self.array = np.empty(0, np.uint8)
            lib.cb_huge_free(self.address, -(-self.n_bytes // HUGE_PAGE) * HUGE_PAGE)
            self.address = 0


def _release(address: int, offset: int, n_bytes: int, *, is_shared: bool) -> None:
    status = lib.cb_huge_release(address + offset, n_bytes, int(is_shared))
    if status != OK:
        raise fail("cb_huge_release", status, f"{n_bytes} bytes at {offset}")


def hash64(data: Any) -> int:
    """XXH64 (seed 0) of a contiguous buffer's bytes; the GIL is free meanwhile."""
    view = np.frombuffer(data, np.uint8)
    found: int = lib.cb_hash64(view.__array_interface__["data"][0], view.nbytes)
    return found
