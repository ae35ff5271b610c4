"""Headers of safetensors files, read and written by hand: files are too large to map, and records must be aligned.

Format: 8 bytes little-endian header length, a JSON header, then the tensors without gaps. Everything that is read here may
come from a stranger: lengths are bounded before memory is spent on them, and offsets are checked against the file's size.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.container.format import RECORD_ALIGN, Stored
from shared.errors import ContainerError
from shared.files import open_file, strict_json

_HEADER_LIMIT = 32 << 20
"""Four times what the largest model needs that has all of its experts in one file."""
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""What safetensors files may hold; what can be converted is the checkpoint's affair."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a file: dtype as the header names it, absolute byte offset, bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class FileHeader(msgspec.Struct, frozen=True):
    """A safetensors file's tensors in the order of their bytes, and where its data starts."""

    tensors: dict[str, TensorEntry]
    data_offset: int
    file_bytes: int


def read_header(path: Path, wanted: str = "") -> FileHeader:
    """The header of a file, checked against the file's size. ContainerError when missing, truncated or malformed.

    ``wanted``: a tensor that the file should hold, for complaints that can name no other.
    """
    try:
        fd = open_file(path)
    except FileNotFoundError:
        raise ContainerError(
            f"{path} is missing{_holding(wanted)}. Copy it again from where the model came from."
        ) from None
    except OSError as error:
        raise ContainerError(f"{path} can't be read{_holding(wanted)}: {error.strerror}.") from None
    try:
        return header_of(fd, path, wanted)
    finally:
        os.close(fd)


def header_of(fd: int, path: Path, wanted: str = "") -> FileHeader:
    """``read_header`` of an open file."""

    def read(at: int, n_bytes: int) -> bytes:
        found = b""
        while len(found) < n_bytes and (piece := os.pread(fd, n_bytes - len(found), at + len(found))):
            found += piece
        return found

    try:
        return header_from(read, os.fstat(fd).st_size, path, wanted)
    except OSError as error:
        raise ContainerError(f"{path} can't be read{_holding(wanted)}: {error.strerror}.") from None


def header_from(read: Callable[[int, int], bytes], size: int, path: Path, wanted: str = "") -> FileHeader:
    """``read_header`` of a file of ``size`` bytes, wherever it is: ``read(offset, n)`` gives up to n bytes of it."""
    prefix = read(0, 8)
    if len(prefix) < 8:
        raise ContainerError(
            f"{path} is truncated{_holding(wanted)}: {size} bytes are no safetensors file. Copy the file again."
        )
    (length,) = struct.unpack("<Q", prefix)
    raw = b"" if length > min(size - 8, _HEADER_LIMIT) else read(8, length)
    if _HEADER_LIMIT < length <= size - 8:
        raise ContainerError(
            f"{path} has a header of {length:,} bytes{_holding(wanted)}, more than the {_HEADER_LIMIT:,} that are read. "
            "Save it again in several shards."
        )
    if len(raw) < length:
        raise ContainerError(
            f"{path} is truncated or no safetensors file{_holding(wanted)}: its header should take {length:,} bytes, the "
            f"file has {size:,}. Copy the file again."
        )
    return FileHeader(parse_header(raw, size - 8 - length, path, wanted), 8 + length, size)


def parse_header(raw: bytes, data_bytes: int, path: Path, wanted: str = "") -> dict[str, TensorEntry]:
    """The tensors of a JSON header with ``data_bytes`` of data behind it; as strict as the safetensors library. Pure.

    Tensors cover the data exactly: they follow each other from its first byte to its last, without hole, overlap or rest.
    """
    try:
        parsed = strict_json(raw)
    except ValueError as error:
        raise ContainerError(
            f"{path} has a header that is not valid JSON{_holding(wanted)} ({error}). Copy the file again."
        ) from None
    if not isinstance(parsed, dict):
        raise ContainerError(f"{path} has a header that is not a JSON object{_holding(wanted)}. Copy the file again.")
    notes = parsed.pop("__metadata__", None)
    if notes is None:
        notes = {}
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ContainerError(
            f'{path} has a "__metadata__" in its header that is no object of strings{_holding(wanted)}. Copy the file again.'
        )
    data_offset = 8 + len(raw)
    found = {name: _entry(path, name, value, data_offset) for name, value in parsed.items()}
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].offset, item[1].n_bytes)))
    end, last = data_offset, ""
    for name, entry in tensors.items():
        if entry.offset != end:
            where = f"where {last!r} ends" if last else "where the header ends"
            raise ContainerError(
                f"{path}: tensor {name!r} begins at byte {entry.offset:,}, it should begin at {end:,}, {where}. The header is "
                "damaged: copy the file again."
            )
        end, last = entry.offset + entry.n_bytes, name
        if end > data_offset + data_bytes:
            raise ContainerError(
                f"{path} is truncated: tensor {name!r} ends at byte {end:,}, the file has {data_offset + data_bytes:,}. "
                "Copy the file again."
            )
    if end != data_offset + data_bytes:
        behind = f"its last tensor {last!r}" if last else "its header"
        raise ContainerError(
            f"{path} should have {end:,} bytes, it has {data_offset + data_bytes:,}: something lies behind {behind}. "
            "Copy the file again."
        )
    return tensors


def _entry(path: Path, name: str, value: Any, data_offset: int) -> TensorEntry:
    def is_size(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62

    try:
        name.encode()
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(is_size, [*shape, begin, end])):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ContainerError(
            f"{path}: the header's entry of tensor {name!r} is malformed. Copy the file again."
        ) from None
    if dtype not in _DTYPE_BITS:
        raise ContainerError(
            f"{path}: tensor {name!r} has dtype {dtype[:40]!r}, which no safetensors file has. Copy the file again."
        )
    n_bits = _DTYPE_BITS[dtype]
    for dim in shape:
        n_bits *= dim
        if n_bits > 1 << 70:  # no file has that; a long shape must not become a long multiplication
            break
    n_bytes = end - begin
    if n_bytes < 0 or n_bits != 8 * n_bytes:
        raise ContainerError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {_short(shape)} should have {-(-n_bits // 8):,} bytes, the "
            f"header gives it {n_bytes:,}. Copy the file again."
        )
    return TensorEntry(dtype, tuple(shape), data_offset + begin, n_bytes)


def _holding(wanted: str) -> str:
    return f" (it should hold {wanted!r})" if wanted else ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def build_header(tensors: Sequence[Stored], align: int = RECORD_ALIGN) -> bytes:
    """Length and JSON header for tensors that follow each other; padded with spaces so that data starts at ``align``."""
    at = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "colibri"}}
    for tensor in tensors:
        end = at + tensor.n_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text
