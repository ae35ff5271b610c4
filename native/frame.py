"""Layout of a step frame as the C library computes it (native/include/cb_frame.h says who writes what)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from native.library import OK, NativeError, check_struct, constant, declare, fail, lib

N_FIELDS = constant("CB_FRAME_FIELDS")


class _Dims(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "rows",
            "logit_rows",
            "sequences",
            "blocks_per_sequence",
            "hidden",
            "gate_k",
            "vocab",
            "stages",
            "residual_rows",
        )
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 16),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("dim", ctypes.c_int64 * 3),
        ("n_dims", ctypes.c_int32),
        ("dtype", ctypes.c_char * 4),
    )


class _Stage(ctypes.Structure):
    _fields_ = (
        ("start_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("stage", ctypes.c_int32),
        ("layer", ctypes.c_int32),
    )


check_struct(_Dims, "cb_frame_dims")
check_struct(_Field, "cb_frame_field")
check_struct(_Stage, "cb_stage")
declare(
    "cb_frame_layout", ctypes.c_int, [ctypes.POINTER(_Dims), ctypes.POINTER(_Field), ctypes.POINTER(ctypes.c_int64)]
)

STAGE_DTYPE = np.dtype(_Stage)


@dataclass(frozen=True)
class Field:
    """One tensor of a frame: bytes from the frame's start, shape, dtype."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


def frame_layout(
    rows: int,
    logit_rows: int,
    sequences: int,
    blocks_per_sequence: int,
    hidden: int,
    gate_k: int,
    vocab: int,
    stages: int,
    residual_rows: int,
) -> tuple[list[Field], int]:
    """The fields of a frame of these sizes and its total bytes (a multiple of 4096)."""
    dims = _Dims(rows, logit_rows, sequences, blocks_per_sequence, hidden, gate_k, vocab, stages, residual_rows)
    found = (_Field * N_FIELDS)()
    total = ctypes.c_int64()
    status = lib.cb_frame_layout(ctypes.byref(dims), found, ctypes.byref(total))
    if status != OK:
        sizes = ", ".join(f"{name} {getattr(dims, name)}" for name, *_ in _Dims._fields_)
        raise fail("cb_frame_layout", status, f"{sizes} (each 0 .. 2^31)")
    fields = []
    for f in found:
        code = f.dtype.decode()
        dtype = STAGE_DTYPE if code == f"V{STAGE_DTYPE.itemsize}" else np.dtype(code)
        shape = tuple(f.dim[: f.n_dims])
        if int(np.prod(shape)) * dtype.itemsize != f.bytes:
            raise NativeError(f"frame field {f.name.decode()}: {f.bytes} bytes do not hold {dtype} {list(shape)}")
        fields.append(Field(f.name.decode(), f.offset, shape, dtype))
    return fields, total.value
