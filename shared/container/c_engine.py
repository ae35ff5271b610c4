"""Opens the containers of the C engine as they lie: which tensor of the model is made from which bytes of which file.

Such a directory has a checkpoint's ``config.json`` and safetensors files in which a matrix [O, I] is two flat tensors: ``NAME``
(U8 or I8: int8, or nibbles q + 8, row after row, the lower one first) and ``NAME.qs`` (F32 or F16 scales, one a row or one for
a group of inputs). Their sizes alone tell which it is. Nothing is assumed of the order of tensors, and nothing is written.
Reads headers alone. Every complaint is a ContainerError that names the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shared.container.checksum import checksum
from shared.container.entries import Copy, DenseEntry, ExpertFile, RawExperts, RawMatrix
from shared.container.format import (
    INDEX_NAME,
    ContainerPlan,
    Converter,
    DenseFilePlan,
    DenseItem,
    ExpertFilePlan,
    expert_layout,
    plan_dense_items,
)
from shared.container.recognise import shard_names
from shared.container.safetensors_file import TensorEntry, read_header
from shared.errors import ContainerError
from shared.files import open_file, read_file
from shared.model.attention.latent import Latent
from shared.model.family import expert_source, load_spec, source_name
from shared.model.spec import ModelSpec
from shared.model.tensors import Source

SCALES = ".qs"
MADE_BY = "C engine"
_GROUPS = (64, 128, 192, 256, 32, 16, 48, 96)
"""Inputs per scale that the C engine knows; where a count of scales would fit several, the first."""
_MAX_FILES = 512
_LOOKED_AT = 4
_SAMPLES, _SAMPLE_BYTES = 4, 4096
_CONFIG_LIMIT_BYTES = 16 << 20
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OFFSET_FORMAT = "q8"
"""Of matrices that must be rounded again because their groups lie across another dimension (MLA's ``k_b``)."""
_INDEXER = ".self_attn.indexer."


class Opened(NamedTuple):
    """What a ``Container`` consists of. ``notes``: what the user should know. ``exact_context``: positions up to which the
    model computes what its makers meant; 0: all."""

    spec: ModelSpec
    plan: ContainerPlan
    dense: dict[str, DenseEntry]
    experts: dict[int, ExpertFile]
    fingerprint: str
    converter: Converter
    notes: tuple[str, ...]
    exact_context: int


def is_c_engine(path: Path) -> bool:
    """Whether a directory without ``colibri.json`` is such a container, by the headers of its first files."""
    if os.path.lexists(path / INDEX_NAME) or not os.path.lexists(path / "config.json"):
        return False
    try:
        names = shard_names(os.listdir(path))[:_LOOKED_AT]
        return any(name.endswith(f".weight{SCALES}") for file in names for name in read_header(path / file).tensors)
    except (OSError, ContainerError):
        return False


def open_c_engine(path: Path) -> Opened:
    """Maps the whole directory. ContainerError names the tensor or the file that does not fit."""
    found = _Found(path)
    spec, notes, exact_context = _spec_of(path, found)
    items = [_item(found, spec, item) for item in plan_dense_items(spec, _ANY_PRECISION)]
    dense = {item.name: _entry(found, spec, item) for item in items}
    experts = {layer: _experts(found, spec, layer) for layer in spec.moe_layers}
    files = tuple(ExpertFilePlan(file.name, layer, spec.n_experts, file.layout) for layer, file in experts.items())
    precision = {**{item.role: item.format for item in reversed(items)}, "exact": "f32"}
    for layer, file in reversed(experts.items()):
        precision["mtp" if layer >= spec.n_layers else "expert"] = file.format
    for role in ("shared", "mtp"):
        precision.setdefault(role, precision["expert"])
    plan = ContainerPlan(precision, (DenseFilePlan(str(path), tuple(items)),), files)
    found.require_all_known(spec)
    kinds = sorted({f"{raw.format} {_grouping(raw.group)}" for raw in found.used.values()})
    notes = (
        f"{path} is a container of the {MADE_BY} ({', '.join(kinds)}), opened as it lies. It has no checksums: damage is not "
        "noticed.",
        *notes,
    )
    if any(raw.format == "q4" for raw in found.used.values()):
        notes = (
            *notes,
            "its f32 scales of int4 are rounded to f16 when they are read: a weight changes by 1/2048 at most.",
        )
    converter = Converter(MADE_BY, {"weights": ", ".join(kinds)})
    return Opened(spec, plan, dense, experts, found.fingerprint(), converter, notes, exact_context)


_ANY_PRECISION = {
    **dict.fromkeys(("expert", "shared", "attention", "embed", "head", "mtp"), "q8"),
    "exact": "f32",
}
"""For the names and shapes of a plan, whose formats the files then decide."""


class _Found:
    """Every tensor of the directory, and which of them are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, tuple[str, TensorEntry]] = {}
        self.sizes: dict[str, int] = {}
        self.used: dict[str, RawMatrix] = {}
        """Quantised matrices by name."""
        self.plain: set[str] = set()
        self._headers: list[str] = []
        names = shard_names(os.listdir(path))
        if len(names) > _MAX_FILES:
            raise ContainerError(f"{path} holds {len(names)} *.safetensors files, at most {_MAX_FILES} are expected.")
        for file in names:
            header = read_header(path / file)
            self.sizes[file] = header.file_bytes
            for name, entry in header.tensors.items():
                if name in self.tensors:
                    raise ContainerError(
                        f"{path}: tensor {name!r} is in both {self.tensors[name][0]} and {file}. Remove the file that does not "
                        "belong to the container."
                    )
                self.tensors[name] = (file, entry)
            self._headers.append(
                f"{file} {header.file_bytes} {checksum(repr(sorted(header.tensors.items())).encode())}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def place(self, name: str) -> tuple[str, TensorEntry]:
        if name not in self.tensors:
            raise ContainerError(
                f"{self.path} has no tensor {name!r}, which its config.json calls for. Complete the directory, or use the "
                "config.json that belongs to it."
            )
        return self.tensors[name]

    def exact(self, name: str, shape: tuple[int, ...]) -> tuple[Path, TensorEntry]:
        """A tensor in plain f32."""
        file, entry = self.place(name)
        if (entry.dtype, entry.shape) != ("F32", shape):
            raise ContainerError(
                f"{self.path / file}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected F32 {list(shape)}. This "
                "container has other formats than can be read; convert the model's checkpoint instead: colibri convert."
            )
        self.plain.add(name)
        return self.path / file, entry

    def matrix(self, name: str, shape: tuple[int, ...]) -> RawMatrix:
        """A quantised matrix [O, I], recognised by the sizes of its two tensors."""
        if name in self.used:
            return self.used[name]
        out, in_ = shape
        file, entry = self.place(name)
        where = f"{self.path / file}: tensor {name!r}"
        remedy = "It can't be opened as it lies; convert the model's checkpoint instead: colibri convert."
        if name + SCALES not in self.tensors or entry.dtype not in ("U8", "I8") or len(entry.shape) != 1:
            raise ContainerError(
                f"{where} is {entry.dtype} {list(entry.shape)}{'' if name + SCALES in self.tensors else ' and has no scales'}; "
                f"flat bytes of a [{out}, {in_}] matrix with scales in {name + SCALES!r} are expected. {remedy}"
            )
        formats = {out * in_: "q8", out * -(-in_ // 2): "q4"}
        if entry.n_bytes not in formats:
            raise ContainerError(
                f"{where} has {entry.n_bytes:,} bytes; a [{out}, {in_}] matrix has {out * in_:,} in int8 and "
                f"{out * -(-in_ // 2):,} in int4 (int2, int3 and lattices are not read). {remedy}"
            )
        fmt = formats[entry.n_bytes]
        scale_file, scales = self.tensors[name + SCALES]
        groups = {out * -(-in_ // group): group for group in reversed(_GROUPS)} if fmt == "q4" else {}
        count = scales.shape[0] if len(scales.shape) == 1 else -1
        group = 0 if count == out else groups.get(count, -1)
        if scales.dtype not in ("F32", "F16") or group < 0 or group % 64:
            raise ContainerError(
                f"{where} has {fmt} weights and scales {scales.dtype} {list(scales.shape)}; F32 or F16, {out:,} (one a row) "
                f"or, of int4, one for 64, 128, 192 or 256 inputs are read. {remedy}"
            )
        raw = RawMatrix(
            name, self.path / file, entry.offset, self.path / scale_file, scales.offset, fmt, out, in_, group,
            scales.dtype == "F16",
        )  # fmt: skip
        self.used[name] = raw
        return raw

    def require_all_known(self, spec: ModelSpec) -> None:
        """Leaving weights out would change the model."""
        known = self.plain | set(self.used) | {name + SCALES for name in self.used}
        mtp = f"model.layers.{spec.n_layers}."
        unknown = [
            name for name in self.tensors
            if name not in known and _INDEXER not in name and not (name.startswith(mtp) and not spec.n_mtp)
        ]  # fmt: skip
        if unknown:
            raise ContainerError(
                f"{self.path / self.tensors[unknown[0]][0]}: tensor {unknown[0]!r} has no place in a {spec.family} model with "
                f"this config.json ({len(unknown)} such tensors). Use the config.json that belongs to the container."
            )

    def fingerprint(self) -> str:
        """Stands for the content: config.json, all headers, and some samples of each file's bytes."""
        parts = [checksum(read_file(self.path / "config.json", _CONFIG_LIMIT_BYTES)), *self._headers]
        for file, size in self.sizes.items():
            fd = open_file(self.path / file)
            try:
                step = max((size - _SAMPLE_BYTES) // _SAMPLES, 1)
                parts += [checksum(os.pread(fd, _SAMPLE_BYTES, (i + 1) * step)) for i in range(_SAMPLES)]
            finally:
                os.close(fd)
        return checksum("".join(parts).encode())


def _spec_of(path: Path, found: _Found) -> tuple[ModelSpec, tuple[str, ...], int]:
    """The model as it can run: without an MTP layer or a sparse indexer that the files lack."""
    spec = load_spec(path)
    notes: list[str] = []
    if spec.n_mtp and not any(name.startswith(f"model.layers.{spec.n_layers}.") for name in found.tensors):
        spec = load_spec(path, has_mtp=False)
        notes.append("its MTP layer is not there: no drafts, the same text.")
    topk = max((a.indexer.topk for a in spec.attention if isinstance(a, Latent) and a.indexer), default=0)
    if not topk:
        return spec, tuple(notes), 0
    owners = [
        layer for layer, a in enumerate(spec.attention[: spec.n_layers]) if isinstance(a, Latent) and a.owns_indexer
    ]
    is_complete = all(f"model.layers.{layer}{_INDEXER}wq_b.weight" in found for layer in owners)
    mtp_has_one = f"model.layers.{spec.n_layers}{_INDEXER}wq_b.weight" in found
    attention = [
        msgspec.structs.replace(a, indexer=None)
        if isinstance(a, Latent) and not (is_complete and (layer < spec.n_layers or mtp_has_one))
        else a
        for layer, a in enumerate(spec.attention)
    ]
    spec = msgspec.structs.replace(spec, attention=tuple(attention))
    if is_complete:
        return spec, tuple(notes), 0
    notes.append(
        f"its sparse indexer is not there, so attention is dense: up to {topk:,} positions that is what the indexer would "
        "choose; beyond them it is another (slower) model, which --attention dense allows."
    )
    return spec, tuple(notes), topk


def _source(spec: ModelSpec, item: DenseItem) -> Source:
    source = item.source or Source(item.name, item.shape)
    if item.name == _HEAD and spec.tie_embeddings:
        source = Source(_EMBEDDING, item.shape)
    return msgspec.structs.replace(source, name=source_name(spec.family, source.name))


def _is_exact(found: _Found, name: str) -> bool:
    return name + SCALES not in found.tensors


def _item(found: _Found, spec: ModelSpec, item: DenseItem) -> DenseItem:
    """The item in the format in which it will lie in memory."""
    source = _source(spec, item)
    if item.kind == "vector" or item.role == "exact":
        return item
    if item.kind == "table":
        raw = found.matrix(source.name, source.shape)
        if raw.format != "q8":
            raise ContainerError(
                f"{raw.file}: the embedding {source.name!r} is int4; int8 with a scale per row is expected."
            )
        return msgspec.structs.replace(item, format="q8")
    raw = found.matrix(source.name, source.shape)
    return msgspec.structs.replace(item, format=_OFFSET_FORMAT if source.is_transposed else raw.format)


def _entry(found: _Found, spec: ModelSpec, item: DenseItem) -> DenseEntry:
    source = _source(spec, item)
    stored = [part.n_bytes for part in item.stored]
    scale_bytes = stored[1] if len(stored) > 1 else 0
    raw: RawMatrix | None = None
    offset = scale_offset = 0
    if item.kind == "vector":
        file, entry = found.exact(source.name, source.shape)
        offset = entry.offset
    elif item.kind == "table":
        table = found.matrix(source.name, source.shape)
        file, offset, scale_offset = table.file, table.offset, table.scale_offset
        if table.scale_file != file or table.is_f16:
            raise ContainerError(f"{file}: the scales of {source.name!r} must lie in the same file, as F32.")
    elif _is_exact(found, source.name):
        file, entry = found.exact(source.name, source.shape)
        out, in_ = source.shape
        raw = RawMatrix(source.name, file, entry.offset, file, 0, "f32", out, in_, 0, False)
    else:
        raw = found.matrix(source.name, source.shape)
        file = raw.file
    if raw is not None:
        raw = msgspec.structs.replace(
            raw, start=source.start, stride=source.stride, n_rows=source.n_rows, is_transposed=source.is_transposed
        )
    return DenseEntry(
        item.name, item.kind, file, offset, stored[0], item.format, item.role, item.shape, item.stack, "",
        scale_offset, scale_bytes, "", raw,
    )  # fmt: skip


def _experts(found: _Found, spec: ModelSpec, layer: int) -> ExpertFile:
    inner, hidden = spec.expert_inner, spec.hidden
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if spec.inner.has_biases:
        raise ContainerError(
            f"{found.path}: experts of {spec.family} have biases, which containers of the {MADE_BY} lack."
        )
    matrices = [
        [found.matrix(_expert_name(spec, layer, expert, part, shape), shape) for part, shape in shapes.items()]
        for expert in range(spec.n_experts)
    ]
    first = matrices[0]
    kind = [(raw.format, raw.group, raw.is_f16) for raw in first]
    for expert, of_expert in enumerate(matrices):
        if [(raw.format, raw.group, raw.is_f16) for raw in of_expert] != kind or len({fmt for fmt, _, _ in kind}) > 1:
            raise ContainerError(
                f"{of_expert[0].file}: expert {expert} of layer {layer} has {', '.join(_kind(raw) for raw in of_expert)}; all "
                f"matrices of a layer's experts must have the same format, as {_kind(first[0])}. Convert the model's "
                "checkpoint instead: colibri convert."
            )
    files = tuple(sorted({path for of_expert in matrices for raw in of_expert for path in (raw.file, raw.scale_file)}))
    number = {path: i for i, path in enumerate(files)}
    at = np.array([[*(raw.offset for raw in row), *(raw.scale_offset for raw in row)] for row in matrices], np.int64)
    file_of = np.array(
        [[*(number[raw.file] for raw in row), *(number[raw.scale_file] for raw in row)] for row in matrices], np.int32
    )
    raw = RawExperts(files, file_of, at, tuple(first))
    layout = expert_layout(first[0].format, inner, hidden)
    return ExpertFile(
        layer, f"experts of layer {layer}", first[0].format, 0, layout.record_bytes, spec.n_experts, (), layout,
        (Copy(files[0], 0),), raw,
    )  # fmt: skip


def _expert_name(spec: ModelSpec, layer: int, expert: int, part: str, shape: tuple[int, int]) -> str:
    source = expert_source(spec.family, layer, expert, spec.n_experts, f"{part}.weight", shape)
    if source.index is not None:
        raise ContainerError(
            f"Experts of {spec.family} lie in one tensor; containers of the {MADE_BY} are not read of it."
        )
    return source.name


def _grouping(group: int) -> str:
    return f"gs{group}" if group else "per row"


def _kind(raw: RawMatrix) -> str:
    return f"{raw.format} {_grouping(raw.group)}{' f16' if raw.is_f16 else ''}"
