"""Ranges of files read with their checksums verified, through the page cache: for tools, tests and the check of a mirror."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.container.dense_reads import Part, check
from shared.errors import ChecksumMismatch, ContainerError, ShortRead
from shared.files import open_file

_PIECE_BYTES = 4 << 20


class OpenFiles:
    """Open files of one reading pass, shared by its threads. ``drops_cache``: what was read leaves the page cache."""

    def __init__(self, drops_cache: bool = False) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._drops_cache = drops_cache

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def fill(self, part: Part) -> npt.NDArray[np.uint8]:
        """Reads a range and compares its checksum; returns the bytes."""
        target = np.empty(part.n_bytes, np.uint8)
        try:
            with self._lock:
                if part.file not in self._fds:
                    self._fds[part.file] = open_file(part.file)
                fd = self._fds[part.file]
            view, done = memoryview(target.data), 0
            while done < len(view):
                n_read = os.preadv(fd, [view[done : done + _PIECE_BYTES]], part.offset + done)
                if n_read == 0:
                    raise ShortRead(
                        f"{part.file}: {part.what} needs {len(view):,} bytes at offset {part.offset:,}, the file ends after "
                        f"{done:,}. Copy the container again."
                    )
                done += n_read
            if self._drops_cache:
                os.posix_fadvise(fd, part.offset, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ContainerError(
                f"{part.file}: {part.what} can't be read at offset {part.offset:,}: {error.strerror}."
            ) from None
        check(part, target)
        return target

    def complaint(self, part: Part) -> str | None:
        """None when the range is sound, else what is wrong with it."""
        try:
            self.fill(part)
        except (ShortRead, ChecksumMismatch, ContainerError) as error:
            return str(error)
        return None
