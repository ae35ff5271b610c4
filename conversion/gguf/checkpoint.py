"""A model in GGUF files, one or several, as the converter sees it: named tensors, read in pieces as f32.

Formats are decided per tensor by its type. Block formats are the ``gguf`` library's to dequantise; what it makes of a block is
the definition. Memory is bounded by the piece that is asked for.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from conversion.checkpoint import Checkpoint, FileState
from conversion.gguf.architectures import Facts, GgufNames, config_of, joined_heads
from conversion.gguf.header import GgufHeader, gguf_header_of, type_sizes
from conversion.gguf.kept import codes_of
from conversion.gguf.vocabulary import documents_of, end_ids
from shared.container.pack import F32, U8, from_bf16
from shared.container.safetensors_file import FileHeader
from shared.errors import ContainerError
from shared.files import open_file

_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_BLOCKS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ1_S", "IQ1_M", "IQ2_XXS",
    "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
)  # fmt: skip
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint(Checkpoint):
    """Headers of all files, checked; ``rows`` reads. ``documents``: the small files of a checkpoint, made from the keys."""

    def __init__(self, path: Path, headers: dict[str, GgufHeader], states: dict[str, FileState]) -> None:
        found = {}
        for file, header in headers.items():
            tensors = {name: joined_heads(name, entry) for name, entry in header.tensors.items()}
            found[file] = FileHeader(tensors, 0, header.file_bytes)
        super().__init__(path.parent, found, None, states)
        self.path = path
        self._turned_rows: dict[str, int] = {}

    @staticmethod
    def open_file(path: Path) -> tuple[GgufCheckpoint, GgufNames, dict[str, bytes]]:
        """The tensors of a file and of those it belongs with, their names, and a checkpoint's small files by name.

        ContainerError names the file that is missing, truncated or malformed, or the key that can't be.
        """
        headers: dict[str, GgufHeader] = {}
        states: dict[str, FileState] = {}
        for name in _parts_of(path):
            headers[name], states[name] = _read(path.parent / name)
        _require_all_parts(path, headers)
        checkpoint = GgufCheckpoint(path, headers, states)
        try:
            metadata = next(iter(headers.values())).metadata
            entries = {name: tensor.entry for name, tensor in checkpoint.tensors.items()}
            facts = Facts(str(path), metadata, entries, checkpoint.rows)
            config = config_of(facts) | {"eos_token_id": end_ids(facts)}
            names = GgufNames(facts)
            checkpoint._turned_rows = names.turned_rows
            documents = {"config.json": json.dumps(config, indent=2).encode() + b"\n", **documents_of(facts)}
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint, names, documents

    def parts_of(self, name: str) -> list[str]:
        return [name]

    def require(self, name: str, shape: tuple[int, ...]) -> list[str]:
        if name not in self.tensors:
            raise ContainerError(
                f"{self.path} has no tensor {name!r}, which its keys call for. Use a file with the whole model."
            )
        entry = self.tensors[name].entry
        self._require_readable(name)
        if entry.shape != shape:
            raise ContainerError(
                f"{self.where(name)} has shape {list(entry.shape)}, the file's keys call for {list(shape)}. Use a file that "
                "llama.cpp's converter made."
            )
        return [name]

    def _require_readable(self, name: str) -> None:
        dtype = self.tensors[name].entry.dtype
        if dtype not in _PLAIN and dtype not in _BLOCKS:
            raise ContainerError(
                f"{self.where(name)} is of type {dtype}, which is not read; what can be read is "
                f"{', '.join([*_PLAIN, *_BLOCKS])}."
            )

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Entries ``start`` .. ``stop`` of the first dimension as f32. ContainerError for a type that is not read."""
        self._require_readable(name)
        entry = self.tensors[name].entry
        raw = self.blocks(name, start, stop)
        if entry.dtype == "BF16":
            return from_bf16(raw.view(np.uint16))
        if entry.dtype in _PLAIN:
            return raw.view(_PLAIN[entry.dtype]).astype(np.float32, copy=False)
        from gguf import GGMLQuantizationType, dequantize

        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where it is packed
            values: F32 = dequantize(raw, GGMLQuantizationType[entry.dtype])
        return values

    def blocks(self, name: str, start: int = 0, stop: int | None = None) -> U8:
        """The same as they lie in the file: u8[entries, ..., bytes of a row]."""
        n = self.tensors[name].entry.shape[0]
        stop = n if stop is None else min(stop, n)
        head = self._turned_rows.get(name)
        if head is None:
            return self._raw(name, start, stop)
        first = start // head * head
        raw = self._raw(name, first, min(-(-stop // head) * head, n))
        return np.ascontiguousarray(raw[_turned_back(np.arange(start, stop), head) - first])

    def kept_rows(self, name: str, fmt: str, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """Codes and scales of a type that ``fmt`` holds (``is_held``), nothing rounded. ContainerError: impossible scales."""
        try:
            return codes_of(self.blocks(name, start, stop), self.tensors[name].entry.dtype, fmt)
        except ValueError as error:
            raise ContainerError(f"{self.where(name)} can't be converted: {error}.") from None

    def _raw(self, name: str, start: int, stop: int) -> U8:
        entry = self.tensors[name].entry
        _, n_values, n_bytes = type_sizes(entry.dtype)
        is_vector = len(entry.shape) == 1
        if is_vector and entry.dtype not in _PLAIN:
            raise ContainerError(f"{self.where(name)} is a vector in blocks ({entry.dtype}), which is not read.")
        width = 1 if is_vector else entry.shape[-1]
        row_bytes = entry.n_bytes // entry.shape[0]
        raw = np.empty((stop - start) * row_bytes, np.uint8)
        self._fill(name, memoryview(raw.data), entry.offset + start * row_bytes)
        if is_vector:
            return raw
        return raw.reshape(stop - start, *entry.shape[1:-1], width // n_values * n_bytes)

    def where(self, name: str) -> str:
        return f"{self.directory / self.tensors[name].file}: tensor {name!r}"


def _turned_back(rows: Any, head: int) -> Any:
    """llama.cpp has a head's rows i and i + head / 2, which turn together, one behind the other: where are these rows?"""
    inside = rows % head
    half, i = inside // (head // 2), inside % (head // 2)
    return rows - inside + 2 * i + half


def _read(path: Path) -> tuple[GgufHeader, FileState]:
    try:
        fd = open_file(path)
    except FileNotFoundError:
        raise ContainerError(f"{path} is missing. Copy it again from where the model came from.") from None
    except OSError as error:
        raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
    try:
        return gguf_header_of(fd, path), FileState.of(os.fstat(fd))
    finally:
        os.close(fd)


def _parts_of(path: Path) -> list[str]:
    """Names of the files that make up the model, in their order."""
    match = _PART.fullmatch(path.name)
    if not match:
        return [path.name]
    names = [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]
    for name in names:
        if not os.path.lexists(path.parent / name):
            raise ContainerError(
                f"{path.parent / name} is missing: {path.name} is one of {int(match[3]):,}. Copy it from where the model "
                "came from."
            )
    return names


def _require_all_parts(path: Path, headers: dict[str, GgufHeader]) -> None:
    """What files say of the split agrees with their names."""
    n_tensors = sum(len(header.tensors) for header in headers.values())
    for i, (name, header) in enumerate(headers.items()):
        count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        promised = header.metadata.get("split.tensors.count", n_tensors)
        if (count or 1, number) != (len(headers), i):
            raise ContainerError(
                f"{path.parent / name} says that it is part {number!r} (from 0) of {count!r}; by its name it is part {i} of "
                f"{len(headers)}. Files of a split model keep the names they were given, like X-00001-of-0000N.gguf."
            )
        if promised != n_tensors:
            raise ContainerError(
                f"{path.parent / name} says that the model has {promised!r} tensors, its files hold {n_tensors:,}. Copy them "
                "again."
            )
