"""A slow and obvious forward pass over a container, in float64: what the kernels and the process group are compared with.

It reads the packed tensors that the kernels read (absorbed attention from k_b and v_b, expert records), so agreement with
the stored oracles proves the container's contents before any C code runs. No cache, no batching, one sequence. Activations
are never quantised here: with q8 and q4 containers this is the exact result for the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.container.entries import Tensor
from shared.container.plain import dense_values, expert_biases, expert_values
from shared.container.reader import Container, aligned_buffer
from shared.model.attention.delta import Delta
from shared.model.attention.grouped import Grouped
from shared.model.attention.latent import Indexer
from shared.model.inner import Inner
from shared.model.rope import Rope
from shared.model.spec import ModelSpec
from tests.reference.delta import DeltaLayer, mixer
from tests.reference.gqa_moe import Attention, attention, gelu, softmax

F64 = npt.NDArray[np.float64]


class Weights:
    """All tensors of a container as float64, dequantised on first use."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._tensors = container.read_dense(lambda _: True, aligned_buffer)
        self._cache: dict[Any, Any] = {}

    def __getitem__(self, name: str) -> F64:
        if name not in self._cache:
            self._cache[name] = plain_values(self._tensors[name]).astype(np.float64)
        found: F64 = self._cache[name]
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def expert(self, layer: int, expert: int) -> tuple[F64, F64, F64]:
        """(gate, up, down) of one routed expert, from its record."""
        if (layer, expert) not in self._cache:
            record = self._container.read_expert(layer, expert)
            matrices = expert_values(record, self._container.experts[layer].layout)
            self._cache[layer, expert] = tuple(m.astype(np.float64) for m in matrices)
        found: tuple[F64, F64, F64] = self._cache[layer, expert]
        return found

    def biases(self, layer: int, expert: int) -> tuple[F64, ...]:
        """Of gate, up and down; empty when the experts have none."""
        found = expert_biases(self._container.read_expert(layer, expert), self._container.experts[layer].layout)
        return tuple(bias.astype(np.float64) for bias in found)


def inner_values(inner: Inner, gate: F64, up: F64) -> F64:
    """What the down projection is given."""
    if inner.function in ("clamped", "swiglu"):
        gate, up = np.minimum(gate, inner.limit), np.clip(up, -inner.limit, inner.limit)
    if inner.function == "swiglu":
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    return (gelu(gate) if inner.function == "gelu" else _silu(gate)) * up


