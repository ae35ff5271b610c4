"""Matrix products, norms, feed-forward and gate. Arrays are C-contiguous; T rows, D hidden, F inner width, E experts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from native.library import ENONFINITE, OK, NativeError, Pool, address, check_struct, checked, declare, fail, lib
from native.matrix import ACT_F32, Matrix

f32, i32 = np.dtype(np.float32), np.dtype(np.int32)


INNER_FUNCTIONS: dict[str, int] = {"silu": 0, "clamped": 1, "swiglu": 2, "gelu": 3}
"""What stands between gate, up and down projection (colibri.h, CB_INNER_...)."""


class Ffn(ctypes.Structure):
    """cb_ffn: gate and up [F, D], down [D, F]; biases f32[F], f32[F], f32[D] or none."""

    _fields_ = (
        *((name, Matrix) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_bias", "up_bias", "down_bias")),
        ("function", ctypes.c_int32),
        ("limit", ctypes.c_float),
    )
    keep: tuple[object, ...] = ()


def ffn(
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    function: str = "silu",
    limit: float = 0.0,
    biases: Sequence[np.ndarray | int] | None = None,
) -> Ffn:
    """A gated MLP; keeps alive what is given as arrays. ``function``: one of INNER_FUNCTIONS. ``biases``: of all three."""
    if function not in INNER_FUNCTIONS:
        raise NativeError(f"ffn: function {function!r}: expected one of {', '.join(INNER_FUNCTIONS)}")
    if not limit > 0 and function in ("clamped", "swiglu"):
        raise NativeError(f"ffn: limit {limit}: {function} needs one above 0")
    made = Ffn(gate, up, down, function=INNER_FUNCTIONS[function], limit=limit)
    for name, m, bias in zip(("gate_bias", "up_bias", "down_bias"), (gate, up, down), biases or ()):
        at = bias if isinstance(bias, int) else checked(bias, f32, (m.out,), f"ffn: {name}")
        setattr(made, name, at)
    made.keep = (*gate.keep, *up.keep, *down.keep, *(biases or ()))
    return made


class Rows:
    """An array [T, D] that was checked once: a part of it costs a multiplication, a call with it a few comparisons.

    For arrays that live long and are used in every layer. The part keeps the whole array alive.
    """

    __slots__ = ("array", "at", "dtype", "n_rows", "row_bytes", "width")

    def __init__(self, array: np.ndarray) -> None:
        self.at: int = checked(array, array.dtype, (None, None), "Rows")
        self.array, self.dtype = array, array.dtype
        self.n_rows, self.width = map(int, array.shape)
        self.row_bytes = self.width * array.itemsize

    def part(self, begin: int, end: int) -> Rows:
        """The rows from begin to end. NativeError when they are not all there."""
        if not 0 <= begin <= end <= self.n_rows:
            raise NativeError(f"Rows.part: rows {begin} to {end} of {self.n_rows}")
        made = Rows.__new__(Rows)
        made.array, made.dtype, made.width, made.row_bytes = self.array, self.dtype, self.width, self.row_bytes
        made.at = self.at + begin * self.row_bytes
        made.n_rows = end - begin
        return made

    def __len__(self) -> int:
        return self.n_rows


def _at(rows: np.ndarray | Rows, dtype: Any, n_rows: int | None, width: int, what: str) -> int:
    """Address of rows [n_rows, width] after checking them; None: any number."""
    if not isinstance(rows, Rows):
        return checked(rows, dtype, (n_rows, width), what)
    if rows.dtype != dtype or rows.width != width or (n_rows is not None and rows.n_rows != n_rows):
        raise NativeError(
            f"{what}: expected {dtype}[{'any' if n_rows is None else n_rows}, {width}], "
            f"found {rows.dtype}[{rows.n_rows}, {rows.width}]"
        )
    return rows.at


def _width(rows: np.ndarray | Rows) -> int:
    return rows.width if isinstance(rows, Rows) else int(rows.shape[1])


class ExpertJob(ctypes.Structure):
    """cb_expert_job."""

    _fields_ = (("ffn", Ffn), ("rows", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n_rows", ctypes.c_int64))


GATE_SCORINGS: dict[str, int] = {"sigmoid": 0, "softmax": 1}


class _Gate(ctypes.Structure):
    _fields_ = (
        ("weight", Matrix),
        ("bias", ctypes.c_void_p),
        ("n_experts", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("n_group", ctypes.c_int32),
        ("topk_group", ctypes.c_int32),
        ("norm_topk", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("logit_bias", ctypes.c_void_p),
        ("expert_scale", ctypes.c_void_p),
        ("scoring", ctypes.c_int32),
        ("pad_", ctypes.c_int32),
    )


check_struct(Ffn, "cb_ffn")
check_struct(ExpertJob, "cb_expert_job")
check_struct(_Gate, "cb_gate")

_ptr, _i64, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "cb_linear": (_int, [_ptr, ctypes.POINTER(Matrix), _ptr, _i64, _i64, _ptr, _i64]),
    "cb_rmsnorm": (_int, [_ptr, _ptr, _i64, _ptr, ctypes.c_float, _i64, _i64, _ptr, _i64]),
    "cb_gate_rows": (_int, [_ptr, ctypes.POINTER(Matrix), _ptr, _i64, _ptr]),
    "cb_soft_cap": (_int, [_ptr, ctypes.c_float, _i64, _ptr]),
    "cb_ffn_forward": (_int, [_ptr, ctypes.POINTER(Ffn), _ptr, _i64, _int, _ptr]),
    "cb_expert_ffn": (_int, [_ptr, _ptr, _i64, _ptr, _i64, _ptr, _i64]),
    "cb_expert_reduce": (_int, [_ptr, _ptr, _ptr, _ptr, _ptr, _i64, _i64, _i64, _ptr, ctypes.POINTER(_i64)]),
    "cb_gate_forward": (_int, [_ptr, ctypes.POINTER(_Gate), _ptr, _i64, _ptr, _ptr, ctypes.POINTER(_i64)]),
}
for _name, (_restype, _argtypes) in PROTOTYPES.items():
    declare(_name, _restype, _argtypes)


def linear(pool: Pool, m: Matrix, x: np.ndarray, out: np.ndarray) -> None:
    """out f32[T, m.out] = x f32[T, m.in_] times W^T."""
    n_rows = len(x)
    x_at = checked(x, f32, (n_rows, m.in_), "linear: x")
    out_at = checked(out, f32, (n_rows, m.out), "linear: out")
    status = lib.cb_linear(pool.handle, ctypes.byref(m), x_at, m.in_, n_rows, out_at, m.out)
    if status != OK:
        raise fail("cb_linear", status, f"format {m.format} act {m.act} [{m.out}, {m.in_}], {n_rows} rows")


def rmsnorm(pool: Pool, x: np.ndarray, w: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out f32[T, n] = x f32[T, n] / rms(x) * w f32[n]; out may be x."""
    n_rows, n = x.shape
    x_at = checked(x, f32, (n_rows, n), "rmsnorm: x")
    w_at = checked(w, f32, (n,), "rmsnorm: w")
    out_at = checked(out, f32, (n_rows, n), "rmsnorm: out")
    status = lib.cb_rmsnorm(pool.handle, x_at, n, w_at, eps, n_rows, n, out_at, n)
    if status != OK:
        raise fail("cb_rmsnorm", status, f"[{n_rows}, {n}]")


