"""Writes a container file by file: atomic, resumable, never over a finished one. Run by ``colibri convert`` and ``synth``.

While work is in progress ``OUT/.unfinished/`` holds the identity of the work (``plan.json``) and, per file, a journal with
one line per finished group of tensors: which one, their checksums, and evidence of the bytes that they were made from. A file
is written under ``NAME.partial``, its groups in any order: each has its place. On resume every group that the journal names is
hashed again, and its source too unless that is the same untouched file; a group is kept where both agree. So whatever was torn,
damaged or replaced costs no more than time.
``colibri.json`` comes last; then ``.unfinished`` goes away. A lock on the directory keeps a second writer out.
"""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from shared.container.checksum import checksum
from shared.container.format import (
    FORMAT_VERSION,
    INDEX_NAME,
    ContainerPlan,
    Converter,
    DenseRecord,
    ExpertsRecord,
    Index,
    Stored,
)
from shared.container.opening import fingerprint_of
from shared.container.recognise import UNFINISHED_DIR as STATE_DIR
from shared.container.safetensors_file import build_header
from shared.errors import CapacityError, ContainerError
from shared.files import open_file, read_file
from shared.kept import put_in_place, replace_file
from shared.locks import try_lock

_SYNC_BYTES = 256 << 20
_JOURNAL_LIMIT_BYTES = 256 << 20

Produce = Callable[[Sequence[Any]], Iterable[Iterable[Any]]]
"""From the sources of some groups: for each in turn, the bytes of its tensors in as many contiguous buffers as it likes."""


class Evidence(msgspec.Struct, frozen=True):
    """Of the bytes that a group was made from. Two with the same ``digest`` are of equal bytes.

    ``state`` stands for the files as the file system describes them; where it is the same, nobody touched them. "": unknown.
    """

    digest: str = ""
    state: str = ""


Witness = Callable[[Any, Evidence | None], Evidence]
"""The evidence about a group's source now; an earlier one whose state still holds is given back without reading."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a journal: a finished group, by its number in the file."""

    group: int
    checksums: tuple[str, ...]
    source: Evidence


class Group(msgspec.Struct, frozen=True):
    """Tensors of one file that are produced together. ``source``: a ``DenseItem``, or ``(ExpertFilePlan, expert)``."""

    file: str
    number: int
    source: Any
    tensors: tuple[Stored, ...]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


