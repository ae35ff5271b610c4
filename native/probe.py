"""What this machine can do at best, measured now and on the kernels' own threads: the yardstick of ``colibri bench``."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from native.library import OK, NativeError, Pool, address, declare, fail, isa_current, lib

KINDS: dict[str, int] = {"f32": 0, "int8": 1, "int4": 2}
"""Arithmetic -> cb_probe kind: f32 multiply-adds; int8 x int8; 4-bit weights x int8."""

_i64, _out = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
declare("cb_probe_read", ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, _i64, ctypes.c_int, _out])
declare("cb_probe_ops", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int, _i64, _out, _out])


def rate(amount: float, ns: int, what: str) -> float:
    """`amount` per second. NativeError when that is no rate: a limit that is zero or infinite must divide nothing."""
    found = amount / ns * 1e9 if ns > 0 else math.inf
    if not math.isfinite(found) or found <= 0:
        raise NativeError(f"{what}: {amount:g} in {ns} ns is no rate; this machine's clock or its sizes are unusable")
    return found


def read_rate(pool: Pool, buffer: np.ndarray, ahead: bool) -> float:
    """Bytes per second of reading u8[n] once in order; `ahead` prefetches by software as well.

    n is a multiple of 64 and the start 64-byte aligned. For the rate of memory n must be many times the caches' size.
    """
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise NativeError(f"probe: expected contiguous uint8, found {buffer.dtype}{list(buffer.shape)}")
    ns = ctypes.c_int64()
    status = lib.cb_probe_read(pool.handle, address(buffer), buffer.nbytes, int(ahead), ctypes.byref(ns))
    if status != OK:
        raise fail(
            "cb_probe_read", status, f"{buffer.nbytes} bytes at {address(buffer):#x} (multiples of 64 are needed)"
        )
    return rate(buffer.nbytes, ns.value, "read")


def ops_rate(pool: Pool, kind: str, n_items: int) -> float:
    """Operations per second (multiplications plus additions) on registers, with the instruction set in use.

    `kind` is one of KINDS; an item takes some ten microseconds, and there should be many for each thread.
    """
    if kind not in KINDS:
        raise NativeError(f"probe: no arithmetic is called {kind!r}; expected one of {', '.join(KINDS)}")
    ops, ns = ctypes.c_int64(), ctypes.c_int64()
    status = lib.cb_probe_ops(pool.handle, KINDS[kind], n_items, ctypes.byref(ops), ctypes.byref(ns))
    if status != OK:
        raise fail("cb_probe_ops", status, f"{kind} on {isa_current()}, {n_items} items")
    return rate(ops.value, ns.value, f"{kind} on {isa_current()}")
