"""One layer of grouped-query attention. T rows, D hidden, H query heads, K key heads, C components of a head."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from native.attention import KV_BLOCK, AttnStep, kv_row_bytes
from native.library import OK, NativeError, Pool, check_struct, declare, fail, lib
from native.matrix import NONE, Matrix, require_shapes, set_vectors

QK_NORMS: dict[str, int] = {"none": 0, "head": 1, "whole": 2}

_f32 = np.dtype(np.float32)
_int32, _float, _ptr = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class GqaLayer(ctypes.Structure):
    """cb_gqa_layer: one layer's weights, given by keyword. Keeps arrays alive, but not what addresses point to.

    qk_norm is "none", "head" (q_norm and k_norm f32[C]) or "whole" (f32[H * C] and f32[K * C]). Biases f32 of their
    projection's width, out_norm f32[D], sinks f32[H] and gate may be left out; without v, values are the keys as projected.
    NativeError names what does not fit.
    """

    _fields_ = (
        *((name, _int32) for name in ("hidden", "n_heads", "n_kv_heads", "head_dim", "rope", "rope_interleave")),
        *((name, _int32) for name in ("window", "qk_norm", "value_norm")),
        *((name, _float) for name in ("clip", "rms_eps", "softmax_scale", "rope_amplitude")),
        ("pad_", _int32),
        ("inv_freq", _ptr),
        *((name, _ptr) for name in ("input_norm", "q_norm", "k_norm", "post_norm", "out_norm")),
        *((name, _ptr) for name in ("q_bias", "k_bias", "v_bias", "o_bias", "sinks")),
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate")),
    )

    def __init__(self, **values: Any) -> None:
        kind = values.get("qk_norm", 0)
        values["qk_norm"] = code = QK_NORMS.get(kind, -1) if isinstance(kind, str) else kind
        if code not in QK_NORMS.values():
            raise NativeError(f"GqaLayer: qk_norm {kind!r}: expected one of {', '.join(QK_NORMS)}")
        super().__init__(**{k: v for k, v in values.items() if not isinstance(v, np.ndarray)})
        self.keep = tuple(values.values())
        q_width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        whole = code == QK_NORMS["whole"]
        lengths = {
            "inv_freq": self.rope // 2,
            "input_norm": self.hidden,
            "post_norm": self.hidden,
            "out_norm": self.hidden,
            "q_norm": q_width if whole else self.head_dim,
            "k_norm": kv_width if whole else self.head_dim,
            "q_bias": q_width,
            "k_bias": kv_width,
            "v_bias": kv_width,
            "o_bias": self.hidden,
            "sinks": self.n_heads,
        }
        set_vectors(self, values, lengths)
        shapes = {"q": (q_width, self.hidden), "k": (kv_width, self.hidden), "o": (self.hidden, q_width)}
        if self.v.format != NONE:
            shapes["v"] = (kv_width, self.hidden)
        if self.gate.format != NONE:
            shapes["gate"] = (q_width, self.hidden)
        require_shapes(self, shapes)


check_struct(GqaLayer, "cb_gqa_layer")
declare("cb_gqa_forward", ctypes.c_int, [_ptr, ctypes.POINTER(GqaLayer), ctypes.POINTER(AttnStep)])


def n_vectors(layer: GqaLayer) -> int:
    """Vectors of head_dim values that one position takes in the cache, which is laid out as colibri.h says."""
    return 2 * int(layer.n_kv_heads)


def gqa_forward(pool: Pool, layer: GqaLayer, step: AttnStep) -> None:
    """x += attention(RMSNorm(x)) and hidden = RMSNorm(x) for the rows of `step`; writes their cache entries first."""
    if step.n_rows and step.width != layer.hidden:
        raise NativeError(f"gqa_forward: the step has width {step.width}, the layer {layer.hidden}")
    wanted = step.n_blocks * KV_BLOCK * n_vectors(layer) * kv_row_bytes(step.kv_format, layer.head_dim)
    if step.kv_bytes is not None and step.kv_bytes < wanted:
        raise NativeError(f"gqa_forward: kv has {step.kv_bytes} bytes, {step.n_blocks} blocks need {wanted}")
    status = lib.cb_gqa_forward(pool.handle, ctypes.byref(layer), ctypes.byref(step))
    if status != OK:
        raise fail(
            "cb_gqa_forward",
            status,
            f"{step.n_rows} rows, {step.n_blocks} blocks, table [{step.n_sequences}, {step.table_stride}], hidden "
            f"{layer.hidden}, {layer.n_heads} heads over {layer.n_kv_heads} of {layer.head_dim}, rope {layer.rope}, "
            f"window {layer.window}; positions must rise within a sequence, sequences be rows of the table, block "
            "numbers be in the cache, heads be a multiple of key heads",
        )
