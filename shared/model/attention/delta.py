"""Gated delta rule ("linear attention"): a short causal convolution, then a state per head that each token decays and corrects.

No rows per position: a sequence costs the same however long it is. Method: Gated DeltaNet (arXiv 2412.06464), token by token;
docs/numerics.md defines every sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from native.attention import AttnStep
from native.delta import DeltaLayer, delta_forward, state_values
from native.library import Pool
from native.matrix import ACT_F32, Matrix
from shared.model.attention.kind import Attention, LayerKv, SequenceState
from shared.model.inner import sigmoid, silu
from shared.model.lanes import Lanes
from shared.model.tensors import F32, PlannedTensor, Source, Tensors, matrix_of, planned_matrix, planned_vector

_DELTA = "linear_attn."
_L2_EPS = np.float32(1e-6)
"""Of the norm of queries and keys: hard-coded in every implementation."""


class Delta(Attention, frozen=True, kw_only=True):
    """Value head h reads key head h // (n_value_heads / n_key_heads); its state is f32[key_dim, value_dim]."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Positions that the convolution sees, the row's own included."""

    @property
    def key_width(self) -> int:
        return self.n_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.n_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values, in this order."""
        return 2 * self.key_width + self.value_width

    # ---- tensors ----

    def tensors(self) -> Iterator[PlannedTensor]:
        hidden, heads = self.hidden, self.n_value_heads
        conv = Source(_DELTA + "conv1d.weight", (self.channels, 1, self.taps))
        yield planned_vector("input_layernorm.weight", hidden)
        yield planned_matrix(_DELTA + "in_proj_qkv", "attention", self.channels, hidden)
        yield planned_matrix(_DELTA + "in_proj_z", "attention", self.value_width, hidden)
        # Few rows that decide how fast a head forgets: a rounding there would add up over the whole past.
        yield planned_matrix(_DELTA + "in_proj_a", "exact", heads, hidden)
        yield planned_matrix(_DELTA + "in_proj_b", "exact", heads, hidden)
        yield planned_matrix(_DELTA + "conv1d", "exact", self.channels, self.taps, source=conv)
        yield planned_vector(_DELTA + "A_log", heads)
        yield planned_vector(_DELTA + "dt_bias", heads)
        yield planned_vector(_DELTA + "norm.weight", self.value_dim)
        yield planned_matrix(_DELTA + "out_proj", "attention", hidden, self.value_width)
        yield planned_vector("post_attention_layernorm.weight", hidden)

    # ---- memory and cost ----

    @property
    def state(self) -> SequenceState:
        heads = self.n_key_heads, self.n_value_heads
        slot, record = state_values(*heads, self.key_dim, self.value_dim, self.taps)
        return SequenceState("inputs of the convolution and sum over the past", slot, record)

    @property
    def weights_per_row(self) -> int:
        projections = self.hidden * (self.channels + 2 * self.value_width + 2 * self.n_value_heads)
        return projections + self.channels * self.taps + 4 * self.value_width * self.key_dim

    # ---- arithmetic ----

    def kernel(self, prefix: str, tensors: Tensors) -> DeltaKernel:
        p = prefix + _DELTA

        def vector(name: str) -> F32:
            found: F32 = tensors[name].weight
            return found

        def weight(name: str, act: int | None = None) -> Matrix:
            return matrix_of(tensors[f"{p}{name}.weight"], act)

        layer = DeltaLayer(
            hidden=self.hidden,
            n_key_heads=self.n_key_heads,
            n_value_heads=self.n_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            taps=self.taps,
            rms_eps=self.rms_eps,
            input_norm=vector(prefix + "input_layernorm.weight"),
            post_norm=vector(prefix + self.hidden_norm),
            norm=vector(p + "norm.weight"),
            a_log=vector(p + "A_log"),
            dt_bias=vector(p + "dt_bias"),
            qkv=weight("in_proj_qkv"),
            z=weight("in_proj_z"),
            a=weight("in_proj_a", ACT_F32),
            b=weight("in_proj_b", ACT_F32),
            out=weight("out_proj"),
            conv=weight("conv1d", ACT_F32),
        )
        return DeltaKernel(layer)

    def forward(self, lanes: Lanes, prefix: str, h: Sequence[F32]) -> list[F32]:
        p = prefix + _DELTA
        raw, z = lanes.linear(p + "in_proj_qkv.weight", h), lanes.linear(p + "in_proj_z.weight", h)
        a, b = lanes.linear(p + "in_proj_a.weight", h), lanes.linear(p + "in_proj_b.weight", h)
        taps = lanes.linear(p + "conv1d.weight", [np.eye(self.taps, dtype=np.float32)] * len(h))
        rates, biases = lanes.vectors(p + "A_log"), lanes.vectors(p + "dt_bias")
        read = []
        for i in range(len(h)):
            decay = np.exp(-np.exp(rates[i]) * np.logaddexp(a[i] + biases[i], np.float32(0.0)))
            beta = sigmoid(b[i])
            parts = [
                self._walk(convolve(raw[i][span], taps[i]), decay[span], beta[span], len(raw[i][span]))
                for span in lanes.spans
            ]
            read.append(np.concatenate(parts))  # [T, V, dv]
        gated = [
            (x * silu(gate.reshape(x.shape))).reshape(len(x), -1)
            for x, gate in zip(lanes.norm(p + "norm.weight", read, self.rms_eps), z)
        ]
        return lanes.linear(p + "out_proj.weight", gated)

    def _walk(self, mixed: F32, decay: F32, beta: F32, n: int) -> F32:
        """One sequence, mixed f32[n, C], decay and beta f32[n, V] -> f32[n, V, dv]."""
        share = self.n_value_heads // self.n_key_heads
        q, k = (
            np.repeat(unit(x.reshape(n, self.n_key_heads, self.key_dim)), share, axis=1)
            for x in (mixed[:, : self.key_width], mixed[:, self.key_width : 2 * self.key_width])
        )
        q *= np.float32(self.key_dim**-0.5)
        v = mixed[:, 2 * self.key_width :].reshape(n, self.n_value_heads, self.value_dim)
        state = np.zeros((self.n_value_heads, self.key_dim, self.value_dim), np.float32)
        out = np.empty_like(v)
        for t in range(n):
            state *= decay[t][:, None, None]
            known = np.einsum("hkv,hk->hv", state, k[t])
            state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - known))[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        return out

    def describe(self) -> str:
        heads = f"{self.n_value_heads} heads of {self.value_dim} over {self.n_key_heads} of {self.key_dim}"
        return f"gated delta rule, {heads}, a state of {4 * self.state.n_values:,} bytes"


class DeltaKernel:
    """See ``AttentionKernel``."""

    def __init__(self, layer: DeltaLayer) -> None:
        self._layer = layer

    def run(self, pool: Pool, step: AttnStep, caches: LayerKv) -> None:
        step.use_ring(caches.ring)
        step.state, step.records = caches.state, caches.drafts
        delta_forward(pool, self._layer, step)


def convolve(x: F32, taps: F32) -> F32:
    """x f32[T, C] from a sequence's first position on, taps f32[K, C], the last one on a row itself -> silu of the sum."""
    n_taps, n = len(taps), len(x)
    padded = np.concatenate([np.zeros((n_taps - 1, x.shape[1]), np.float32), x])
    total = np.zeros_like(x)
    for j in range(n_taps):
        total += taps[j] * padded[j : j + n]
    return silu(total)


def unit(x: F32) -> F32:
    """Divided by its length."""
    return np.asarray(x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + _L2_EPS), np.float32)
