"""The families with grouped-query attention in float64, from a checkpoint: what the kernel is compared with.

Plain and whole: no cache, no blocks, one sequence; tensors under their checkpoint names, MXFP4 decoded here. `Attention`
is one attention layer with everything the families vary, so that tests may also build layers no checkpoint has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.oracle import read_tensors

F64 = npt.NDArray[np.float64]

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


# ---- pieces ----------------------------------------------------------------------------------------------------------


def rms_norm(x: F64, w: F64 | float, eps: float) -> F64:
    normed: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
    return normed


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(-1, keepdims=True))
    share: F64 = e / e.sum(-1, keepdims=True)
    return share


def silu(x: F64) -> F64:
    out: F64 = x / (1 + np.exp(-x))
    return out


def gelu(x: F64) -> F64:
    """The tanh form."""
    out: F64 = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return out


@dataclass
class Attention:
    """One layer. Matrices [out, in]; vectors of their width; None where a family has none of it."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    w: dict[str, F64]  # q, k, v, o, gate, input_norm, post_norm; q_norm, k_norm, out_norm; *_bias; sinks
    inv_freq: F64
    eps: float
    scale: float
    amplitude: float = 1.0
    window: int = 0
    qk_norm: str = "none"
    value_norm: bool = False
    clip: float = 0.0
    interleave: bool = False

    @property
    def rope(self) -> int:
        return 2 * len(self.inv_freq)


