"""Measures how a model's expert files are read fastest here. ``drive_profile`` is what a start asks."""

from __future__ import annotations

import contextlib
import os
import random
import select
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from native.errors import NativeError
from native.memory import HugeBuffer
from native.reader import Reader, open_direct, uring_refusal
from shared.container.entries import Copy, ExpertFile
from shared.container.format import expert_layout
from shared.container.mirror import number_drives, total_rate
from shared.container.reader import Container
from shared.machine.drive import (
    BUFFERED,
    CANDIDATES,
    DEFAULT,
    FLUID,
    DriveProfile,
    Mount,
    ReadSetting,
    is_usable,
    kept_path,
    load_kept,
    profile_of,
    save_kept,
)
from shared.machine.mounts import MOUNTINFO, device_of, read_mounts

SMALL_MODEL_BYTES = 512 << 20
"""Of experts in all; a model this small is not worth a second of measuring."""
N_ROUNDS = 8
SAMPLE_S = 0.025
"""Six settings, eight rounds: 1.2 s. Many short rounds, so that a busy drive can't make a setting win by chance."""
SCRATCH_BYTES = 512 << 20
PATIENCE_S = 2.0
"""A busy drive may give nothing for longer than a sample; after this long without a byte its rate is 0."""

Say = Callable[[str], None]


def mount_of(path: Path, mountinfo: Path = MOUNTINFO) -> Mount:
    """The file system that ``path`` lies on. Raises OSError when there is no such path."""
    real = path.resolve(strict=True)
    stat = os.statvfs(real)
    fs_type, point = "unknown", Path()
    for mount in read_mounts(mountinfo):
        if real.is_relative_to(mount.directory) and len(mount.directory.parts) >= len(
            point.parts
        ):  # the later one covers
            fs_type, point = mount.fs, mount.directory
    n_bytes = 0 if fs_type.partition(".")[0] in FLUID else stat.f_blocks * stat.f_frsize
    return Mount(device_of(real), fs_type, str(point) if point.parts else "", n_bytes)


def drive_profile(
    experts: Collection[ExpertFile],
    folder: Path | None,
    *,
    may_write: bool,
    must_measure: bool = False,
    report: Say = lambda _: None,
) -> DriveProfile:
    """How to read these expert files: kept, measured now (about a second), or the default where that is no use.

    ``folder``: where results are kept, or None. ``report`` is told what takes time or went wrong, in a sentence.
    """
    file = max((f for f in experts if f.copies), key=lambda f: f.record_bytes * f.n_experts, default=None)
    if file is None:
        return DriveProfile(DEFAULT, "the model has no experts")
    try:
        mount = mount_of(file.path)
    except OSError as error:
        return DriveProfile(DEFAULT, f"{file.path}: {error.strerror}")
    if mount.is_memory:
        return DriveProfile(BUFFERED, f"{mount.mount_point} is a file system in memory ({mount.fs_type})")
    is_small = sum(f.record_bytes * f.n_experts for f in experts) < SMALL_MODEL_BYTES
    path = kept_path(folder, mount, file.record_bytes) if folder else None
    if path and not must_measure:
        kept, why = load_kept(path, mount, file.record_bytes, time.time())
        if kept:
            return kept
        if why and not is_small:
            report(f"{path} is ignored: {why}")
    if is_small and not must_measure:
        return DriveProfile(DEFAULT, "the model is small: not measured")
    report(f"measuring the drive of {file.path.parent} ({N_ROUNDS * len(CANDIDATES) * SAMPLE_S:.1f} s)")
    try:
        with DriveProbe(file) as probe:
            profile = profile_of(probe.rates(), time.time())
    except (OSError, NativeError) as error:
        return DriveProfile(DEFAULT, f"measuring failed: {error}")
    if not is_usable(profile):
        return DriveProfile(DEFAULT, "measuring failed: the drive gave nothing, or impossibly much; it is not kept")
    if path and may_write:
        try:
            save_kept(path, mount, file.record_bytes, profile)
        except OSError as error:
            report(f"{path} can't be written: {error.strerror}")
    return profile


class Drives(NamedTuple):
    """The drives that a container's experts are read from."""

    first: DriveProfile
    """Of the model's own, or where its experts lie elsewhere of the first mirror's."""
    n_drives: int
    bytes_s: float
    """Of all together; 0: not all were measured."""


def drives_of(container: Container, folder: Path | None, *, may_write: bool, report: Say = lambda _: None) -> Drives:
    """``drive_profile`` of each drive, and what they give together where copies lie on several."""
    numbers = number_drives(container.places)
    profiles: dict[int, DriveProfile] = {}
    for place, drive in enumerate(numbers):
        files = container.only_in(place)
        if files and drive not in profiles:
            profiles[drive] = drive_profile(files, folder, may_write=may_write, report=report)
    if not profiles:
        return Drives(drive_profile((), folder, may_write=may_write), 1, 0.0)
    rates = [profiles[drive].ceiling if drive in profiles else 0.0 for drive in range(len(set(numbers)))]
    is_known = all(profile.ceiling for profile in profiles.values())
    together = total_rate(rates, container.shares(numbers)) if is_known else 0.0
    return Drives(profiles[min(profiles)], len(profiles), together)