class ContainerWriter:
    """One run of writing into ``out``. A context manager: it holds the directory's lock.

    ``identity`` says what is being written (source, precision, seed): a directory with other unfinished work is refused.
    """

    def __init__(self, out: Path, plan: ContainerPlan, identity: dict[str, Any]) -> None:
        self.out, self.plan, self.identity = out, plan, identity
        self._state = out / STATE_DIR
        self._lock_fd = -1
        self._files = dict(_files_of(plan))
        self._lines: dict[str, dict[int, _Line]] = {name: {} for name in self._files}
        self.groups_kept = 0

    def __enter__(self) -> ContainerWriter:
        try:
            self._prepare()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors; headers and the index are not counted."""
        return self.plan.dense_bytes + self.plan.expert_bytes

    def bytes_on_disk(self) -> int:
        """Bytes of the output that earlier runs left behind."""
        found = 0
        for name in self._files:
            for path in (self.out / name, self.out / f"{name}.partial"):
                if path.is_file():
                    stat = path.stat()
                    found += min(stat.st_size, stat.st_blocks * 512)  # what was not written yet is a hole
        return found

    def require_space(self, beside: int = 0, what: str = "") -> None:
        """CapacityError when what is still to be written, and ``beside`` bytes for ``what``, do not fit the file system."""
        # Headers, copied files and the index: a generous allowance, small beside any real model.
        needed = self.bytes_total + sum(4096 + 200 * len(groups) for groups in self._files.values()) + (1 << 20)
        left = needed - self.bytes_on_disk() + beside
        stat = os.statvfs(self.out)
        free = stat.f_bavail * stat.f_frsize
        if left > free:
            parts = f"{needed:,} in all, and {beside:,} for {what}" if beside else f"{needed:,} in all"
            raise CapacityError(
                f"{self.out} needs {left:,} more bytes ({parts}), the file system has {free:,} free. "
                f"Free {left - free:,} bytes, choose another directory, or a smaller precision."
            )

    def write(
        self,
        produce_dense: Produce,
        produce_expert: Produce,
        progress: Callable[[int], None] = lambda _: None,
        witness: Witness = lambda _source, _earlier: Evidence(),
    ) -> None:
        """Writes everything that is not there yet, file by file.

        ``progress`` gets byte counts as they are done (kept ones included). ``witness``: not needed if the identity says all.
        """
        for name, groups in self._files.items():
            self._resume_file(name, groups, progress, witness)
            self.write_groups(self._missing(name), produce_dense, produce_expert, progress, witness)

    def resume(self, progress: Callable[[int], None], witness: Witness) -> list[Group]:
        """Looks through what earlier runs left, of which ``progress`` gets the bytes; what is still to be written."""
        for name, groups in self._files.items():
            self._resume_file(name, groups, progress, witness)
        return [group for name in self._files for group in self._missing(name)]

    def write_groups(
        self,
        groups: Sequence[Group],
        produce_dense: Produce,
        produce_expert: Produce,
        progress: Callable[[int], None],
        witness: Witness,
    ) -> None:
        """Writes some groups, those of a file one after the other; what it returns from is on the drive."""
        for name, some in itertools.groupby(groups, lambda group: group.file):
            produce = produce_expert if name.startswith("experts-") else produce_dense
            with self._told(name):
                self._write_groups(name, list(some), produce, progress, witness)
                self._finish_file(name)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of the file system as a sentence."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise ContainerError(f"{self.out / name} can't be written: {error.strerror}.") from None
            raise CapacityError(
                f"No space left while writing {self.out / name} ({error.strerror}). What is finished is kept: "
                "free some space and run the same command again, it goes on from there."
            ) from None

    def put_file(self, name: str, content: bytes) -> None:
        """Writes a small file atomically."""
        final, partial = self.out / name, self.out / f"{name}.partial"
        try:
            final.parent.mkdir(exist_ok=True)
            replace_file(final, content, mode=0o666, is_durable=True, by_way_of=partial)
        except OSError as error:
            raise CapacityError(
                f"{self.out / name} can't be written: {error.strerror}. Free some space and run the same command again."
            ) from None

    def finish(self, family: str, converter: Converter) -> Index:
        """Writes ``colibri.json``: from here on the container exists."""
        dense: dict[str, DenseRecord] = {}
        experts: dict[str, ExpertsRecord] = {}
        for file in self.plan.dense:
            for item, line in zip(file.items, self._lines_of(file.file), strict=True):
                sums, source = line.checksums, line.source.digest or None
                scale = sums[1] if len(sums) > 1 else None
                dense[item.name] = DenseRecord(
                    file.file, item.format, item.role, item.shape, sums[0], item.stack, scale, source
                )
        for layer in self.plan.experts:
            lines = self._lines_of(layer.file)
            stored = [tensor for group in self._files[layer.file] for tensor in group.tensors]
            experts[str(layer.layer)] = ExpertsRecord(
                layer.file,
                layer.layout.format,
                len(build_header(stored)),
                layer.layout.record_bytes,
                layer.n_experts,
                tuple(line.checksums[0] for line in lines),
                tuple(line.source.digest for line in lines if line.source.digest),
            )
        fingerprint = fingerprint_of(self.plan, dense, experts)
        index = Index(FORMAT_VERSION, family, fingerprint, self.plan.precision, converter, dense, experts)
        self.put_file(INDEX_NAME, msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
        shutil.rmtree(self._state, ignore_errors=True)
        return index

    # ---- files ----------------------------------------------------------------------------------------------------

    def _lines_of(self, name: str) -> list[_Line]:
        return [line for _, line in sorted(self._lines[name].items())]

    def _missing(self, name: str) -> list[Group]:
        return [group for group in self._files[name] if group.number not in self._lines[name]]

    def _partial(self, name: str) -> Path:
        return self.out / f"{name}.partial"

    def _journal(self, name: str) -> Path:
        return self._state / f"{name}.journal"

    def _resume_file(
        self, name: str, groups: Sequence[Group], progress: Callable[[int], None], witness: Witness
    ) -> None:
        final, partial, journal = self.out / name, self._partial(name), self._journal(name)
        header = _header_of(groups)
        lines = _read_journal(journal)
        with self._told(name):
            if os.path.lexists(final):
                os.replace(final, partial)  # looked through like every leftover
            with os.fdopen(open_file(partial, os.O_RDWR | os.O_CREAT), "r+b") as file:
                kept = self._verified(file, header, groups, lines, progress, witness)
                self._lines[name] = {line.group: line for line in kept}
                self.groups_kept += len(kept)
                _write_journal(journal, kept)
                file.truncate(len(header) + sum(group.n_bytes for group in groups))
                file.seek(0)
                file.write(header)
            self._finish_file(name)

    def _finish_file(self, name: str) -> None:
        """Gives a file that has all of its groups its name."""
        if self._lines[name].keys() == {group.number for group in self._files[name]}:
            with os.fdopen(open_file(self._partial(name), os.O_RDWR), "r+b") as file:
                os.fsync(file.fileno())
            put_in_place(self._partial(name), self.out / name)

    def _write_groups(
        self,
        name: str,
        groups: Sequence[Group],
        produce: Produce,
        progress: Callable[[int], None],
        witness: Witness,
    ) -> None:
        places = _places(self._files[name])
        unsynced = 0
        with (
            os.fdopen(open_file(self._partial(name), os.O_RDWR), "r+b") as file,
            open(self._journal(name), "ab") as log,
        ):
            made = iter(produce([group.source for group in groups]))
            for group in groups:
                at = places[group.number]
                file.seek(at)
                written = 0
                for buffer in next(made):
                    view = memoryview(buffer).cast("B")
                    file.write(view)
                    written += view.nbytes
                    progress(view.nbytes)
                if written != group.n_bytes:
                    raise AssertionError(f"{group.tensors[0].name}: {written} bytes produced, {group.n_bytes} planned")
                file.flush()
                sums = _checksums_in_file(file, at, group.tensors)
                line = _Line(group.number, sums, witness(group.source, None))
                unsynced += written
                if unsynced >= _SYNC_BYTES:  # bounds what writeback has to do at once
                    os.fdatasync(file.fileno())
                    unsynced = 0
                self._lines[name][group.number] = line
                log.write(msgspec.json.encode(line) + b"\n")
                log.flush()
            os.fdatasync(file.fileno())
            os.fsync(log.fileno())

    def _verified(
        self,
        file: BinaryIO,
        header: bytes,
        groups: Sequence[Group],
        lines: Sequence[_Line],
        progress: Callable[[int], None],
        witness: Witness,
    ) -> list[_Line]:
        """The groups of an earlier run that can be kept, with evidence of now."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        kept: list[_Line] = []
        if not lines or file.read(len(header)) != header:
            return kept
        places = _places(groups)
        last = {line.group: line for line in lines if 0 <= line.group < len(groups)}  # of two that say so the later
        for number, line in sorted(last.items()):
            group, at = groups[number], places[number]
            if at + group.n_bytes > size or _checksums_in_file(file, at, group.tensors) != line.checksums:
                continue
            source = witness(group.source, line.source)
            if source.digest != line.source.digest:
                continue
            kept.append(_Line(number, line.checksums, source))
            progress(group.n_bytes)
        return kept

    # ---- the directory --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ContainerError(f"{self.out} can't be used as output directory: {error.strerror}.") from None
        if not try_lock(self._lock_fd, self.out):
            raise ContainerError(
                f"Another process is writing into {self.out}. Wait until it has finished, or choose another directory."
            )
        if (self.out / INDEX_NAME).exists():
            raise ContainerError(
                f"{self.out} already holds a finished container; it is never overwritten. Choose another directory."
            )
        encoded = msgspec.json.format(msgspec.json.encode(self.identity), indent=1)
        plan_path = self._state / "plan.json"
        if os.path.lexists(plan_path):
            if _plan_in(plan_path) != encoded:
                raise ContainerError(
                    f"{self.out} holds unfinished work with other arguments or another source "
                    f"({_differences(plan_path, self.identity)}). "
                    "Repeat the original command to go on, or choose another directory."
                )
            return
        # Hidden files are other programs' (.DS_Store), lost+found is the file system's.
        foreign = sorted(name for name in os.listdir(self.out) if not name.startswith(".") and name != "lost+found")
        if foreign:
            raise ContainerError(
                f"{self.out} is not empty (it holds {foreign[0]!r}) and was not begun by this command. Choose "
                "an empty or new directory."
            )
        try:
            self._state.mkdir(exist_ok=True)
        except OSError as error:
            raise ContainerError(
                f"{self._state} can't be used as a directory: {error.strerror}. Delete it, or choose another directory."
            ) from None
        try:
            replace_file(plan_path, encoded)
        except OSError as error:
            raise CapacityError(f"{plan_path} can't be written: {error.strerror}.") from None


