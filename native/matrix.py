"""Packed matrices as the kernels read them (layout tile16, native/include/colibri.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from native.library import ENONFINITE, OK, NativeError, address, check_struct, checked, constant, declare, fail, lib

declare("cb_format_name", ctypes.c_char_p, [ctypes.c_int])


def _formats() -> dict[str, int]:
    found: dict[str, int] = {}
    while name := lib.cb_format_name(len(found) + 1):
        found[name.decode()] = len(found) + 1
    return found


FORMATS: dict[str, int] = _formats()
"""The library's weight formats by name."""
NONE = 0
F32, BF16, Q8, Q4 = (FORMATS[name] for name in ("f32", "bf16", "q8", "q4"))
GROUP, TILE_ROWS = constant("CB_GROUP"), constant("CB_TILE_ROWS")
ACT_F32, ACT_Q8 = 0, 1
ALIGNMENT = 64


class Matrix(ctypes.Structure):
    """cb_matrix. Holds addresses only: whoever owns the bytes keeps them alive (arrays given to `matrix` stay alive)."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in_", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("act", ctypes.c_int32),
    )
    keep: tuple[object, ...] = ()


def set_vectors(layer: ctypes.Structure, values: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    """Puts the addresses of a layer's arrays f32[length] into its struct. NativeError names the one that does not fit."""
    for name, length in lengths.items():
        if isinstance(values.get(name), np.ndarray):
            at = checked(values[name], np.dtype(np.float32), (length,), f"{type(layer).__name__}: {name}")
            setattr(layer, name, at)


def require_shapes(layer: ctypes.Structure, shapes: Mapping[str, tuple[int, int]]) -> None:
    """NativeError names the matrix of a layer's struct that is missing or not [out, in]."""
    for name, shape in shapes.items():
        m: Matrix = getattr(layer, name)
        if m.format == NONE or (m.out, m.in_) != shape:
            found = "nothing" if m.format == NONE else f"[{m.out}, {m.in_}]"
            raise NativeError(f"{type(layer).__name__}: {name}: expected {list(shape)}, found {found}")


class RepackMatrix(ctypes.Structure):
    """cb_repack_matrix: where a matrix lies row after row, and where it goes as q8 or q4. Made by `repack_matrix`."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("is_f16", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("out", ctypes.c_int64),
        ("in_", ctypes.c_int64),
        ("weight_from", ctypes.c_int64),
        ("scale_from", ctypes.c_int64),
        ("weight_to", ctypes.c_int64),
        ("scale_to", ctypes.c_int64),
    )


check_struct(RepackMatrix, "cb_repack_matrix")
declare(
    "cb_repack",
    ctypes.c_int,
    [ctypes.POINTER(RepackMatrix), ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p],
)
check_struct(Matrix, "cb_matrix")
declare("cb_weight_bytes", ctypes.c_int64, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64])
declare("cb_scale_bytes", ctypes.c_int64, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64])


def format_code(fmt: int | str) -> int:
    """The number of a format given by name or number. NativeError for an unknown one."""
    code = FORMATS.get(fmt) if isinstance(fmt, str) else fmt
    if code is None or code not in FORMATS.values():
        raise NativeError(f"matrix format {fmt!r}: expected one of {', '.join(FORMATS)}")
    return code


def weight_bytes(fmt: int | str, out: int, in_: int) -> int:
    """Bytes of the packed weights of one [out, in] matrix."""
    n: int = lib.cb_weight_bytes(format_code(fmt), out, in_)
    if n < 0:
        raise NativeError(f"matrix [{out}, {in_}]: sizes must be 1 .. 2^31 - 1")
    return n


def scale_bytes(fmt: int | str, out: int, in_: int) -> int:
    """Bytes of the scales of one [out, in] matrix; 0 for f32 and bf16."""
    n: int = lib.cb_scale_bytes(format_code(fmt), out, in_)
    if n < 0:
        raise NativeError(f"matrix [{out}, {in_}]: sizes must be 1 .. 2^31 - 1")
    return n


def _section(data: np.ndarray | int | None, wanted: int, what: str, shape: str) -> int:
    if data is None:
        raise NativeError(f"{what} of {shape}: missing")
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or data.nbytes < wanted or (wanted and data.nbytes % wanted):
            raise NativeError(
                f"{what} of {shape}: expected {wanted} contiguous bytes (or a stack), found {data.nbytes}"
            )
        data = address(data)
    if data % ALIGNMENT:
        raise NativeError(f"{what} of {shape}: address {data:#x} is not a multiple of {ALIGNMENT}")
    return data


def matrix(
    weight: np.ndarray | int, scale: np.ndarray | int | None, fmt: int | str, out: int, in_: int, act: int | None = None
) -> Matrix:
    """A matrix [out, in] over packed bytes. `weight` and `scale` are arrays (kept alive) or addresses, 64-byte aligned.

    `act` says how activations enter; by default ACT_Q8 where weights have scales, ACT_F32 otherwise.
    """
    code = format_code(fmt)
    shape = f"{next(name for name, c in FORMATS.items() if c == code)}[{out}, {in_}]"
    quantised = scale_bytes(code, 1, 1) > 0
    if act is None:
        act = ACT_Q8 if quantised else ACT_F32
    if act == ACT_Q8 and not quantised:
        raise NativeError(f"{shape}: int8 activations need weights with scales")
    weights = _section(weight, weight_bytes(code, out, in_), "weights", shape)
    scales = _section(scale, scale_bytes(code, out, in_), "scales", shape) if quantised else None
    made = Matrix(weights, scales, out, in_, code, act)
    made.keep = tuple(part for part in (weight, scale) if isinstance(part, np.ndarray))
    return made


def absent_matrix() -> Matrix:
    """The matrix that is not there (format 0), for optional fields."""
    return Matrix()


def repack_matrix(
    fmt: str, out: int, in_: int, group: int, is_f16: bool, source: tuple[int, int], target: tuple[int, int]
) -> RepackMatrix:
    """Byte offsets of (weights, scales): `source` in what was read, `target` in what is made. `group` 0: a scale per row."""
    return RepackMatrix(format_code(fmt), group, int(is_f16), 0, out, in_, *source, *target)


def repack(matrices: list[RepackMatrix], raw: np.ndarray, target: np.ndarray) -> None:
    """Row-major matrices in u8 `raw` become tile16 in u8 `target`; the offsets must lie in both. ValueError for a scale that is
    not finite, or too large for f16. Takes seconds per 10 GB, and gives the interpreter free meanwhile."""
    array = (RepackMatrix * len(matrices))(*matrices)
    status = lib.cb_repack(array, len(matrices), address(raw), address(target))
    if status == ENONFINITE:
        raise ValueError("a scale is NaN, infinite, or too large for f16")
    if status != OK:
        raise fail("cb_repack", status, f"{len(matrices)} matrices")