def turn(x: F64, position: np.ndarray, layer: Attention) -> F64:
    """x [S, heads, head_dim]; the leading components turn, each pair (i, i + half) or (2 i, 2 i + 1) in its place."""
    half = len(layer.inv_freq)
    angle = position[:, None, None] * layer.inv_freq
    cos, sin = np.cos(angle) * layer.amplitude, np.sin(angle) * layer.amplitude
    out = x.copy()
    first = slice(0, 2 * half, 2) if layer.interleave else slice(0, half)
    second = slice(1, 2 * half, 2) if layer.interleave else slice(half, 2 * half)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def queries_keys_values(layer: Attention, x: F64, position: np.ndarray) -> tuple[F64, F64, F64]:
    """[S, H, C] and twice [S, K, C], keys and queries turned, queries unscaled."""
    w, eps = layer.w, layer.eps
    h = rms_norm(x, w["input_norm"], eps)
    q, k = h @ w["q"].T, h @ w["k"].T
    v = h @ w["v"].T if "v" in w else k
    q, k, v = (y + w.get(name, 0.0) for y, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias")))
    if layer.qk_norm == "whole":
        q, k = rms_norm(q, w["q_norm"], eps), rms_norm(k, w["k_norm"], eps)
    q, k, v = (y.reshape(len(x), -1, layer.head_dim) for y in (q, k, v))
    if layer.qk_norm == "head":
        q, k = rms_norm(q, w["q_norm"], eps), rms_norm(k, w["k_norm"], eps)
    if layer.clip:
        q, k, v = (np.clip(y, -layer.clip, layer.clip) for y in (q, k, v))
    if layer.value_norm:
        v = rms_norm(v, 1.0, eps)
    return turn(q, position, layer), turn(k, position, layer), v


def attend(layer: Attention, q: F64, k: F64, v: F64, position: np.ndarray) -> tuple[F64, F64]:
    """Head outputs [S, H * C] of queries at `position` over keys at positions 0 .. len(k) - 1; and [H, S, T] shares."""
    group = layer.n_heads // layer.n_kv_heads
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    behind = position[:, None] - np.arange(len(k))[None]
    seen = (behind >= 0) & ((behind < layer.window) if layer.window else True)
    score = np.where(seen, np.einsum("shc,thc->hst", q, k) * layer.scale, -np.inf)
    if "sinks" in layer.w:
        sink = np.broadcast_to(layer.w["sinks"][:, None, None], (layer.n_heads, len(q), 1))
        share = softmax(np.concatenate([score, sink], -1))[..., :-1]
    else:
        share = softmax(score)
    return np.einsum("hst,thc->shc", share, v).reshape(len(q), -1), share


def finish(layer: Attention, x: F64, heads: F64) -> tuple[F64, F64]:
    """The residual after attention, and what the feed-forward half reads."""
    if "gate" in layer.w:
        heads = heads / (1 + np.exp(-(rms_norm(x, layer.w["input_norm"], layer.eps) @ layer.w["gate"].T)))
    y = heads @ layer.w["o"].T + layer.w.get("o_bias", 0.0)
    if "out_norm" in layer.w:
        y = rms_norm(y, layer.w["out_norm"], layer.eps)
    return x + y, rms_norm(x + y, layer.w["post_norm"], layer.eps)


def attention(layer: Attention, x: F64, position: np.ndarray) -> tuple[F64, F64]:
    """x after attention and the normed hidden state, rows at positions 0 .. S - 1."""
    q, k, v = queries_keys_values(layer, x, position)
    return finish(layer, x, attend(layer, q, k, v, position)[0])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def frequencies(params: dict[str, object], dim: int) -> tuple[F64, float]:
    """inv_freq [dim / 2] and the amplitude for rope types default, yarn and proportional."""
    theta = float(params["rope_theta"])  # type: ignore[arg-type]
    inv = theta ** (-np.arange(0, dim, 2) / dim)
    kind = params.get("rope_type", "default")
    if kind == "proportional":
        inv[int(params["partial_rotary_factor"] * dim) // 2 :] = 0  # type: ignore[operator]
    if kind != "yarn":
        return inv, 1.0
    factor, original = float(params["factor"]), float(params["original_max_position_embeddings"])  # type: ignore[arg-type]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(float(params["beta_fast"])), pair_that_turns(float(params["beta_slow"]))  # type: ignore[arg-type]
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return inv * (1 - stretched) + inv / factor * stretched, 0.1 * math.log(factor) + 1


class Model:
    """A checkpoint of one of the families. `layers[i]` is its attention, `ffn(i, x, h)` adds the other half to x."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.family: str = config["model_type"]
        self.config = config.get("text_config", config)
        prefix = "model.language_model." if self.family == "gemma4" else "model."
        self._raw = {
            ("model." + name.removeprefix(prefix) if name.startswith(prefix) else name): raw
            for name, raw in read_tensors(directory).items()
        }
        self.layers = [self._attention(i) for i in range(self.config["num_hidden_layers"])]

    def has(self, name: str) -> bool:
        return name in self._raw

    def tensor(self, name: str) -> F64:
        dtype, shape, data = self._raw[name]
        if dtype == "BF16":
            bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).astype(np.float64).reshape(shape)
        return np.frombuffer(data, {"F32": np.float32, "U8": np.uint8}[dtype]).astype(np.float64).reshape(shape)

    def _attention(self, i: int) -> Attention:
        c, layer = self.config, f"model.layers.{i}."
        kind = c["layer_types"][i] if "layer_types" in c else "full_attention"
        wide = self.family == "gemma4" and kind == "full_attention"
        head_dim = c["global_head_dim"] if wide else c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        params = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
        params = dict(params[kind]) if kind in params else params
        params.setdefault("rope_theta", c.get("rope_theta"))
        rope = int(head_dim * (c.get("partial_rotary_factor", 1.0) if self.family != "gemma4" else 1.0))
        inv_freq, amplitude = frequencies(params, rope)
        names = {f"{p}": f"self_attn.{p}_proj.weight" for p in "qkvo"}
        names |= {f"{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkvo"}
        names |= {f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"}
        names |= {"sinks": "self_attn.sinks", "input_norm": "input_layernorm.weight"}
        if self.family == "gemma4":
            names |= {"out_norm": "post_attention_layernorm.weight", "post_norm": "pre_feedforward_layernorm.weight"}
        else:
            names |= {"post_norm": "post_attention_layernorm.weight"}
        w = {short: self.tensor(layer + name) for short, name in names.items() if self.has(layer + name)}
        has_norm = "q_norm" in w
        return Attention(
            n_heads=c["num_attention_heads"], n_kv_heads=c["num_global_key_value_heads" if wide else "num_key_value_heads"],
            head_dim=head_dim, w=w, inv_freq=inv_freq, eps=c["rms_norm_eps"],
            scale=1.0 if self.family == "gemma4" else head_dim**-0.5, amplitude=amplitude,
            window=c["sliding_window"] if kind == "sliding_attention" else 0,
            qk_norm="none" if not has_norm else "whole" if self.family == "olmoe" else "head",
            value_norm=self.family == "gemma4", clip=c.get("clip_qkv") or 0.0,
        )  # fmt: skip

    # ---- the other half

    def _mlp(self, prefix: str, h: F64, parts: tuple[str, ...], act: Callable[[F64], F64]) -> F64:
        gate, up, down = (self.tensor(f"{prefix}{part}.weight") for part in parts)
        out: F64 = (act(h @ gate.T) * (h @ up.T)) @ down.T
        return out

    def _mxfp4(self, name: str) -> F64:
        """[E, out, in]: nibbles low first in groups of 32 that share an exponent byte."""
        blocks, scales = self.tensor(name + "_blocks").astype(int), self.tensor(name + "_scales")
        values = FP4[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*blocks.shape[:-1], 32)
        return (values * np.exp2(scales - 127)[..., None]).reshape(*blocks.shape[:2], -1)

    def _choose(self, prefix: str, h: F64) -> tuple[np.ndarray, F64]:
        """Expert ids and weights [S, k]."""
        c = self.config
        k = c.get("num_experts_per_tok") or c["top_k_experts"]
        if self.family == "gpt_oss":
            logits = h @ self.tensor(prefix + "router.weight").T + self.tensor(prefix + "router.bias")
            ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
            return ids, softmax(np.take_along_axis(logits, ids, -1))
        if self.family == "glm4_moe":
            p = 1 / (1 + np.exp(-(h @ self.tensor(prefix + "gate.weight").T)))
            ids = np.argsort(-(p + self.tensor(prefix + "gate.e_score_correction_bias")), axis=-1, kind="stable")[:, :k]
            share = np.take_along_axis(p, ids, -1)
            return ids, share / share.sum(-1, keepdims=True) * c["routed_scaling_factor"]
        p = softmax(h @ self.tensor(prefix + ("router.proj.weight" if self.family == "gemma4" else "gate.weight")).T)
        ids = np.argsort(-p, axis=-1, kind="stable")[:, :k]
        share = np.take_along_axis(p, ids, -1)
        if self.family != "olmoe":
            share = share / share.sum(-1, keepdims=True)
        if self.family == "gemma4":
            share = share * self.tensor(prefix + "router.per_expert_scale")[ids]
        return ids, share

    def _experts(self, prefix: str, h: F64, ids: np.ndarray, share: F64) -> F64:
        out = np.zeros_like(h)
        if self.family in ("gpt_oss", "gemma4"):
            if self.family == "gpt_oss":
                gate_up, down = (self._mxfp4(f"{prefix}experts.{name}_proj") for name in ("gate_up", "down"))
            else:
                gate_up, down = (self.tensor(f"{prefix}experts.{name}_proj") for name in ("gate_up", "down"))
        for e in np.unique(ids):
            rows, slots = np.nonzero(ids == e)
            if self.family == "gpt_oss":
                both = h[rows] @ gate_up[e].T + self.tensor(f"{prefix}experts.gate_up_proj_bias")[e]
                limit = self.config["swiglu_limit"]
                gate, up = np.minimum(both[:, 0::2], limit), np.clip(both[:, 1::2], -limit, limit)
                y = ((up + 1) * gate / (1 + np.exp(-1.702 * gate))) @ down[e].T
                y = y + self.tensor(f"{prefix}experts.down_proj_bias")[e]
            elif self.family == "gemma4":
                gate, up = np.split(h[rows] @ gate_up[e].T, 2, axis=1)
                y = (gelu(gate) * up) @ down[e].T
            else:
                parts = ("w1", "w3", "w2") if self.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
                y = self._mlp(f"{prefix}experts.{e}.", h[rows], parts, silu)
            out[rows] += share[rows, slots, None] * y
        return out

    def ffn(self, i: int, x: F64, h: F64) -> F64:
        """The residual after the layer's other half; x after attention, h = its norm."""
        layer, plain = f"model.layers.{i}.", ("gate_proj", "up_proj", "down_proj")
        if self.family == "gemma4":
            return self._gemma_ffn(layer, x, h)
        prefix = layer + ("block_sparse_moe." if self.family == "mixtral" else "mlp.")
        if not self.has(prefix + "gate.weight") and not self.has(prefix + "router.weight"):
            return x + self._mlp(prefix, h, plain, silu)
        y = self._experts(prefix, h, *self._choose(prefix, h))
        if self.has(prefix + "shared_experts.up_proj.weight"):
            y = y + self._mlp(prefix + "shared_experts.", h, plain, silu)
        return x + y

    def _gemma_ffn(self, layer: str, x: F64, h: F64) -> F64:
        eps = self.config["rms_norm_eps"]

        def norm(name: str, y: F64) -> F64:
            return rms_norm(y, self.tensor(f"{layer}{name}.weight"), eps)

        dense = self._mlp(layer + "mlp.", h, ("gate_proj", "up_proj", "down_proj"), gelu)
        router_in = rms_norm(x, 1.0, eps) * self.tensor(layer + "router.scale") * x.shape[1] ** -0.5
        moe = self._experts(layer, norm("pre_feedforward_layernorm_2", x), *self._choose(layer, router_in))
        both = norm("post_feedforward_layernorm_1", dense) + norm("post_feedforward_layernorm_2", moe)
        after: F64 = (x + norm("post_feedforward_layernorm", both)) * self.tensor(layer + "layer_scalar")
        return after

    # ---- ends

    def embed(self, ids: np.ndarray) -> F64:
        x = self.tensor("model.embed_tokens.weight")[ids]
        scale = math.sqrt(x.shape[1]) if self.family == "gemma4" else 1.0
        scaled: F64 = x * scale
        return scaled

    def logits(self, x: F64) -> F64:
        h = rms_norm(x, self.tensor("model.norm.weight"), self.config["rms_norm_eps"])
        out: F64 = h @ self.tensor("model.embed_tokens.weight" if self.family == "gemma4" else "lm_head.weight").T
        if self.family == "gemma4":
            cap = self.config["final_logit_softcapping"]
            out = cap * np.tanh(out / cap)
        return out
