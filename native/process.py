"""What a process is to the system: its name in the tables, the tie to its parent, how its memory is taken and given back."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from native.errors import NativeError

_FIRST = 3
"""The number of the field behind the name in /proc/<pid>/stat, as proc(5) counts."""
_CODE_AND_STACK = (26, 27, 28)
_DATA_AND_BREAK = (45, 46, 47)
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 48, 49, 50, 51

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_MM_MAP = struct.Struct("<11QQIi")
"""The kernel's struct prctl_mm_map: eleven addresses, no auxiliary vector, no other executable."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_libc = ctypes.CDLL(None, use_errno=True)
_names: list[ctypes.Array[ctypes.c_char]] = []
"""Memory that holds this process's command line where the system's own place is too small."""


def rename_process(argv: list[str]) -> bool:
    """This process's command line, as others see it, becomes ``argv``. False: the system refuses, nothing was changed.

    The new text takes the place of the old one in memory; a longer one gets memory of its own.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        value = {number: int(fields[number - _FIRST]) for number in (*_CODE_AND_STACK, *range(_DATA_AND_BREAK[0], 52))}
    except (OSError, IndexError, ValueError):
        return False
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)
    start, room = value[_ARG_START], value[_ARG_END] - value[_ARG_START]
    if not start:
        return False
    if len(text) <= room:
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
        return True
    return _move_name(text, value)


def _move_name(text: bytes, value: dict[int, int]) -> bool:
    memory = ctypes.create_string_buffer(text, len(text))
    address = ctypes.addressof(memory)
    _libc.sbrk.restype = ctypes.c_void_p
    start_code, end_code, start_stack = (value[number] for number in _CODE_AND_STACK)
    start_data, end_data, start_brk = (value[number] for number in _DATA_AND_BREAK)
    where = _MM_MAP.pack(
        start_code, end_code, start_data, end_data, start_brk, int(_libc.sbrk(ctypes.c_long(0))), start_stack,
        address, address + len(text), value[_ENV_START], value[_ENV_END], 0, 0, -1,
    )  # fmt: skip
    if _prctl(_PR_SET_MM, _PR_SET_MM_MAP, where, len(where)):
        return False
    _names.append(memory)
    return True


def die_with_parent(signal: int) -> None:
    """This process gets ``signal`` when the thread that started it ends; 0 undoes it. NativeError when refused."""
    if _prctl(_PR_SET_PDEATHSIG, signal, None, 0):
        raise NativeError(f"prctl(PR_SET_PDEATHSIG): signal {signal}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, number: int, what: bytes | None, size: int) -> int:
    return int(_libc.prctl(option, ctypes.c_ulong(number), what, ctypes.c_ulong(size), ctypes.c_ulong(0)))


def return_memory_soon(n_arenas: int, trim_bytes: int, mmap_bytes: int) -> None:
    """From now on the C library gives back what is free on top beyond ``trim_bytes``, and at once what had ``mmap_bytes``.

    As the environment variables MALLOC_ARENA_MAX, MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ do for a new program. A C
    library that knows nothing of it is left as it is.
    """
    if hasattr(_libc, "mallopt"):
        for name, value in ((_M_ARENA_MAX, n_arenas), (_M_TRIM_THRESHOLD, trim_bytes), (_M_MMAP_THRESHOLD, mmap_bytes)):
            _libc.mallopt(name, value)
