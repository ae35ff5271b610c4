"""Matrices in the layout ``tile16`` that kernels read in place (``native/include/colibri.h``); sizes are the library's.

Used by the converter, by ``synth`` and by tests; the services never pack or unpack. Quantisers are exact definitions
(docs/container.md): the same input gives the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from native.matrix import GROUP, TILE_ROWS, scale_bytes, weight_bytes

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

HALF = GROUP // 2
"""Inputs that share a scale in the formats that have two for a group."""
E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Of each code of MXFP4, twice its value."""
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
        packed, scales = _pack(part, fmt)
        weight[weight_at : weight_at + packed.size] = packed
        weight_at += packed.size
        if scales is not None:
            scale[scale_at : scale_at + scales.size] = scales
            scale_at += scales.size
    return weight, scale if scale.size else None


def pack_codes(q: npt.NDArray[Any], scale: npt.NDArray[Any], fmt: str) -> tuple[U8, U8]:
    """What a format with scales stores of values that are in it already, nothing rounded: weight u8 and scale u8.

    q [out, in]: integers, i8 in the format's range; of mxfp4 the E2M1 codes u8 0..15. scale: f32[out] of q8, else [out, groups]
    in the format's dtype, f16 or u8 (E8M0).
    """
    kind, (out, in_) = SCALED[fmt], q.shape
    stored = np.full((n_tiles(out) * TILE_ROWS, n_groups(in_) * GROUP), kind.zero, np.uint8)
    stored[:out, :in_] = q.view(np.uint8) + np.uint8(kind.zero)
    if not kind.group:
        scales = np.zeros(len(stored), kind.scale)
        scales[:out] = scale
    else:
        scales = np.zeros((len(stored), stored.shape[1] // kind.group), kind.scale)
        scales[:out, : scale.shape[1]] = scale
    return _tile_codes(stored, scales, kind)


def _tile_codes(stored: U8, scales: npt.NDArray[Any], kind: Scaled) -> tuple[U8, U8]:
    """stored u8[16 n, 64 m], scales [16 n] or [16 n, groups] -> their places in ``tile16``."""
    tiles = len(stored) // TILE_ROWS
    if kind.bits == 4:
        halves = stored.reshape(len(stored), -1, 2, GROUP // 2)
        stored = halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))
    # [tile][row][group * quads][4] -> [tile][group * quads][row][4]; four bytes move as one word
    words = np.ascontiguousarray(stored).view(np.uint32).reshape(tiles, TILE_ROWS, -1)
    if kind.group:
        scales = scales.reshape(tiles, TILE_ROWS, -1).transpose(0, 2, 1)
    return _bytes(words.transpose(0, 2, 1)), _bytes(scales)


def unpack_matrix(weight: U8, scale: U8 | None, fmt: str, out: int, in_: int) -> F32:
    """The dequantised matrix f32[out, in]; exact for f32 and bf16. Padding is dropped, not checked."""
    if fmt not in SCALED:
        return _untiled(weight.view(np.float32) if fmt == "f32" else from_bf16(weight.view(np.uint16)), out, in_)
    q, s = unpack_quants(weight, scale, fmt, out, in_)
    with np.errstate(over="ignore"):
        return q.astype(np.float32) * (np.repeat(s, SCALED[fmt].group, axis=1)[:, :in_] if s.ndim == 2 else s[:, None])


def unpack_quants(
    weight: U8, scale: U8 | None, fmt: str, out: int, in_: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """(q i8[out, in], scales): f32[out] for q8, f32[out, groups] else. Of mxfp4, twice the values and half the scales."""
    assert scale is not None
    kind, tiles, groups = SCALED[fmt], n_tiles(out), n_groups(in_)
    if kind.bits == 8:
        q = weight.reshape(tiles, groups, 16, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4)
    else:
        packed = weight.reshape(tiles, groups, 8, TILE_ROWS, 4)
        halves = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
        q = halves.transpose(0, 4, 1, 2, 3, 5)
    codes = q.reshape(tiles * TILE_ROWS, groups * GROUP)[:out, :in_]
    raw = scale.view(kind.scale)
    if not kind.group:
        s = raw[:out].astype(np.float32)
    else:
        s = raw.reshape(tiles, -1, TILE_ROWS).transpose(0, 2, 1).reshape(tiles * TILE_ROWS, -1)[:out]
        s = s[:, : -(-in_ // kind.group)].astype(np.float32)
    if fmt == "mxfp4":
        with np.errstate(over="ignore"):
            return E2M1_TWICE[codes], np.ldexp(np.float32(0.5), s.astype(np.int32) - 127)
    return (codes.astype(np.int16) - np.int16(kind.zero)).astype(np.int8), s


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


def quantise_short_rows(w: F32) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """w f32[rows, groups * 32] -> q i8 in -127..127 of the same shape and scales f16[rows, groups].

    s = f16(max|w| / 127), the next f16 above where rounding took so much that max|w| > 127.5 s (in f16's denormal range alone);
    q = rint(w / s) clamped to +-127; a group whose s is 0 has q = 0. ValueError when a value is not finite, or too large.
    """
    grouped = w.reshape(w.shape[0], -1, HALF)
    largest = np.abs(grouped).max(axis=2).astype(np.float32)
    _require_finite(largest)
    wanted = largest / np.float32(127.0)
    if wanted.size and float(wanted.max()) > float(_F16_MAX):
        raise ValueError(f"a weight of {largest.max():g} is too large for int8 in groups (at most {127 * 65504})")
    scale = wanted.astype(np.float16)
    clips = largest > np.float32(127.5) * scale.astype(np.float32)
    scale[clips] = np.nextafter(scale[clips], np.float16(np.inf))
    wide = scale.astype(np.float32)
    q = np.rint(grouped / np.where(wide != 0, wide, np.float32(1.0))[:, :, None])
    return np.clip(q, -127.0, 127.0).astype(np.int8).reshape(w.shape), scale


def quantise_mxfp4(w: F32) -> tuple[U8, U8]:
    """w f32[rows, groups * 32] -> E2M1 codes u8 0..15 of the same shape and E8M0 scales u8[rows, groups].

    As the OCP Microscaling specification (1.0, 6.3) has it: the scale is 2^(floor(log2(max|w|)) - 2), 2 being E2M1's largest
    exponent; values divided by it are rounded to the nearest code, ties to even mantissas, beyond 6 to 6. A group of zeros has
    the scale 2^-127. ValueError when a value is not finite.
    """
    grouped = w.reshape(w.shape[0], -1, HALF)
    largest = np.abs(grouped).max(axis=2).astype(np.float32)
    _require_finite(largest)
    exponent = np.frexp(largest)[1] - 1 - 2
    exponent = np.where(largest > 0, np.clip(exponent, -127, 127), -127)
    a = np.abs(np.ldexp(grouped.astype(np.float64), -exponent[:, :, None]))
    code = np.zeros(a.shape, np.uint8)
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += a >= middle if i % 2 else a > middle
    code |= np.signbit(grouped).astype(np.uint8) << np.uint8(3)
    code[code == 8] = 0  # -0
    return code.reshape(w.shape), (exponent + 127).astype(np.uint8)


def _require_finite(largest: npt.NDArray[Any]) -> None:
    if not np.isfinite(largest).all():
        raise ValueError("a weight is NaN or infinite")


def _bytes(x: npt.NDArray[Any]) -> U8:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _pad_groups(w: npt.NDArray[Any], value: int = 0) -> npt.NDArray[Any]:
    rest = -w.shape[1] % GROUP
    return np.ascontiguousarray(np.pad(w, ((0, 0), (0, rest)), constant_values=value) if rest else w)


def _pack(w: F32, fmt: str) -> tuple[U8, U8 | None]:
    """w f32[16 n, in] as ``pack_matrix``."""
    if fmt in SCALED:
        return _tile_codes(*_quantised(w, SCALED[fmt]), SCALED[fmt])
    _require_finite(w)
    return _bytes((w if fmt == "f32" else to_bf16(w)).reshape(-1, TILE_ROWS, w.shape[1]).transpose(0, 2, 1)), None


def _quantised(w: F32, kind: Scaled) -> tuple[U8, npt.NDArray[Any]]:
    """Codes as they are stored, padded to groups of 64, and scales."""
    if kind.group:
        q, scale = kind.quantise(_pad_groups(w))
        return q.view(np.uint8) + np.uint8(kind.zero), scale
    q, scale = kind.quantise(w)
    return _pad_groups(q.view(np.uint8) + np.uint8(kind.zero), kind.zero), scale


def _untiled(tiles: npt.NDArray[Any], out: int, in_: int) -> F32:
    return np.ascontiguousarray(tiles.reshape(-1, in_, TILE_ROWS).transpose(0, 2, 1).reshape(-1, in_)[:out])


class Scaled(NamedTuple):
    """A format with scales. ``group``: inputs that share one, 0 for a whole row. ``zero``: how the value 0 is stored."""

    bits: int
    group: int
    scale: Any
    zero: int
    quantise: Callable[[F32], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


SCALED: dict[str, Scaled] = {
    "q8": Scaled(8, 0, np.float32, 128, quantise_rows),
    "q4": Scaled(4, GROUP, np.float16, 8, quantise_groups),
    "q8g32": Scaled(8, HALF, np.float16, 128, quantise_short_rows),
    "q4g32": Scaled(4, HALF, np.float16, 8, lambda w: quantise_groups(w, HALF)),
    "mxfp4": Scaled(4, HALF, np.uint8, 0, quantise_mxfp4),
}
"""What the library's formats with scales hold, and who rounds to them; f32 and bf16 have none."""
