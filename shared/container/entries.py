"""What a container has, and where: tensors of the dense part, the experts of a layer and their copies. Reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from native.reader import SECTOR
from shared.container.dense_reads import Part
from shared.container.format import ExpertLayout
from shared.container.mirror import Held


class Extent(msgspec.Struct, frozen=True):
    """A range of a file that a record is read from, and where it goes: in the record, or in the stage it is made from."""

    path: Path
    offset: int
    n_bytes: int
    at: int


class RawMatrix(msgspec.Struct, frozen=True):
    """A matrix [out, in_] row after row with its scales: q4 as nibbles q + 8, the lower one first, q8 as signed bytes, or f32.

    ``group``: inputs per scale, 0: one a row. From ``start`` on: which rows a stack of matrices is made from, as in ``Source``.
    """

    name: str
    file: Path
    offset: int
    scale_file: Path
    scale_offset: int
    format: str
    out: int
    in_: int
    group: int
    is_f16: bool
    start: int = 0
    stride: int = 0
    n_rows: int = 0
    is_transposed: bool = False

    @property
    def row_bytes(self) -> int:
        return {"q4": -(-self.in_ // 2), "q8": self.in_, "f32": 4 * self.in_}[self.format]

    @property
    def scale_row_bytes(self) -> int:
        if self.format == "f32":
            return 0
        return (2 if self.is_f16 else 4) * (-(-self.in_ // self.group) if self.group else 1)

    @property
    def n_bytes(self) -> int:
        return self.out * self.row_bytes

    @property
    def scale_bytes(self) -> int:
        return self.out * self.scale_row_bytes


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
    raw: RawMatrix | None = None
    """What it is made from when it is read; None: it lies as it is used."""

    def parts(self) -> list[Part]:
        """The weight, and the scales if it has any, as they lie. Without a checksum where nobody has written one down."""
        if self.raw is not None:
            raw = self.raw
            found = [Part(self.name, raw.file, raw.offset, raw.n_bytes, "")]
            if raw.scale_bytes:
                found.append(Part(f"{self.name}.scale", raw.scale_file, raw.scale_offset, raw.scale_bytes, ""))
            return found
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


class RawRecord(NamedTuple):
    """Where a record's bytes lie and go in a stage; where in the stage its six tensors begin: gate, up, down, their scales."""

    extents: tuple[Extent, ...]
    places: tuple[int, ...]


class RawExperts:
    """A layer's experts, each as six ranges of some files: gate, up and down row after row, and their scales.

    ``file_of`` i32[E, 6] and ``at`` i64[E, 6] say where each lies; ``matrices`` are those of the first expert, whose formats
    and sizes all have.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        file_of: npt.NDArray[np.int32],
        at: npt.NDArray[np.int64],
        matrices: tuple[RawMatrix, ...],
    ) -> None:
        self.files, self.matrices = files, matrices
        self._file_of, self._at = file_of, at
        self._sizes = (*(m.n_bytes for m in matrices), *(m.scale_bytes for m in matrices))

    @property
    def stage_bytes(self) -> int:
        """Room for any record's ranges, each widened to sectors of its own; a multiple of 4096."""
        return sum(-(-size // SECTOR) * SECTOR + SECTOR for size in self._sizes)

    def record(self, expert: int) -> RawRecord:
        """Ranges that follow each other in a file are one extent: as a rule there are two, weights and scales."""
        file_of, at = self._file_of[expert].tolist(), self._at[expert].tolist()
        places = [0] * len(self._sizes)
        extents: list[Extent] = []
        end = 0
        for i in sorted(range(len(at)), key=lambda i: (file_of[i], at[i])):
            path, offset, size = self.files[file_of[i]], at[i], self._sizes[i]
            if extents and (extents[-1].path, extents[-1].offset + extents[-1].n_bytes) == (path, offset):
                last = extents[-1]
                places[i] = last.at + last.n_bytes
                extents[-1] = Extent(path, last.offset, last.n_bytes + size, last.at)
            else:
                places[i] = -(-end // SECTOR) * SECTOR + offset % SECTOR
                extents.append(Extent(path, offset, size, places[i]))
            end = places[i] + size
        return RawRecord(tuple(extents), tuple(places))


class ExpertFile(msgspec.Struct, frozen=True):
    """One MoE layer's records: record ``e`` lies at ``offset_of(e)``, a multiple of 4096, in every copy that holds it.

    With ``raw`` it is made from ranges that lie elsewhere: ask ``extents``.
    """

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
    raw: RawExperts | None = None

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

    def extents(self, expert: int, copy: Copy | None = None) -> tuple[Extent, ...]:
        """What to read for a record, from ``copy`` or the first that holds it: one range of a record that lies whole."""
        if self.raw is not None:
            return self.raw.record(expert).extents
        path = (copy or self.copy_of(expert)).path
        return (Extent(path, self.offset_of(expert), self.record_bytes, 0),)

    def parts(self, expert: int, copy: Copy | None = None) -> list[Part]:
        """The same with the checksum, where there is one."""
        known = self.checksums[expert] if self.checksums else ""
        what = f"layer {self.layer} expert {expert}"
        return [Part(what, each.path, each.offset, each.n_bytes, known) for each in self.extents(expert, copy)]

    @property
    def probe_reads(self) -> tuple[Path, tuple[int, ...], int]:
        """(file, offsets, bytes) of reads like those of its records, at sectors: for measuring the drive."""
        if self.raw is None:
            held = [expert for expert in range(self.n_experts) if self.copies[0].holds(expert)]
            return self.path, tuple(map(self.offset_of, held)), self.record_bytes
        largest = [max(self.extents(expert), key=lambda each: each.n_bytes) for expert in range(self.n_experts)]
        alike = [each for each in largest if each.path == largest[0].path]
        # Rounded down at both ends: never past the end of the file.
        n_bytes = min(each.n_bytes for each in alike) // SECTOR * SECTOR
        return largest[0].path, tuple(each.offset // SECTOR * SECTOR for each in alike), n_bytes
