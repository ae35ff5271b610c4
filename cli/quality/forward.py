"""The engine's forward pass in numpy, for several lanes at once: each tensor is read once, and every lane takes its own
rounding of it.

Definitions are those of docs/numerics.md (absorbed attention, the sparse indexer, the gate, order of experts) up to the
order of f32 additions. Slow but bounded: besides the rows themselves, one tensor (a piece of a large one) is in memory
per scheme. The MTP layer is left out: it never changes a logit of the model.

Rows are positions of independent sequences, one after the other. A list always has one entry per lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cli.quality.schemes import Lane, round_activations, round_cache
from cli.quality.tensors import LaneWeights
from shared.container.layer_weights import INDEX_NORM_EPS
from shared.container.pack import F32
from shared.errors import ContainerError
from shared.model.spec import ModelSpec

_LOGITS_AT_ONCE = 2 << 20
"""Of one lane: more would take more memory than the rows themselves."""

Mask = npt.NDArray[np.bool_]
Routes = tuple[npt.NDArray[np.int64], F32]
"""ids [T, K] and weights f32 [T, K] of the chosen experts."""


class Forward:
    """Runs ``sequences`` of token ids through the model. ``progress`` gets 1 after each layer and each expert."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: LaneWeights,
        lanes: Sequence[Lane],
        sequences: Sequence[Sequence[int]],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._spec, self._weights, self._lanes, self._progress = spec, weights, lanes, progress
        self._ids = [token for sequence in sequences for token in sequence]
        ends = np.cumsum([len(sequence) for sequence in sequences])
        self._spans = [slice(int(end) - len(s), int(end)) for end, s in zip(ends, sequences)]
        positions = np.concatenate([np.arange(len(s)) for s in sequences])
        angles = positions[:, None] * np.array(spec.inv_freq())
        amplitude = np.float32(spec.rope_amplitude)
        self._cos = np.cos(angles).astype(np.float32)[:, None] * amplitude
        self._sin = np.sin(angles).astype(np.float32)[:, None] * amplitude
        self._x: list[F32] = []
        self._allowed: list[list[Mask]] = []
        """Per lane and sequence, which keys each row may see: [rows, keys]."""

    def logits(self) -> Iterator[list[F32]]:
        """Pieces of the vocabulary in order: for each lane f32[T, n]."""
        rows = self.hidden()
        for lane, x in zip(self._lanes, rows):
            if not np.isfinite(x).all():
                raise ContainerError(
                    f"the forward pass of {lane.name!r} overflows f32: its logits can't be compared. Look at the tensor "
                    "errors (--no-logits)."
                )
        inputs = [self._activate(i, "head", x) for i, x in enumerate(rows)]
        step = max(_LOGITS_AT_ONCE // len(self._ids), 1)
        for piece in self._weights.pieces("lm_head.weight"):
            for start in range(0, len(piece[0]), step):
                yield [x @ w[start : start + step].T for x, w in zip(inputs, piece)]

    def hidden(self) -> list[F32]:
        """The residual stream after the final norm, f32[T, D] of each lane."""
        spec = self._spec
        distinct, at = np.unique(self._ids, return_inverse=True)
        self._x = [np.ascontiguousarray(table[at]) for table in self._weights.embeddings(distinct.tolist())]
        causal = [np.tri(span.stop - span.start, dtype=np.bool_) for span in self._spans]
        self._allowed = [causal] * len(self._lanes)
        for layer in range(spec.n_layers):
            prefix = f"model.layers.{layer}."
            self._add(self._attention(layer, self._norm(prefix + "input_layernorm.weight", self._x, spec.rms_eps)))
            h = self._norm(prefix + "post_attention_layernorm.weight", self._x, spec.rms_eps)
            if spec.layer_kind(layer) == "dense":
                self._add(self._ffn(prefix + "mlp.", h))
            else:
                self._add(self._experts(layer, h))
            self._progress(1)
        return self._norm("model.norm.weight", self._x, spec.rms_eps)

    # ---- pieces of a layer ----

    def _add(self, deltas: Sequence[F32]) -> None:
        for x, delta in zip(self._x, deltas):
            x += delta

    def _norm(self, name: str, rows: Sequence[F32], eps: float) -> list[F32]:
        return [rms_norm(x, w, eps) for x, w in zip(rows, self._weights.vectors(name))]

    def _activate(self, lane: int, role: str, x: F32) -> F32:
        return round_activations(x) if role in self._lanes[lane].int8_inputs else x

    def _linear(self, name: str, inputs: Sequence[F32]) -> list[F32]:
        """x W^T for each lane, the matrix in pieces of rows."""
        role = self._weights.role(name)
        ready = [self._activate(i, role, x) for i, x in enumerate(inputs)]
        parts: list[list[F32]] = [[] for _ in self._lanes]
        for piece in self._weights.pieces(name):
            for part, x, w in zip(parts, ready, piece):
                part.append(x @ w.T)
        return [part[0] if len(part) == 1 else np.concatenate(part, axis=1) for part in parts]

    def _per_head(self, name: str, inputs: Sequence[F32]) -> list[F32]:
        """x f32[T, H, in] through a stack of H matrices: f32[T, H, out]."""
        role = self._weights.role(name)
        found = []
        for i, (x, stack) in enumerate(zip(inputs, self._weights.stacks(name))):
            by_head = np.matmul(self._activate(i, role, x).transpose(1, 0, 2), stack.transpose(0, 2, 1))
            found.append(np.ascontiguousarray(by_head.transpose(1, 0, 2)))
        return found

    def _ffn(self, prefix: str, h: Sequence[F32]) -> list[F32]:
        gate, up = self._linear(prefix + "gate_proj.weight", h), self._linear(prefix + "up_proj.weight", h)
        return self._linear(prefix + "down_proj.weight", [silu(g) * u for g, u in zip(gate, up)])

    # ---- attention ----

    def _attention(self, layer: int, h: list[F32]) -> list[F32]:
        spec, p = self._spec, f"model.layers.{layer}.self_attn."
        n_rows, rank, nope = len(self._ids), spec.kv_lora_rank, spec.qk_nope
        if spec.q_lora_rank is None:
            q_latent, q = h, self._linear(p + "q_proj.weight", h)
        else:
            q_latent = self._norm(p + "q_a_layernorm.weight", self._linear(p + "q_a_proj.weight", h), spec.latent_eps)
            q = self._linear(p + "q_b_proj.weight", q_latent)
        heads = [x.reshape(n_rows, spec.n_heads, spec.qk_head) for x in q]
        kv = self._linear(p + "kv_a_proj_with_mqa.weight", h)
        latent = self._norm(
            p + "kv_a_layernorm.weight", [np.ascontiguousarray(x[:, :rank]) for x in kv], spec.latent_eps
        )
        folded = self._per_head(p + "k_b.weight", [x[..., :nope] for x in heads])
        if spec.index_kind(layer) == "full":
            self._allowed = self._selections(p + "indexer.", h, q_latent)
        mixed = []
        for i, lane in enumerate(self._lanes):
            key_rope = self._rope(kv[i][:, None, rank:], spec.rope_interleave)[:, 0]
            keys = round_cache(np.concatenate([latent[i], key_rope], axis=1), lane.kv_dtype)
            queries = np.concatenate([folded[i], self._rope(heads[i][..., nope:], spec.rope_interleave)], axis=2)
            parts = [
                attend(queries[span], keys[span], rank, spec.softmax_scale, allowed)
                for span, allowed in zip(self._spans, self._allowed[i])
            ]
            mixed.append(np.concatenate(parts))
        values = self._per_head(p + "v_b.weight", mixed)
        return self._linear(p + "o_proj.weight", [x.reshape(n_rows, -1) for x in values])

    def _rope(self, x: F32, is_interleaved: bool) -> F32:
        """x [T, heads, rope] turned by its row's position; interleaved pairs come back de-interleaved."""
        half = x.shape[-1] // 2
        u, v = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
        return np.concatenate([u * self._cos - v * self._sin, v * self._cos + u * self._sin], axis=-1)

    def _selections(self, p: str, h: list[F32], q_latent: list[F32]) -> list[list[Mask]]:
        """For each lane and sequence, the best index_topk keys of each row among those up to its own."""
        spec, n_rows = self._spec, len(self._ids)
        queries = self._linear(p + "wq_b.weight", q_latent)
        keys = self._linear(p + "wk.weight", h)
        gains = self._linear(p + "weights_proj.weight", h)
        norms, biases = self._weights.vectors(p + "k_norm.weight"), self._weights.vectors(p + "k_norm.bias")
        scale = np.float32((spec.index_heads * spec.index_dim) ** -0.5)
        found = []
        for i, lane in enumerate(self._lanes):
            k = layer_norm(keys[i], norms[i], biases[i])
            k = self._index_rope(k[:, None])[:, 0]
            k = round_cache(k, lane.kv_dtype)
            q = self._index_rope(queries[i].reshape(n_rows, spec.index_heads, spec.index_dim))
            g = gains[i] * scale
            found.append([select(q[span], k[span], g[span], spec.index_topk) for span in self._spans])
        return found

    def _index_rope(self, x: F32) -> F32:
        rope = self._spec.qk_rope
        turned = self._rope(x[..., :rope], self._spec.index_rope_interleave)
        return np.concatenate([turned, x[..., rope:]], axis=-1)

    # ---- experts ----

    def _experts(self, layer: int, h: list[F32]) -> list[F32]:
        spec, p = self._spec, f"model.layers.{layer}.mlp."
        scores = self._linear(p + "gate.weight", h)
        biases = self._weights.vectors(p + "gate.e_score_correction_bias")
        routes = [choose_experts(spec, x, bias) for x, bias in zip(scores, biases)]
        inputs = [self._activate(i, "expert", x) for i, x in enumerate(h)]
        mixed = [np.zeros_like(x) for x in h]
        # Ascending ids: the order in which the engine adds.
        for expert in range(spec.n_experts):
            self._progress(1)
            places = [np.nonzero(ids == expert) for ids, _ in routes]
            if not any(len(rows) for rows, _ in places):
                continue
            gate, up, down = self._weights.expert(layer, expert)
            for i, (rows, k) in enumerate(places):
                if not len(rows):
                    continue
                x = inputs[i][rows]
                inner = self._activate(i, "expert", silu(x @ gate[i].T) * (x @ up[i].T))
                mixed[i][rows] += routes[i][1][rows, k][:, None] * (inner @ down[i].T)
        for out, shared in zip(mixed, self._ffn(p + "shared_experts.", h)):
            out += shared
        return mixed


def rms_norm(x: F32, w: F32, eps: float) -> F32:
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    scaled: F32 = x * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * w
    return scaled


def layer_norm(x: F32, w: F32, b: F32) -> F32:
    centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
    scale = 1.0 / np.sqrt(np.mean(np.square(centred), axis=1, keepdims=True) + INDEX_NORM_EPS)
    return np.asarray(centred * scale * w + b).astype(np.float32)


def silu(x: F32) -> F32:
    # exp of a large positive number may overflow to infinity: the quotient is then the 0 it should be
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1.0) + np.exp(-x)), np.float32)


def attend(queries: F32, keys: F32, rank: int, scale: float, allowed: Mask) -> F32:
    """queries [T, H, R + rope], keys [T, R + rope], allowed [T, T] -> mixed latents f32[T, H, R]."""
    scores = np.matmul((queries * np.float32(scale)).transpose(1, 0, 2), keys.T)
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


def choose_experts(spec: ModelSpec, gate: F32, bias: F32) -> Routes:
    """gate f32[T, E] (before the sigmoid) -> the k experts of each row and their weights."""
    with np.errstate(over="ignore"):
        score = np.float32(1.0) / (np.float32(1.0) + np.exp(-gate))
    choice = score + bias
    if spec.n_group > 1:
        groups = choice.reshape(len(choice), spec.n_group, -1)
        worth = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        losers = np.argsort(-worth, axis=1, kind="stable")[:, spec.topk_group :]
        np.put_along_axis(groups, losers[:, :, None], -np.inf, axis=1)
    ids = np.sort(np.argsort(-choice, axis=1, kind="stable")[:, : spec.gate_k], axis=1)
    weights = np.take_along_axis(score, ids, axis=1)
    if spec.norm_topk:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return ids, (weights * np.float32(spec.routed_scaling)).astype(np.float32)
