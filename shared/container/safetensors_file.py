"""Headers of safetensors files, read and written by hand: files are too large to map, and records must be aligned.

Format: 8 bytes little-endian header length, a JSON header, then the tensors without gaps. Everything that is read here may
come from a stranger: lengths are bounded before memory is spent on them, and offsets are checked against the file's size.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.container.format import RECORD_ALIGN, SAFETENSORS_DTYPE_BYTES, Stored
from shared.errors import ContainerError

_HEADER_LIMIT = 100_000_000


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a file: dtype as the header names it, absolute byte offset, bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class FileHeader(msgspec.Struct, frozen=True):
    """A safetensors file's tensors, in the header's order, and where its data starts."""

    tensors: dict[str, TensorEntry]
    data_offset: int
    file_bytes: int


def read_header(path: Path) -> FileHeader:
    """The header of a file, checked against the file's size. ContainerError when missing, truncated or malformed."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ContainerError(f"{path} is truncated: {size} bytes are no safetensors file. Copy the file again.")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _HEADER_LIMIT):
                raise ContainerError(
                    f"{path} is truncated or no safetensors file: its header should take {length:,} bytes, the file has "
                    f"{size:,}. Copy the file again."
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise ContainerError(f"{path} is missing. Copy it again from where the model came from.") from None
    except OSError as error:
        raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        raise ContainerError(f"{path} has a header that is not JSON. Copy the file again.") from None
    if not isinstance(parsed, dict):
        raise ContainerError(f"{path} has a header that is not a JSON object. Copy the file again.")
    data_offset = 8 + length
    tensors = {name: _entry(path, name, value, data_offset) for name, value in parsed.items() if name != "__metadata__"}
    end = max((entry.offset + entry.n_bytes for entry in tensors.values()), default=data_offset)
    if end > size:
        raise ContainerError(
            f"{path} is truncated: its header promises {end:,} bytes, the file has {size:,}. Copy the file again."
        )
    return FileHeader(tensors, data_offset, size)


def _entry(path: Path, name: str, value: Any, data_offset: int) -> TensorEntry:
    def is_size(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62

    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(is_size, [*shape, begin, end])):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ContainerError(
            f"{path}: the header's entry of tensor {name!r} is malformed. Copy the file again."
        ) from None
    n_bytes = end - begin
    item_bytes = SAFETENSORS_DTYPE_BYTES.get(dtype)
    expected = item_bytes
    for dim in shape:
        expected = None if expected is None else expected * dim
    if n_bytes < 0 or (expected is not None and expected != n_bytes):
        raise ContainerError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {shape} should have "
            f"{'?' if expected is None else f'{expected:,}'} bytes, the header gives it {n_bytes:,}. Copy the file again."
        )
    return TensorEntry(dtype, tuple(shape), data_offset + begin, n_bytes)


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