def _files_of(plan: ContainerPlan) -> Iterator[tuple[str, list[Group]]]:
    """Every file with its groups, in the order in which they lie in it."""
    for dense in plan.dense:
        yield dense.file, [Group(dense.file, i, item, item.stored) for i, item in enumerate(dense.items)]
    for layer in plan.experts:
        size = layer.layout.record_bytes
        yield (
            layer.file,
            [
                Group(layer.file, e, (layer, e), (Stored(layer.tensor_name(e), "U8", (size,), size),))
                for e in range(layer.n_experts)
            ],
        )


def _header_of(groups: Sequence[Group]) -> bytes:
    return build_header([tensor for group in groups for tensor in group.tensors])


def _places(groups: Sequence[Group]) -> list[int]:
    """Where each group begins in its file."""
    return list(itertools.accumulate((group.n_bytes for group in groups[:-1]), initial=len(_header_of(groups))))


def _plan_in(path: Path) -> bytes:
    try:
        return read_file(path, _JOURNAL_LIMIT_BYTES)
    except OSError as error:
        raise ContainerError(
            f"{path} can't be read: {error.strerror}. Delete {path.parent.parent} and start again."
        ) from None


def _differences(path: Path, identity: dict[str, Any]) -> str:
    try:
        before = json.loads(read_file(path, _JOURNAL_LIMIT_BYTES))
        if not isinstance(before, dict):
            raise ValueError
    except (ValueError, RecursionError):
        return "its plan.json is damaged"
    keys = [key for key in identity if before.get(key) != identity[key]]
    shown = [f"{key}: {before.get(key)!r} then, {identity[key]!r} now" for key in keys if len(repr(identity[key])) < 60]
    return "; ".join(shown) or ", ".join(keys) or "other keys"


def _read_journal(path: Path) -> list[_Line]:
    """Complete lines of a journal; a torn last line ends it."""
    lines: list[_Line] = []
    try:
        content = read_file(path, _JOURNAL_LIMIT_BYTES)
    except OSError:  # without it everything is made again
        return lines
    for raw in content.split(b"\n")[:-1]:
        try:
            lines.append(msgspec.json.decode(raw, type=_Line))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
    return lines


def _write_journal(path: Path, lines: Sequence[_Line]) -> None:
    replace_file(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _checksums_in_file(file: BinaryIO, at: int, tensors: Sequence[Stored]) -> tuple[str, ...]:
    """Checksums of tensors as they lie in the file: what is recorded is what can be read back."""
    total = sum(tensor.n_bytes for tensor in tensors)
    start = at - at % mmap.ALLOCATIONGRANULARITY
    sums = []
    with mmap.mmap(file.fileno(), at - start + total, access=mmap.ACCESS_READ, offset=start) as mapped:
        position = at - start
        for tensor in tensors:
            with memoryview(mapped) as view, view[position : position + tensor.n_bytes] as part:
                sums.append(checksum(part))
            position += tensor.n_bytes
    return tuple(sums)
