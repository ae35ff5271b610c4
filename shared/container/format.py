"""The container's format: which tensors a model must have, in which format, shape and file; the structs of the index.

Pure: no files are touched here. The converter, ``synth`` and the reader all derive what they write or expect from
``plan_container``, so a container is complete exactly when it matches its own ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from native.matrix import FORMATS, scale_bytes, weight_bytes
from shared.errors import ContainerError
from shared.model.spec import ModelSpec
from shared.model.tensors import PlannedTensor, Source, planned_matrix, planned_vector

FORMAT_VERSION = 1
INDEX_NAME = "colibri.json"
RECORD_ALIGN = 4096
SECTION_ALIGN = 64
DENSE_FILE_BYTES = 2_000_000_000
PLAIN_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")

ROLES = ("expert", "shared", "attention", "embed", "head", "mtp", "exact")


def _formats(matrices: str, tables: str) -> dict[str, str]:
    """An int4 MTP head accepts nothing and an int4 embedding or head costs quality: those three have a format of their own."""
    own = dict.fromkeys(("expert", "shared", "attention"), matrices)
    return {**own, **dict.fromkeys(("embed", "head", "mtp"), tables), "exact": "f32"}


PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "int4": _formats("q4", "q8"),
    "mxfp4": {**_formats("q8", "q8"), "expert": "mxfp4"},
    "int8": _formats("q8", "q8"),
    "bf16": _formats("bf16", "bf16"),
    "f32": _formats("f32", "f32"),
}
"""Format of each role under a ``--precision``."""
DEFAULT_PRECISION = "int4"

TABLE_DTYPES: Mapping[str, str] = {"f32": "F32", "bf16": "BF16", "q8": "I8"}
"""Formats that the embedding may have, and how its plain rows are stored."""
SAFETENSORS_DTYPE_BYTES = {"U8": 1, "I8": 1, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


class DenseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of ``colibri.json``'s "dense". ``shape`` is that of one matrix of the stack, or of the vector."""

    file: str
    format: str
    role: str
    shape: tuple[int, ...]
    checksum: str
    stack: int = 1
    scale_checksum: str | None = None
    source: str | None = None
    """Stands for the checkpoint's bytes that it was made from."""


class ExpertsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of ``colibri.json``'s "experts": a layer's file."""

    file: str
    format: str
    data_offset: int
    record_bytes: int
    n_experts: int
    checksums: tuple[str, ...]
    sources: tuple[str, ...] = ()
    """For each expert, as ``DenseRecord.source``."""


class Converter(msgspec.Struct, frozen=True):
    """Who wrote the container, with which arguments."""

    version: str
    arguments: dict[str, str]


class Version(msgspec.Struct, frozen=True):
    """Of a JSON file of ours, read before anything else is believed."""

    format_version: Any = None


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``colibri.json``."""

    format_version: int
    family: str
    fingerprint: str
    precision: dict[str, str]
    converter: Converter
    dense: dict[str, DenseRecord]
    experts: dict[str, ExpertsRecord]


class ExpertLayout(msgspec.Struct, frozen=True):
    """Where the sections of one expert record lie: byte offsets from the record's start. Scales: None when unscaled."""

    format: str
    inner: int
    hidden: int
    gate_w: int
    up_w: int
    down_w: int
    gate_s: int | None
    up_s: int | None
    down_s: int | None
    record_bytes: int
    biases: tuple[int, ...] = ()
    """Of gate, up and down, f32; empty when there are none."""

    @property
    def bias_widths(self) -> tuple[int, ...]:
        return (self.inner, self.inner, self.hidden) if self.biases else ()