def soft_cap(pool: Pool, cap: float, x: np.ndarray) -> None:
    """x f32[T, n] becomes cap * tanh(x / cap), in place; cap above 0."""
    n_rows, n = x.shape
    status = lib.cb_soft_cap(pool.handle, cap, n_rows * n, checked(x, f32, (n_rows, n), "soft_cap: x"))
    if status != OK:
        raise fail("cb_soft_cap", status, f"cap {cap}, [{n_rows}, {n}]")


def gate_rows(pool: Pool, gate: Matrix, h: np.ndarray | Rows, y: np.ndarray | Rows) -> None:
    """y f32[T, D], row by row times sigmoid(gate h); gate [1, D] in f32, h f32[T, D]."""
    n_rows, hidden = len(h), gate.in_
    h_at = _at(h, f32, n_rows, hidden, "gate_rows: h")
    y_at = _at(y, f32, n_rows, hidden, "gate_rows: y")
    status = lib.cb_gate_rows(pool.handle, ctypes.byref(gate), h_at, n_rows, y_at)
    if status != OK:
        raise fail("cb_gate_rows", status, f"gate [{gate.out}, {hidden}], {n_rows} rows; expected [1, D] in f32")


def ffn_forward(pool: Pool, ffn: Ffn, h: np.ndarray | Rows, y: np.ndarray | Rows, add: bool) -> None:
    """y f32[T, D] = (or += when `add`) down(silu(gate h) * up h), h f32[T, D]."""
    n_rows, hidden = len(h), ffn.gate.in_
    h_at = _at(h, f32, n_rows, hidden, "ffn_forward: h")
    y_at = _at(y, f32, n_rows, hidden, "ffn_forward: y")
    status = lib.cb_ffn_forward(pool.handle, ctypes.byref(ffn), h_at, n_rows, int(add), y_at)
    if status != OK:
        raise fail("cb_ffn_forward", status, f"hidden {hidden}, inner {ffn.gate.out}, {n_rows} rows")


