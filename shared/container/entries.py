"""What a container has, and where: tensors of the dense part, the experts of a layer and their copies. Reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from shared.container.dense_reads import Part
from shared.container.format import ExpertLayout
from shared.container.mirror import Held


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

    def parts(self) -> list[Part]:
        """The weight, and the scales if it has any."""
        parts = [Part(self.name, self.file, self.offset, self.bytes, self.checksum)]
        if self.scale_bytes:
            name = f"{self.name}.scale"
            parts.append(Part(name, self.file, self.scale_offset, self.scale_bytes, self.scale_checksum))
        return parts


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

    def part(self, expert: int, copy: Copy | None = None) -> Part:
        """One record, from ``copy`` or the first that holds it."""
        path = (copy or self.copy_of(expert)).path
        what = f"layer {self.layer} expert {expert}"
        return Part(what, path, self.offset_of(expert), self.record_bytes, self.checksums[expert])
