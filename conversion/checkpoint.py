"""A Hugging Face checkpoint as the converter sees it: named tensors in any number of files, read in pieces as f32.

Formats are decided per tensor by dtype: F32, BF16, F16, or F8_E4M3 with one multiplier per block of 128 x 128 in a sibling
``<name>_scale_inv`` (the last block of a row or column may be partial). Memory is bounded by the piece that is asked for.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.container.checksum import checksum
from shared.container.format import PLAIN_FILE_NAME
from shared.container.pack import F32, from_bf16
from shared.container.safetensors_file import TensorEntry, read_header
from shared.errors import ContainerError, ShortRead

FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "F8_E4M3": np.uint8}
_INDEX_LIMIT_BYTES = 256 << 20


def _fp8_table() -> F32:
    """Value of each E4M3 (finite) byte: 1 sign, 4 exponent (bias 7), 3 mantissa; 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


_FP8 = _fp8_table()


class SourceTensor(msgspec.Struct, frozen=True):
    file: str
    entry: TensorEntry


class Checkpoint:
    """Headers of all shards, checked; ``rows`` reads. Names are without the prefix that some repositories add."""

    def __init__(self, directory: Path, tensors: dict[str, SourceTensor], files: dict[str, str], prefix: str) -> None:
        self.directory, self.tensors, self.prefix = directory, tensors, prefix
        self.files = files
        """Shard -> what identifies it: bytes and a checksum of its tensor list."""
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """ContainerError names the shard that is missing, truncated or malformed, or a tensor that is listed twice."""
        names, weight_map = _shards(directory)
        tensors: dict[str, SourceTensor] = {}
        files: dict[str, str] = {}
        for file in names:
            header = read_header(directory / file)
            listing = json.dumps([[name, msgspec.to_builtins(entry)] for name, entry in sorted(header.tensors.items())])
            files[file] = f"{header.file_bytes}:{checksum(listing.encode())}"
            for name, entry in header.tensors.items():
                if weight_map is not None and weight_map.get(name, file) != file:
                    continue
                if name in tensors:
                    raise ContainerError(
                        f"{directory}: tensor {name!r} is in both {tensors[name].file} and {file}. "
                        f"Remove the shard that does not belong to the checkpoint, or add its {_INDEX_FILE}."
                    )
                tensors[name] = SourceTensor(file, entry)
        for name, file in (weight_map or {}).items():
            if name not in tensors:
                raise ContainerError(
                    f"{_INDEX_FILE} says that {file} holds {name!r}, but it does not. Copy both again."
                )
        prefix = _common_prefix(tensors)
        if prefix:
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return Checkpoint(directory, tensors, files, prefix)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].entry.shape

    def require(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Checks that a tensor is there with this shape and a readable dtype; returns the names it consumes."""
        if name not in self.tensors:
            raise ContainerError(
                f"{self.directory} has no tensor {self.prefix + name!r}, which its config.json calls for. "
                "Complete the checkpoint, or use the config.json that belongs to it."
            )
        entry = self.tensors[name].entry
        if entry.shape != shape:
            raise ContainerError(
                f"{self._where(name)} has shape {list(entry.shape)}, config.json calls for {list(shape)}. "
                "Use the config.json and the weights of the same model."
            )
        if entry.dtype not in _DTYPES:
            raise ContainerError(
                f"{self._where(name)} has dtype {entry.dtype}; what can be read is {', '.join(_DTYPES)}. "
                "Use the bf16 or the fp8 block-128 repository of the model."
            )
        scale_name = name + SCALE_SUFFIX
        if entry.dtype != "F8_E4M3":
            if scale_name in self.tensors:
                raise ContainerError(
                    f"{self._where(name)} has dtype {entry.dtype} and yet a scale {scale_name!r}. Only F8_E4M3 "
                    "tensors have one."
                )
            return [name]
        if scale_name not in self.tensors or len(shape) != 2:
            raise ContainerError(
                f"{self._where(name)} is F8_E4M3 but has no {scale_name!r}: its values can't be known. Complete the checkpoint."
            )
        blocks = tuple(-(-dim // FP8_BLOCK) for dim in shape)
        scale = self.tensors[scale_name].entry
        if scale.shape != blocks or scale.dtype not in ("F32", "BF16"):
            raise ContainerError(
                f"{self._where(scale_name)} must be F32 {list(blocks)} (blocks of 128 x 128, the last one partial), "
                f"found {scale.dtype} {list(scale.shape)}. Other block sizes are not supported."
            )
        return [name, scale_name]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` .. ``stop`` as f32, dequantised: f32[rows, in], or f32[n] of a vector."""
        entry = self.tensors[name].entry
        stop = entry.shape[0] if stop is None else min(stop, entry.shape[0])
        raw = self._read(name, start, stop)
        if entry.dtype == "BF16":
            return from_bf16(raw)
        if entry.dtype != "F8_E4M3":
            plain: F32 = raw.astype(np.float32, copy=False)
            return plain
        first, last = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
        scale = self.rows(name + SCALE_SUFFIX, first, last)
        columns = np.repeat(scale, FP8_BLOCK, axis=1)[:, : entry.shape[1]]
        values: F32 = _FP8[raw]
        for block in range(first, last):
            values[max(block * FP8_BLOCK - start, 0) : (block + 1) * FP8_BLOCK - start] *= columns[block - first]
        return values

    def row_chunks(self, name: str, n_rows: int) -> Iterator[F32]:
        for start in range(0, self.shape(name)[0], n_rows):
            yield self.rows(name, start, start + n_rows)

    def _read(self, name: str, start: int, stop: int) -> Any:
        tensor = self.tensors[name]
        entry = tensor.entry
        data = np.empty((stop - start, *entry.shape[1:]), _DTYPES[entry.dtype])
        row_bytes = entry.n_bytes // entry.shape[0]
        view = memoryview(data.reshape(-1).view(np.uint8).data)
        at, done = entry.offset + start * row_bytes, 0
        try:
            with self._lock:
                if tensor.file not in self._fds:
                    self._fds[tensor.file] = os.open(self.directory / tensor.file, os.O_RDONLY | os.O_CLOEXEC)
                fd = self._fds[tensor.file]
            while done < len(view):
                n_read = os.preadv(fd, [view[done : done + (64 << 20)]], at + done)
                if n_read == 0:
                    raise ShortRead(
                        f"{self._where(name)}: expected {len(view):,} bytes at offset {at:,}, the file ends after "
                        f"{done:,}. Copy it again."
                    )
                done += n_read
        except OSError as error:
            raise ContainerError(f"{self._where(name)} can't be read at offset {at:,}: {error.strerror}.") from None
        return data

    def _where(self, name: str) -> str:
        return f"{self.directory / self.tensors[name].file}: tensor {self.prefix + name!r}"


def _shards(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the shards, and the index's map of tensors when there is an index."""
    path = directory / _INDEX_FILE
    if not path.exists():
        names = sorted(file.name for file in directory.glob("*.safetensors"))
        if not names:
            raise ContainerError(
                f"{directory} holds no *.safetensors file. Give the directory of a downloaded checkpoint."
            )
        return names, None
    try:
        if path.stat().st_size > _INDEX_LIMIT_BYTES:
            raise ValueError("too large")
        weight_map = msgspec.convert(json.loads(path.read_bytes())["weight_map"], dict[str, str])
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise ContainerError(
            f'{path} is malformed ({error}): it must have a "weight_map" of names. Copy it again.'
        ) from None
    for file in weight_map.values():
        if not PLAIN_FILE_NAME.fullmatch(file):
            raise ContainerError(f"{path} names the file {file!r}; a shard must lie in the same directory.")
    return sorted(set(weight_map.values())), weight_map


def _common_prefix(names: Iterable[str]) -> str:
    """What stands before "model." in repositories that wrap the language model ("" in others)."""
    tail = "model.embed_tokens.weight"
    found = [name[: -len(tail)] for name in names if name.endswith("." + tail) or name == tail]
    return found[0] if len(found) == 1 else ""