def rate_at(directory: Path, record_bytes: int, folder: Path | None, *, report: Say = lambda _: None) -> float:
    """Bytes per second of reading records of this size in a directory that has none yet: kept from an earlier measurement, or
    measured with a file of its own that is removed again (some seconds); 0 where that can't be done."""
    try:
        mount = mount_of(directory)
        kept = (
            load_kept(kept_path(folder, mount, record_bytes), mount, record_bytes, time.time())[0] if folder else None
        )
        if kept:
            return kept.ceiling
        if mount.is_memory or not record_bytes:
            return 0.0
        report(f"measuring the drive of {directory} with {SCRATCH_BYTES:,} bytes")
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".colibri-drive-") as scratch:
            piece = random.randbytes(4 << 20)
            n_records = max(SCRATCH_BYTES // record_bytes, 1)
            for _ in range(-(-n_records * record_bytes // len(piece))):
                scratch.write(piece)
            scratch.flush()
            os.fsync(scratch.fileno())
            os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            path = Path(scratch.name)
            layout = expert_layout("f32", 1, 1)  # nobody looks into these records
            file = ExpertFile(0, path.name, "f32", 0, record_bytes, n_records, (), layout, (Copy(path, 0),))
            with DriveProbe(file) as probe:
                profile = profile_of(probe.rates(), time.time())
    except (OSError, NativeError) as error:
        report(f"measuring failed: {error}")
        return 0.0
    return profile.ceiling if is_usable(profile) else 0.0


class DriveProbe:
    """Reads random records of an expert file's first copy for a moment per setting. Raises OSError, NativeError."""

    def __init__(self, file: ExpertFile, seed: int | None = None) -> None:
        self.path, self._offsets, self._n_bytes = file.probe_reads
        self._random = random.Random(seed)
        self._fds = {False: os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)}
        with contextlib.suppress(OSError):  # this file system has none
            self._fds[True] = open_direct(self.path)
        has_ring = not uring_refusal()
        self.settings = tuple(s for s in CANDIDATES if s.is_direct in self._fds and (has_ring or s.engine != "uring"))
        self._buffer = HugeBuffer(max(self._n_waiting(s) for s in self.settings) * self._n_bytes)
        self._buffer.array[:] = 0

    def _n_waiting(self, setting: ReadSetting) -> int:
        """Records in the queue: twice what is in flight, and at least two."""
        return max(2, -(-2 * setting.depth * setting.piece_bytes // self._n_bytes))

    def rates(self, n_rounds: int = N_ROUNDS, sample_s: float = SAMPLE_S) -> dict[ReadSetting, list[float]]:
        """Bytes per second per setting and round; settings take turns, back and forth."""
        found: dict[ReadSetting, list[float]] = {setting: [] for setting in self.settings}
        for i in range(n_rounds):
            for setting in self.settings if i % 2 == 0 else self.settings[::-1]:
                found[setting].append(self.sample(setting, sample_s))
        return found

    def sample(self, setting: ReadSetting, seconds: float) -> float:
        """Bytes per second of this setting now, for ``seconds`` or until the first bytes are there.

        What is buffered is read past what the page cache holds already.
        """
        size, fd = self._n_bytes, self._fds[setting.is_direct]
        free = list(range(self._n_waiting(setting)))
        waiting: dict[int, tuple[int, int]] = {}  # tag -> (slot, offset)
        tag = n_bytes = 0
        with Reader(setting.depth, setting.piece_bytes, engine=setting.engine) as reader:
            begin = time.perf_counter()
            is_over = False
            while not is_over or waiting:
                while free and not is_over:
                    slot, offset = free.pop(), self._random.choice(self._offsets)
                    if not setting.is_direct:
                        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
                    reader.submit(tag, fd, offset, size, self._buffer.address + slot * size)
                    waiting[tag] = (slot, offset)
                    tag += 1
                left = begin + (seconds if n_bytes else PATIENCE_S) - time.perf_counter()
                select.select([reader.fd], [], [], max(left, 0) if not is_over else None)
                for done in reader.take():
                    slot, offset = waiting.pop(done.tag)
                    free.append(slot)
                    n_bytes += done.bytes
                    if done.error:
                        raise OSError(done.error, os.strerror(done.error), str(self.path))
                    if not setting.is_direct:
                        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
                elapsed = time.perf_counter() - begin
                if not is_over and elapsed >= seconds and (n_bytes or elapsed >= PATIENCE_S):
                    is_over = True
                    for pending in waiting:
                        reader.cancel(pending)
            return n_bytes / (time.perf_counter() - begin)

    def __enter__(self) -> DriveProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._buffer.close()
