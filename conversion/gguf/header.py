"""Headers of GGUF files, read by hand: the library maps whole files and believes every length in them.

Format (versions 2 and 3, little-endian): "GGUF", version u32, number of tensors u64, number of keys u64; the keys, each a
string, a type u32 and a value; the tensors, each a name, the number of dimensions u32, dimensions u64 (the fastest first), a
type u32 and an offset u64; then, at a multiple of the alignment, the data. Strings are a length u64 and UTF-8, arrays a type
u32, a length u64 and the values. Everything may come from a stranger: lengths are compared with the file's size before memory
is spent on them.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.container.recognise import GGUF_MAGIC
from shared.container.safetensors_file import TensorEntry
from shared.errors import ContainerError
from shared.files import open_file

_VERSIONS = (2, 3)
_HEADER_LIMIT = 512 << 20
"""Many times the largest vocabulary."""
_PIECE_BYTES = 4 << 20
_KEY_LIMIT, _TEXT_LIMIT = 1 << 16, 64 << 20
_MAX_DIMS = 4
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"), 6: ("f32", "f"),
    7: ("bool", "B"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_F32 = 6


class GgufHeader(msgspec.Struct, frozen=True):
    """One file: its keys as plain values, its tensors in the order of their bytes. Shapes have the slowest dimension first."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    file_bytes: int


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a file, checked against the file's size. ContainerError when missing, truncated or malformed."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        raise ContainerError(f"{path} is missing. Copy it again from where the model came from.") from None
    except OSError as error:
        raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
    try:
        return gguf_header_of(fd, path)
    finally:
        os.close(fd)


def gguf_header_of(fd: int, path: Path) -> GgufHeader:
    """``read_gguf_header`` of an open file."""
    reader = _Reader(fd, path)
    version, n_tensors, n_keys = _read_start(reader)
    del version
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = reader.text("a key", _KEY_LIMIT)
        if key in metadata:
            raise reader.complaint(f"has the key {key!r} twice")
        metadata[key] = _read_value(reader, reader.u32(), key)
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = reader.text("a tensor's name", _KEY_LIMIT)
        n_dims = reader.u32()
        if not 1 <= n_dims <= _MAX_DIMS:
            raise reader.complaint(f"gives tensor {name!r} {n_dims:,} dimensions, it can have 1 to {_MAX_DIMS}")
        dims = tuple(reader.u64() for _ in range(n_dims))
        kind, offset = reader.u32(), reader.u64()
        if name in found:
            raise reader.complaint(f"lists tensor {name!r} twice")
        found[name] = (dims[::-1], kind, offset)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise reader.complaint(f"has the alignment {alignment!r}, which is no power of two")
    data_offset = -(-reader.position // alignment) * alignment
    tensors = {
        name: _entry(reader, name, shape, kind, data_offset + offset) for name, (shape, kind, offset) in found.items()
    }
    return GgufHeader(metadata, _in_order(reader, tensors, data_offset, alignment), reader.file_bytes)


def type_sizes(kind: int | str) -> tuple[str, int, int]:
    """(name, values of a block, bytes of a block) of a tensor's type, given by number or name. KeyError: there is none."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        found = GGMLQuantizationType[kind] if isinstance(kind, str) else GGMLQuantizationType(kind)
    except ValueError:
        raise KeyError(kind) from None
    return found.name, *GGML_QUANT_SIZES[found]


class _Reader:
    """Reads on from a position of a file; every length is checked against what is left of it."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path
        self.file_bytes = os.fstat(fd).st_size
        self._buffer, self._at, self._start = b"", 0, 0

    @property
    def position(self) -> int:
        return self._start + self._at

    @property
    def n_left(self) -> int:
        return self.file_bytes - self.position

    def complaint(self, what: str) -> ContainerError:
        return ContainerError(f"{self._path} {what}: its header is damaged. Copy the file again.")

    def take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self.n_left:
            raise ContainerError(
                f"{self._path} is truncated or damaged: {what} should take {n_bytes:,} bytes at byte {self.position:,}, the "
                f"file has {self.file_bytes:,}. Copy the file again."
            )
        if self.position + n_bytes > _HEADER_LIMIT:
            raise ContainerError(
                f"{self._path} has a header of more than the {_HEADER_LIMIT:,} bytes that are read. Copy the file again."
            )
        if self._at + n_bytes > len(self._buffer):
            self._start, self._at = self.position, 0
            self._buffer = self._read(max(n_bytes, _PIECE_BYTES))
            if len(self._buffer) < n_bytes:
                raise ContainerError(f"{self._path} became shorter while it was read. Copy the file again.")
        found = self._buffer[self._at : self._at + n_bytes]
        self._at += n_bytes
        return found

    def _read(self, n_bytes: int) -> bytes:
        found = b""
        try:
            while len(found) < n_bytes:
                piece = os.pread(self._fd, n_bytes - len(found), self._start + len(found))
                if not piece:
                    break
                found += piece
        except OSError as error:
            raise ContainerError(f"{self._path} can't be read: {error.strerror}.") from None
        return found

    def u32(self) -> int:
        return int.from_bytes(self.take(4, "a number"), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8, "a number"), "little")

    def text(self, what: str, limit: int) -> str:
        n_bytes = self.u64()
        if n_bytes > limit:
            raise self.complaint(f"gives {what} {n_bytes:,} bytes, more than the {limit:,} it may have")
        try:
            return self.take(n_bytes, what).decode()
        except UnicodeDecodeError:
            raise self.complaint(f"has {what} that is no UTF-8 (before byte {self.position:,})") from None


