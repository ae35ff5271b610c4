"""Random numbers that belong to (seed, position), sampling, log-softmax. V is the vocabulary."""

from __future__ import annotations

import ctypes

import numpy as np

from native.library import EINVAL, ENOMEM, ENONFINITE, OK, checked, declare, fail, lib

_f32 = np.dtype(np.float32)
_u32x4, _u32x2 = ctypes.c_uint32 * 4, ctypes.c_uint32 * 2

declare("cb_uniform", ctypes.c_double, [ctypes.c_uint64, ctypes.c_uint64])
declare("cb_philox4x32", None, [_u32x4, _u32x2, _u32x4])
declare("cb_sample", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_double])
declare("cb_log_softmax", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p])


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """One block of Philox-4x32-10."""
    out = _u32x4()
    lib.cb_philox4x32(_u32x4(*counter), _u32x2(*key), out)
    return tuple(out)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position); both are taken modulo 2^64."""
    found: float = lib.cb_uniform(seed, position)
    return found


def sample(logits: np.ndarray, temperature: float, top_p: float, u: float) -> int:
    """The id that `u` in [0, 1) draws from logits f32[V]; temperature 0 takes the largest (lower id on ties).

    -infinity is never drawn. A negative result means that the logits hold NaN, +infinity or nothing else than -infinity.
    NativeError when temperature < 0, top_p is outside 0..1 or u outside [0, 1).
    """
    at = checked(logits, _f32, (None,), "sample: logits")
    found: int = lib.cb_sample(at, len(logits), temperature, top_p, u)
    if found in (EINVAL, ENOMEM):
        raise fail("cb_sample", found, f"{len(logits)} logits, temperature {temperature}, top_p {top_p}, u {u}")
    return found


def log_softmax(logits: np.ndarray, out: np.ndarray) -> None:
    """out f32[V] = log softmax of logits f32[V]. Non-finite logits (as in `sample`) make all of out NaN."""
    at = checked(logits, _f32, (None,), "log_softmax: logits")
    out_at = checked(out, _f32, (len(logits),), "log_softmax: out")
    status = lib.cb_log_softmax(at, len(logits), out_at)
    if status == ENONFINITE:
        out.fill(np.nan)
    elif status != OK:
        raise fail("cb_log_softmax", status, f"{len(logits)} logits")
