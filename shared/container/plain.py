"""Plain f32 values of what a container stores: for tools that compare and for tests. Kernels read the packed bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from native.matrix import TILE_ROWS, scale_bytes, weight_bytes
from shared.container.entries import Tensor
from shared.container.format import ExpertLayout
from shared.container.pack import F32, from_bf16, unpack_matrix


def dense_values(tensor: Tensor, n_rows: int | None = None) -> Iterator[F32]:
    """A loaded tensor, dequantised: f32[n] of a vector, else each matrix of the stack in pieces of ``n_rows`` rows.

    ``n_rows`` is a multiple of 16; None gives whole matrices. One piece is in memory at a time.
    """
    if tensor.kind == "vector":
        yield tensor.weight
        return
    out, in_ = tensor.shape
    step = out if n_rows is None else n_rows
    if tensor.kind == "table":
        for start in range(0, out, step):
            yield table_values(tensor, range(start, min(start + step, out)))
        return
    for i in range(tensor.stack):
        weight = _section(tensor.weight, i, weight_bytes(tensor.format, out, in_))
        scale = None
        if tensor.scale is not None:
            scale = _section(tensor.scale, i, scale_bytes(tensor.format, out, in_))
        for start in range(0, out, step):
            yield _rows(weight, scale, tensor.format, start, min(start + step, out), in_)


def table_values(tensor: Tensor, rows: Sequence[int]) -> F32:
    """f32[len(rows), D] of a loaded table."""
    picked = tensor.weight[list(rows)]
    if tensor.format == "bf16":
        return from_bf16(picked)
    if tensor.scale is None:
        plain: F32 = picked
        return plain
    scaled: F32 = picked.astype(np.float32) * tensor.scale[list(rows), None]
    return scaled


def expert_values(record: npt.NDArray[np.uint8], layout: ExpertLayout) -> tuple[F32, F32, F32]:
    """(gate f32[F, D], up f32[F, D], down f32[D, F]) of one expert's record."""

    def matrix(at: int, scale_at: int | None, out: int, in_: int) -> F32:
        weight = record[at : at + weight_bytes(layout.format, out, in_)]
        scale = None if scale_at is None else record[scale_at : scale_at + scale_bytes(layout.format, out, in_)]
        return unpack_matrix(weight, scale, layout.format, out, in_)

    inner, hidden = layout.inner, layout.hidden
    return (
        matrix(layout.gate_w, layout.gate_s, inner, hidden),
        matrix(layout.up_w, layout.up_s, inner, hidden),
        matrix(layout.down_w, layout.down_s, hidden, inner),
    )


def expert_biases(record: npt.NDArray[np.uint8], layout: ExpertLayout) -> tuple[F32, ...]:
    """Of gate f32[F], up f32[F] and down f32[D]; empty when the experts have none."""
    return tuple(
        record[at : at + 4 * width].view(np.float32)
        for at, width in zip(layout.biases, layout.bias_widths, strict=True)
    )


def _section(data: npt.NDArray[np.uint8], i: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    return data[i * n_bytes : (i + 1) * n_bytes]


def _rows(
    weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8] | None, fmt: str, start: int, stop: int, in_: int
) -> F32:
    """Rows of one packed matrix; ``start`` is a multiple of 16: tiles lie one after the other."""
    assert start % TILE_ROWS == 0
    n = stop - start
    at = weight_bytes(fmt, start, in_) if start else 0
    part = weight[at : at + weight_bytes(fmt, n, in_)]
    if scale is None:
        return unpack_matrix(part, None, fmt, n, in_)
    at = scale_bytes(fmt, start, in_) if start else 0
    return unpack_matrix(part, scale[at : at + scale_bytes(fmt, n, in_)], fmt, n, in_)
