"""Checks a container at its opening: ``colibri.json`` against the model, and both against headers and sizes of the files.

Reads no weights but the first record of a mirror without manifest. Every complaint is a ContainerError that names the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from shared.container.checked_reads import OpenFiles
from shared.container.checksum import checksum
from shared.container.entries import Copy, DenseEntry, ExpertFile
from shared.container.format import (
    FORMAT_VERSION,
    INDEX_NAME,
    PLAIN_FILE_NAME,
    ContainerPlan,
    DenseItem,
    DenseRecord,
    ExpertFilePlan,
    ExpertsRecord,
    Index,
    Version,
)
from shared.container.mirror import MANIFEST_NAME, FileFacts, held_files
from shared.container.recognise import why_no_container
from shared.container.safetensors_file import FileHeader, read_header
from shared.errors import ContainerError
from shared.files import read_file, strict_json
from shared.model.spec import ModelSpec

_INDEX_LIMIT_BYTES = 64 << 20
_SEARCHED_BYTES = 8 << 20


def read_index(path: Path) -> Index:
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


def open_dense(
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


def expert_files(path: Path, plan: ContainerPlan, records: dict[str, ExpertsRecord]) -> dict[int, ExpertFile]:
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


def find_copies(
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
        with OpenFiles() as files:
            complaint = files.complaint(*experts[layer].parts(0, copy))
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