class ExpertJobs:
    """(expert, rows) pairs of one call, filled anew for each; owns the row lists, allocates nothing in between."""

    def __init__(self, capacity_jobs: int, capacity_rows: int) -> None:
        self._jobs = (ExpertJob * max(1, capacity_jobs))()
        self._rows = np.zeros(max(1, capacity_rows), np.int32)
        self._out = np.zeros(max(1, capacity_rows), np.int32)
        self._rows_at, self._out_at = address(self._rows), address(self._out)
        self.n_jobs = self.n_rows = 0

    def clear(self) -> None:
        """Forget all jobs."""
        self.n_jobs = self.n_rows = 0

    def add(self, ffn: Ffn, rows: np.ndarray, out: np.ndarray) -> None:
        """parts[out[i]] = ffn(h[rows[i]]); rows and out i32[n] are copied. The expert's bytes must live until `run` ends."""
        n = len(rows)
        if len(out) != n or self.n_jobs == len(self._jobs) or self.n_rows + n > len(self._rows):
            raise NativeError(
                f"ExpertJobs.add: {n} rows and {len(out)} outputs on top of {self.n_jobs} jobs with {self.n_rows} rows; "
                f"capacity is {len(self._jobs)} jobs and {len(self._rows)} rows"
            )
        begin, end = self.n_rows, self.n_rows + n
        self._rows[begin:end] = rows
        self._out[begin:end] = out
        job = self._jobs[self.n_jobs]
        job.ffn = ffn
        job.rows = self._rows_at + 4 * begin
        job.out = self._out_at + 4 * begin
        job.n_rows = n
        self.n_jobs += 1
        self.n_rows = end

    def add_at(self, ffn: Ffn, rows_at: int, out_at: int, n: int) -> None:
        """As `add`, with the addresses of i32[n] that stay as they are until `run` has ended."""
        if self.n_jobs == len(self._jobs):
            raise NativeError(f"ExpertJobs.add_at: there are {self.n_jobs} jobs, which is the capacity")
        job = self._jobs[self.n_jobs]
        job.ffn, job.rows, job.out, job.n_rows = ffn, rows_at, out_at, n
        self.n_jobs += 1

    def run(self, pool: Pool, h: np.ndarray | Rows, parts: np.ndarray | Rows) -> None:
        """Compute all jobs: h f32[T, D], parts f32[N, D]; rows of parts that no job names are left alone."""
        if not self.n_jobs:
            return
        hidden = self._jobs[0].ffn.gate.in_
        h_at = _at(h, f32, None, hidden, "expert_ffn: h")
        parts_at = _at(parts, f32, None, hidden, "expert_ffn: parts")
        status = lib.cb_expert_ffn(pool.handle, self._jobs, self.n_jobs, h_at, len(h), parts_at, len(parts))
        if status != OK:
            raise fail(
                "cb_expert_ffn",
                status,
                f"{self.n_jobs} jobs, {self.n_rows} rows, h [{len(h)}, {hidden}], parts [{len(parts)}, {hidden}]",
            )


