"""Writes a GGUF file (version 3) of random weights, streaming. The format: a header, typed key-value pairs, the tensors'
names, sizes and offsets, then their data, each aligned to 32 bytes; little endian throughout.

Weights have zero mean: with a mean, every product would add the same to every output, and soon every token would be
routed to the same experts. Blocks come from a pool of random ones; each tensor and each expert starts elsewhere in it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.peers.shapes import BLOCK_BYTES, Model, Tensor
from shared.errors import CapacityError, ConfigError
from shared.kept import put_in_place

ALIGN = 32
TYPE_IDS: Mapping[str, int] = {"F32": 0, "Q4_0": 2, "Q8_0": 8}
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
POOL_BYTES = 64 << 20
HEAD_GAIN = 3.0
"""As colibri synth has it: a random model's tokens would otherwise be close to uniform."""


def write_gguf(path: Path, model: Model, seed: int = 0, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes ``path``, whole or not at all. CapacityError beforehand when the file system is too small."""
    free = os.statvfs(path.parent)
    if model.gguf_bytes > free.f_bavail * free.f_frsize:
        raise CapacityError(
            f"{path} needs {model.gguf_bytes:,} bytes, {free.f_bavail * free.f_frsize:,} are free in {path.parent}."
        )
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            _write(file, model, np.random.default_rng(seed), progress)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write(file: BinaryIO, model: Model, rng: np.random.Generator, progress: Callable[[int], None]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(model.tensors), len(model.metadata)))
    for key, value in model.metadata.items():
        file.write(_string(key) + _value(value))
    offset = 0
    for tensor in model.tensors:
        dimensions = tensor.shape[::-1]  # GGUF: fastest first
        file.write(_string(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        file.write(struct.pack("<IQ", TYPE_IDS[tensor.type], offset))
        offset += _padded(tensor.n_bytes)
    _pad(file)
    pools: dict[tuple[str, float], memoryview] = {}
    for tensor in model.tensors:
        for piece in _data(tensor, rng, pools):
            file.write(piece)
            progress(len(piece))
        _pad(file)
        if tensor.role == "expert":  # a file of the size of memory must not fill it with pages to be written
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGN))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and value of one pair."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return struct.pack(f"<IIQ{len(value)}I", _ARRAY, _U32, len(value), *value)
    raise ConfigError(
        f"GGUF metadata: {value!r} is neither a number, a text, a truth value nor a list of whole numbers"
    )


def _data(
    tensor: Tensor, rng: np.random.Generator, pools: dict[tuple[str, float], memoryview]
) -> Iterator[bytes | memoryview]:
    if tensor.type == "F32":
        yield _plain(tensor, rng).tobytes()
        return
    std = (HEAD_GAIN if tensor.role == "head" else 1.0) / math.sqrt(tensor.shape[-1])
    if tensor.role == "embed":
        std = 1.0
    key = (tensor.type, std)
    if key not in pools:
        blocks = random_blocks(tensor.type, std, min(POOL_BYTES, max(tensor.n_bytes, 1 << 16)), rng)
        pools[key] = blocks.data.cast("B")
    pool, block = pools[key], BLOCK_BYTES[tensor.type]
    n_pieces = tensor.shape[0] if tensor.role == "expert" else 1
    for _ in range(n_pieces):
        left, at = tensor.n_bytes // n_pieces, int(rng.integers(len(pool) // block)) * block
        while left:
            n = min(left, len(pool) - at)
            yield pool[at : at + n]
            left, at = left - n, 0


def _plain(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Gains close to one, biases close to zero, the gate and the indexer's weights as matrices."""
    drawn = rng.standard_normal(tensor.shape, np.float32)
    if len(tensor.shape) > 1:
        return drawn / np.float32(math.sqrt(tensor.shape[-1]))
    return (0.02 * drawn if tensor.name.endswith("bias") else 1 + 0.1 * drawn).astype(np.float32)


def random_blocks(kind: str, std: float, n_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """u8[n, block] of about `n_bytes`: blocks of 32 weights with mean 0 and this standard deviation."""
    size = BLOCK_BYTES[kind]
    blocks = rng.integers(0, 256, (max(n_bytes // size, 1), size), np.uint8)
    quants = blocks[:, 2:]
    if kind == "Q4_0":  # stored + 8; -8 has no partner, so it becomes 0
        quants[quants & 0x0F == 0] |= 0x08
        quants[quants & 0xF0 == 0] |= 0x80
        rms = math.sqrt(np.mean(np.square([*range(-7, 8), 0])))
    else:  # int8; likewise -128
        quants[quants == 0x80] = 0
        rms = math.sqrt(np.mean(np.square([*range(-127, 128), 0])))
    blocks[:, :2] = np.frombuffer(np.float16(std / rms).tobytes(), np.uint8)
    return blocks
