"""A Hugging Face checkpoint as the converter sees it: named tensors in any number of files, read in pieces as f32.

Formats are decided per tensor by dtype: F32, BF16, F16, or F8_E4M3 with multipliers in a sibling ``<name>_scale_inv`` or
``<name>_scale``: one per block of 128 x 128 (the last one of a row or column may be partial), per row, or for the tensor. What
lies in MXFP4 or in packed int4 can be had as it is, too (``kept_rows``). Memory is bounded by the piece that is asked for.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from conversion.layouts import PLAIN_REMEDY, SCALE_SUFFIXES, about_scales
from conversion.packed import Codes, Packed, as_stored, find_packed, no_format_for
from shared.container.checksum import checksum
from shared.container.format import PLAIN_FILE_NAME
from shared.container.pack import F32, from_bf16
from shared.container.recognise import shard_names
from shared.container.safetensors_file import FileHeader, TensorEntry, header_of
from shared.errors import ContainerError, ShortRead
from shared.files import open_file, read_file, strict_json

FP8_BLOCK = 128
INDEX_FILE = "model.safetensors.index.json"
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
FP4_GROUP = 32
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_DTYPES = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "F8_E4M3": np.uint8}
_PARTS_DTYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64}
"""Of what packed weights consist of."""
_LARGEST_E8M0 = 252
"""6 * 2^(252 - 127) is the last one that f32 holds."""
_INDEX_LIMIT_BYTES = 32 << 20
_PIECE_BYTES = 16 << 20
_CLOCK_GRAIN_NS = 2_000_000_000
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


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


class FileState(NamedTuple):
    """What a file system says of a file: equal states, equal bytes, unless it was written within the clock's grain."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(stat: os.stat_result) -> FileState:
        return FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Checkpoint:
    """Headers of all shards, checked; ``rows`` reads. Names are without the prefix that some repositories add."""

    def __init__(
        self,
        directory: Path,
        headers: dict[str, FileHeader],
        weight_map: dict[str, str] | None = None,
        states: dict[str, FileState] | None = None,
    ) -> None:
        """From the headers of all shards. ContainerError names a tensor that is listed twice or nowhere."""
        tensors: dict[str, SourceTensor] = {}
        self.files: dict[str, str] = {}
        """Shard -> bytes and a checksum of its tensor list; its content may differ all the same (``digest``)."""
        for file, header in headers.items():
            listing = json.dumps([[name, msgspec.to_builtins(entry)] for name, entry in sorted(header.tensors.items())])
            self.files[file] = f"{header.file_bytes}:{checksum(listing.encode())}"
            for name, entry in header.tensors.items():
                if name in tensors:
                    raise ContainerError(
                        f"{directory}: tensor {name!r} is in both {tensors[name].file} and {file}. Remove the shard that does "
                        "not belong to the checkpoint."
                    )
                if weight_map is not None and weight_map.get(name, file) != file:
                    raise ContainerError(
                        f"{directory / INDEX_FILE} says that {weight_map[name]} holds {name!r}, but it is in {file}. Copy the "
                        "index and the shards again."
                    )
                tensors[name] = SourceTensor(file, entry)
        for name, file in (weight_map or {}).items():
            if name not in tensors:
                raise ContainerError(
                    f"{directory / INDEX_FILE} says that {file} holds {name!r}, but it does not. Copy both again."
                )
        self.directory = directory
        self.prefix = _common_prefix(tensors)
        self.tensors = {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}
        self.entries = {name: tensor.entry for name, tensor in self.tensors.items()}
        self.quantization: Mapping[str, Any] = {}
        """config.json's "quantization_config"."""
        self._states = states or {}
        self._settled_ns = time.time_ns() - _CLOCK_GRAIN_NS
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """ContainerError names the shard that is missing, truncated or malformed, or a tensor that is listed twice."""
        names, weight_map = shards_of(directory, os.listdir(directory))
        headers: dict[str, FileHeader] = {}
        states: dict[str, FileState] = {}
        wanted = {file: name for name, file in reversed((weight_map or {}).items())}
        for file in names:
            headers[file], states[file] = _read_shard(directory / file, wanted.get(file, ""))
        return Checkpoint(directory, headers, weight_map, states)

    # ---- is it still what was read? -------------------------------------------------------------------------------

    def state_of(self, names: Iterable[str]) -> str:
        """Stands for the state of the files that hold these tensors and their scales, "" when nothing can be told from it.

        Equal strings in two runs: the files were not written, replaced or moved between them.
        """
        states = [self._states[file] for file in sorted({self.tensors[name].file for name in names})]
        if any(state.changed_ns > self._settled_ns for state in states):
            return ""  # written a moment ago: perhaps again, without a later time
        return checksum(repr([tuple(state) for state in states]).encode())

    def digest(self, names: Iterable[str]) -> str:
        """XXH64 that stands for these tensors' dtypes, shapes and bytes, read now; their scales must be named too."""
        found = []
        for name in names:
            entry = self.tensors[name].entry
            sums = []
            piece = np.empty(min(_PIECE_BYTES, entry.n_bytes), np.uint8)
            for at in range(0, entry.n_bytes, _PIECE_BYTES):
                view = memoryview(piece.data)[: min(_PIECE_BYTES, entry.n_bytes - at)]
                self._fill(name, view, entry.offset + at)
                sums.append(checksum(view))
            found.append([name, entry.dtype, entry.shape, sums])
        return checksum(json.dumps(found).encode())

    def require_unchanged(self) -> None:
        """ContainerError when a shard is no longer the file whose header was read, or was written since."""
        for file in self._states:
            path = self.directory / file
            try:
                is_same = FileState.of(os.stat(path)) == self._states[file]
            except OSError:
                is_same = False
            if not is_same:
                raise _has_changed(str(path))

    def parts_of(self, name: str) -> list[str]:
        """The tensors in the shards that hold it: itself, with its scales if it has any, or what it is packed in."""
        if self._is_mxfp4(name):
            return [name + BLOCKS_SUFFIX, name + SCALES_SUFFIX]
        if packed := self._packed(name):
            return list(packed.parts)
        if name not in self.tensors or self.tensors[name].entry.dtype != "F8_E4M3":
            return [name]
        # The scale for activations was measured beforehand; ours are taken from the activations themselves.
        beside = [self._scale_name(name), f"{name.removesuffix('weight')}input_scale"]
        return [name, *(part for part in beside if part in self.tensors)]

    def _scale_name(self, name: str) -> str:
        found = (name + suffix for suffix in SCALE_SUFFIXES if name + suffix in self.tensors)
        return next(found, name + SCALE_SUFFIXES[0])

    def _packed(self, name: str, shape: tuple[int, ...] | None = None) -> Packed | None:
        return find_packed(name, self.entries, self.quantization, shape)

    # ---- as it is -------------------------------------------------------------------------------------------------

    def kept_format(self, name: str) -> str:
        """The container's format that holds a tensor's values as they are, 4 bits of each; "" for one in floating point.

        ContainerError for packed integers that no format holds.
        """
        if self._is_mxfp4(name):
            return "mxfp4"
        packed = self._packed(name)
        if packed and not packed.format:
            raise ContainerError(f"{self.where(packed.parts[0])} has {no_format_for(packed)}")
        return packed.format if packed else ""

    def kept_rows(self, name: str, fmt: str, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """What ``pack_codes`` wants of rows ``start`` .. ``stop`` (of experts, where they are stacked) in format ``fmt``.

        ContainerError for scales that are no numbers, and values that the format does not hold exactly.
        """
        if packed := self._packed(name):
            return as_stored(self._codes(packed, start, stop), fmt, self.where(packed.parts[0]))
        blocks, scales = self._mxfp4_parts(name, start, stop)
        if scales.size and scales.max() > _LARGEST_E8M0:
            what = "NaN or infinite" if scales.max() == 255 else "too large for f32"
            raise ContainerError(f"{self.where(name + SCALES_SUFFIX)}: a value is {what}. Copy the checkpoint again.")
        return np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1).reshape(*scales.shape[:-1], -1), scales

    def _codes(self, packed: Packed, start: int, stop: int | None) -> Codes:
        stop = packed.shape[0] if stop is None else min(stop, packed.shape[0])
        return packed.codes(self._read_whole, start, stop, self.where(packed.parts[0]))

    def _read_whole(self, name: str) -> Any:
        entry = self.tensors[name].entry
        data = np.empty(entry.shape, (_DTYPES | _PARTS_DTYPES)[entry.dtype])
        self._fill(name, memoryview(data.reshape(-1).view(np.uint8).data), entry.offset)
        return data

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def _is_mxfp4(self, name: str) -> bool:
        return name not in self.tensors and name + BLOCKS_SUFFIX in self.tensors

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor's values, however they are stored; None when there is none of this name."""
        if self._is_mxfp4(name):
            *outer, groups, n_bytes = self.tensors[name + BLOCKS_SUFFIX].entry.shape
            return (*outer, groups * n_bytes * 2)
        if packed := self._packed(name):
            return packed.shape
        return self.tensors[name].entry.shape if name in self.tensors else None

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.shape_of(name)
        assert shape is not None
        return shape

    def require(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Checks that a tensor is there with this shape and a readable dtype; returns the names it consumes."""
        if self._is_mxfp4(name):
            return self._require_mxfp4(name, shape)
        if packed := self._packed(name, shape):
            return list(packed.parts)
        if name not in self.tensors:
            raise ContainerError(
                f"{self.directory} has no tensor {self.prefix + name!r}, which its config.json calls for. "
                "Complete the checkpoint, or use the config.json that belongs to it."
            )
        entry = self.tensors[name].entry
        if entry.dtype not in _DTYPES:  # before the shape: packed integers have another one
            raise ContainerError(
                f"{self.where(name)} has dtype {entry.dtype} and shape {list(entry.shape)}; what can be read is "
                f"{', '.join(_DTYPES)}. {PLAIN_REMEDY}"
            )
        if entry.shape != shape:
            raise ContainerError(
                f"{self.where(name)} has shape {list(entry.shape)}, config.json calls for {list(shape)}. "
                "Use the config.json and the weights of the same model."
            )
        scale_name = self._scale_name(name)
        if entry.dtype != "F8_E4M3":
            if scale_name in self.tensors:
                raise ContainerError(
                    f"{self.where(name)} has dtype {entry.dtype} and yet a scale {scale_name!r}. Only F8_E4M3 "
                    "tensors have one."
                )
            return [name]
        if scale_name not in self.tensors or len(shape) != 2:
            raise ContainerError(
                f"{self.where(name)} is F8_E4M3 but has no {scale_name!r}: its values can't be known. "
                "Complete the checkpoint, or use the model's bf16 repository."
            )
        scale = self.tensors[scale_name].entry
        if scale.shape not in _fp8_scale_shapes(shape) or scale.dtype not in ("F32", "BF16", "F16"):
            what = about_scales(scale_name.rpartition(".")[2], entry, scale.shape)
            raise ContainerError(
                f"{self.where(scale_name)}: this checkpoint is in a layout that is not understood: {what}. It should be "
                f"F32, BF16 or F16, {list(_fp8_scale_shapes(shape)[0])} (blocks of 128 x 128, the last one partial), "
                f"[{shape[0]}, 1] (rows) or [1], found {scale.dtype} {list(scale.shape)}. {PLAIN_REMEDY}"
            )
        return self.parts_of(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` .. ``stop`` as f32, dequantised: f32[rows, in], or f32[n] of a vector."""
        if self._is_mxfp4(name):
            return self._mxfp4_rows(name, start, stop)
        if packed := self._packed(name):
            return self._codes(packed, start, stop).values()
        entry = self.tensors[name].entry
        stop = entry.shape[0] if stop is None else min(stop, entry.shape[0])
        raw = self._read(name, start, stop)
        if entry.dtype == "BF16":
            return from_bf16(raw)
        if entry.dtype != "F8_E4M3":
            plain: F32 = raw.astype(np.float32, copy=False)
            return plain
        values: F32 = _FP8[raw]
        scale = self._fp8_scale(name)
        if scale.size != 1 and scale.shape not in _row_shapes(entry.shape):
            columns = np.repeat(scale, FP8_BLOCK, axis=1)[:, : entry.shape[1]]
            for block in range(start // FP8_BLOCK, -(-stop // FP8_BLOCK)):
                values[max(block * FP8_BLOCK - start, 0) : (block + 1) * FP8_BLOCK - start] *= columns[block]
            return values
        values *= scale.reshape(()) if scale.size == 1 else scale.reshape(-1, 1)[start:stop]
        return values

    def _fp8_scale(self, name: str) -> F32:
        scale_name = self._scale_name(name)
        raw = self._read_whole(scale_name)
        scale: F32 = from_bf16(raw) if raw.dtype == np.uint16 else raw.astype(np.float32)
        if not np.isfinite(scale).all() or (scale < 0).any():
            raise ContainerError(
                f"{self.where(scale_name)}: a scale is negative, NaN or infinite. Copy the checkpoint again."
            )
        return scale

    def _require_mxfp4(self, name: str, shape: tuple[int, ...]) -> list[str]:
        parts = self.parts_of(name)
        groups = (*shape[:-1], -(-shape[-1] // FP4_GROUP))
        for part, wanted in zip(parts, ((*groups, FP4_GROUP // 2), groups)):
            if part not in self.tensors:
                raise ContainerError(f"{self.directory} has no tensor {self.prefix + part!r}. Complete the checkpoint.")
            entry = self.tensors[part].entry
            if (entry.dtype, entry.shape) != ("U8", wanted) or shape[-1] % FP4_GROUP:
                raise ContainerError(
                    f"{self.where(part)} is {entry.dtype} {list(entry.shape)}, config.json calls for U8 {list(wanted)} (MXFP4, "
                    f"groups of {FP4_GROUP}). Use the config.json and the weights of the same model."
                )
        return parts

    def _mxfp4_rows(self, name: str, start: int, stop: int | None) -> F32:
        """Entries ``start`` .. ``stop`` of the first dimension: nibbles, the lower first, times a power of two per group."""
        blocks, scales = self._mxfp4_parts(name, start, stop)
        plain = _FP4[np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1)]
        with np.errstate(over="ignore"):  # 2^128: whoever packs it says so
            values: F32 = np.ldexp(plain.reshape(*scales.shape, FP4_GROUP), scales.astype(np.int32)[..., None] - 127)
        return values.reshape(*scales.shape[:-1], -1)

    def _mxfp4_parts(self, name: str, start: int, stop: int | None) -> tuple[Any, Any]:
        blocks_name, scales_name = self.parts_of(name)
        n = self.tensors[blocks_name].entry.shape[0]
        stop = n if stop is None else min(stop, n)
        return self._read(blocks_name, start, stop), self._read(scales_name, start, stop)

    def row_chunks(self, name: str, n_rows: int) -> Iterator[F32]:
        for start in range(0, self.shape(name)[0], n_rows):
            yield self.rows(name, start, start + n_rows)

    def _read(self, name: str, start: int, stop: int) -> Any:
        entry = self.tensors[name].entry
        data = np.empty((stop - start, *entry.shape[1:]), np.uint8 if entry.dtype == "U8" else _DTYPES[entry.dtype])
        row_bytes = entry.n_bytes // entry.shape[0]
        self._fill(name, memoryview(data.reshape(-1).view(np.uint8).data), entry.offset + start * row_bytes)
        return data

    def _fill(self, name: str, view: memoryview, at: int) -> None:
        done = 0
        try:
            fd = self._fd(name)
            while done < len(view):
                n_read = os.preadv(fd, [view[done : done + (64 << 20)]], at + done)
                if n_read == 0:
                    raise ShortRead(
                        f"{self.where(name)}: expected {len(view):,} bytes at offset {at:,}, the file ends after "
                        f"{done:,}. Copy it again."
                    )
                done += n_read
        except OSError as error:
            raise ContainerError(f"{self.where(name)} can't be read at offset {at:,}: {error.strerror}.") from None

    def _fd(self, name: str) -> int:
        file = self.tensors[name].file
        with self._lock:
            if file not in self._fds:
                self._fds[file] = self._open_shard(name)
            return self._fds[file]

    def _open_shard(self, name: str) -> int:
        """The shard that holds a tensor, the same file as when its header was read."""
        file = self.tensors[name].file
        fd = open_file(self.directory / file)
        if FileState.of(os.fstat(fd)) != self._states[file]:
            os.close(fd)
            raise _has_changed(self.where(name))
        return fd

    def where(self, name: str) -> str:
        """File and full name of a tensor, for complaints."""
        return f"{self.directory / self.tensors[name].file}: tensor {self.prefix + name!r}"


def _fp8_scale_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of a matrix: per block, per row, for the whole of it."""
    blocks = tuple(-(-dim // FP8_BLOCK) for dim in shape)
    return [blocks, *_row_shapes(shape), (), (1,), (1, 1)]


def _row_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (shape[0],), (shape[0], 1)


def _read_shard(path: Path, wanted: str) -> tuple[FileHeader, FileState]:
    try:
        fd = open_file(path)
    except FileNotFoundError:
        holding = f" (it should hold {wanted!r})" if wanted else ""
        raise ContainerError(f"{path} is missing{holding}. Copy it again from where the model came from.") from None
    except OSError as error:
        raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
    try:
        return header_of(fd, path, wanted), FileState.of(os.fstat(fd))
    finally:
        os.close(fd)


def _has_changed(where: str) -> ContainerError:
    return ContainerError(
        f"{where} has changed since the header was read. When the file is complete, run the same command again: what was "
        "made from other bytes is made anew."
    )


def shards_of(directory: Path, names: Iterable[str]) -> tuple[list[str], dict[str, str] | None]:
    """Of the files with these names, those that are shards; and the index's map of tensors when ``directory`` has an index."""
    path = directory / INDEX_FILE
    if not os.path.lexists(path):
        names = shard_names(list(names))
        if not names:
            raise ContainerError(
                f"{directory} holds no *.safetensors file. Give the directory of a downloaded checkpoint."
            )
        _require_all_numbers(directory, names)
        return names, None
    try:
        index = strict_json(read_file(path, _INDEX_LIMIT_BYTES))
        weight_map = msgspec.convert(index["weight_map"], dict[str, str])
    except OSError as error:
        raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ContainerError(
            f'{path} is malformed ({error}): it must have a "weight_map" of names. Copy it again.'
        ) from None
    for name, file in weight_map.items():
        if not PLAIN_FILE_NAME.fullmatch(file):
            raise ContainerError(f"{path} says that {file!r} holds {name!r}; a shard must lie in the same directory.")
    return sorted(set(weight_map.values())), weight_map


def _require_all_numbers(directory: Path, names: list[str]) -> None:
    """Without an index only the names tell that a shard is missing: model-00001-of-00003.safetensors."""
    found: dict[tuple[str, str, int], str] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        found[match[1], match[3], len(match[2])] = match[0]
    for (stem, n_all, width), known in found.items():
        # With fewer files than that one of the first numbers is missing.
        for i in range(1, min(int(n_all), len(names) + 1) + 1):
            name = f"{stem}-{i:0{width}}-of-{n_all}.safetensors"
            if name not in names:
                raise ContainerError(
                    f"{directory / name} is missing: {known} is one of {int(n_all):,}. Copy it from where the model came from."
                )


def _common_prefix(names: Iterable[str]) -> str:
    """What stands before "model." in repositories that wrap the language model ("" in others)."""
    tail = "model.embed_tokens.weight"
    found = [name[: -len(tail)] for name in names if name.endswith("." + tail) or name == tail]
    return found[0] if len(found) == 1 else ""
