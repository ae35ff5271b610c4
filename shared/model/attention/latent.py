"""Latent attention (MLA), absorbed: keys and values are one cached latent per position; with or without a sparse indexer.

Methods: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3.2's sparse attention; docs/numerics.md defines every sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from native.attention import AttnLayer, AttnStep, attn_forward
from native.library import Pool
from native.matrix import ACT_F32, Matrix, absent_matrix
from shared.model.attention.kind import Attention, LayerKv, PositionRows
from shared.model.lanes import Lanes, causal
from shared.model.rope import Rope
from shared.model.tensors import F32, PlannedTensor, Source, Tensors, matrix_of, planned_matrix, planned_vector

INDEX_NORM_EPS = 1e-6
"""Of the LayerNorm of the indexer's keys: hard-coded in every implementation."""

_ATTN = "self_attn."
_INDEXER = "self_attn.indexer."
_SELECTION = "latent.selection"

Mask = NDArray[np.bool_]


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """The sparse indexer that chooses the ``topk`` keys a row may see. ``is_owner``: else the selection of the nearest earlier
    owner is used."""

    n_heads: int
    dim: int
    topk: int
    rope: Rope
    is_owner: bool


class Latent(Attention, frozen=True, kw_only=True):
    """H heads over a latent of ``kv_rank`` values and ``rope.dim`` turned ones."""

    n_heads: int
    q_rank: int | None
    """None: one ``q_proj`` maps hidden directly."""
    kv_rank: int
    nope: int
    v_dim: int
    latent_eps: float
    """Of the two inner norms."""
    softmax_scale: float
    rope: Rope
    indexer: Indexer | None = None

    @property
    def qk_head(self) -> int:
        return self.nope + self.rope.dim

    @property
    def latent(self) -> int:
        """Cached values per position: the latent and its turned part."""
        return self.kv_rank + self.rope.dim

    @property
    def owns_indexer(self) -> bool:
        return self.indexer is not None and self.indexer.is_owner

    # ---- tensors ----

    def tensors(self) -> Iterator[PlannedTensor]:
        n_heads, hidden = self.n_heads, self.hidden
        yield planned_vector("input_layernorm.weight", hidden)
        if self.q_rank is None:
            yield planned_matrix(_ATTN + "q_proj", "attention", n_heads * self.qk_head, hidden)
        else:
            yield planned_matrix(_ATTN + "q_a_proj", "attention", self.q_rank, hidden)
            yield planned_vector(_ATTN + "q_a_layernorm.weight", self.q_rank)
            yield planned_matrix(_ATTN + "q_b_proj", "attention", n_heads * self.qk_head, self.q_rank)
        yield planned_matrix(_ATTN + "kv_a_proj_with_mqa", "attention", self.latent, hidden)
        yield planned_vector(_ATTN + "kv_a_layernorm.weight", self.kv_rank)
        # kv_b_proj has a block of nope + v_dim rows for each head.
        block = self.nope + self.v_dim
        kv_b, shape = _ATTN + "kv_b_proj.weight", (n_heads * block, self.kv_rank)
        k_b = Source(kv_b, shape, stride=block, n_rows=self.nope, is_transposed=True)
        v_b = Source(kv_b, shape, start=self.nope, stride=block, n_rows=self.v_dim)
        yield planned_matrix(_ATTN + "k_b", "attention", self.kv_rank, self.nope, n_heads, k_b)
        yield planned_matrix(_ATTN + "v_b", "attention", self.v_dim, self.kv_rank, n_heads, v_b)
        yield planned_matrix(_ATTN + "o_proj", "attention", hidden, n_heads * self.v_dim)
        if self.indexer is not None and self.indexer.is_owner:
            index = self.indexer
            yield planned_matrix(_INDEXER + "wq_b", "attention", index.n_heads * index.dim, self.q_rank or hidden)
            yield planned_matrix(_INDEXER + "wk", "attention", index.dim, hidden)
            yield planned_matrix(_INDEXER + "weights_proj", "exact", index.n_heads, hidden)
            yield planned_vector(_INDEXER + "k_norm.weight", index.dim)
            yield planned_vector(_INDEXER + "k_norm.bias", index.dim)
        yield planned_vector("post_attention_layernorm.weight", hidden)

    def ignores(self, name: str) -> bool:
        """Indexer weights of a layer that uses another layer's selection."""
        return self.indexer is not None and not self.indexer.is_owner and name.startswith(_INDEXER)

    # ---- memory and cost ----

    @property
    def rows(self) -> tuple[PositionRows, ...]:
        latent = PositionRows("latent", self.latent)
        if self.indexer is not None and self.indexer.is_owner:
            return latent, PositionRows("index key", self.indexer.dim)
        return (latent,)

    @property
    def n_selected(self) -> int:
        return self.indexer.topk if self.indexer else 0

    @property
    def weights_per_row(self) -> int:
        queries = self.n_heads * self.qk_head
        rank, hidden = self.q_rank, self.hidden
        n = hidden * queries if rank is None else rank * (hidden + queries)
        n += hidden * self.latent + self.n_heads * self.kv_rank * (self.nope + self.v_dim)
        return n + self.n_heads * self.v_dim * hidden

    # ---- arithmetic ----

    def kernel(self, prefix: str, tensors: Tensors) -> LatentKernel:
        attn, index = prefix + _ATTN, self.indexer

        def vector(name: str) -> F32:
            found: F32 = tensors[name].weight
            return found

        def weight(name: str, act: int | None = None) -> Matrix:
            return matrix_of(tensors[f"{attn}{name}.weight"], act)

        has_lora, owns = self.q_rank is not None, self.owns_indexer
        layer = AttnLayer(
            hidden=self.hidden,
            n_heads=self.n_heads,
            q_rank=self.q_rank or 0,
            kv_rank=self.kv_rank,
            nope=self.nope,
            rope=self.rope.dim,
            v_dim=self.v_dim,
            rope_interleave=self.rope.is_interleaved,
            rms_eps=self.rms_eps,
            latent_eps=self.latent_eps,
            softmax_scale=self.softmax_scale,
            index_kind="none" if index is None else "full" if index.is_owner else "shared",
            index_heads=index.n_heads if index else 0,
            index_dim=index.dim if index else 0,
            index_topk=index.topk if index else 0,
            index_rope_interleave=index.rope.is_interleaved if index else False,
            inv_freq=np.array(self.rope.inv_freq(), np.float32),
            rope_amplitude=self.rope.amplitude,
            index_norm_eps=INDEX_NORM_EPS,
            input_norm=vector(prefix + "input_layernorm.weight"),
            q_a_norm=vector(attn + "q_a_layernorm.weight") if has_lora else None,
            kv_a_norm=vector(attn + "kv_a_layernorm.weight"),
            post_norm=vector(prefix + "post_attention_layernorm.weight"),
            q_a=weight("q_a_proj") if has_lora else absent_matrix(),
            q_b=weight("q_b_proj" if has_lora else "q_proj"),
            kv_a=weight("kv_a_proj_with_mqa"),
            k_b=weight("k_b"),
            v_b=weight("v_b"),
            o=weight("o_proj"),
            index_wq_b=weight("indexer.wq_b") if owns else absent_matrix(),
            index_wk=weight("indexer.wk") if owns else absent_matrix(),
            index_weights=weight("indexer.weights_proj", ACT_F32) if owns else absent_matrix(),
            index_k_norm_w=vector(attn + "indexer.k_norm.weight") if owns else None,
            index_k_norm_b=vector(attn + "indexer.k_norm.bias") if owns else None,
        )
        return LatentKernel(layer)

    def forward(self, lanes: Lanes, prefix: str, h: Sequence[F32]) -> list[F32]:
        p = prefix + _ATTN
        n_rows, rank, nope = len(lanes.positions), self.kv_rank, self.nope
        if self.q_rank is None:
            q_latent, q = list(h), lanes.linear(p + "q_proj.weight", h)
        else:
            q_latent = lanes.norm(p + "q_a_layernorm.weight", lanes.linear(p + "q_a_proj.weight", h), self.latent_eps)
            q = lanes.linear(p + "q_b_proj.weight", q_latent)
        heads = [x.reshape(n_rows, self.n_heads, self.qk_head) for x in q]
        kv = lanes.linear(p + "kv_a_proj_with_mqa.weight", h)
        latent = lanes.norm(
            p + "kv_a_layernorm.weight", [np.ascontiguousarray(x[:, :rank]) for x in kv], self.latent_eps
        )
        folded = lanes.per_head(p + "k_b.weight", [x[..., :nope] for x in heads])
        allowed = self._allowed(lanes, p + "indexer.", h, q_latent)
        turned = [self.rope.turn(x[:, None, rank:], lanes.positions)[:, 0] for x in kv]
        keys = lanes.cached([np.concatenate(pair, axis=1) for pair in zip(latent, turned)])
        scale = np.float32(self.softmax_scale)
        turned_queries = [self.rope.turn(x[..., nope:], lanes.positions) for x in heads]
        queries = lanes.queries([np.concatenate(pair, axis=2) * scale for pair in zip(folded, turned_queries)])
        mixed = []
        for i, query in enumerate(queries):
            parts = [attend(query[span], keys[i][span], rank, seen) for span, seen in zip(lanes.spans, allowed[i])]
            mixed.append(np.concatenate(parts))
        values = lanes.per_head(p + "v_b.weight", mixed)
        return lanes.linear(p + "o_proj.weight", [x.reshape(n_rows, -1) for x in values])

    def _allowed(self, lanes: Lanes, p: str, h: Sequence[F32], q_latent: Sequence[F32]) -> list[list[Mask]]:
        """For each lane and sequence, the keys that each row sees: all up to its own, or the best topk of them."""
        if self.indexer is None:
            return [causal(lanes)] * len(h)
        if self.indexer.is_owner:
            lanes.carried[_SELECTION] = self._selections(lanes, self.indexer, p, h, q_latent)
        found: list[list[Mask]] = lanes.carried[_SELECTION]
        return found

    def _selections(
        self, lanes: Lanes, index: Indexer, p: str, h: Sequence[F32], q_latent: Sequence[F32]
    ) -> list[list[Mask]]:
        n_rows = len(lanes.positions)
        queries = lanes.linear(p + "wq_b.weight", q_latent)
        plain_keys = lanes.linear(p + "wk.weight", h)
        gains = lanes.linear(p + "weights_proj.weight", h)
        norms, biases = lanes.vectors(p + "k_norm.weight"), lanes.vectors(p + "k_norm.bias")
        scale = np.float32((index.n_heads * index.dim) ** -0.5)
        normed = [layer_norm(k, w, b) for k, w, b in zip(plain_keys, norms, biases)]
        keys = lanes.cached([index.rope.turn(k[:, None], lanes.positions)[:, 0] for k in normed])
        shape = n_rows, index.n_heads, index.dim
        turned = lanes.queries([index.rope.turn(q.reshape(shape), lanes.positions) for q in queries])
        found = []
        for i, (q, k) in enumerate(zip(turned, keys)):
            g = gains[i] * scale
            found.append([select(q[span], k[span], g[span], index.topk) for span in lanes.spans])
        return found

    def describe(self) -> str:
        text = f"MLA, {self.n_heads} heads, latent {self.kv_rank} + rope {self.rope.dim}"
        if self.indexer is None:
            return text
        return f"{text}, {'own' if self.indexer.is_owner else 'shared'} selection of {self.indexer.topk:,} keys"


