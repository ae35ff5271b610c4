"""Grouped-query attention: H query heads over K key heads, with everything in which the families differ.

Bias, norm of queries and keys, clamp, partial rope, window, sinks, values that are the keys, a norm behind the output
projection. docs/numerics.md defines every sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from native.attention import AttnStep
from native.gqa import GqaLayer, gqa_forward
from native.library import Pool
from native.matrix import Matrix, absent_matrix
from shared.model.attention.kind import Attention, LayerKv, PositionRows
from shared.model.inner import sigmoid
from shared.model.lanes import Lanes, causal
from shared.model.rope import Rope
from shared.model.tensors import F32, PlannedTensor, Source, Tensors, matrix_of, planned_matrix, planned_vector

_ATTN = "self_attn."


class Grouped(Attention, frozen=True, kw_only=True):
    """Query head h reads key head h // (n_heads / n_kv_heads)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    softmax_scale: float
    rope: Rope
    window: int = 0
    """Keys a row sees, its own included; 0 = all."""
    qk_norm: str = "none"
    """"none", "head" (each head by itself) or "whole" (all heads as one vector)."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_sinks: bool = False
    """One learned logit per head joins each softmax, without a value."""
    has_values: bool = True
    """False: values are the keys as projected."""
    has_value_norm: bool = False
    has_output_norm: bool = False
    """The output projection is normed before it joins the residual stream, by ``post_attention_layernorm``."""
    post_norm: str = "post_attention_layernorm"
    """What makes ``hidden``."""
    has_gate: bool = False
    """What the heads give is multiplied with the sigmoid of a further projection; ``q_proj`` holds the rows of both, a head's
    queries before its gate."""
    clip: float = 0.0
    """Queries, keys and values are clamped to +-clip; 0 = not."""

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    # ---- tensors ----

    def tensors(self) -> Iterator[PlannedTensor]:
        hidden, whole = self.hidden, self.qk_norm == "whole"
        yield planned_vector("input_layernorm.weight", hidden)
        parts = [("q_proj", self.q_width), ("k_proj", self.kv_width)]
        for name, width in [*parts, ("v_proj", self.kv_width)] if self.has_values else parts:
            source = self._half("q_proj", 0) if self.has_gate and name == "q_proj" else None
            yield planned_matrix(_ATTN + name, "attention", width, hidden, source=source)
            if self.has_qkv_bias:
                yield planned_vector(f"{_ATTN}{name}.bias", width)
        if self.has_gate:
            yield planned_matrix(_ATTN + "q_gate", "attention", self.q_width, hidden, source=self._half("q_proj", 1))
        if self.qk_norm != "none":
            yield planned_vector(_ATTN + "q_norm.weight", self.q_width if whole else self.head_dim)
            yield planned_vector(_ATTN + "k_norm.weight", self.kv_width if whole else self.head_dim)
        if self.has_sinks:
            yield planned_vector(_ATTN + "sinks", self.n_heads)
        yield planned_matrix(_ATTN + "o_proj", "attention", hidden, self.q_width)
        if self.has_output_bias:
            yield planned_vector(_ATTN + "o_proj.bias", hidden)
        if self.has_output_norm:
            yield planned_vector("post_attention_layernorm.weight", hidden)
        yield planned_vector(self.hidden_norm, hidden)

    def _half(self, name: str, nth: int) -> Source:
        """Of a tensor whose rows are two matrices, head by head."""
        dim, shape = self.head_dim, (2 * self.q_width, self.hidden)
        return Source(f"{_ATTN}{name}.weight", shape, start=nth * dim, stride=2 * dim, n_rows=dim)

    @property
    def hidden_norm(self) -> str:
        return f"{self.post_norm}.weight"

    # ---- memory and cost ----

    @property
    def rows(self) -> tuple[PositionRows, ...]:
        return (PositionRows("keys and values", self.head_dim, 2 * self.n_kv_heads),)

    @property
    def reach(self) -> int:
        return self.window

    @property
    def weights_per_row(self) -> int:
        n_queries = 3 if self.has_gate else 2
        return self.hidden * (n_queries * self.q_width + (2 if self.has_values else 1) * self.kv_width)

    # ---- arithmetic ----

    def kernel(self, prefix: str, tensors: Tensors) -> GroupedKernel:
        attn = prefix + _ATTN

        def vector(name: str, is_there: bool = True) -> F32 | None:
            return tensors[name].weight if is_there else None

        def weight(name: str) -> Matrix:
            return matrix_of(tensors[f"{attn}{name}.weight"])

        has_norm, has_bias = self.qk_norm != "none", self.has_qkv_bias
        layer = GqaLayer(
            hidden=self.hidden,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope.dim,
            rope_interleave=self.rope.is_interleaved,
            window=self.window,
            qk_norm=self.qk_norm,
            value_norm=self.has_value_norm,
            clip=self.clip,
            rms_eps=self.rms_eps,
            softmax_scale=self.softmax_scale,
            rope_amplitude=self.rope.amplitude,
            inv_freq=np.array(self.rope.inv_freq(), np.float32),
            input_norm=vector(prefix + "input_layernorm.weight"),
            q_norm=vector(attn + "q_norm.weight", has_norm),
            k_norm=vector(attn + "k_norm.weight", has_norm),
            post_norm=vector(prefix + self.hidden_norm),
            out_norm=vector(prefix + "post_attention_layernorm.weight", self.has_output_norm),
            q_bias=vector(attn + "q_proj.bias", has_bias),
            k_bias=vector(attn + "k_proj.bias", has_bias),
            v_bias=vector(attn + "v_proj.bias", has_bias and self.has_values),
            o_bias=vector(attn + "o_proj.bias", self.has_output_bias),
            sinks=vector(attn + "sinks", self.has_sinks),
            q=weight("q_proj"),
            k=weight("k_proj"),
            v=weight("v_proj") if self.has_values else absent_matrix(),
            o=weight("o_proj"),
            gate=weight("q_gate") if self.has_gate else absent_matrix(),
        )
        return GroupedKernel(layer)

    def forward(self, lanes: Lanes, prefix: str, h: Sequence[F32]) -> list[F32]:
        p, n_rows = prefix + _ATTN, len(lanes.positions)
        q, k = (self._projected(lanes, p, part, h) for part in ("q", "k"))
        v = self._projected(lanes, p, "v", h) if self.has_values else lanes.linear(p + "k_proj.weight", h)
        if self.qk_norm == "whole":
            q, k = (lanes.norm(f"{p}{part}_norm.weight", x, self.rms_eps) for part, x in (("q", q), ("k", k)))
        q, k, v = ([x.reshape(n_rows, -1, self.head_dim) for x in part] for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = (lanes.norm(f"{p}{part}_norm.weight", x, self.rms_eps) for part, x in (("q", q), ("k", k)))
        if self.clip:
            limit = np.float32(self.clip)
            q, k, v = ([np.clip(x, -limit, limit) for x in part] for part in (q, k, v))
        if self.has_value_norm:
            v = [x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self.rms_eps)) for x in v]
        scale = np.float32(self.softmax_scale)
        q = lanes.queries([self.rope.turn(x, lanes.positions) * scale for x in q])
        k = lanes.cached([self.rope.turn(x, lanes.positions) for x in k])
        v = lanes.cached(v)
        seen = causal(lanes, self.window)
        sinks = lanes.vectors(p + "sinks") if self.has_sinks else [None] * len(h)
        mixed = []
        for i, sink in enumerate(sinks):
            parts = [
                attend(q[i][span], k[i][span], v[i][span], allowed, sink) for span, allowed in zip(lanes.spans, seen)
            ]
            mixed.append(np.concatenate(parts).reshape(n_rows, -1))
        if self.has_gate:
            mixed = [x * sigmoid(gate) for x, gate in zip(mixed, lanes.linear(p + "q_gate.weight", h))]
        out = lanes.linear(p + "o_proj.weight", mixed)
        if self.has_output_bias:
            out = [x + bias for x, bias in zip(out, lanes.vectors(p + "o_proj.bias"))]
        if self.has_output_norm:
            out = lanes.norm(prefix + "post_attention_layernorm.weight", out, self.rms_eps)
        return out

    def _projected(self, lanes: Lanes, p: str, part: str, h: Sequence[F32]) -> list[F32]:
        found = lanes.linear(f"{p}{part}_proj.weight", h)
        if not self.has_qkv_bias:
            return found
        return [x + bias for x, bias in zip(found, lanes.vectors(f"{p}{part}_proj.bias"))]

    def describe(self) -> str:
        text = f"GQA, {self.n_heads} heads over {self.n_kv_heads} of {self.head_dim}, rope {self.rope.dim}"
        text += ", gated" if self.has_gate else ""
        return f"{text}, window {self.window:,}" if self.window else text


class GroupedKernel:
    """See ``AttentionKernel``."""

    def __init__(self, layer: GqaLayer) -> None:
        self._layer = layer

    def run(self, pool: Pool, step: AttnStep, caches: LayerKv) -> None:
        step.use_ring(caches.ring)
        step.kv, step.index_k = caches.rows[0], None
        gqa_forward(pool, self._layer, step)


def attend(queries: F32, keys: F32, values: F32, allowed: NDArray[np.bool_], sink: F32 | None) -> F32:
    """queries f32[T, H, C], scaled, keys and values f32[T, K, C], allowed [T, T], sink f32[H] or None -> f32[T, H, C]."""
    n_rows, n_heads, dim = queries.shape
    group = n_heads // keys.shape[1]
    by_key = queries.reshape(n_rows, -1, group, dim).transpose(1, 2, 0, 3)  # [K, G, T, C]
    scores = np.matmul(by_key, keys.transpose(1, 2, 0)[:, None])
    scores += np.where(allowed, np.float32(0.0), np.float32(-np.inf))
    most = scores.max(axis=3, keepdims=True)
    if sink is not None:
        extra = sink.reshape(-1, group, 1, 1)
        most = np.maximum(most, extra)
    np.exp(scores - most, out=scores)
    total = scores.sum(axis=3, keepdims=True)
    scores /= total if sink is None else total + np.exp(extra - most)
    mixed = np.matmul(scores, values.transpose(1, 0, 2)[:, None])
    return np.ascontiguousarray(mixed.transpose(2, 0, 1, 3)).reshape(n_rows, n_heads, dim)
