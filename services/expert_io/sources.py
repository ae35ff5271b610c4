"""Where the experts' records lie: the open files of every copy, their drives, and what is known of each. Reads nothing itself.

Which copy is read next ``copies.py`` decides; this module carries its numbers to files and faults to the log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from native.matrix import RepackMatrix
from native.reader import ReadExtent, open_direct
from services.expert_io.copies import CopyChooser
from shared.container.entries import Copy, ExpertFile
from shared.container.mirror import number_drives
from shared.container.raw import repack_matrices
from shared.container.reader import Container
from shared.errors import StoreError
from shared.experts.residency import Key


@dataclass(frozen=True)
class Source:
    """One copy of one record: a range of a file, or several that it is put together from. ``drive`` counts from 0."""

    fd: int
    offset: int
    n_bytes: int
    path: str
    place: int
    drive: int
    extents: tuple[ReadExtent, ...] = ()
    """To be read to a stage, and ``matrices`` to be repacked from there; empty: the record lies whole."""
    matrices: tuple[RepackMatrix, ...] = ()


class RecordSources:
    """The expert files of ``layers`` in all places, open for direct reads where ``direct_io`` ("auto", "on", "off") and the
    mount allow. ``warn`` takes an event and its facts, as a log does."""

    def __init__(
        self, container: Container, layers: tuple[int, ...], direct_io: str, warn: Callable[..., None]
    ) -> None:
        self.files: dict[int, ExpertFile] = {layer: container.experts[layer] for layer in layers}
        self.places = container.places
        self._warn = warn
        self._buffered: set[int] = set(range(len(self.places))) if direct_io == "off" else set()
        self._fds: dict[tuple[int, int], int] = {}
        self._raw_fds: dict[Path, int] = {}
        try:
            for layer, file in self.files.items():
                if file.raw is not None:
                    for path in file.raw.files:
                        if path not in self._raw_fds:
                            self._raw_fds[path] = self._open(Copy(path, 0), direct_io)
                    continue
                for copy in file.copies:
                    self._fds[layer, copy.place] = self._open(copy, direct_io)
            self.drives = number_drives(self.places)
        except BaseException:
            self.close()
            raise
        self.n_drives = len(set(self.drives))
        self._chooser = CopyChooser(self.drives)
        self._verified: set[tuple[int, Key]] = set()
        self._damaged_files: set[str] = set()
        self.n_faults = 0  # reads of one copy that failed or came damaged

    @property
    def is_direct(self) -> bool:
        return not self._buffered

    def _open(self, copy: Copy, direct_io: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if copy.place not in self._buffered:
            try:
                return open_direct(copy.path)
            except OSError:
                if direct_io == "on":
                    raise StoreError(
                        f"{copy.path} can't be opened for direct reads; this file system has none. "
                        'Use direct_io = "auto".'
                    ) from None
                # One mount serves all files of a place: buffered for all of them.
                self._buffered.add(copy.place)
        return os.open(copy.path, flags)

    # -- choosing ---------------------------------------------------------------------------------------------

    def choose(self, key: Key, *, is_guess: bool, tried: Collection[int] = ()) -> Source | None:
        """The copy to read next, counted as queued until ``ended``; None when all places that hold it were tried."""
        layer, expert = key
        file = self.files[layer]
        places = [copy.place for copy in file.copies if copy.place not in tried and copy.holds(expert)]
        if not places:
            return None
        place = self._chooser.choose(key, places, file.record_bytes, time.monotonic_ns(), is_guess=is_guess)
        if file.raw is not None:
            return self._raw_source(file, expert)
        path = next(copy.path for copy in file.copies if copy.place == place)
        return Source(
            self._fds[layer, place], file.offset_of(expert), file.record_bytes, str(path), place, self.drives[place]
        )

    def _raw_source(self, file: ExpertFile, expert: int) -> Source:
        extents = file.extents(expert)
        first = extents[0]
        ranges = tuple(ReadExtent(each.offset, each.n_bytes, each.at, self._raw_fds[each.path]) for each in extents)
        matrices = tuple(repack_matrices(file, expert))
        return Source(
            ranges[0].fd, first.offset, file.record_bytes, str(first.path), 0, self.drives[0], ranges, matrices
        )

    def promoted(self, source: Source) -> None:
        """Somebody waits for this guessed read now."""
        self._chooser.promoted(source.place, source.n_bytes)

    def ended(self, source: Source, n_read: int, start_ns: int, end_ns: int, *, is_guess: bool) -> None:
        """A read is over, however it went."""
        self._chooser.ended(source.place, source.n_bytes, n_read, start_ns, end_ns, is_guess=is_guess)

    # -- what came of it --------------------------------------------------------------------------------------

    def is_verified(self, source: Source, key: Key) -> bool:
        """Whether this copy of the record has had the right checksum before, or nobody knows one."""
        return (source.place, key) in self._verified or not self.files[key[0]].checksums

    def arrived(self, source: Source, key: Key) -> None:
        """The record came whole and as it was written."""
        self._verified.add((source.place, key))
        self._chooser.succeeded(source.place)

    def failed(self, source: Source, reason: str) -> None:
        """The read failed for good."""
        self.n_faults += 1
        rest_ns = self._chooser.failed(source.place, time.monotonic_ns())
        if rest_ns >= 0 and len(self.places) > 1:
            directory = str(self.places[source.place])
            self._warn("copy_failed", directory=directory, rests_s=rest_ns // 1_000_000_000, reason=reason)

    def found_damaged(self, source: Source, key: Key, reason: str) -> None:
        """The record's checksum is wrong."""
        self.n_faults += 1
        self._chooser.found_damaged(source.place, key)
        if source.path not in self._damaged_files and len(self.places) > 1:
            self._damaged_files.add(source.path)
            self._warn("copy_damaged", path=source.path, layer=key[0], expert=key[1], reason=reason)

    @property
    def n_damaged(self) -> int:
        """Records known to be damaged, each copy counted."""
        return self._chooser.n_damaged()

    @property
    def n_resting(self) -> int:
        """Places that are left alone for a while."""
        return self._chooser.n_resting(time.monotonic_ns())

    def close(self) -> None:
        for fd in (*self._fds.values(), *self._raw_fds.values()):
            os.close(fd)
        self._fds.clear()
        self._raw_fds.clear()
