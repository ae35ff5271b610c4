"""Makes and checks mirrors: which records a directory gets, and copying them. Run by ``colibri mirror``. A model is only read.

A staged file has the original's name, header, size and offsets; records that were not chosen are holes. A new file grows as
``NAME.partial``; resuming hashes what is in it, so whatever an interruption left is either right or copied again. A file
counts from when ``mirror.json`` lists it. What a mirror already holds is never taken away: a running group may be reading it.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from shared.container.checksum import checksum
from shared.container.entries import ExpertFile
from shared.container.mirror import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    Manifest,
    ManifestFile,
    pack_held,
    read_manifest,
    unpack_held,
    write_manifest,
)
from shared.container.opening import file_facts
from shared.container.reader import Container
from shared.errors import CapacityError, ContainerError
from shared.files import open_file
from shared.kept import put_in_place
from shared.locks import try_lock

Records = dict[int, frozenset[int]]
"""Layer -> experts."""

_READ_AHEAD = 3
_SYNC_BYTES = 256 << 20
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class StagePlan:
    """What a directory holds and what it is to hold. ``allocated``: bytes of unfinished files that are already on disk."""

    directory: Path
    held: Records
    wanted: Records
    n_bytes: int
    """Of the records to be copied."""
    allocated: int
    free: int
    is_listed: bool

    @property
    def needed(self) -> int:
        """Bytes of room that copying takes: records, headers and a little for the file system's own books."""
        return max(0, self.n_bytes - self.allocated) + _SPARE_BYTES if self.n_bytes else 0

    def require_room(self) -> None:
        """CapacityError with the arithmetic."""
        if self.needed > self.free:
            part = max(self.free - _SPARE_BYTES, 0) >> 20
            way = f"Free {self.needed - self.free:,} bytes, " + (
                f"or stage a part: --size {part}M." if part else "or choose a directory on another drive."
            )
            raise CapacityError(
                f"{self.directory} needs {self.needed:,} more bytes ({self.n_bytes:,} of records, {self.allocated:,} of them "
                f"on disk already), its file system has {self.free:,} free. {way}"
            )


def choose_records(
    files: Mapping[int, ExpertFile], held: Records, size: int | None, expected: Mapping[tuple[int, int], float]
) -> Records:
    """What a mirror of at most ``size`` bytes of records is to hold (None: everything). Pure.

    What is ``held`` stays. Then the experts with the highest ``expected`` use, then the others, evenly over the layers.
    """
    everything: Records = {layer: frozenset(range(file.n_experts)) for layer, file in files.items()}
    if size is None:
        return everything
    chosen = {layer: set(held.get(layer, ())) for layer in files}
    left = size - sum(len(experts) * files[layer].record_bytes for layer, experts in chosen.items())
    known = [key for key in sorted(expected, key=lambda k: -expected[k]) if key[0] in files]
    others = sorted(((layer, e) for layer in files for e in everything[layer]), key=lambda key: (key[1], key[0]))
    for layer, expert in [*known, *others]:
        if expert not in chosen[layer] and files[layer].record_bytes <= left:
            chosen[layer].add(expert)
            left -= files[layer].record_bytes
    return {layer: frozenset(experts) for layer, experts in chosen.items()}


def plan_staging(
    container: Container, directory: Path, size: int | None, expected: Mapping[tuple[int, int], float]
) -> StagePlan:
    """Compares a directory (which need not exist yet) with what it is to hold. Raises ContainerError when it can't be used."""
    _require_apart(container.path, directory)
    files = container.experts
    if any(file.raw for file in files.values()):
        raise ContainerError(
            f"{container.path} is a container of the C engine: its experts are not read from mirrors. Convert the model's "
            "checkpoint to have one that can be."
        )
    manifest = read_manifest(directory, container.fingerprint, file_facts(files)) if directory.is_dir() else None
    if manifest is None and any((directory / file.name).exists() for file in files.values()):
        raise ContainerError(
            f"{directory} holds expert files but no {MANIFEST_NAME}: they were moved or copied there and already serve as "
            "they are. Choose an empty directory to stage into."
        )
    held = _held(directory, files, manifest)
    wanted = choose_records(files, held, size, expected)
    n_bytes = sum(len(wanted[layer] - held[layer]) * file.record_bytes for layer, file in files.items())
    allocated = 0
    for layer, file in files.items():
        if wanted[layer] - held[layer] and not held[layer]:
            allocated += sum(_allocated(directory / name) for name in (file.name, f"{file.name}.partial"))
    stat = os.statvfs(_existing_parent(directory))
    return StagePlan(
        directory, held, wanted, n_bytes, min(allocated, n_bytes), stat.f_bavail * stat.f_frsize, manifest is not None
    )


