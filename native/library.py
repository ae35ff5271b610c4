"""Loads the C library, checks that it is the one this code was written for, and offers what every binding needs."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from native.errors import LibraryError
from native.errors import NativeError as NativeError

ABI_VERSION = 1
LIBRARY_NAME = "libcolibri_native.so"
OK, EINVAL, ENOMEM, ENONFINITE, EIO, ESYS = 0, -1, -2, -3, -4, -5
ISAS = ("ref", "avx2", "avx512", "avx512vnni", "amx", "neon", "neondot")


def find_library() -> Path:
    """Path of the compiled library: inside the package (installed, or built into the source tree by ``make kernels``)."""
    found = Path(str(resources.files("native") / LIBRARY_NAME))
    if not found.is_file():
        raise LibraryError(
            f"{LIBRARY_NAME} was expected at {found} and is not there; build it with `make kernels` "
            "(or `cmake -S . -B build/dev && cmake --build build/dev`) or install the package"
        )
    return found


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library file and check that it is complete and of our ABI version. LibraryError otherwise."""
    _require_complete(path)
    try:
        opened = ctypes.CDLL(str(path))
        version = opened.cb_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path} cannot be loaded: {error}; build it again with `make kernels`") from error
    if version != ABI_VERSION:
        raise LibraryError(
            f"{path} has ABI version {version}, expected {ABI_VERSION}; build it again with `make kernels`"
        )
    opened.cb_status_text.restype = ctypes.c_char_p
    opened.cb_layout_of.restype = ctypes.c_int64
    opened.cb_layout_of.argtypes = [ctypes.c_char_p]
    for name in ("cb_isa_available", "cb_isa_error", "cb_dispatch_text"):
        getattr(opened, name).restype = ctypes.c_char_p
        getattr(opened, name).argtypes = []
    opened.cb_isa_limit.argtypes = [ctypes.c_int]
    opened.cb_pool_new.restype = ctypes.c_void_p
    opened.cb_pool_new.argtypes = [ctypes.c_int]
    opened.cb_pool_new_dry.restype = ctypes.c_void_p
    opened.cb_pool_new_dry.argtypes = [ctypes.c_int]
    opened.cb_pool_take_phases.restype = None
    opened.cb_pool_take_phases.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    opened.cb_pool_scratch_bytes.restype = ctypes.c_int64
    opened.cb_pool_scratch_bytes.argtypes = [ctypes.c_void_p]
    opened.cb_pool_threads.argtypes = [ctypes.c_void_p]
    opened.cb_quota_cpus.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    opened.cb_pool_free.restype = None
    opened.cb_pool_free.argtypes = [ctypes.c_void_p]
    return opened


def _require_complete(path: Path) -> None:
    """An ELF file ends with its table of sections. One that is cut off would not be refused by the loader: it maps what
    the headers promise, and the process dies of SIGBUS."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            found = file.seek(0, 2)
    except OSError as error:
        raise LibraryError(f"{path} cannot be read: {error.strerror}; build it again with `make kernels`") from error
    expected = 64
    if len(head) == 64 and head[:6] == b"\x7fELF\x02\x01":
        (sections,) = struct.unpack_from("<Q", head, 40)
        entry_bytes, n_entries = struct.unpack_from("<HH", head, 58)
        expected = sections + entry_bytes * n_entries
    if found < expected:
        raise LibraryError(
            f"{path} is incomplete: {expected} bytes were expected, {found} found (an interrupted build, or one that "
            "is running now); build it again with `make kernels`"
        )


lib: ctypes.CDLL = open_library(find_library())


def declare(name: str, restype: Any, argtypes: Sequence[Any], target: ctypes.CDLL | None = None) -> None:
    """State a function's types once, next to the wrapper that calls it."""
    try:
        function = getattr(target or lib, name)
    except AttributeError:
        raise LibraryError(
            f"the function {name} was expected in {LIBRARY_NAME} and is not there: the library is older than the "
            "source; build it again with `make kernels`"
        ) from None
    function.restype = restype
    function.argtypes = list(argtypes)


def check_struct(struct: type[ctypes.Structure], c_name: str) -> None:
    """Assert that a ctypes structure has the size and the offsets that the compiler gave the C one."""
    expected = lib.cb_layout_of(c_name.encode())
    if expected != ctypes.sizeof(struct):
        raise NativeError(
            f"{c_name} has {expected} bytes in the library and {ctypes.sizeof(struct)} in {struct.__name__}"
        )
    for field in struct._fields_:
        name = field[0]
        offset = lib.cb_layout_of(f"{c_name}.{name.rstrip('_')}".encode())
        if name.startswith("pad"):
            continue
        if offset != getattr(struct, name).offset:
            raise NativeError(
                f"{c_name}.{name} lies at {offset} in the library and at {getattr(struct, name).offset} in {struct.__name__}"
            )


