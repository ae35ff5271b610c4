"""Opens a container: validates everything that can be checked without reading weights, then reads the dense part.

``Container.open`` compares ``colibri.json`` with what the model's ``config.json`` calls for, and both with the headers and
sizes of the files. ``read_dense`` fills one buffer and verifies checksums. Experts are read by expert_io itself, from the
offsets given here; ``verify`` reads everything.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from native.reader import SECTOR
from shared.container.checksum import checksum
from shared.container.dense_reads import ALIGN, Part, check, place, read_runs
from shared.container.format import (
    FORMAT_VERSION,
    INDEX_NAME,
    PLAIN_FILE_NAME,
    ContainerPlan,
    Converter,
    DenseItem,
    DenseRecord,
    ExpertFilePlan,
    ExpertLayout,
    ExpertsRecord,
    Facts,
    Index,
    Version,
    check_precision,
    plan_container,
    plan_facts,
)
from shared.container.mirror import MANIFEST_NAME, FileFacts, Held, held_files
from shared.container.recognise import why_no_container
from shared.container.safetensors_file import FileHeader, read_header
from shared.errors import ChecksumMismatch, ContainerError, ShortRead
from shared.files import is_file, open_file, read_file, strict_json
from shared.model.family import load_spec
from shared.model.spec import ModelSpec

_PIECE_BYTES = 4 << 20
_N_READERS = 4
_INDEX_LIMIT_BYTES = 64 << 20
_SEARCHED_BYTES = 8 << 20
TOKENIZER_NAME = "tokenizer.json"


class DenseEntry(msgspec.Struct, frozen=True):
    """A tensor of the dense part. Offsets are absolute; ``shape`` is one matrix of the ``stack``, or the vector."""

    name: str
    kind: str
    """"matrix" (tile16), "table" (row-major embedding) or "vector" (plain f32)."""
    file: Path
    offset: int
    bytes: int
    format: str
    role: str
    shape: tuple[int, ...]
    stack: int
    checksum: str
    scale_offset: int = 0
    scale_bytes: int = 0
    scale_checksum: str = ""


class Tensor(msgspec.Struct, frozen=True):
    """A loaded tensor; arrays are views into the caller's buffer, 64-byte aligned.

    matrix: ``weight`` u8 (tile16; a stack's matrices follow each other), ``scale`` u8 or None.
    table: ``weight`` f32, u16 (bf16) or i8 [V, D], ``scale`` f32[V] or None. vector: ``weight`` f32[n].
    """

    name: str
    kind: str
    weight: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None
    format: str
    shape: tuple[int, ...]
    stack: int


class Copy(msgspec.Struct, frozen=True):
    """One file with records of a layer. ``place``: which of ``Container.places`` it lies in."""

    path: Path
    place: int
    held: Held = None
    """Its records; None: all."""

    def holds(self, expert: int) -> bool:
        return self.held is None or expert in self.held


class ExpertFile(msgspec.Struct, frozen=True):
    """One MoE layer's records: record ``e`` lies at ``offset_of(e)``, a multiple of 4096, in every copy that holds it."""

    layer: int
    name: str
    format: str
    data_offset: int
    record_bytes: int
    n_experts: int
    checksums: tuple[str, ...]
    layout: ExpertLayout
    copies: tuple[Copy, ...] = ()
    """At least one holds each record; the model directory's own comes first. Empty when opened without copies."""

    def offset_of(self, expert: int) -> int:
        return self.data_offset + expert * self.record_bytes

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        return self.offset_of(self.n_experts)

    @property
    def path(self) -> Path:
        """The first copy."""
        return self.copies[0].path

    def copy_of(self, expert: int) -> Copy:
        """The first copy that holds this record."""
        return next(copy for copy in self.copies if copy.holds(expert))


class Container:
    """A validated container. ``experts`` has one file per MoE layer, the MTP layer included.

    ``places`` are the directories with copies of expert files: the model's own, then the mirrors.
    """

    def __init__(
        self, path: Path, spec: ModelSpec, index: Index, dense: dict[str, DenseEntry], experts: dict[int, ExpertFile],
        places: tuple[Path, ...],
    ) -> None:  # fmt: skip
        self.path, self.spec, self.dense, self.experts, self.places = path, spec, dense, experts, places
        self.fingerprint: str = index.fingerprint
        self.index = index
        """``colibri.json``."""
        self.precision: dict[str, str] = index.precision
        self.converter: Converter = index.converter

    @staticmethod
    def open(
        path: Path | str,
        mirrors: Iterable[Path | str] = (),
        *,
        with_copies: bool = True,
        on_bad_mirror: Callable[[ContainerError], None] | None = None,
    ) -> Container:
        """ContainerError or ConfigError names the file and what does not fit; no weights are read.

        Expert files may be missing in ``path`` if ``mirrors`` hold them. A mirror that does not fit is an error, or passed to
        ``on_bad_mirror`` and left out. ``with_copies``: False for who reads no experts; their files are not looked at.
        """
        path = Path(path)
        index = _read_index(path)
        spec = load_spec(path)
        if index.family != spec.family:
            raise ContainerError(
                f"{path}: {INDEX_NAME} says family {index.family!r}, config.json says {spec.family!r}. Convert "
                "the checkpoint again."
            )
        try:
            check_precision(index.precision)
        except ContainerError as error:
            raise ContainerError(f"{path}: {error}") from None
        plan = plan_container(spec, index.precision)
        dense = _open_dense(path, spec, plan, index.dense)
        experts = _expert_files(path, plan, index.experts)
        places: tuple[Path, ...] = ()
        if with_copies:
            places = _find_copies(path, plan, experts, index.fingerprint, [Path(m) for m in mirrors], on_bad_mirror)
        return Container(path, spec, index, dense, experts, places)

    @property
    def plan(self) -> ContainerPlan:
        """What this model in this precision consists of."""
        return plan_container(self.spec, self.precision)

    def facts(self) -> Facts:
        """Bytes by owner, for the ledger."""
        facts = plan_facts(self.spec, self.plan)
        return msgspec.structs.replace(facts, has_tokenizer=_has_tokenizer(self.path))

    def shares(self, drives: Sequence[int]) -> dict[frozenset[int], float]:
        """Sets of drives -> share of the experts' bytes with copies exactly there. ``drives``: of each of ``places``."""
        found: dict[frozenset[int], float] = {}
        total = sum(file.record_bytes * file.n_experts for file in self.experts.values())
        for file in self.experts.values():
            for expert in range(file.n_experts):
                where = frozenset(drives[copy.place] for copy in file.copies if copy.holds(expert))
                found[where] = found.get(where, 0.0) + file.record_bytes / total
        return found

    def only_in(self, place: int) -> list[ExpertFile]:
        """The expert files as this place alone has them."""
        return [
            msgspec.structs.replace(file, copies=(copy,))
            for file in self.experts.values()
            for copy in file.copies
            if copy.place == place
        ]

    def read_dense(
        self,
        wanted: Collection[str] | Callable[[DenseEntry], bool],
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        is_filled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Tensor]:
        """Reads the wanted tensors (names, or a predicate) into one buffer and verifies their checksums.

        ``allocate(n_bytes)`` gives a u8 array of at least that size, 64-byte aligned, that outlives the tensors; aligned to
        4096 it can be filled by direct reads.
        ``is_filled``, asked after it: whether an earlier call for the same tensors has filled it (``dense_content``).
        ShortRead, ChecksumMismatch, or ContainerError for a name that does not exist.
        """
        if callable(wanted):
            entries = [entry for entry in self.dense.values() if wanted(entry)]
        else:
            missing = sorted(set(wanted) - set(self.dense))
            if missing:
                raise ContainerError(f"{self.path} has no tensor {missing[0]!r}; convert the checkpoint again.")
            entries = [entry for name, entry in self.dense.items() if name in set(wanted)]
        runs, n_bytes = place([part for entry in entries for part in _parts_of(entry)])
        buffer = allocate(n_bytes)
        if buffer.ctypes.data % ALIGN:
            raise ValueError(f"allocate() must give memory aligned to {ALIGN} bytes")
        if not is_filled():
            read_runs(runs, buffer)
        found = {part.what: buffer[run.place_of(part) :][: part.n_bytes] for run in runs for part in run.parts}
        tensors = {e.name: _as_tensor(e, found[e.name], found.get(f"{e.name}.scale")) for e in entries}
        return {name: tensors[name] for name in self.dense if name in tensors}

    def read_scale(self, name: str) -> npt.NDArray[np.float32] | None:
        """The scales f32[V] of a table alone, verified; None when its format has none."""
        entry = self.dense[name]
        if not entry.scale_bytes:
            return None
        (part,) = [part for part in _parts_of(entry) if part.what == f"{name}.scale"]
        with _Files() as files:
            return files.fill(part).view(np.float32)

    def dense_content(self, wanted: Callable[[DenseEntry], bool]) -> Iterator[str]:
        """What ``read_dense`` would put into the buffer, and where: equal strings, equal bytes."""
        runs, _ = place([part for entry in self.dense.values() if wanted(entry) for part in _parts_of(entry)])
        for run in runs:
            for part in run.parts:
                yield f"{part.what} {run.place_of(part)} {part.n_bytes} {part.checksum}"

    def experts_content(self) -> Iterator[str]:
        """What the experts' records are: equal strings, equal bytes."""
        for layer, file in sorted(self.experts.items()):
            yield f"{layer} {file.format} {file.record_bytes}"
            yield from file.checksums

    def fingerprint_complaint(self) -> str | None:
        """None when the fingerprint is that of the checksums in ``colibri.json``, else what is wrong."""
        found = fingerprint_of(self.plan, self.index.dense, self.index.experts)
        if found == self.fingerprint:
            return None
        return (
            f"{self.path / INDEX_NAME} has fingerprint {self.fingerprint!r}, its checksums give {found!r}: it was changed "
            "since it was written. Copy it again, or convert the checkpoint again."
        )

    def verify(self, place: int | None = None) -> Iterator[tuple[str, int, str | None]]:
        """Reads everything: yields (what, bytes, None or the complaint) per tensor and per expert, in order.

        ``place``: only the experts, and those copies of them that lie there.
        """
        with _Files(drops_cache=True) as files, ThreadPoolExecutor(_N_READERS) as pool:
            pending: deque[tuple[Part, Future[str | None]]] = deque()
            for part in self._all_parts() if place is None else self._parts_in(place):
                pending.append((part, pool.submit(files.complaint, part)))
                if len(pending) > 2 * _N_READERS:
                    done, future = pending.popleft()
                    yield done.what, done.n_bytes, future.result()
            for done, future in pending:
                yield done.what, done.n_bytes, future.result()

    def _all_parts(self) -> Iterator[Part]:
        for entry in self.dense.values():
            yield from _parts_of(entry)
        for _, file in sorted(self.experts.items()):
            for expert in range(file.n_experts):
                yield _expert_part(file, expert)

    def _parts_in(self, place: int) -> Iterator[Part]:
        for _, file in sorted(self.experts.items()):
            for copy in file.copies:
                if copy.place == place:
                    yield from (_expert_part(file, e, copy) for e in range(file.n_experts) if copy.holds(e))

    def read_expert(self, layer: int, expert: int, *, drops_cache: bool = False) -> npt.NDArray[np.uint8]:
        """One record, checksum verified: for tests and tools, not for the hot path."""
        with _Files(drops_cache) as files:
            return files.fill(_expert_part(self.experts[layer], expert))


def no_tokenizer(model_dir: Path) -> str:
    """The sentence about a model without one."""
    return (
        f"{model_dir} has no {TOKENIZER_NAME}: requests must give token ids, text is refused. Copy the model's "
        f"{TOKENIZER_NAME} (and tokenizer_config.json) into it."
    )


def _has_tokenizer(path: Path) -> bool:
    try:
        return is_file(path / TOKENIZER_NAME)
    except OSError as error:
        raise ContainerError(f"{path / TOKENIZER_NAME} can't be read: {error.strerror}.") from None


def aligned_buffer(n_bytes: int) -> npt.NDArray[np.uint8]:
    """A u8 array of ordinary memory, aligned for direct reads: an ``allocate`` for tests and tools."""
    raw = np.empty(n_bytes + SECTOR, np.uint8)
    start = -raw.ctypes.data % SECTOR
    return raw[start : start + n_bytes]


def _parts_of(entry: DenseEntry) -> list[Part]:
    """The weight, and the scales if it has any."""
    parts = [Part(entry.name, entry.file, entry.offset, entry.bytes, entry.checksum)]
    if entry.scale_bytes:
        name = f"{entry.name}.scale"
        parts.append(Part(name, entry.file, entry.scale_offset, entry.scale_bytes, entry.scale_checksum))
    return parts


def _expert_part(file: ExpertFile, expert: int, copy: Copy | None = None) -> Part:
    what = f"layer {file.layer} expert {expert}"
    path = (copy or file.copy_of(expert)).path
    return Part(what, path, file.offset_of(expert), file.record_bytes, file.checksums[expert])


class _Files:
    """Open files of one reading pass, shared by its threads. ``drops_cache``: what was read leaves the page cache."""

    def __init__(self, drops_cache: bool = False) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._drops_cache = drops_cache

    def __enter__(self) -> _Files:
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


def _as_tensor(entry: DenseEntry, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8] | None) -> Tensor:
    plain: npt.NDArray[Any] = weight
    plain_scale: npt.NDArray[Any] | None = scale
    if entry.kind == "vector":
        plain = weight.view(np.float32)
    elif entry.kind == "table":
        dtype = {"f32": np.float32, "bf16": np.uint16, "q8": np.int8}[entry.format]
        plain = weight.view(dtype).reshape(entry.shape)
        plain_scale = None if scale is None else scale.view(np.float32)
    return Tensor(entry.name, entry.kind, plain, plain_scale, entry.format, entry.shape, entry.stack)