def plain_values(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The dequantised values of a loaded tensor: f32 of its shape, with the stack in front when there is one."""
    pieces = list(dense_values(tensor))
    return np.stack(pieces) if tensor.name.endswith(("k_b.weight", "v_b.weight")) else pieces[0]


def _rms_norm(x: F64, w: F64, eps: float) -> F64:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * w


def _silu(x: F64) -> F64:
    return x / (1.0 + np.exp(-x))


class Reference:
    """The model of a container. Rows are the positions 0 .. S-1 of one sequence."""

    def __init__(self, path: Path | str, latent_eps: float | None = None) -> None:
        self.container = Container.open(path)
        self.spec: ModelSpec = self.container.spec
        self.w = Weights(self.container)
        self.latent_eps = latent_eps
        """Of the inner norms of latent attention; None: as the model says."""

    # ---- whole passes ----

    def forward(self, ids: Sequence[int]) -> tuple[F64, F64]:
        """(logits [S, V], hidden [S, D] after the final norm)."""
        x = self.w["model.embed_tokens.weight"][list(ids)] * self.spec.embedding_scale
        selection: list[npt.NDArray[np.int64]] | None = None
        for layer in range(self.spec.n_layers):
            x, selection = self.layer(layer, x, selection)
        hidden = _rms_norm(x, self.w["model.norm.weight"], self.spec.rms_eps)
        logits, cap = hidden @ self.w["lm_head.weight"].T, self.spec.logit_cap
        return cap * np.tanh(logits / cap) if cap else logits, hidden

    def greedy(self, prompt: Sequence[int], n: int) -> tuple[list[int], F64]:
        """The n arg max tokens that follow, and the logits each was taken from."""
        ids, rows = list(prompt), []
        for _ in range(n):
            logits = self.forward(ids)[0][-1]
            rows.append(logits)
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :], np.stack(rows)

    def draft(self, next_ids: Sequence[int], hidden: F64) -> tuple[F64, F64]:
        """One MTP pass: next_ids[i] follows position i, whose hidden state is given. (logits, hidden out)."""
        layer, eps = self.spec.mtp_layer, self.spec.rms_eps
        prefix = f"model.layers.{layer}."
        e = _rms_norm(self.w["model.embed_tokens.weight"][list(next_ids)], self.w[prefix + "enorm.weight"], eps)
        h = _rms_norm(hidden, self.w[prefix + "hnorm.weight"], eps)
        x = np.concatenate([e, h], axis=1) @ self.w[prefix + "eh_proj.weight"].T
        x, _ = self.layer(layer, x, None)
        out = _rms_norm(x, self.w[prefix + "shared_head.norm.weight"], eps)
        return out @ self.w["lm_head.weight"].T, out

    def draft_chain(self, next_ids: Sequence[int], hidden: F64, n: int) -> list[int]:
        """n drafted tokens, each fed back with the state that drafted it."""
        ids, tokens = list(next_ids), []
        for _ in range(n):
            logits, out = self.draft(ids, hidden)
            tokens.append(int(logits[-1].argmax()))
            ids.append(tokens[-1])
            hidden = np.concatenate([hidden, out[-1:]])
        return tokens

    # ---- one layer ----

    def layer(
        self, layer: int, x: F64, selection: list[npt.NDArray[np.int64]] | None
    ) -> tuple[F64, list[npt.NDArray[np.int64]] | None]:
        """(residual stream after the layer, key positions of each row for the shared layers that follow)."""
        prefix, spec = f"model.layers.{layer}.", self.spec
        if isinstance(spec.attention[layer], Grouped):
            x, h = attention(self._grouped(spec.attention[layer], prefix), x, np.arange(len(x)))
        elif isinstance(spec.attention[layer], Delta):
            x = x + mixer(self._delta(spec.attention[layer], prefix), x)[0]
            h = _rms_norm(x, self.w[prefix + "post_attention_layernorm.weight"], spec.rms_eps)
        else:
            h = _rms_norm(x, self.w[prefix + "input_layernorm.weight"], spec.rms_eps)
            attended, selection = self._attention(layer, h, selection)
            x = x + attended
            h = _rms_norm(x, self.w[prefix + "post_attention_layernorm.weight"], spec.rms_eps)
        if spec.layer_kind(layer) == "dense":
            return x + self._ffn(prefix + "mlp.", h), selection
        if not spec.branch:
            return x + self._experts(layer, h, h), selection
        return self._with_branch(prefix, x, self._experts(layer, h, x)), selection

    def _with_branch(self, prefix: str, x: F64, mixed: F64) -> F64:
        def norm(name: str, y: F64) -> F64:
            return _rms_norm(y, self.w[f"{prefix}{name}.weight"], self.spec.rms_eps)

        h, p = norm("pre_feedforward_layernorm", x), prefix + "mlp."
        gate, up = (h @ self.w[f"{p}{part}_proj.weight"].T for part in ("gate", "up"))
        dense = inner_values(self.spec.branch.inner, gate, up) @ self.w[p + "down_proj.weight"].T
        both = norm("post_feedforward_layernorm_1", dense) + norm("post_feedforward_layernorm_2", mixed)
        return (x + norm("post_feedforward_layernorm", both)) * self.w[prefix + "layer_scalar"]

    def _delta(self, found: Delta, prefix: str) -> DeltaLayer:
        parts = {part: f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")}
        parts |= {
            "conv": "linear_attn.conv1d.weight",
            "norm": "linear_attn.norm.weight",
            "out": "linear_attn.out_proj.weight",
        }
        parts |= {
            "a_log": "linear_attn.A_log",
            "dt_bias": "linear_attn.dt_bias",
            "input_norm": "input_layernorm.weight",
        }
        w = {short: self.w[prefix + name] for short, name in parts.items()}
        return DeltaLayer(found.n_key_heads, found.n_value_heads, found.key_dim, found.value_dim, found.rms_eps, w)

    def _grouped(self, found: Grouped, prefix: str) -> Attention:
        names = {f"{p}": f"self_attn.{p}_proj.weight" for p in "qkvo"} | {"gate": "self_attn.q_gate.weight"}
        names |= {f"{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkvo"}
        names |= {f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"}
        names |= {"sinks": "self_attn.sinks", "input_norm": "input_layernorm.weight", "post_norm": found.hidden_norm}
        names |= {"out_norm": "post_attention_layernorm.weight"} if found.has_output_norm else {}
        return Attention(
            n_heads=found.n_heads, n_kv_heads=found.n_kv_heads, head_dim=found.head_dim,
            w={short: self.w[prefix + name] for short, name in names.items() if prefix + name in self.w},
            inv_freq=np.array(found.rope.inv_freq()), eps=found.rms_eps, scale=found.softmax_scale,
            amplitude=found.rope.amplitude, window=found.window, qk_norm=found.qk_norm,
            value_norm=found.has_value_norm, clip=found.clip, interleave=found.rope.is_interleaved,
        )  # fmt: skip

    def _attention(
        self, layer: int, h: F64, selection: list[npt.NDArray[np.int64]] | None
    ) -> tuple[F64, list[npt.NDArray[np.int64]] | None]:
        mla, p = self.spec.attention[layer], f"model.layers.{layer}.self_attn."
        latent_eps = mla.latent_eps if self.latent_eps is None else self.latent_eps
        n_rows, rank = len(h), mla.kv_rank
        if mla.q_rank is None:
            q_latent, q = h, h @ self.w[p + "q_proj.weight"].T
        else:
            q_latent = _rms_norm(h @ self.w[p + "q_a_proj.weight"].T, self.w[p + "q_a_layernorm.weight"], latent_eps)
            q = q_latent @ self.w[p + "q_b_proj.weight"].T
        q = q.reshape(n_rows, mla.n_heads, mla.qk_head)
        kv = h @ self.w[p + "kv_a_proj_with_mqa.weight"].T
        latent = _rms_norm(kv[:, :rank], self.w[p + "kv_a_layernorm.weight"], latent_eps)
        key_rope = self._rope(kv[:, None, rank:], mla.rope)[:, 0]
        query_rope = self._rope(q[..., mla.nope :], mla.rope)
        folded = np.einsum("hrn,thn->thr", self.w[p + "k_b.weight"], q[..., : mla.nope])
        if mla.owns_indexer:
            selection = self._select(mla.indexer, p + "indexer.", h, q_latent)
        heads = np.empty((n_rows, mla.n_heads, mla.v_dim))
        for row in range(n_rows):
            keys = np.arange(row + 1) if selection is None else selection[row]
            scores = (folded[row] @ latent[keys].T + query_rope[row] @ key_rope[keys].T) * mla.softmax_scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            heads[row] = np.einsum("hvr,hr->hv", self.w[p + "v_b.weight"], weights @ latent[keys])
        return heads.reshape(n_rows, -1) @ self.w[p + "o_proj.weight"].T, selection

    def _rope(self, x: F64, rope: Rope) -> F64:
        """x [S, heads, rope] turned by its row's position; interleaved pairs come back de-interleaved."""
        half = x.shape[-1] // 2
        u, v = (x[..., 0::2], x[..., 1::2]) if rope.is_interleaved else (x[..., :half], x[..., half:])
        angle = np.arange(len(x))[:, None, None] * np.array(rope.inv_freq())
        cos, sin = np.cos(angle) * rope.amplitude, np.sin(angle) * rope.amplitude
        return np.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)

    def _select(self, index: Indexer, p: str, h: F64, q_latent: F64) -> list[npt.NDArray[np.int64]]:
        """For each row the positions its attention may see, ascending: the best index_topk of those up to its own."""
        n_rows = len(h)
        queries = (q_latent @ self.w[p + "wq_b.weight"].T).reshape(n_rows, index.n_heads, index.dim)
        keys = h @ self.w[p + "wk.weight"].T
        keys = keys - keys.mean(axis=1, keepdims=True)
        keys = keys / np.sqrt(np.mean(keys**2, axis=1, keepdims=True) + 1e-6)
        keys = keys * self.w[p + "k_norm.weight"] + self.w[p + "k_norm.bias"]
        rope = index.rope.dim
        queries = np.concatenate([self._rope(queries[..., :rope], index.rope), queries[..., rope:]], axis=-1)
        keys = np.concatenate([self._rope(keys[:, None, :rope], index.rope)[:, 0], keys[:, rope:]], axis=-1)
        gains = h @ self.w[p + "weights_proj.weight"].T * (index.n_heads * index.dim) ** -0.5
        result = []
        for row in range(n_rows):
            score = gains[row] @ np.maximum(queries[row] @ keys[: row + 1].T, 0.0)
            best = np.argsort(-score, kind="stable")[: index.topk]
            result.append(np.sort(best))
        return result

    def _ffn(self, p: str, h: F64) -> F64:
        w = self.w
        return (_silu(h @ w[p + "gate_proj.weight"].T) * (h @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T

    def _experts(self, layer: int, h: F64, gate_input: F64) -> F64:
        p = f"model.layers.{layer}.mlp."
        out = self._ffn(p + "shared_experts.", h) if self.spec.n_shared else np.zeros_like(h)
        own_gate = p + "shared_experts.own_gate.weight"
        if own_gate in self.w:
            out = out / (1.0 + np.exp(-(h @ self.w[own_gate].T)))
        for row, (ids, weights) in enumerate(self.route(layer, gate_input)):
            for expert, weight in zip(ids, weights):
                gate, up, down = self.w.expert(layer, int(expert))
                on_gate, on_up, on_down = self.w.biases(layer, int(expert)) or (0.0, 0.0, 0.0)
                a = inner_values(self.spec.inner, gate @ h[row] + on_gate, up @ h[row] + on_up)
                out[row] += weight * (down @ a + on_down)
        return out

    def route(self, layer: int, h: F64) -> list[tuple[npt.NDArray[np.int64], F64]]:
        """(expert ids ascending, their weights) for each row."""
        spec, p = self.spec, f"model.layers.{layer}.mlp.gate."
        if p + "norm.weight" in self.w:
            h = _rms_norm(h, self.w[p + "norm.weight"], spec.rms_eps) * h.shape[1] ** -0.5
        z = h @ self.w[p + "weight"].T
        if p + "bias" in self.w:
            z = z + self.w[p + "bias"]
        score = softmax(z) if spec.gate.scoring == "softmax" else 1.0 / (1.0 + np.exp(-z))
        bias = p + "e_score_correction_bias"
        choice = score + self.w[bias] if bias in self.w else score
        result = []
        for row in range(len(h)):
            chosen = choice[row].copy()
            if spec.gate.n_group > 1:
                groups = chosen.reshape(spec.gate.n_group, -1)
                worth = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
                losers = np.argsort(-worth, kind="stable")[spec.gate.topk_group :]
                groups[losers] = -np.inf
            ids = np.sort(np.argsort(-chosen, kind="stable")[: spec.gate_k])
            weights = score[row][ids]
            if spec.gate.norm_topk:
                weights = weights / (weights.sum() + 1e-20)
            weights = weights * spec.gate.scaling
            scale = p + "per_expert_scale"
            result.append((ids, weights * self.w[scale][ids] if scale in self.w else weights))
        return result
