"""Layers of grouped-query attention at random for the tests, their library side, and a paged cache that starts as NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from native.attention import KV_BLOCK, AttnStep, kv_row_bytes
from native.gqa import GqaLayer, gqa_forward
from native.library import Pool
from tests.checkasm.attn_cases import from_bf16, packed, to_bf16
from tests.reference.gqa_moe import Attention

SHARPNESS = 3.0  # standard deviation of the attention scores: nearly equal shares would hide errors


@dataclass(frozen=True)
class Dims:
    hidden: int = 72
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 32
    rope: int = 32
    interleave: bool = False
    window: int = 0
    qk_norm: str = "none"
    value_norm: bool = False
    clip: float = 0.0
    bias: bool = False
    sinks: bool = False
    has_v: bool = True
    out_norm: bool = False
    gate: bool = False
    amplitude: float = 1.0


def random_layer(d: Dims, seed: int) -> Attention:
    """Weights exact in f32."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
        w: np.ndarray = (rng.normal(size=shape) * gain / np.sqrt(shape[-1])).astype(np.float32).astype(np.float64)
        return w

    def near(middle: float, n: int, gain: float = 1.0) -> np.ndarray:
        w: np.ndarray = ((middle + 0.2 * rng.normal(size=n)) * gain).astype(np.float32).astype(np.float64)
        return w

    q_width, kv_width = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
    w = {
        "input_norm": near(1, d.hidden),
        "post_norm": near(1, d.hidden),
        "q": normal(q_width, d.hidden, gain=SHARPNESS),
        "k": normal(kv_width, d.hidden),
        "o": normal(d.hidden, q_width, gain=4.0),
    }
    if d.has_v:
        w["v"] = normal(kv_width, d.hidden)
    if d.qk_norm != "none":
        whole = d.qk_norm == "whole"
        w["q_norm"] = near(1, q_width if whole else d.head_dim, SHARPNESS)
        w["k_norm"] = near(1, kv_width if whole else d.head_dim)
    if d.bias:
        w |= {"q_bias": near(0, q_width), "k_bias": near(0, kv_width), "v_bias": near(0, kv_width)}
        w["o_bias"] = near(0, d.hidden)
    if d.sinks:
        w["sinks"] = near(1, d.n_heads, 2.0)
    if d.gate:
        w["gate"] = normal(q_width, d.hidden, gain=2.0)
    if d.out_norm:
        w["out_norm"] = near(1, d.hidden)
    inv_freq = (1e4 ** (-np.arange(d.rope // 2) / max(1, d.rope // 2))).astype(np.float32).astype(np.float64)
    return Attention(
        n_heads=d.n_heads, n_kv_heads=d.n_kv_heads, head_dim=d.head_dim, w=w, inv_freq=inv_freq, eps=1e-5,
        scale=float(np.float32(d.head_dim**-0.5)), amplitude=d.amplitude, window=d.window, qk_norm=d.qk_norm,
        value_norm=d.value_norm, clip=d.clip, interleave=d.interleave,
    )  # fmt: skip


def struct(layer: Attention) -> GqaLayer:
    """The library's layer, matrices in f32."""
    w = {
        name: value.astype(np.float32) if value.ndim == 1 else packed(value.astype(np.float32), "f32")
        for name, value in layer.w.items()
    }
    return GqaLayer(
        hidden=layer.w["o"].shape[0], n_heads=layer.n_heads, n_kv_heads=layer.n_kv_heads, head_dim=layer.head_dim,
        rope=layer.rope, rope_interleave=int(layer.interleave), window=layer.window, qk_norm=layer.qk_norm,
        value_norm=int(layer.value_norm), clip=layer.clip, rms_eps=layer.eps, softmax_scale=layer.scale,
        rope_amplitude=layer.amplitude, inv_freq=layer.inv_freq.astype(np.float32), **w,
    )  # fmt: skip


def perturbed(layer: Attention, name: str) -> Attention:
    """Every second output (or value) changed by a percent."""
    changed = layer.w[name].copy()
    changed[::2] *= 1.01
    return replace(layer, w={**layer.w, name: changed})


@dataclass
class Cache:
    """A paged cache whose blocks lie in a random order; everything not written is NaN."""

    layer: Attention
    kv_format: str
    n_sequences: int
    max_context: int
    seed: int = 0
    kv: np.ndarray = field(init=False)
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        per_sequence = -(-self.max_context // KV_BLOCK)
        self.n_blocks = self.n_sequences * per_sequence + 3
        order = np.random.default_rng(self.seed).permutation(self.n_blocks)[: self.n_sequences * per_sequence]
        self.table = order.reshape(self.n_sequences, per_sequence).astype(np.int32)
        y = self.layer
        if self.kv_format == "int8":  # all ones: the scales are NaN
            n_bytes = 2 * KV_BLOCK * kv_row_bytes("int8", y.head_dim)
            self.kv = np.full((self.n_blocks, y.n_kv_heads, n_bytes), 255, np.uint8)
            return
        dtype, nan = (np.float32, np.nan) if self.kv_format == "f32" else (np.uint16, 0x7FC0)
        self.kv = np.full((self.n_blocks, y.n_kv_heads, 2 * KV_BLOCK * y.head_dim), nan, dtype)

    def _views(self) -> tuple[np.ndarray, np.ndarray]:
        """keys [blocks, heads, components, 64] and values [blocks, heads, 64, components]."""
        y, half = self.layer, KV_BLOCK * self.layer.head_dim
        shape = (self.n_blocks, y.n_kv_heads)
        keys = self.kv[:, :, :half].reshape(*shape, y.head_dim, KV_BLOCK)
        return keys, self.kv[:, :, half:].reshape(*shape, KV_BLOCK, y.head_dim)

    def entries(self, seq: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values f64[n, heads, components] of a sequence's first n positions."""
        if self.kv_format == "int8":
            (keys, of_keys), (values, of_values) = self.int8_entries(seq, n)
            return keys * of_keys, values * of_values
        plain = self.kv if self.kv.dtype == np.float32 else from_bf16(self.kv)
        y, half = self.layer, KV_BLOCK * self.layer.head_dim
        blocks = plain[self.table[seq]].astype(np.float64)
        keys = blocks[:, :, :half].reshape(-1, y.n_kv_heads, y.head_dim, KV_BLOCK).transpose(0, 3, 1, 2)
        values = blocks[:, :, half:].reshape(-1, y.n_kv_heads, KV_BLOCK, y.head_dim).transpose(0, 2, 1, 3)
        shape = (-1, y.n_kv_heads, y.head_dim)
        return keys.reshape(shape)[:n], values.reshape(shape)[:n]

    def int8_entries(self, seq: int, n: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Keys and values, each as integers and the scale of each: f64[n, heads, components]."""
        dim, blocks = self.layer.head_dim, self.kv[self.table[seq]]
        quads, groups = -(-dim // 4), -(-dim // 64)
        n_bytes, shape = KV_BLOCK * quads * 4, blocks.shape[:2]
        keys = (
            blocks[..., :n_bytes].reshape(*shape, quads, KV_BLOCK, 4).transpose(0, 3, 1, 2, 4).astype(np.float64) - 128
        )
        values = blocks[..., n_bytes : 2 * n_bytes].view(np.int8).reshape(*shape, KV_BLOCK // 4, quads * 4, 4)
        scales = from_bf16(np.ascontiguousarray(blocks[..., 2 * n_bytes :]).view(np.uint16))
        scales = scales.reshape(*shape, 2, groups, KV_BLOCK).transpose(2, 0, 4, 1, 3).astype(np.float64)
        of_all = [np.repeat(s.reshape(-1, shape[1], groups), 64, axis=2)[:n, :, :dim] for s in scales]
        by_position = values.transpose(0, 4, 2, 1, 3)  # [blocks, 4, 16, heads, components]: j + 16 i is place (i, j)
        found = keys.reshape(-1, shape[1], quads * 4), by_position.reshape(-1, shape[1], quads * 4).astype(np.float64)
        return (found[0][:n, :, :dim], of_all[0]), (found[1][:n, :, :dim], of_all[1])

    def fill(self, seq: int, keys: np.ndarray, values: np.ndarray) -> None:
        """The first len(keys) positions of a sequence become f32[n, heads, components]."""
        if self.kv_format == "int8":
            self._fill_int8(seq, keys, values)
            return
        all_keys, all_values = self._views()
        for p, (k, v) in enumerate(zip(keys, values, strict=True)):
            block, offset = self.table[seq, p // KV_BLOCK], p % KV_BLOCK
            all_keys[block, :, :, offset] = k if self.kv_format == "f32" else to_bf16(k)
            all_values[block, :, offset] = v if self.kv_format == "f32" else to_bf16(v)

    def _fill_int8(self, seq: int, keys: np.ndarray, values: np.ndarray) -> None:
        dim = self.layer.head_dim
        quads, groups = -(-dim // 4), -(-dim // 64)
        n_bytes = KV_BLOCK * quads * 4
        for i, rows in enumerate((keys, values)):
            padded = np.pad(rows, ((0, 0), (0, 0), (0, groups * 64 - dim))).reshape(*rows.shape[:2], groups, 64)
            scale = to_bf16(np.abs(padded).max(-1) / 127)
            step = np.where(scale == 0, np.float32(1), from_bf16(scale))[..., None]
            q = np.clip(np.rint(padded / step), -127, 127).reshape(*rows.shape[:2], -1)[..., : quads * 4]
            for p in range(len(rows)):
                block, offset = self.kv[self.table[seq, p // KV_BLOCK]], p % KV_BLOCK
                part = block[:, i * n_bytes : (i + 1) * n_bytes]
                if i == 0:
                    part.reshape(-1, quads, KV_BLOCK, 4)[:, :, offset] = (q[p] + 128).reshape(-1, quads, 4)
                else:
                    by_quad = part.reshape(-1, KV_BLOCK // 4, quads * 4, 4)
                    by_quad[:, offset % 16, :, offset // 16] = q[p].astype(np.int8).view(np.uint8)
                scales = block[:, 2 * n_bytes :].view(np.uint16).reshape(-1, 2, groups, KV_BLOCK)
                scales[:, i, :, offset] = scale[p]


@dataclass
class Result:
    x: np.ndarray
    hidden: np.ndarray


def run(
    pool: Pool,
    layer: GqaLayer,
    cache: Cache,
    x: np.ndarray,
    position: np.ndarray,
    seq: np.ndarray | None = None,
    chunk: int = 0,
) -> Result:
    """The layer over rows f32[T, D] in calls of `chunk` rows (0: one call). Outputs start as NaN."""
    n = len(x)
    position = position.astype(np.int32)
    seq = np.zeros(n, np.int32) if seq is None else seq.astype(np.int32)
    out = Result(x.copy(), np.full_like(x, np.nan))
    for a in range(0, n, chunk or n):
        part = slice(a, min(n, a + (chunk or n)))
        step = AttnStep(
            kv=cache.kv, index_k=None, kv_format=cache.kv_format, n_blocks=cache.n_blocks, selected=None,
            n_selected=None, x=out.x[part],
        )  # fmt: skip
        step.set_rows(part.stop - part.start, position[part], seq[part], cache.table, out.hidden[part])
        gqa_forward(pool, layer, step)
    return out
