"""Writes a container file by file: atomic, resumable, never over a finished one. Run by ``colibri convert`` and ``synth``.

While work is in progress ``OUT/.unfinished/`` holds the identity of the work (``plan.json``) and, per file, a journal with
one line per finished group of tensors: their checksums. A file is written under ``NAME.partial``. On resume the groups
that the journal names are hashed again and kept as far as they agree, so a torn write or a power cut costs one group.
``colibri.json`` comes last; then ``.unfinished`` goes away. A lock on the directory keeps a second writer out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from shared.container.safetensors_file import build_header
from shared.errors import CapacityError, ContainerError

STATE_DIR = ".unfinished"
_SYNC_BYTES = 256 << 20

Produce = Callable[[Any], Iterable[Any]]
"""Gives the bytes of one group's tensors, in order, in as many contiguous buffers as it likes."""


class _Group(msgspec.Struct, frozen=True):
    """Tensors of one file that are produced together. ``source`` is what the caller's producer understands."""

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
        self._checksums: dict[str, list[str]] = {}
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
        for name, _ in self._files():
            for path in (self.out / name, self.out / f"{name}.partial"):
                if path.exists():
                    found += path.stat().st_size
        return found

    def require_space(self) -> None:
        """CapacityError when what is still to be written does not fit the file system."""
        # Headers, copied files and the index: a generous allowance, small beside any real model.
        needed = self.bytes_total + sum(4096 + 200 * len(groups) for _, groups in self._files()) + (1 << 20)
        left = needed - self.bytes_on_disk()
        stat = os.statvfs(self.out)
        free = stat.f_bavail * stat.f_frsize
        if left > free:
            raise CapacityError(
                f"{self.out} needs {left:,} more bytes ({needed:,} in all), the file system has {free:,} free. "
                f"Free {left - free:,} bytes, choose another directory, or a smaller precision."
            )

    def write(
        self, produce_dense: Produce, produce_expert: Produce, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Writes every file that is not there yet. Producers get a ``DenseItem``, or ``(ExpertFilePlan, expert)``.

        ``progress`` gets byte counts as they are done (kept ones included).
        """
        for name, groups in self._files():
            produce = produce_expert if name.startswith("experts-") else produce_dense
            try:
                self._checksums[name] = self._write_file(name, groups, produce, progress)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise ContainerError(f"{self.out / name} can't be written: {error.strerror}.") from None
                raise CapacityError(
                    f"No space left while writing {self.out / name} ({error.strerror}). What is finished is kept: "
                    "free some space and run the same command again, it goes on from there."
                ) from None

    def copy_files(self, source: Path, names: Iterable[str]) -> None:
        """Copies small files unchanged (configuration, tokenizer)."""
        for name in names:
            self.put_file(name, (source / name).read_bytes())

    def put_file(self, name: str, content: bytes) -> None:
        """Writes a small file atomically."""
        partial = self.out / f"{name}.partial"
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.out / name)
        except OSError as error:
            raise CapacityError(
                f"{self.out / name} can't be written: {error.strerror}. Free some space and run the same command again."
            ) from None

    def finish(self, family: str, converter: Converter) -> Index:
        """Writes ``colibri.json``: from here on the container exists."""
        dense: dict[str, DenseRecord] = {}
        experts: dict[str, ExpertsRecord] = {}
        joined: list[str] = []
        for file in self.plan.dense:
            sums = iter(self._checksums[file.file])
            for item in file.items:
                own = [next(sums) for _ in item.stored]
                joined += own
                dense[item.name] = DenseRecord(
                    file.file, item.format, item.role, item.shape, own[0], item.stack, own[1] if len(own) > 1 else None
                )
        for layer in self.plan.experts:
            checksums = tuple(self._checksums[layer.file])
            joined += checksums
            stored = [tensor for _, group in self._expert_groups(layer.file) for tensor in group.tensors]
            experts[str(layer.layer)] = ExpertsRecord(
                layer.file,
                layer.layout.format,
                len(build_header(stored)),
                layer.layout.record_bytes,
                layer.n_experts,
                checksums,
            )
        fingerprint = checksum("".join(joined).encode())
        index = Index(FORMAT_VERSION, family, fingerprint, self.plan.precision, converter, dense, experts)
        self.put_file(INDEX_NAME, msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
        self._sync_directory()
        shutil.rmtree(self._state, ignore_errors=True)
        return index

    # ---- files ----------------------------------------------------------------------------------------------------

    def _files(self) -> Iterator[tuple[str, list[_Group]]]:
        for dense in self.plan.dense:
            yield dense.file, [_Group(item, item.stored) for item in dense.items]
        for layer in self.plan.experts:
            yield layer.file, [group for _, group in self._expert_groups(layer.file)]

    def _expert_groups(self, file: str) -> Iterator[tuple[int, _Group]]:
        layer = next(plan for plan in self.plan.experts if plan.file == file)
        size = layer.layout.record_bytes
        for expert in range(layer.n_experts):
            yield expert, _Group((layer, expert), (Stored(layer.tensor_name(expert), "U8", (size,), size),))

    def _write_file(
        self, name: str, groups: Sequence[_Group], produce: Produce, progress: Callable[[int], None]
    ) -> list[str]:
        final, partial, journal = self.out / name, self.out / f"{name}.partial", self._state / f"{name}.journal"
        header = build_header([tensor for group in groups for tensor in group.tensors])
        size = len(header) + sum(group.n_bytes for group in groups)
        lines = _read_journal(journal)
        if final.exists():
            # Renamed only after its journal was complete and on disk.
            if len(lines) == len(groups) and final.stat().st_size == size:
                progress(size - len(header))
                self.groups_kept += len(groups)
                return [item for line in lines for item in line]
            os.replace(final, partial)
        with open(partial, "r+b" if partial.exists() else "w+b") as file:
            kept, at = self._verified_prefix(file, header, groups, lines)
            for group in groups[:kept]:
                progress(group.n_bytes)
            self.groups_kept += kept
            del lines[kept:]
            _write_journal(journal, lines)
            file.truncate(at)
            file.seek(0)
            file.write(header)
            file.seek(at)
            with open(journal, "ab") as log:
                self._write_groups(file, log, at, groups[kept:], lines, produce, progress)
            file.flush()
            os.fsync(file.fileno())
        assert partial.stat().st_size == size
        os.replace(partial, final)
        self._sync_directory()
        return [item for line in lines for item in line]

    def _write_groups(
        self,
        file: BinaryIO,
        log: BinaryIO,
        at: int,
        groups: Sequence[_Group],
        lines: list[list[str]],
        produce: Produce,
        progress: Callable[[int], None],
    ) -> None:
        unsynced = 0
        for group in groups:
            written = 0
            for buffer in produce(group.source):
                view = memoryview(buffer).cast("B")
                file.write(view)
                written += view.nbytes
                progress(view.nbytes)
            if written != group.n_bytes:
                raise AssertionError(f"{group.tensors[0].name}: {written} bytes produced, {group.n_bytes} planned")
            file.flush()
            sums = _checksums_in_file(file, at, group.tensors)
            at += written
            unsynced += written
            if unsynced >= _SYNC_BYTES:  # bounds what writeback has to do at once
                os.fdatasync(file.fileno())
                unsynced = 0
            lines.append(sums)
            log.write(json.dumps(sums).encode() + b"\n")
            log.flush()
        os.fsync(log.fileno())

    def _verified_prefix(
        self, file: BinaryIO, header: bytes, groups: Sequence[_Group], lines: Sequence[list[str]]
    ) -> tuple[int, int]:
        """How many groups of an earlier run can be kept, and where the next one starts."""
        at = len(header)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if not lines or file.read(at) != header:
            return 0, at
        kept = 0
        for group, sums in zip(groups, lines):
            if at + group.n_bytes > size or _checksums_in_file(file, at, group.tensors) != sums:
                break
            at += group.n_bytes
            kept += 1
        return kept, at

    # ---- the directory --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ContainerError(f"{self.out} can't be used as output directory: {error.strerror}.") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ContainerError(
                f"Another process is writing into {self.out}. Wait until it has finished, or choose another directory."
            ) from None
        if (self.out / INDEX_NAME).exists():
            raise ContainerError(
                f"{self.out} already holds a finished container; it is never overwritten. Choose another directory."
            )
        encoded = msgspec.json.format(msgspec.json.encode(self.identity), indent=1)
        plan_path = self._state / "plan.json"
        if plan_path.exists():
            if plan_path.read_bytes() != encoded:
                raise ContainerError(
                    f"{self.out} holds unfinished work with other arguments or another source "
                    f"({_differences(plan_path, self.identity)}). "
                    "Repeat the original command to go on, or choose another directory."
                )
            return
        foreign = sorted(path.name for path in self.out.iterdir() if path.name != STATE_DIR)
        if foreign:
            raise ContainerError(
                f"{self.out} is not empty (it holds {foreign[0]!r}) and was not begun by this command. Choose "
                "an empty or new directory."
            )
        self._state.mkdir(exist_ok=True)
        temporary = self._state / "plan.json.partial"
        try:
            temporary.write_bytes(encoded)
            os.replace(temporary, plan_path)
        except OSError as error:
            raise CapacityError(f"{plan_path} can't be written: {error.strerror}.") from None

    def _sync_directory(self) -> None:
        os.fsync(self._lock_fd)


def _differences(path: Path, identity: dict[str, Any]) -> str:
    try:
        before = json.loads(path.read_bytes())
    except ValueError:
        return "its plan.json is damaged"
    keys = [key for key in identity if before.get(key) != identity[key]]
    shown = [f"{key}: {before.get(key)!r} then, {identity[key]!r} now" for key in keys if len(repr(identity[key])) < 60]
    return "; ".join(shown) or ", ".join(keys) or "other keys"


def _read_journal(path: Path) -> list[list[str]]:
    """Complete lines of a journal; a torn last line ends it."""
    lines: list[list[str]] = []
    if not path.exists():
        return lines
    for raw in path.read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(msgspec.json.decode(raw, type=list[str]))
        except msgspec.DecodeError:
            break
    return lines


def _write_journal(path: Path, lines: Sequence[list[str]]) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    os.replace(temporary, path)


def _checksums_in_file(file: BinaryIO, at: int, tensors: Sequence[Stored]) -> list[str]:
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
    return sums