def _read_start(reader: _Reader) -> tuple[int, int, int]:
    start = reader.take(4, "the magic number")
    if start != GGUF_MAGIC:
        raise ContainerError(
            f"{reader._path} is no GGUF file: it begins with {start!r}, not with {GGUF_MAGIC!r}. Copy the file again."
        )
    version = reader.u32()
    if version and not version & 0xFFFF:
        raise ContainerError(
            f"{reader._path} is a GGUF file for big-endian machines, which is not read. Use the little-endian one that models "
            "are published as."
        )
    if version not in _VERSIONS:
        raise ContainerError(
            f"{reader._path} is a GGUF file of version {version}; versions {' and '.join(map(str, _VERSIONS))} are read. "
            "Use a file that a current llama.cpp made."
        )
    n_tensors, n_keys = reader.u64(), reader.u64()
    for n, what, least in ((n_tensors, "tensors", 32), (n_keys, "keys", 13)):
        if n * least > reader.n_left:
            raise reader.complaint(f"promises {n:,} {what}, which can't be in {reader.file_bytes:,} bytes")
    return version, n_tensors, n_keys


def _read_value(reader: _Reader, kind: int, key: str) -> Any:
    if kind == _STRING:
        return reader.text(f"the value of {key!r}", _TEXT_LIMIT)
    if kind in _SCALARS:
        return _numbers(reader, kind, 1, key)[0]
    if kind != _ARRAY:
        raise reader.complaint(f"gives {key!r} a value of type {kind:,}, which there is not")
    inner, n = reader.u32(), reader.u64()
    if inner == _STRING:
        if 8 * n > reader.n_left:
            raise reader.complaint(f"promises {n:,} texts in {key!r}, which can't be in {reader.file_bytes:,} bytes")
        return [reader.text(f"a text of {key!r}", _TEXT_LIMIT) for _ in range(n)]
    if inner not in _SCALARS:
        raise reader.complaint(f"gives {key!r} an array of values of type {inner:,}, which is not read")
    return _numbers(reader, inner, n, key)


def _numbers(reader: _Reader, kind: int, n: int, key: str) -> list[Any]:
    """f32 becomes the shortest decimal number that is rounded to it: 1e-05, not 9.999999747378752e-06."""
    code = _SCALARS[kind][1]
    raw = reader.take(n * struct.calcsize(f"<{code}"), f"the value of {key!r}")
    values = list(struct.unpack(f"<{n}{code}", raw))
    if kind == _BOOL:
        if any(value > 1 for value in values):
            raise reader.complaint(f"gives {key!r} a truth value that is neither 0 nor 1")
        return [bool(value) for value in values]
    return [float(str(np.float32(value))) for value in values] if kind == _F32 else values


def _entry(reader: _Reader, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
    try:
        dtype, n_values, n_bytes = type_sizes(kind)
    except KeyError:
        raise reader.complaint(f"gives tensor {name!r} the type {kind:,}, which there is not") from None
    n = 1
    for dim in shape:
        n *= dim
        if n > 1 << 62:
            break
    if not 0 < n <= 1 << 62 or shape[-1] % n_values:
        raise reader.complaint(
            f"gives tensor {name!r} of type {dtype} the shape {list(shape)}, whose rows are not whole blocks of {n_values}"
            if n
            else f"gives tensor {name!r} the shape {list(shape)}, which holds nothing"
        )
    return TensorEntry(dtype, shape, offset, n // n_values * n_bytes)


def _in_order(
    reader: _Reader, tensors: dict[str, TensorEntry], data_offset: int, alignment: int
) -> dict[str, TensorEntry]:
    """Tensors follow each other, each at the next multiple of the alignment, up to the file's end."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].n_bytes)))
    end, last = data_offset, ""
    for name, entry in ordered.items():
        if entry.offset != end:
            where = f"behind {last!r}" if last else "where the data begin"
            raise reader.complaint(f"lets tensor {name!r} begin at byte {entry.offset:,}, not at {end:,}, {where}")
        stop = entry.offset + entry.n_bytes
        if stop > reader.file_bytes:
            raise ContainerError(
                f"{reader._path} is truncated: tensor {name!r} ({entry.dtype}, {list(entry.shape)}) ends at byte {stop:,}, the "
                f"file has {reader.file_bytes:,}. Copy the file again."
            )
        end, last = -(-stop // alignment) * alignment, name
    if reader.file_bytes > max(end, data_offset):
        raise reader.complaint(
            f"should have {end:,} bytes, it has {reader.file_bytes:,}, so something lies behind {last or 'the header'!r}"
        )
    return ordered