def _read_index(path: Path) -> Index:
    index_path = path / INDEX_NAME
    try:
        raw = read_file(index_path, _INDEX_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise ContainerError(why_no_container(path)) from None
    except OSError as error:
        if not os.path.isdir(path):
            raise ContainerError(why_no_container(path)) from None
        raise ContainerError(f"{index_path} can't be read: {error.strerror}.") from None
    try:
        version = msgspec.json.decode(raw, type=Version).format_version
        if version != FORMAT_VERSION:
            raise ContainerError(
                f"{index_path} has format version {_short(repr(version))}, this program reads version {FORMAT_VERSION}. "
                "Convert the checkpoint again with this program."
            )
        index = msgspec.json.decode(raw, type=Index)
        strict_json(raw)  # msgspec takes the last of two keys
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ContainerError(
            f"{index_path} is malformed ({_short(error)}{_culprit(raw)}). Copy it again, or convert the checkpoint again."
        ) from None
    return index


def _culprit(raw: bytes) -> str:
    """Which entry of ``colibri.json`` is malformed, as far as that can be told: msgspec names no keys of a map."""
    parts: tuple[tuple[str, type], ...] = (("dense", DenseRecord), ("experts", ExpertsRecord))
    with contextlib.suppress(ValueError, RecursionError):
        parsed = strict_json(raw) if len(raw) <= _SEARCHED_BYTES else None
        for part, record in parts:
            entries = parsed.get(part) if isinstance(parsed, dict) else None
            for name, value in entries.items() if isinstance(entries, dict) else ():
                try:
                    msgspec.convert(value, record)
                except msgspec.ValidationError:
                    what = f"tensor {_short(name)!r}" if part == "dense" else f"experts of layer {_short(name)!r}"
                    return f", the entry of {what}"
    return ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def fingerprint_of(plan: ContainerPlan, dense: Mapping[str, DenseRecord], experts: Mapping[str, ExpertsRecord]) -> str:
    """What identifies a container's content: XXH64 over the checksums of everything in it, in the plan's order."""
    joined: list[str] = []
    for item in (item for file in plan.dense for item in file.items):
        joined += [dense[item.name].checksum, dense[item.name].scale_checksum or ""]
    for layer in plan.experts:
        joined += experts[str(layer.layer)].checksums
    return checksum("".join(joined).encode())


def _require_same_names(path: Path, what: str, expected: Collection[str], found: Collection[str]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        raise ContainerError(
            f"{path}: {INDEX_NAME} lacks {what} {missing[0]!r} ({len(missing)} missing). Convert the checkpoint again."
        )
    if extra:
        raise ContainerError(
            f"{path}: {INDEX_NAME} lists {what} {extra[0]!r}, which the model does not have. Convert the checkpoint again."
        )


def _checked_file(path: Path, name: str) -> Path:
    if not PLAIN_FILE_NAME.fullmatch(name):
        raise ContainerError(
            f"{path}: {INDEX_NAME} names the file {name!r}; files of a container lie in its own directory."
        )
    return path / name


def _require_agreed_mtp(path: Path, spec: ModelSpec, expected: Collection[str], found: Collection[str]) -> None:
    """Whether there is an MTP layer: the most likely thing for a config.json to be wrong in."""
    own = f"model.layers.{spec.n_layers}."
    wants, has = (any(name.startswith(own) for name in names) for names in (expected, found))
    if wants and not has:
        raise ContainerError(
            f"{path}: {INDEX_NAME} lacks the MTP layer ('{own}*') that config.json promises. Use the config.json that the "
            "container was made with, or convert the checkpoint again; with --no-mtp the layer is left out of both."
        )
    if has and not wants:
        raise ContainerError(
            f"{path}: {INDEX_NAME} lists an MTP layer ('{own}*'), which the model does not have by its config.json. Use the "
            "config.json that the container was made with, or convert the checkpoint again with --no-mtp."
        )


def _open_dense(
    path: Path, spec: ModelSpec, plan: ContainerPlan, records: dict[str, DenseRecord]
) -> dict[str, DenseEntry]:
    items = {item.name: item for file in plan.dense for item in file.items}
    _require_agreed_mtp(path, spec, items, records)
    _require_same_names(path, "tensor", items, records)
    headers: dict[str, FileHeader] = {}
    entries = {}
    for name, item in items.items():
        record = records[name]
        expected = (item.format, item.role, item.shape, item.stack, len(item.stored) > 1)
        if (record.format, record.role, record.shape, record.stack, record.scale_checksum is not None) != expected:
            raise ContainerError(
                f"{path}: {INDEX_NAME} describes {name!r} as {record.format} {record.role} {list(record.shape)} "
                f"x {record.stack}, "
                f"the model calls for {item.format} {item.role} {list(item.shape)} x {item.stack}. Convert the "
                "checkpoint again."
            )
        file = _checked_file(path, record.file)
        if record.file not in headers:
            headers[record.file] = read_header(file, name)
        entries[name] = _dense_entry(file, headers[record.file], item, record)
    _require_exact_files(path, headers, {f: [n for n, r in records.items() if r.file == f] for f in headers}, records)
    return entries


def _dense_entry(file: Path, header: FileHeader, item: DenseItem, record: DenseRecord) -> DenseEntry:
    places = []
    for stored in item.stored:
        found = header.tensors.get(stored.name)
        if found is None or (found.dtype, found.shape, found.n_bytes) != (stored.dtype, stored.shape, stored.n_bytes):
            shown = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ContainerError(
                f"{file}: expected tensor {stored.name!r} as {stored.dtype} {list(stored.shape)}, found "
                f"{shown}. Copy the file again."
            )
        places.append(found)
    scale = (places[1].offset, places[1].n_bytes, record.scale_checksum or "") if len(places) > 1 else (0, 0, "")
    return DenseEntry(
        item.name, item.kind, file, places[0].offset, places[0].n_bytes, item.format, item.role, item.shape, item.stack,
        record.checksum, *scale,
    )  # fmt: skip


def _require_exact_files(
    path: Path, headers: dict[str, FileHeader], names: dict[str, list[str]], records: dict[str, DenseRecord]
) -> None:
    for file, header in headers.items():
        expected = set(names[file]) | {
            f"{name}.scale" for name in names[file] if records[name].scale_checksum is not None
        }
        extra = sorted(set(header.tensors) - expected)
        if extra:
            raise ContainerError(
                f"{path / file} holds tensor {extra[0]!r}, which {INDEX_NAME} does not list. Copy both again."
            )


def _expert_files(path: Path, plan: ContainerPlan, records: dict[str, ExpertsRecord]) -> dict[int, ExpertFile]:
    """The expert files as ``colibri.json`` describes them, compared with what the model calls for; no copies yet."""
    plans = {str(file.layer): file for file in plan.experts}
    _require_same_names(path, "experts of layer", plans, records)
    return {file.layer: _expert_file(path, file, records[key]) for key, file in plans.items()}


def _expert_file(path: Path, plan: ExpertFilePlan, record: ExpertsRecord) -> ExpertFile:
    _checked_file(path, record.file)
    layout = plan.layout
    if (record.format, record.record_bytes, record.n_experts) != (layout.format, layout.record_bytes, plan.n_experts):
        raise ContainerError(
            f"{path}: {INDEX_NAME} gives layer {plan.layer} {record.n_experts} experts of "
            f"{record.record_bytes:,} bytes in {record.format}, "
            f"the model calls for {plan.n_experts} of {layout.record_bytes:,} in {layout.format}. Convert the checkpoint again."
        )
    if len(record.checksums) != plan.n_experts or len(record.sources) not in (0, plan.n_experts):
        raise ContainerError(
            f"{path}: {INDEX_NAME} has {len(record.checksums)} checksums and {len(record.sources)} sources for the "
            f"{plan.n_experts} experts of layer {plan.layer}. "
            "Convert the checkpoint again."
        )
    return ExpertFile(
        plan.layer,
        record.file,
        record.format,
        record.data_offset,
        record.record_bytes,
        record.n_experts,
        record.checksums,
        layout,
    )


def _find_copies(
    path: Path,
    plan: ContainerPlan,
    experts: dict[int, ExpertFile],
    fingerprint: str,
    mirrors: Sequence[Path],
    on_bad_mirror: Callable[[ContainerError], None] | None,
) -> tuple[Path, ...]:
    """Gives every file of ``experts`` its copies, their headers checked; returns the places."""
    plans = {file.layer: file for file in plan.experts}
    copies: dict[int, list[Copy]] = {layer: [] for layer in experts}
    for layer, file in experts.items():
        if os.path.lexists(path / file.name):
            _check_expert_header(path / file.name, plans[layer], file)
            copies[layer].append(Copy(path / file.name, 0))
    places = [path]
    for mirror in mirrors:
        try:
            if any(mirror.exists() and os.path.samefile(mirror, place) for place in places[1:]):
                raise ContainerError(f"the mirror {mirror} is given twice. Leave one out.")
            found = _copies_in(mirror, path, plans, experts, fingerprint, len(places))
        except ContainerError as error:
            if on_bad_mirror is None:
                raise
            on_bad_mirror(error)
            continue
        places.append(mirror)
        for layer, copy in found.items():
            copies[layer].append(copy)
    for layer, file in experts.items():
        for expert in range(file.n_experts):
            if not any(copy.holds(expert) for copy in copies[layer]):
                what = f"expert {expert} of {file.name}" if copies[layer] else file.name
                raise ContainerError(
                    f"{what} is missing; looked in {', '.join(map(str, places))}. Copy the file, which should hold "
                    f"{plans[layer].tensor_name(expert)!r}, again from where the model came from, or name the directory that "
                    "holds it with --mirror."
                )
        experts[layer] = msgspec.structs.replace(file, copies=tuple(copies[layer]))
    return tuple(places)


def _copies_in(
    mirror: Path,
    model_dir: Path,
    plans: dict[int, ExpertFilePlan],
    experts: dict[int, ExpertFile],
    fingerprint: str,
    place: int,
) -> dict[int, Copy]:
    """What a mirror holds. ContainerError when a header differs from the original's, or its first record does where no
    manifest says which model the files are of."""
    held = held_files(mirror, model_dir, fingerprint, file_facts(experts))
    found: dict[int, Copy] = {}
    for layer, file in experts.items():
        if file.name in held:
            found[layer] = Copy(mirror / file.name, place, held[file.name])
            _check_expert_header(mirror / file.name, plans[layer], file)
    if found and not (mirror / MANIFEST_NAME).exists():
        layer, copy = next(iter(found.items()))
        with _Files() as files:
            complaint = files.complaint(_expert_part(experts[layer], 0, copy))
        if complaint:
            raise ContainerError(f"the expert files in {mirror} are not this model's, or damaged: {complaint}")
    return found


def file_facts(experts: dict[int, ExpertFile]) -> dict[str, FileFacts]:
    """What a mirror's manifest is compared with."""
    return {file.name: FileFacts(file.n_bytes, file.n_experts) for file in experts.values()}


def _check_expert_header(path: Path, plan: ExpertFilePlan, file: ExpertFile) -> None:
    """ContainerError unless the file at ``path`` has the header and the size of this layer's records."""
    header = read_header(path, plan.tensor_name(0))
    if header.data_offset != file.data_offset or file.data_offset % 4096:
        raise ContainerError(
            f"{path}: records ({plan.tensor_name(0)!r} is the first) start at byte {header.data_offset:,}, {INDEX_NAME} says "
            f"{file.data_offset:,} (a multiple of 4,096). Copy both again."
        )
    wanted = {plan.tensor_name(e) for e in range(plan.n_experts)}
    if wanted != header.tensors.keys():
        lacking, foreign = sorted(wanted - header.tensors.keys()), sorted(header.tensors.keys() - wanted)
        what = (
            f"lacks tensor {lacking[0]!r}" if lacking else f"holds tensor {foreign[0]!r}, which does not belong there"
        )
        raise ContainerError(f"{path} {what}. Copy the file again.")
    for expert in range(plan.n_experts):
        entry = header.tensors[plan.tensor_name(expert)]
        if (entry.dtype, entry.shape, entry.offset) != ("U8", (file.record_bytes,), file.offset_of(expert)):
            raise ContainerError(
                f"{path}: {plan.tensor_name(expert)!r} should be U8 [{file.record_bytes}] at byte "
                f"{file.offset_of(expert):,}, found {entry.dtype} "
                f"{list(entry.shape)} at {entry.offset:,}. Copy the file again."
            )
