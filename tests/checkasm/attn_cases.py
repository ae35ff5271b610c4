"""Attention layers at random for the tests, and the plain model they are held against.

The model is float64, dense, expanded (per-head keys and values, no absorption, no blocks, no cache) and knows nothing of
the library. Weights are scaled so that softmax is far from uniform: with nearly equal probabilities an error of one
percent in a projection would vanish below the noise and the tests would be blind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from native.attention import KV_BLOCK, AttnLayer, AttnStep, attn_forward, kv_row_bytes
from native.library import Pool
from native.matrix import BF16, F32, Matrix, matrix

SHARPNESS = 3.0  # standard deviation of the attention scores


@dataclass(frozen=True)
class Dims:
    hidden: int = 136
    n_heads: int = 4
    q_rank: int = 48
    kv_rank: int = 32
    nope: int = 24
    rope: int = 16
    v_dim: int = 32
    index_kind: str = "full"
    index_heads: int = 8
    index_dim: int = 32
    index_topk: int = 8
    rope_interleave: bool = True
    index_rope_interleave: bool = True
    rope_amplitude: float = 1.0
    weights: str = "f32"


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64."""
    room = np.empty(data.nbytes + 64, np.uint8)
    start = -room.__array_interface__["data"][0] % 64
    out = room[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    out[...] = data
    return out


def to_bf16(x: np.ndarray) -> np.ndarray:
    """f32 -> bf16 as u16, nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(h: np.ndarray) -> np.ndarray:
    return (h.astype(np.uint32) << 16).view(np.float32)


def tiled(w: np.ndarray) -> np.ndarray:
    """[..., out, in] -> [..., nb, in, 16], padding rows 0."""
    *stack, out, in_ = w.shape
    n_blocks = -(-out // 16)
    padded = np.zeros((*stack, n_blocks * 16, in_), w.dtype)
    padded[..., :out, :] = w
    return np.swapaxes(padded.reshape(*stack, n_blocks, 16, in_), -1, -2)


def packed(w: np.ndarray, fmt: str) -> Matrix:
    """A kernel matrix (or a stack of them) of f32[..., out, in]."""
    data = tiled(to_bf16(w) if fmt == "bf16" else w.astype(np.float32))
    flat = aligned(np.ascontiguousarray(data)).reshape(-1)
    return matrix(flat, None, BF16 if fmt == "bf16" else F32, w.shape[-2], w.shape[-1])


@dataclass
class Layer:
    """Weights f32 under the names of cb_attn_layer; k_b f32[H, R, nope], v_b f32[H, v, R]."""

    dims: Dims
    w: dict[str, np.ndarray]
    inv_freq: np.ndarray
    softmax_scale: float
    rms_eps: float = 1e-5
    latent_eps: float = 1e-6

    @staticmethod
    def random(dims: Dims, seed: int) -> Layer:
        rng = np.random.default_rng(seed)
        d = dims

        def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
            w = (rng.normal(size=shape) * gain / np.sqrt(shape[-1])).astype(np.float32)
            return from_bf16(to_bf16(w)) if d.weights == "bf16" else w

        def near_one(n: int) -> np.ndarray:
            return (1 + 0.2 * rng.normal(size=n)).astype(np.float32)

        w = {
            "input_norm": near_one(d.hidden),
            "post_norm": near_one(d.hidden),
            "kv_a_norm": near_one(d.kv_rank),
            "q_b": normal(d.n_heads * (d.nope + d.rope), d.q_rank or d.hidden, gain=SHARPNESS),
            "kv_a": normal(d.kv_rank + d.rope, d.hidden),
            "k_b": normal(d.n_heads, d.kv_rank, d.nope) * np.float32(np.sqrt(d.nope / d.kv_rank)),
            "v_b": normal(d.n_heads, d.v_dim, d.kv_rank),
            "o": normal(d.hidden, d.n_heads * d.v_dim, gain=4.0),
        }
        if d.weights == "bf16":
            w["k_b"] = from_bf16(to_bf16(w["k_b"]))
        if d.q_rank:
            w["q_a"] = normal(d.q_rank, d.hidden)
            w["q_a_norm"] = near_one(d.q_rank)
        if d.index_kind == "full":
            w["index_wq_b"] = normal(d.index_heads * d.index_dim, d.q_rank or d.hidden)
            w["index_wk"] = normal(d.index_dim, d.hidden)
            w["index_weights"] = normal(d.index_heads, d.hidden)
            w["index_k_norm_w"] = near_one(d.index_dim)
            w["index_k_norm_b"] = (0.1 * rng.normal(size=d.index_dim)).astype(np.float32)
        inv_freq = (10000.0 ** (-np.arange(d.rope // 2) / max(1, d.rope // 2))).astype(np.float32)
        return Layer(d, w, inv_freq, float(np.float32((d.nope + d.rope) ** -0.5)))

    def struct(self) -> AttnLayer:
        d = self.dims
        w = {name: value if value.ndim == 1 else packed(value, d.weights) for name, value in self.w.items()}
        if "index_weights" in w:
            w["index_weights"] = packed(self.w["index_weights"], "f32")
        return AttnLayer(
            hidden=d.hidden, n_heads=d.n_heads, q_rank=d.q_rank, kv_rank=d.kv_rank, nope=d.nope, rope=d.rope,
            v_dim=d.v_dim, rope_interleave=int(d.rope_interleave), rms_eps=self.rms_eps, latent_eps=self.latent_eps,
            softmax_scale=self.softmax_scale, index_kind=d.index_kind, index_heads=d.index_heads,
            index_dim=d.index_dim, index_topk=d.index_topk, index_rope_interleave=int(d.index_rope_interleave),
            inv_freq=self.inv_freq, rope_amplitude=d.rope_amplitude, index_norm_eps=1e-6, **w,
        )  # fmt: skip

    def perturbed(self, name: str, factor: float = 1.01) -> Layer:
        """Every second output of one weight changed by a percent."""
        changed = self.w[name].copy()
        changed[..., ::2, :] *= np.float32(factor)
        return replace(self, w={**self.w, name: changed})


# ---- the library's side ------------------------------------------------------------------------------------


@dataclass
class Cache:
    """A paged cache whose blocks lie in a random order; everything not written is NaN."""

    dims: Dims
    kv_format: str
    n_sequences: int
    max_context: int
    seed: int = 0
    kv: np.ndarray = field(init=False)
    index_k: np.ndarray = field(init=False)
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        per_sequence = -(-self.max_context // KV_BLOCK)
        self.n_blocks = self.n_sequences * per_sequence + 3
        order = np.random.default_rng(self.seed).permutation(self.n_blocks)[: self.n_sequences * per_sequence]
        self.table = order.reshape(self.n_sequences, per_sequence).astype(np.int32)
        d = self.dims
        self.kv, self.index_k = self._blocks(d.kv_rank + d.rope), self._blocks(d.index_dim)

    def _blocks(self, width: int) -> np.ndarray:
        if self.kv_format == "int8":  # all ones: the scales are NaN
            return np.full((self.n_blocks, KV_BLOCK * kv_row_bytes("int8", width)), 255, np.uint8)
        dtype, nan = (np.float32, np.nan) if self.kv_format == "f32" else (np.uint16, 0x7FC0)
        return np.full((self.n_blocks, KV_BLOCK, width), nan, dtype)

    def entries(self, which: np.ndarray, seq: int, n: int) -> np.ndarray:
        """The first n cached entries of a sequence as f32."""
        blocks = which[self.table[seq]]
        if which.dtype == np.uint8:
            values, scales = self.int8_entries(which, seq, n)
            return (values * np.repeat(scales, 64, axis=1)[:, : values.shape[1]]).astype(np.float32)
        rows = blocks.reshape(-1, which.shape[-1])[:n]
        return rows if rows.dtype == np.float32 else from_bf16(rows)

    def fill(self, rows: np.ndarray) -> None:
        """The first sequence's latents from rows f32[n, width]."""
        self._fill(self.kv, rows)

    def fill_index(self, rows: np.ndarray) -> None:
        """Its index keys from rows f32[n, index_dim]."""
        self._fill(self.index_k, rows)

    def _fill(self, which: np.ndarray, rows: np.ndarray) -> None:
        n, width = rows.shape
        padded = np.zeros((len(self.table[0]) * KV_BLOCK, width), np.float32)
        padded[:n] = rows
        if self.kv_format != "int8":
            stored = padded if self.kv_format == "f32" else to_bf16(padded)
            which[self.table[0]] = stored.reshape(-1, KV_BLOCK, width)
            return
        groups = np.pad(padded, ((0, 0), (0, -width % 64))).reshape(len(padded), -1, 64)
        scale = to_bf16(np.abs(groups).max(-1) / 127)
        step = np.where(scale == 0, np.float32(1), from_bf16(scale))
        q = np.clip(np.rint(groups / step[..., None]), -127, 127).reshape(len(padded), -1)[:, :width]
        blocks, bytes_of_row = which[self.table[0]], -(-width // 4) * 4
        values = np.pad((q + 128).astype(np.uint8), ((0, 0), (0, bytes_of_row - width))).reshape(
            len(blocks), KV_BLOCK, -1
        )
        scale = scale.reshape(len(blocks), KV_BLOCK, -1)
        if which is self.index_k:  # component by component
            values = values.reshape(len(blocks), KV_BLOCK, -1, 4).transpose(0, 2, 1, 3)
            scale = np.ascontiguousarray(scale.transpose(0, 2, 1))
        blocks[:, : KV_BLOCK * bytes_of_row] = values.reshape(len(blocks), -1)
        blocks[:, KV_BLOCK * bytes_of_row :] = scale.reshape(len(blocks), -1).view(np.uint8)
        which[self.table[0]] = blocks

    def int8_entries(self, which: np.ndarray, seq: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The first n entries as integers f32[n, width] and their scales f32[n, ceil(width / 64)]."""
        d, blocks = self.dims, which[self.table[seq]]
        width = d.kv_rank + d.rope if which is self.kv else d.index_dim
        bytes_of_row, groups = -(-width // 4) * 4, -(-width // 64)
        values = blocks[:, : KV_BLOCK * bytes_of_row]
        scales = np.ascontiguousarray(blocks[:, KV_BLOCK * bytes_of_row :]).view(np.uint16)
        if which is self.index_k:  # component by component
            values = values.reshape(len(blocks), -1, KV_BLOCK, 4).transpose(0, 2, 1, 3)
            scales = scales.reshape(len(blocks), groups, KV_BLOCK).transpose(0, 2, 1)
        plain = values.reshape(-1, bytes_of_row)[:n, :width].astype(np.float32) - np.float32(128)
        return plain, from_bf16(np.ascontiguousarray(scales)).reshape(-1, groups)[:n]


@dataclass
class Result:
    x: np.ndarray
    hidden: np.ndarray
    selected: np.ndarray
    n_selected: np.ndarray


def run(
    pool: Pool,
    layer: AttnLayer,
    cache: Cache,
    x: np.ndarray,
    position: np.ndarray,
    seq: np.ndarray | None = None,
    chunk: int = 0,
    selection: Result | None = None,
) -> Result:
    """The layer over rows f32[T, D] in calls of `chunk` rows (0: one call). Outputs start as NaN."""
    n = len(x)
    position = position.astype(np.int32)
    seq = np.zeros(n, np.int32) if seq is None else seq.astype(np.int32)
    out = Result(
        x.copy(),
        np.full_like(x, np.nan),
        np.full((n, cache.dims.index_topk), -7, np.int32),
        np.full(n, -7, np.int32),
    )
    if selection:
        out.selected[:], out.n_selected[:] = selection.selected, selection.n_selected
    index_k = cache.index_k if cache.dims.index_kind == "full" else None
    for a in range(0, n, chunk or n):
        part = slice(a, min(n, a + (chunk or n)))
        step = AttnStep(
            kv=cache.kv, index_k=index_k, kv_format=cache.kv_format, n_blocks=cache.n_blocks,
            selected=out.selected[part], n_selected=out.n_selected[part], x=out.x[part],
        )  # fmt: skip
        step.set_rows(part.stop - part.start, position[part], seq[part], cache.table, out.hidden[part])
        attn_forward(pool, layer, step)
    return out


# ---- the model ---------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rotate(x: np.ndarray, position: np.ndarray, layer: Layer, interleave: bool) -> np.ndarray:
    """x [S, ..., rope], positions [S]; result de-interleaved, as the cache holds it."""
    half = x.shape[-1] // 2
    angle = position.astype(np.float64)[:, None] * layer.inv_freq.astype(np.float64)
    angle = angle.reshape(len(position), *[1] * (x.ndim - 2), half)
    cos, sin = np.cos(angle) * layer.dims.rope_amplitude, np.sin(angle) * layer.dims.rope_amplitude
    u, v = (x[..., 0::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
    return np.concatenate([u * cos - v * sin, v * cos + u * sin], -1)


@dataclass
class ModelState:
    """What the model computes before attention, float64; c, k_pe and ki may be replaced by what a cache holds."""

    c: np.ndarray
    k_pe: np.ndarray
    ki: np.ndarray | None
    h: np.ndarray
    q_lat: np.ndarray


def model_state(layer: Layer, x: np.ndarray, position: np.ndarray) -> ModelState:
    d, w = layer.dims, {name: value.astype(np.float64) for name, value in layer.w.items()}
    h = rms_norm(x.astype(np.float64), w["input_norm"], layer.rms_eps)
    q_lat = rms_norm(h @ w["q_a"].T, w["q_a_norm"], layer.latent_eps) if d.q_rank else h
    kv = h @ w["kv_a"].T
    c = rms_norm(kv[:, : d.kv_rank], w["kv_a_norm"], layer.latent_eps)
    k_pe = rotate(kv[:, d.kv_rank :], position, layer, d.rope_interleave)
    ki = None
    if d.index_kind == "full":
        ki = h @ w["index_wk"].T
        ki = ki - ki.mean(-1, keepdims=True)
        ki = ki / np.sqrt((ki * ki).mean(-1, keepdims=True) + 1e-6) * w["index_k_norm_w"] + w["index_k_norm_b"]
        ki[:, : d.rope] = rotate(ki[:, : d.rope], position, layer, d.index_rope_interleave)
    return ModelState(c, k_pe, ki, h, q_lat)


def model_index_scores(layer: Layer, state: ModelState, position: np.ndarray) -> np.ndarray:
    """[S, S] float64: rows score all positions, their own future included."""
    d, w = layer.dims, layer.w
    assert state.ki is not None
    q = (state.q_lat @ w["index_wq_b"].astype(np.float64).T).reshape(len(position), d.index_heads, d.index_dim)
    q[..., : d.rope] = rotate(q[..., : d.rope], position, layer, d.index_rope_interleave)
    g = state.h @ w["index_weights"].astype(np.float64).T
    dots = np.maximum(np.einsum("shd,td->sht", q, state.ki), 0)
    return np.einsum("sh,sht->st", g, dots) * d.index_heads**-0.5 * d.index_dim**-0.5


def model_attention(
    layer: Layer, x: np.ndarray, position: np.ndarray, state: ModelState, keep: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x after attention, hidden, and the probabilities [H, S, S]; keep bool[S, S] says which keys a row may see."""
    d, n, w = layer.dims, len(x), {name: value.astype(np.float64) for name, value in layer.w.items()}
    q = (state.q_lat @ w["q_b"].T).reshape(n, d.n_heads, d.nope + d.rope)
    q_pe = rotate(q[..., d.nope :], position, layer, d.rope_interleave)
    k_nope = np.einsum("tr,hre->the", state.c, w["k_b"])
    v = np.einsum("tr,hvr->thv", state.c, w["v_b"])
    a = np.einsum("she,the->hst", q[..., : d.nope], k_nope) + np.einsum("shp,tp->hst", q_pe, state.k_pe)
    a = np.where(keep[None], a * layer.softmax_scale, -np.inf)
    p = np.exp(a - a.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("hst,thv->shv", p, v).reshape(n, -1)
    after = x.astype(np.float64) + o @ w["o"].T
    return after, rms_norm(after, w["post_norm"], layer.rms_eps), p


def keep_of(result: Result, position: np.ndarray) -> np.ndarray:
    """The library's selection as bool[S, S] (positions 0 .. S-1)."""
    keep = np.tril(np.ones((len(position), len(position)), bool))
    for t, n in enumerate(result.n_selected):
        if n >= 0:
            keep[t] = False
            keep[t, result.selected[t, :n]] = True
    return keep