def stage(container: Container, plan: StagePlan, progress: Callable[[int], None] = lambda _: None) -> int:
    """Copies what the plan wants and the directory lacks; ``progress`` gets bytes. Returns how many records were copied, those
    that an interrupted run had left not counted.

    CapacityError when there is no room, ChecksumMismatch when the original is damaged, ContainerError for everything else;
    what is finished is kept, and the same call goes on from there.
    """
    plan.require_room()
    n_copied = 0
    with lock_of(plan.directory) as directory:
        files = container.experts
        manifest = read_manifest(directory, container.fingerprint, file_facts(files))
        listed = dict(manifest.files) if manifest else {}
        try:
            if manifest is None:  # from now on only listed files count
                _list_files(directory, container, listed)
            for layer, file in sorted(files.items()):
                missing = plan.wanted[layer] - plan.held[layer]
                if missing:
                    n_copied += _stage_file(
                        container, directory, file, sorted(missing), bool(plan.held[layer]), progress
                    )
                    held = plan.held[layer] | missing
                    listed[file.name] = ManifestFile(file.n_bytes, pack_held(held, file.n_experts))
                    _list_files(directory, container, listed)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise CapacityError(
                    f"No space left while writing into {directory} ({error.strerror}). What is finished is kept: free some "
                    "space and run the same command again, it goes on from there."
                ) from None
            raise ContainerError(
                f"{directory} can't be written: {error.strerror}. What is finished is kept; run the same command again."
            ) from None
    return n_copied


def _list_files(directory: Path, container: Container, listed: dict[str, ManifestFile]) -> None:
    write_manifest(directory, Manifest(MANIFEST_VERSION, container.fingerprint, listed))


def _stage_file(
    container: Container,
    directory: Path,
    file: ExpertFile,
    experts: list[int],
    is_listed: bool,
    progress: Callable[[int], None],
) -> int:
    """Puts records into a file that has its final name (``is_listed``) or gets it when all are on disk."""
    final, partial = directory / file.name, directory / f"{file.name}.partial"
    if not is_listed and os.path.lexists(final):  # renamed, but not listed when the work was interrupted
        os.replace(final, partial)
    path = final if is_listed else partial
    with os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT), "r+b") as out:
        if not is_listed:
            _write_header(file, out)
        n_copied = 0
        unsynced = 0
        todo = []
        for expert in experts:
            if _has_record(out, file, expert):
                progress(file.record_bytes)
            else:
                todo.append(expert)
        for expert, record in _read_ahead(container, file.layer, todo):
            _write_at(out, memoryview(record.data), file.offset_of(expert))
            n_copied += 1
            unsynced += file.record_bytes
            progress(file.record_bytes)
            if unsynced >= _SYNC_BYTES:  # bounds what writeback has to do at once
                os.fdatasync(out.fileno())
                unsynced = 0
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if path != final:
        put_in_place(path, final)
    return n_copied


def _write_header(file: ExpertFile, out: BinaryIO) -> None:
    with os.fdopen(open_file(file.path), "rb") as original:
        header = original.read(file.data_offset)
    os.ftruncate(out.fileno(), file.n_bytes)
    _write_at(out, memoryview(header), 0)


def _write_at(out: BinaryIO, data: memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(out.fileno(), data, offset)
        data, offset = data[n:], offset + n


def _has_record(out: BinaryIO, file: ExpertFile, expert: int) -> bool:
    """Whether the record is there and right. A hole is seen without reading it."""
    begin, end = file.offset_of(expert), file.offset_of(expert + 1)
    try:
        if os.lseek(out.fileno(), begin, os.SEEK_DATA) >= end:
            return False
    except OSError:  # nothing but a hole up to the end
        return False
    data = os.pread(out.fileno(), file.record_bytes, begin)
    return len(data) == file.record_bytes and checksum(data) == file.checksums[expert]


def _read_ahead(container: Container, layer: int, experts: list[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Records with their checksums verified, read while earlier ones are written."""
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        waiting: deque[tuple[int, Future[NDArray[Any]]]] = deque()
        try:
            for expert in experts:
                waiting.append((expert, pool.submit(container.read_expert, layer, expert, drops_cache=True)))
                if len(waiting) >= _READ_AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


# ---- the directory --------------------------------------------------------------------------------------------------


def _held(directory: Path, files: Mapping[int, ExpertFile], manifest: Manifest | None) -> Records:
    """What the manifest lists and the directory really has; a file that was deleted is staged again."""
    held: Records = {layer: frozenset() for layer in files}
    for layer, file in files.items():
        entry = manifest.files.get(file.name) if manifest else None
        path = directory / file.name
        if entry is None or not path.is_file():
            continue
        if path.stat().st_size != file.n_bytes:
            raise ContainerError(
                f"{path} should have {file.n_bytes:,} bytes, it has {path.stat().st_size:,}. Delete it and run the same "
                "command again."
            )
        found = unpack_held(entry.held, file.n_experts)
        held[layer] = frozenset(range(file.n_experts)) if found is None else found
    return held


def _require_apart(model_dir: Path, directory: Path) -> None:
    model, mirror = Path(os.path.realpath(model_dir)), Path(os.path.realpath(directory))  # resolve() raises on a loop
    if mirror.is_relative_to(model):
        raise ContainerError(
            f"{directory} lies in the model directory {model_dir}, which is never written to. Choose a directory on another "
            "drive."
        )


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


@contextmanager
def lock_of(directory: Path) -> Iterator[Path]:
    """Makes the directory and keeps a second writer out of it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ContainerError(f"{directory} can't be used as a mirror: {error.strerror}.") from None
    try:
        if not try_lock(fd, directory):
            raise ContainerError(
                f"Another process is writing into {directory}. Wait until it has finished, or choose another directory."
            )
        yield directory
    finally:
        os.close(fd)