class LatentKernel:
    """See ``AttentionKernel``."""

    def __init__(self, layer: AttnLayer) -> None:
        self._layer = layer

    def run(self, pool: Pool, step: AttnStep, caches: LayerKv) -> None:
        step.use_ring(caches.ring)
        step.kv = caches.rows[0]
        step.index_k = caches.rows[1] if len(caches.rows) > 1 else None
        attn_forward(pool, self._layer, step)


def layer_norm(x: F32, w: F32, b: F32) -> F32:
    centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
    scale = 1.0 / np.sqrt(np.mean(np.square(centred), axis=1, keepdims=True) + INDEX_NORM_EPS)
    return np.asarray(centred * scale * w + b).astype(np.float32)


def attend(queries: F32, keys: F32, rank: int, allowed: Mask) -> F32:
    """queries [T, H, R + rope], scaled, keys [T, R + rope], allowed [T, T] -> mixed latents f32[T, H, R]."""
    scores = np.matmul(queries.transpose(1, 0, 2), keys.T)
    scores += np.where(allowed, np.float32(0.0), np.float32(-np.inf))
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    mixed = np.matmul(scores, keys[:, :rank])
    return np.ascontiguousarray(mixed.transpose(1, 0, 2))


def select(queries: F32, keys: F32, gains: F32, topk: int) -> Mask:
    """queries [T, heads, dim], keys [T, dim], gains [T, heads] -> [T, T]: the keys each row may see."""
    n = len(keys)
    allowed = np.tri(n, dtype=np.bool_)
    if n <= topk:
        return allowed
    scores = np.zeros((n, n), np.float32)
    for head in range(queries.shape[1]):
        scores += gains[:, head, None] * np.maximum(queries[:, head] @ keys.T, np.float32(0.0))
    scores[~allowed] = -np.inf
    best = np.argsort(-scores[topk:], axis=1, kind="stable")[:, :topk]
    chosen = np.zeros((n - topk, n), np.bool_)
    np.put_along_axis(chosen, best, True, axis=1)
    allowed[topk:] &= chosen
    return allowed