class Stored(msgspec.Struct, frozen=True):
    """One safetensors tensor to be: name, dtype, shape, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


class DenseItem(msgspec.Struct, frozen=True):
    """One tensor of the dense part. ``kind``: "matrix" (tile16), "table" (row-major, the embedding) or "vector" (f32).

    ``source``: what of the checkpoint it is made from; None: the tensor of the same name, as it is.
    """

    name: str
    kind: str
    role: str
    format: str
    shape: tuple[int, ...]
    stack: int = 1
    source: Source | None = None

    @property
    def stored(self) -> tuple[Stored, ...]:
        """What lies in the safetensors file: the tensor, then its scales when the format has them."""
        if self.kind == "vector":
            return (Stored(self.name, "F32", self.shape, 4 * self.shape[0]),)
        out, in_ = self.shape
        if self.kind == "table":
            dtype = TABLE_DTYPES[self.format]
            table = Stored(self.name, dtype, self.shape, out * in_ * SAFETENSORS_DTYPE_BYTES[dtype])
            scale = Stored(self.scale_name, "F32", (out,), 4 * out)
            return (table, scale) if self.format == "q8" else (table,)
        n_bytes = self.stack * weight_bytes(self.format, out, in_)
        weight = Stored(self.name, "U8", (n_bytes,), n_bytes)
        n_bytes = self.stack * scale_bytes(self.format, out, in_)
        return (weight, Stored(self.scale_name, "U8", (n_bytes,), n_bytes)) if n_bytes else (weight,)

    @property
    def scale_name(self) -> str:
        return f"{self.name}.scale"

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.stored)


class DenseFilePlan(msgspec.Struct, frozen=True):
    file: str
    items: tuple[DenseItem, ...]


class ExpertFilePlan(msgspec.Struct, frozen=True):
    """One MoE layer's experts, ascending."""

    file: str
    layer: int
    n_experts: int
    layout: ExpertLayout

    def tensor_name(self, expert: int) -> str:
        return f"model.layers.{self.layer}.mlp.experts.{expert}"


class ContainerPlan(msgspec.Struct, frozen=True):
    """Every file of a container, in the order in which they are written."""

    precision: dict[str, str]
    dense: tuple[DenseFilePlan, ...]
    experts: tuple[ExpertFilePlan, ...]

    @property
    def dense_bytes(self) -> int:
        return sum(item.n_bytes for file in self.dense for item in file.items)

    @property
    def expert_bytes(self) -> int:
        return sum(file.n_experts * file.layout.record_bytes for file in self.experts)


class Facts(msgspec.Struct, frozen=True):
    """What the ledger needs to know of a container, besides the spec. Bytes of each role's tensors as loaded."""

    dense_bytes: int
    """Attention: everything but gates, shared experts of MoE layers and the MTP layer."""
    embed_bytes: int
    """The embedding table's part of ``dense_bytes``: a token reads one row of it."""
    gate_bytes: int
    shared_bytes: int
    """Shared experts of all MoE layers (expert_io holds them)."""
    mtp_bytes: int
    """The MTP layer without gate and shared expert."""
    record_bytes: tuple[int, ...]
    """Of each MoE layer, ascending."""
    has_tokenizer: bool = True
    """A model of random weights has none."""
    stage_bytes: int = 0
    """Room that a record takes while it is put together from ranges that lie apart; 0: records lie whole."""


def check_precision(precision: Mapping[str, str]) -> None:
    """ContainerError unless every role has a format that the kernels offer for it."""
    if set(precision) != set(ROLES):
        raise ContainerError(
            f'{INDEX_NAME}: "precision" must name the roles {", ".join(ROLES)}, found {", ".join(sorted(precision)) or "none"}.'
        )
    for role, fmt in precision.items():
        allowed = ("f32",) if role == "exact" else tuple(TABLE_DTYPES) if role == "embed" else tuple(FORMATS)
        if fmt not in allowed:
            raise ContainerError(
                f'{INDEX_NAME}: precision of role "{role}" must be one of {", ".join(allowed)}, found {fmt[:40]!r}.'
            )


