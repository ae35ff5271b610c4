"""Random packed weights in huge pages: what a kernel reads, without a model."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from native.matrix import Matrix, matrix, scale_bytes, weight_bytes
from native.memory import HugeBuffer
from shared.container.pack import SCALED

ALIGN = 64
_PLAIN = {"f32": (np.float32, 0.02), "bf16": (np.uint16, 0x3CA4)}
"""Formats without scales: dtype and one harmless value (0.02)."""


class Weights:
    """A huge buffer that matrices are cut from, filled with random bytes; closing it ends their lives."""

    def __init__(self, n_bytes: int) -> None:
        self.buffer = HugeBuffer(max(n_bytes, ALIGN))
        self.used = 0
        block = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        array = self.buffer.array
        for begin in range(0, array.size, block.size):
            part = array[begin : begin + block.size]
            part[:] = block[: part.size]

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.buffer.close()

    def take(self, n_bytes: int) -> np.ndarray:
        """The next u8[n_bytes], 64-byte aligned."""
        begin, self.used = self.used, self.used + aligned(n_bytes)
        assert self.used <= self.buffer.n_bytes, "a buffer's size is computed by matrix_bytes"
        return self.buffer.array[begin : begin + n_bytes]

    def matrix(self, fmt: str, out: int, in_: int, act: int | None = None, stack: int = 1) -> Matrix:
        """A matrix (or a stack of them) whose products are finite; random where that costs nothing."""
        weight = self.take(weight_bytes(fmt, out, in_) * stack)
        if fmt in _PLAIN:
            dtype, value = _PLAIN[fmt]
            weight.view(dtype)[:] = value
            return matrix(weight, None, fmt, out, in_, act)
        scale = self.take(scale_bytes(fmt, out, in_) * stack)
        scale.view(SCALED[fmt].scale)[:] = 118 if fmt == "mxfp4" else 0.002
        return matrix(weight, scale, fmt, out, in_, act)


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def matrix_bytes(fmt: str, out: int, in_: int, stack: int = 1) -> int:
    """Bytes of a stack's weights and scales, each rounded up to where the next may begin."""
    return aligned(weight_bytes(fmt, out, in_) * stack) + aligned(scale_bytes(fmt, out, in_) * stack)
