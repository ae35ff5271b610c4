"""Where the experts' records lie: open files, offsets, checksums. Reads nothing itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shared.container.reader import Container, ExpertFile
from shared.errors import StoreError
from shared.residency import Key


@dataclass(frozen=True)
class Source:
    """One copy of one record."""

    fd: int
    offset: int
    n_bytes: int
    path: str


class RecordSources:
    """The expert files of ``layers``, open for direct reads where ``direct_io`` ("auto", "on", "off") and the mount allow."""

    def __init__(self, container: Container, layers: tuple[int, ...], direct_io: str) -> None:
        self.files: dict[int, ExpertFile] = {layer: container.experts[layer] for layer in layers}
        self.is_direct = direct_io != "off"
        self._fds: dict[int, int] = {}
        for layer, file in self.files.items():
            self._fds[layer] = self._open(str(file.path), direct_io)

    def _open(self, path: str, direct_io: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if self.is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError:
                if direct_io == "on":
                    raise StoreError(
                        f'{path} can\'t be opened for direct reads; this file system has none. Use direct_io = "auto".'
                    ) from None
                # One mount serves all files of a model: buffered for all, so that the facts say one thing.
                self.is_direct = False
        return os.open(path, flags)

    def choose(self, key: Key) -> Source:
        """The copy to read next."""
        layer, expert = key
        file = self.files[layer]
        return Source(self._fds[layer], file.offset_of(expert), file.record_bytes, str(file.path))

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