def expert_layout(fmt: str, inner: int, hidden: int, has_biases: bool = False) -> ExpertLayout:
    """Sections of a record, each at a multiple of 64: gate [F, D], up [F, D], down [D, F] weights, their scales, biases."""
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    at, offsets = 0, []
    for n_bytes in [weight_bytes(fmt, *shape) for shape in shapes] + [scale_bytes(fmt, *shape) for shape in shapes]:
        offsets.append(at if n_bytes else None)
        at = -(-(at + n_bytes) // SECTION_ALIGN) * SECTION_ALIGN
    gate_w, up_w, down_w, gate_s, up_s, down_s = offsets
    biases = []
    for out, _ in shapes if has_biases else ():
        biases.append(at)
        at = -(-(at + 4 * out) // SECTION_ALIGN) * SECTION_ALIGN
    assert gate_w is not None
    assert up_w is not None
    assert down_w is not None
    record_bytes = -(-at // RECORD_ALIGN) * RECORD_ALIGN
    return ExpertLayout(fmt, inner, hidden, gate_w, up_w, down_w, gate_s, up_s, down_s, record_bytes, tuple(biases))


def plan_dense_items(spec: ModelSpec, precision: Mapping[str, str]) -> list[DenseItem]:
    """Every tensor that is not a routed expert, in the order in which they are stored."""
    items = [
        DenseItem("model.embed_tokens.weight", "table", "embed", precision["embed"], (spec.vocab, spec.hidden)),
        DenseItem("model.norm.weight", "vector", "exact", "f32", (spec.hidden,)),
        DenseItem("lm_head.weight", "matrix", "head", precision["head"], (spec.vocab, spec.hidden)),
    ]
    for layer in spec.all_layers:
        items.extend(_plan_layer(spec, precision, layer))
    return items


def _plan_layer(spec: ModelSpec, precision: Mapping[str, str], layer: int) -> Iterator[DenseItem]:
    is_mtp = layer >= spec.n_layers
    prefix = f"model.layers.{layer}."
    for tensor in _layer_tensors(spec, layer):
        role = "mtp" if is_mtp and tensor.role != "exact" else tensor.role
        fmt = "f32" if tensor.kind == "vector" else precision[role]
        source = tensor.source and msgspec.structs.replace(tensor.source, name=prefix + tensor.source.name)
        yield DenseItem(prefix + tensor.name, tensor.kind, role, fmt, tensor.shape, tensor.stack, source)


def _layer_tensors(spec: ModelSpec, layer: int) -> Iterator[PlannedTensor]:
    is_mtp, hidden = layer >= spec.n_layers, spec.hidden
    if is_mtp:
        yield planned_vector("enorm.weight", hidden)
        yield planned_vector("hnorm.weight", hidden)
        yield planned_matrix("eh_proj", "mtp", hidden, 2 * hidden)
    yield from spec.attention[layer].tensors()
    if spec.layer_kind(layer) == "dense":
        ffn, inner = "mlp", spec.dense_inner
    else:
        yield from spec.gate.tensors(hidden)
        if spec.branch and not is_mtp:
            yield from spec.branch.tensors()
        ffn, inner = "mlp.shared_experts", spec.shared_inner
    if inner:
        yield planned_matrix(f"{ffn}.gate_proj", "shared", inner, hidden)
        yield planned_matrix(f"{ffn}.up_proj", "shared", inner, hidden)
        yield planned_matrix(f"{ffn}.down_proj", "shared", hidden, inner)
        if spec.has_shared_gate and ffn != "mlp":
            yield planned_matrix(f"{ffn}.own_gate", "exact", 1, hidden)
    if is_mtp:
        yield planned_vector("shared_head.norm.weight", hidden)


def plan_container(
    spec: ModelSpec, precision: Mapping[str, str], dense_file_bytes: int = DENSE_FILE_BYTES
) -> ContainerPlan:
    """Files, tensors, formats and shapes of a container of this model."""
    check_precision(precision)
    groups: list[list[DenseItem]] = [[]]
    size = 0
    for item in plan_dense_items(spec, precision):
        if groups[-1] and size + item.n_bytes > dense_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.n_bytes
    dense = tuple(DenseFilePlan(f"dense-{i:05d}.safetensors", tuple(items)) for i, items in enumerate(groups))
    experts = []
    for layer in spec.moe_layers:
        fmt = precision["mtp" if layer >= spec.n_layers else "expert"]
        layout = expert_layout(fmt, spec.expert_inner, spec.hidden, spec.inner.has_biases)
        experts.append(ExpertFilePlan(f"experts-{layer:03d}.safetensors", layer, spec.n_experts, layout))
    return ContainerPlan(dict(precision), dense, tuple(experts))


def owner_of(name: str, spec: ModelSpec) -> str:
    """Which process holds a dense tensor: "dense" (attention), "gate" (router), "shared" (expert_io), "mtp" (drafter)."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return "dense"
    layer = int(parts[2])
    if parts[3:5] == ["mlp", "gate"]:
        return "gate"
    if parts[3:5] == ["mlp", "shared_experts"]:
        return "shared"
    return "mtp" if layer >= spec.n_layers else "dense"


def plan_facts(spec: ModelSpec, plan: ContainerPlan) -> Facts:
    """Bytes by owner, of a container that exists or of one that would be made."""
    sums = dict.fromkeys(("dense", "gate", "shared", "mtp"), 0)
    embed = 0
    for file in plan.dense:
        for item in file.items:
            size = sum(-(-part.n_bytes // SECTION_ALIGN) * SECTION_ALIGN for part in item.stored)
            sums[owner_of(item.name, spec)] += size
            embed += size if item.kind == "table" else 0
    records = tuple(file.layout.record_bytes for file in plan.experts)
    return Facts(sums["dense"], embed, sums["gate"], sums["shared"], sums["mtp"], records)