def expert_reduce(
    pool: Pool,
    parts: np.ndarray | Rows,
    weight: np.ndarray | Rows,
    order: np.ndarray | Rows,
    shared: np.ndarray | Rows | None,
    mixed: np.ndarray | Rows,
) -> int:
    """mixed f32[T, D] = sum over k in `order` of weight[t, k] * parts[t*K + k], plus shared f32[T, D].

    parts f32[T*K, D] (more rows are allowed), weight f32[T, K], order i32[T, K]: ascending expert ids as positions
    0..K-1. Returns -1, or the first row whose result is not finite.
    """
    n_rows, k = len(weight), _width(weight)
    hidden = _width(mixed)
    parts_at = _at(parts, f32, None, hidden, "expert_reduce: parts")
    if len(parts) < n_rows * k:
        raise NativeError(f"expert_reduce: parts has {len(parts)} rows, expected at least {n_rows} * {k}")
    weight_at = _at(weight, f32, n_rows, k, "expert_reduce: weight")
    order_at = _at(order, i32, n_rows, k, "expert_reduce: order")
    shared_at = None if shared is None else _at(shared, f32, n_rows, hidden, "expert_reduce: shared")
    mixed_at = _at(mixed, f32, n_rows, hidden, "expert_reduce: mixed")
    bad = ctypes.c_int64(-1)
    status = lib.cb_expert_reduce(
        pool.handle, parts_at, weight_at, order_at, shared_at, n_rows, k, hidden, mixed_at, ctypes.byref(bad)
    )
    if status not in (OK, ENONFINITE):
        raise fail("cb_expert_reduce", status, f"{n_rows} rows, {k} experts, hidden {hidden}")
    return int(bad.value) if status == ENONFINITE else -1


class Gate:
    """Chooses k of E experts per row. `weight` f32[E, D] with f32 activations, `bias` f32[E] only for choosing.

    `scoring`: one of GATE_SCORINGS. `logit_bias` f32[E] joins the logits, `expert_scale` f32[E] the weights of the chosen.
    """

    def __init__(
        self,
        weight: Matrix,
        bias: np.ndarray | None,
        k: int,
        n_group: int,
        topk_group: int,
        norm_topk: bool,
        scaling: float,
        scoring: str = "sigmoid",
        logit_bias: np.ndarray | None = None,
        expert_scale: np.ndarray | None = None,
    ) -> None:
        if weight.act != ACT_F32:
            raise NativeError("gate: the weight must take f32 activations")
        if scoring not in GATE_SCORINGS:
            raise NativeError(f"gate: scoring {scoring!r}: expected one of {', '.join(GATE_SCORINGS)}")
        given = {"bias": bias, "logit_bias": logit_bias, "expert_scale": expert_scale}
        vectors = {
            name: None if value is None else checked(value, f32, (weight.out,), f"gate: {name}")
            for name, value in given.items()
        }
        self._keep = (weight, *given.values())
        self._struct = _Gate(
            weight=weight,
            n_experts=weight.out,
            k=k,
            n_group=n_group,
            topk_group=topk_group,
            norm_topk=int(norm_topk),
            scaling=scaling,
            scoring=GATE_SCORINGS[scoring],
            **vectors,
        )
        self.k = k

    def forward(self, pool: Pool, h: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> int:
        """h f32[T, D] -> ids i32[T, K] ascending and weights f32[T, K].

        Returns -1, or the first row whose scores are not finite (such rows get NaN weights).
        """
        n_rows, gate = len(h), self._struct
        h_at = checked(h, f32, (n_rows, gate.weight.in_), "gate: h")
        ids_at = checked(ids, i32, (n_rows, self.k), "gate: ids")
        weights_at = checked(weights, f32, (n_rows, self.k), "gate: weights")
        bad = ctypes.c_int64(-1)
        status = lib.cb_gate_forward(
            pool.handle, ctypes.byref(gate), h_at, n_rows, ids_at, weights_at, ctypes.byref(bad)
        )
        if status not in (OK, ENONFINITE):
            raise fail(
                "cb_gate_forward",
                status,
                f"{gate.n_experts} experts, k {gate.k}, {gate.topk_group} of {gate.n_group} groups, {n_rows} rows",
            )
        return int(bad.value) if status == ENONFINITE else -1