def constant(name: str) -> int:
    """A constant of colibri.h, for example "CB_GROUP"."""
    value: int = lib.cb_layout_of(name.encode())
    if value < 0:
        raise NativeError(f"{name} is no constant of the library; build it again with `make kernels`")
    return value


def status_text(status: int) -> str:
    """The library's words for a status code."""
    text: bytes = lib.cb_status_text(status)
    return text.decode()


def fail(kernel: str, status: int, detail: str) -> NativeError:
    """The error for a status: kernel, meaning, what it was called with."""
    return NativeError(f"{kernel}: {status_text(status)} ({status}); called with {detail}")


def address(array: np.ndarray) -> int:
    """Address of an array's first element."""
    data: int = array.__array_interface__["data"][0]
    return data


def checked(array: np.ndarray, dtype: Any, shape: tuple[int | None, ...], what: str) -> int:
    """Address of an array after checking dtype, contiguity and shape (None: any extent)."""
    fits = (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.ndim == len(shape)
        and all(want is None or want == got for want, got in zip(shape, array.shape))
        and array.flags.c_contiguous
    )
    if not fits:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        contiguous = isinstance(array, np.ndarray) and array.flags.c_contiguous
        raise NativeError(
            f"{what}: expected contiguous {np.dtype(dtype)}{['any' if n is None else n for n in shape]}, "
            f"found {found}{'' if contiguous else ' (not contiguous)'}"
        )
    return address(array)


def available_isas() -> list[str]:
    """Rungs of the dispatch ladder that this machine offers, lowest first."""
    text: bytes = lib.cb_isa_available()
    return text.decode().split(",")


def isa_limit(name: str) -> None:
    """Use no rung above ``name``. NativeError when this machine does not offer it."""
    if name not in ISAS or lib.cb_isa_limit(ISAS.index(name)) != OK:
        raise NativeError(f"instruction set {name!r}: this machine offers {', '.join(available_isas())}")


def isa_current() -> str:
    """The highest rung in use."""
    return ISAS[lib.cb_isa_current()]


def dispatch_text() -> str:
    """Which rung each kernel family uses, for the log."""
    text: bytes = lib.cb_dispatch_text()
    return text.decode()


def default_threads() -> int:
    """Physical cores that this process may use by its affinity mask, at most the CPUs that its control groups grant."""
    n_threads: int = lib.cb_default_threads()
    return n_threads


def quota_cpus(membership: str | os.PathLike[str], root: str | os.PathLike[str]) -> int:
    """CPUs that control groups grant, rounded up; 0: no limit. ``membership``: a /proc/PID/cgroup, ``root``: /sys/fs/cgroup."""
    granted: int = lib.cb_quota_cpus(os.fsencode(membership), os.fsencode(root))
    return granted


PHASES = ("projections", "indexer", "scores", "values")
"""What attention spends its time on (colibri.h, CB_PHASE_...)."""


class Pool:
    """The process's kernel threads. ``n_threads`` 0: one per usable physical core; 1: no workers.

    ``is_dry``: calls compute nothing, they only take the scratch that they would take with as many threads.
    """

    def __init__(self, n_threads: int = 0, *, is_dry: bool = False) -> None:
        self.handle: int | None = (lib.cb_pool_new_dry if is_dry else lib.cb_pool_new)(n_threads)
        if not self.handle:
            raise NativeError(f"cb_pool_new: cannot start {n_threads} threads (0..256 are possible)")
        self.n_threads: int = lib.cb_pool_threads(self.handle)
        self._phases = (ctypes.c_int64 * len(PHASES))()

    def take_phases(self) -> list[int]:
        """ns that attention has spent since the last call on each of PHASES."""
        lib.cb_pool_take_phases(self.handle, self._phases)
        return self._phases[:]

    @property
    def scratch_bytes(self) -> int:
        """Memory that the calls so far have left with the pool."""
        n_bytes: int = lib.cb_pool_scratch_bytes(self.handle)
        return n_bytes

    def close(self) -> None:
        """Stop the workers. Calling it again does nothing."""
        if self.handle:
            lib.cb_pool_free(self.handle)
            self.handle = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


if lib.cb_isa_error():
    raise NativeError(f"{lib.cb_isa_error().decode()}; unset COLIBRI_ISA or name an available instruction set")
