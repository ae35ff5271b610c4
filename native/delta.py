"""One layer of the gated delta rule. T rows, D hidden, K key heads of dk, V value heads of dv, C = 2 K dk + V dv channels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from native.attention import AttnStep
from native.library import OK, NativeError, Pool, check_struct, constant, declare, fail, lib
from native.matrix import Matrix, require_shapes, set_vectors

MAX_DRAFTS = constant("CB_DELTA_MAX_DRAFTS")

_f32 = np.dtype(np.float32)
_int32, _float, _ptr, _i64 = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64


class DeltaLayer(ctypes.Structure):
    """cb_delta_layer: one layer's weights, given by keyword. Keeps arrays alive, but not what addresses point to.

    input_norm and post_norm f32[D], norm f32[dv], a_log and dt_bias f32[V]; qkv [C, D], z [V dv, D], a and b [V, D],
    out [D, V dv], conv [C, taps] in f32. NativeError names what does not fit.
    """

    _fields_ = (
        *((name, _int32) for name in ("hidden", "n_key_heads", "n_value_heads", "key_dim", "value_dim", "taps")),
        ("rms_eps", _float),
        ("pad_", _int32),
        *((name, _ptr) for name in ("input_norm", "post_norm", "norm", "a_log", "dt_bias")),
        *((name, Matrix) for name in ("qkv", "z", "a", "b", "out", "conv")),
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**{k: v for k, v in values.items() if not isinstance(v, np.ndarray)})
        self.keep = tuple(values.values())
        n_values, hidden = self.n_value_heads * self.value_dim, self.hidden
        n_channels = 2 * self.n_key_heads * self.key_dim + n_values
        lengths = {
            "input_norm": hidden,
            "post_norm": hidden,
            "norm": self.value_dim,
            "a_log": self.n_value_heads,
            "dt_bias": self.n_value_heads,
        }
        set_vectors(self, values, lengths)
        shapes = {
            "qkv": (n_channels, hidden),
            "z": (n_values, hidden),
            "a": (self.n_value_heads, hidden),
            "b": (self.n_value_heads, hidden),
            "out": (hidden, n_values),
            "conv": (n_channels, self.taps),
        }
        require_shapes(self, shapes)


check_struct(DeltaLayer, "cb_delta_layer")
declare("cb_delta_forward", ctypes.c_int, [_ptr, ctypes.POINTER(DeltaLayer), ctypes.POINTER(AttnStep)])
declare("cb_delta_state_values", _i64, [ctypes.POINTER(DeltaLayer)])
declare("cb_delta_record_values", _i64, [ctypes.POINTER(DeltaLayer)])


def state_values(n_key_heads: int, n_value_heads: int, key_dim: int, value_dim: int, taps: int) -> tuple[int, int]:
    """f32 values of a slot (a state has two), and of one draft's record."""
    layer = DeltaLayer.__new__(DeltaLayer)
    ctypes.Structure.__init__(layer, 1, n_key_heads, n_value_heads, key_dim, value_dim, taps)
    slot: int = lib.cb_delta_state_values(ctypes.byref(layer))
    record: int = lib.cb_delta_record_values(ctypes.byref(layer))
    if slot < 0 or record < 0:
        raise NativeError(
            f"gated delta rule: {n_key_heads} key heads of {key_dim}, {n_value_heads} value heads of {value_dim}, {taps} taps: "
            "expected widths that are multiples of 16, value heads a multiple of key heads, 1 to 16 taps"
        )
    return slot, record


def delta_forward(pool: Pool, layer: DeltaLayer, step: AttnStep) -> None:
    """x += mixer(RMSNorm(x)) and hidden = RMSNorm(x) for the rows of ``step``; moves their sequences' states on."""
    if step.n_rows and step.width != layer.hidden:
        raise NativeError(f"delta_forward: the step has width {step.width}, the layer {layer.hidden}")
    status = lib.cb_delta_forward(pool.handle, ctypes.byref(layer), ctypes.byref(step))
    if status != OK:
        raise fail(
            "cb_delta_forward",
            status,
            f"{step.n_rows} rows, {step.n_states} states, {step.n_drafts} drafts, hidden {layer.hidden}, {layer.n_key_heads} "
            f"key heads of {layer.key_dim}, {layer.n_value_heads} value heads of {layer.value_dim}; positions must follow each "
            "other within a sequence, the first be 0 or where its state was left, states be different ones that exist",
        )
