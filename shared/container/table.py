"""The embedding table without memory of its own: rows are read from the container when a step wants them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from native.library import NativeError
from shared.container.reader import Container
from shared.errors import ContainerError
from shared.files import open_file

_DTYPES = {"f32": np.float32, "bf16": np.uint16, "q8": np.int8}


def witness(container: Container, name: str) -> str:
    """Which table in which file, as long as nobody has written to it."""
    entry = container.dense[name]
    found = os.stat(entry.file)
    return f"{name} {entry.checksum} {entry.offset} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


class TableOnDisk:
    """One table [V, D] of a container, verified when it is opened: that takes its size of memory for a moment.

    ``allocate(n_bytes)`` gives that memory (64-byte aligned), ``free()`` takes it back. ``is_verified``: an earlier process has
    done so, and the file is still the same (``witness``). Raises what ``Container.read_dense`` raises.
    """

    def __init__(
        self,
        container: Container,
        name: str,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        free: Callable[[], None],
        is_verified: bool = False,
    ) -> None:
        entry = container.dense[name]
        self.format = entry.format
        self._scale: npt.NDArray[np.float32] | None
        if is_verified:
            self._scale = container.read_scale(name)
        else:
            table = container.read_dense({name}, allocate)[name]
            self._scale = None if table.scale is None else table.scale.copy()
            del table
            free()
        self._name, self._path, self._offset = name, entry.file, entry.offset
        self.n_rows, self.hidden = entry.shape
        self._dtype: Any = _DTYPES[entry.format]
        self._row_bytes = self.hidden * np.dtype(self._dtype).itemsize
        self._fd = open_file(entry.file)
        # One row says nothing about the next: reading ahead would only fill the page cache.
        os.posix_fadvise(self._fd, entry.offset, entry.bytes, os.POSIX_FADV_RANDOM)

    def rows(self, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]:
        """(rows [n, D] as they are stored, their scales f32[n] or None) of ids i32[n].

        NativeError for an id outside 0..V-1, as the kernel has it for a table in memory; ContainerError for a failed read.
        """
        n = len(ids)
        if n and not 0 <= int(ids.min()) <= int(ids.max()) < self.n_rows:
            raise NativeError(f"embedding: ids {ids.min()}..{ids.max()} of a vocabulary of {self.n_rows}")
        out = np.empty((n, self.hidden), self._dtype)
        for row, token in zip(out, ids.tolist()):
            self._fill(memoryview(row.view(np.uint8).data), self._offset + token * self._row_bytes)
        return out, None if self._scale is None else self._scale[ids]

    def _fill(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                n_read = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise ContainerError(
                    f"{self._path}: {self._name} can't be read at offset {offset:,}: {error.strerror}. Check the drive."
                ) from None
            if not n_read:
                raise ContainerError(
                    f"{self._path}: {self._name} ends before offset {offset:,}. Copy the container again."
                )
            done += n_read

    def close(self) -> None:
        os.close(self._fd)
