"""Matrices in the layout ``tile16`` that kernels read in place (``native/include/colibri.h``); sizes are the library's.

Used by the converter, by ``synth`` and by tests; the services never pack or unpack. Quantisers are exact definitions
(docs/container.md): the same input gives the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from native.matrix import GROUP, TILE_ROWS, scale_bytes, weight_bytes

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_F16_MAX = np.float32(65504.0)
_CHUNK_VALUES = 1 << 20


def n_tiles(out: int) -> int:
    return -(-out // TILE_ROWS)


def n_groups(in_: int) -> int:
    return -(-in_ // GROUP)


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Round to nearest even bfloat16; a NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded = np.where(is_nan, (bits >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40), rounded)
    return rounded


def from_bf16(x: npt.NDArray[np.uint16]) -> F32:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack_matrix(w: F32, fmt: str) -> tuple[U8, U8 | None]:
    """w f32[out, in] -> packed weight u8[weight_bytes] and scale u8[scale_bytes] (None for f32, bf16).

    Rows may be packed in several calls and joined, provided that every call but the last has a multiple of 16 rows.
    ValueError when a value is not finite, or too large for the format.
    """
    w = np.ascontiguousarray(w, dtype=np.float32)
    out, in_ = w.shape
    weight = np.empty(weight_bytes(fmt, out, in_), np.uint8)
    scale = np.empty(scale_bytes(fmt, out, in_), np.uint8)
    # Rows in pieces that stay in the cache: three times faster than whole matrices.
    step = max(_CHUNK_VALUES // max(in_, 1) // TILE_ROWS, 1) * TILE_ROWS
    weight_at = scale_at = 0
    for start in range(0, out, step):
        part = w[start : start + step]
        if part.shape[0] % TILE_ROWS:
            part = np.concatenate([part, np.zeros((-part.shape[0] % TILE_ROWS, in_), np.float32)])
        packed, scales = PACKINGS[fmt][0](part)
        weight[weight_at : weight_at + packed.size] = packed
        weight_at += packed.size
        if scales is not None:
            scale[scale_at : scale_at + scales.size] = scales
            scale_at += scales.size
    return weight, scale if scale.size else None


def unpack_matrix(weight: U8, scale: U8 | None, fmt: str, out: int, in_: int) -> F32:
    """The dequantised matrix f32[out, in]; exact for f32 and bf16. Padding is dropped, not checked."""
    return PACKINGS[fmt][1](weight, scale, out, in_)


def unpack_quants(
    weight: U8, scale: U8 | None, fmt: str, out: int, in_: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """(q i8[out, in], scales): f32[out] for q8, f32[out, groups] for q4."""
    assert scale is not None
    tiles, groups = n_tiles(out), n_groups(in_)
    if fmt == "q8":
        q = weight.reshape(tiles, groups, 16, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4)
        s = scale.view(np.float32)[:out]
    else:
        packed = weight.reshape(tiles, groups, 8, TILE_ROWS, 4)
        halves = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
        q = halves.transpose(0, 4, 1, 2, 3, 5)
        by_group = scale.view(np.float16).reshape(tiles, groups, TILE_ROWS).transpose(0, 2, 1)
        s = by_group.reshape(-1, groups)[:out].astype(np.float32)
    zero = np.int16(128 if fmt == "q8" else 8)
    plain = q.reshape(tiles * TILE_ROWS, groups * GROUP)[:out, :in_].astype(np.int16) - zero
    return plain.astype(np.int8), s


def quantise_rows(w: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """w f32[rows, n] -> q i8[rows, n] in -127..127 and one scale f32 per row, max|w| / 127."""
    largest = np.abs(w).max(axis=1, initial=0.0).astype(np.float32)
    _require_finite(largest)
    scale = largest / np.float32(127.0)
    # A denormal scale has lost bits; where it is 0 every value of the row rounds to 0.
    safe = np.where(scale > 0, scale, np.float32(1.0))
    q = np.rint(w / safe[:, None])
    np.clip(q, -127.0, 127.0, out=q)
    q[scale == 0] = 0.0
    return q.astype(np.int8), scale


def quantise_groups(w: F32, group: int = GROUP) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """w f32[rows, groups * group] -> q i8 in -8..7 of the same shape and scales f16[rows, groups], which may be negative.

    Of each group, v is the value of largest magnitude; where both +m and -m are, the negative one. The scale is
    s = f16(v / -8), so that v itself becomes step -8 and all 16 steps are used. Where rounding took so much of s that v
    would lie more than half a step outside (|v| > 8.5 |s|, in f16's denormal range alone), s is the next f16 away from
    zero. q = rint(w / s) clamped to -8..7: a value of the other sign beyond 7.5 steps becomes 7, up to one step short.
    A group of zeros has s = +0 and q = 0; no other group's scale is 0.

    ValueError when a value is not finite, or beyond 8 * 65504.
    """
    grouped = w.reshape(w.shape[0], -1, group)
    # reduceat: half the time of max(axis=2), which pays for each short row
    starts = np.arange(0, w.size, group)
    highest, lowest = (extreme.reduceat(w.reshape(-1), starts) for extreme in (np.maximum, np.minimum))
    largest = np.where(-lowest >= highest, lowest, highest).astype(np.float32).reshape(grouped.shape[:2])
    _require_finite(largest)
    wanted = largest / np.float32(-8.0)
    wanted += np.float32(0.0)  # -0 becomes +0
    if wanted.size and float(np.abs(wanted).max()) > float(_F16_MAX):
        too_large = float(largest.flat[np.abs(wanted).argmax()])
        raise ValueError(f"a weight of {too_large:g} is too large for int4 (at most {8 * 65504} in magnitude)")
    scale = wanted.astype(np.float16)
    wide = scale.astype(np.float32)
    clips = np.abs(largest) > np.float32(8.5) * np.abs(wide)
    if clips.any():
        away = np.copysign(np.float16(np.inf), wanted[clips]).astype(np.float16)
        scale[clips] = np.nextafter(scale[clips], away)
        wide = scale.astype(np.float32)
    safe = np.where(wide != 0, wide, np.float32(1.0))
    q = grouped / safe[:, :, None]
    np.rint(q, out=q)
    np.clip(q, -8.0, 7.0, out=q)
    return q.astype(np.int8).reshape(w.shape), scale


def _require_finite(largest: npt.NDArray[Any]) -> None:
    if not np.isfinite(largest).all():
        raise ValueError("a weight is NaN or infinite")


def _bytes(x: npt.NDArray[Any]) -> U8:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _pad_groups(w: F32) -> F32:
    rest = -w.shape[1] % GROUP
    return np.pad(w, ((0, 0), (0, rest))) if rest else w


def _pack_f32(w: F32) -> tuple[U8, U8 | None]:
    _require_finite(w)
    return _bytes(w.reshape(-1, TILE_ROWS, w.shape[1]).transpose(0, 2, 1)), None


def _pack_bf16(w: F32) -> tuple[U8, U8 | None]:
    _require_finite(w)
    return _bytes(to_bf16(w).reshape(-1, TILE_ROWS, w.shape[1]).transpose(0, 2, 1)), None


def _pack_q8(w: F32) -> tuple[U8, U8 | None]:
    q, scale = quantise_rows(w)
    stored = _pad_groups_i8(q).view(np.uint8) ^ np.uint8(128)
    tiles = stored.reshape(w.shape[0] // TILE_ROWS, TILE_ROWS, -1, 4)
    # [tile][row][group * 16 + kq][4] -> [tile][group * 16 + kq][row][4]; four bytes move as one word
    words = np.ascontiguousarray(tiles).view(np.uint32)[..., 0]
    return _bytes(words.transpose(0, 2, 1)), _bytes(scale)


def _pack_q4(w: F32) -> tuple[U8, U8 | None]:
    q, scale = quantise_groups(_pad_groups(w))
    stored = (q + np.int8(8)).view(np.uint8).reshape(w.shape[0], -1, 2, GROUP // 2)
    bytes_ = stored[:, :, 0] | (stored[:, :, 1] << np.uint8(4))
    words = np.ascontiguousarray(bytes_).view(np.uint32).reshape(w.shape[0] // TILE_ROWS, TILE_ROWS, -1)
    scales = scale.reshape(w.shape[0] // TILE_ROWS, TILE_ROWS, -1).transpose(0, 2, 1)
    return _bytes(words.transpose(0, 2, 1)), _bytes(scales)


def _pad_groups_i8(q: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    rest = -q.shape[1] % GROUP
    return np.ascontiguousarray(np.pad(q, ((0, 0), (0, rest))) if rest else q)


def _untiled(tiles: npt.NDArray[Any], out: int, in_: int) -> F32:
    return np.ascontiguousarray(tiles.reshape(-1, in_, TILE_ROWS).transpose(0, 2, 1).reshape(-1, in_)[:out])


def _unpack_f32(weight: U8, scale: U8 | None, out: int, in_: int) -> F32:
    return _untiled(weight.view(np.float32), out, in_)


def _unpack_bf16(weight: U8, scale: U8 | None, out: int, in_: int) -> F32:
    return _untiled(from_bf16(weight.view(np.uint16)), out, in_)


def _unpack_q8(weight: U8, scale: U8 | None, out: int, in_: int) -> F32:
    q, s = unpack_quants(weight, scale, "q8", out, in_)
    return q.astype(np.float32) * s[:, None]


def _unpack_q4(weight: U8, scale: U8 | None, out: int, in_: int) -> F32:
    q, s = unpack_quants(weight, scale, "q4", out, in_)
    return q.astype(np.float32) * np.repeat(s, GROUP, axis=1)[:, :in_]


Pack = Callable[[F32], tuple[U8, U8 | None]]
Unpack = Callable[[U8, U8 | None, int, int], F32]

PACKINGS: dict[str, tuple[Pack, Unpack]] = {
    "f32": (_pack_f32, _unpack_f32),
    "bf16": (_pack_bf16, _unpack_bf16),
    "q8": (_pack_q8, _unpack_q8),
    "q4": (_pack_q4, _unpack_q4),
}
"""Of each format of the library: rows f32[16 n, in] to bytes and scales, and back."""
