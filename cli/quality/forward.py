"""The engine's forward pass in numpy, for several lanes at once: each tensor is read once, and every lane takes its own
rounding of it.

Definitions are those of docs/numerics.md (absorbed attention, the sparse indexer, the gate, order of experts) up to the
order of f32 additions. Slow but bounded: besides the rows themselves, one tensor (a piece of a large one) is in memory
per scheme. The MTP layer is left out: it never changes a logit of the model.

Rows are positions of independent sequences, one after the other. A list always has one entry per lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cli.quality.schemes import Lane, round_activations, round_cache, round_queries
from cli.quality.tensors import LaneWeights
from shared.container.pack import F32
from shared.errors import ContainerError
from shared.model.inner import sigmoid
from shared.model.spec import ModelSpec

_LOGITS_AT_ONCE = 2 << 20
"""Of one lane: more would take more memory than the rows themselves."""


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
        self.spans: Sequence[slice[int, int, Any]] = [
            slice(int(end) - len(s), int(end)) for end, s in zip(ends, sequences)
        ]
        self.positions = np.concatenate([np.arange(len(s)) for s in sequences])
        self.carried: dict[str, Any] = {}
        self._x: list[F32] = []

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
                yield [self._capped(x @ w[start : start + step].T) for x, w in zip(inputs, piece)]

    def _capped(self, logits: F32) -> F32:
        cap = np.float32(self._spec.logit_cap)
        return cap * np.tanh(logits / cap) if cap else logits

    def hidden(self) -> list[F32]:
        """The residual stream after the final norm, f32[T, D] of each lane."""
        spec = self._spec
        distinct, at = np.unique(self._ids, return_inverse=True)
        scale = np.float32(spec.embedding_scale)
        self._x = [np.ascontiguousarray(table[at]) * scale for table in self._weights.embeddings(distinct.tolist())]
        for layer, attention in enumerate(spec.main_attention):
            prefix = f"model.layers.{layer}."
            h = self.norm(prefix + "input_layernorm.weight", self._x, attention.rms_eps)
            self._add(attention.forward(self, prefix, h))
            h = self.norm(prefix + attention.hidden_norm, self._x, attention.rms_eps)
            if spec.layer_kind(layer) == "dense":
                self._add(self._ffn(prefix + "mlp.", h))
            elif spec.branch:
                self._x = spec.branch.forward(self, prefix, self._x, self._experts(layer, h))
            else:
                self._add(self._experts(layer, h))
            self._progress(1)
        return self.norm("model.norm.weight", self._x, spec.rms_eps)

    # ---- pieces of a layer ----

    def _add(self, deltas: Sequence[F32]) -> None:
        for x, delta in zip(self._x, deltas):
            x += delta

    def norm(self, name: str, rows: Sequence[F32], eps: float) -> list[F32]:
        return [rms_norm(x, w, eps) for x, w in zip(rows, self._weights.vectors(name))]

    def _activate(self, lane: int, role: str, x: F32) -> F32:
        return round_activations(x) if role in self._lanes[lane].int8_inputs else x

    def linear(self, name: str, inputs: Sequence[F32]) -> list[F32]:
        """x W^T for each lane, the matrix in pieces of rows."""
        role = self._weights.role(name)
        ready = [self._activate(i, role, x) for i, x in enumerate(inputs)]
        parts: list[list[F32]] = [[] for _ in self._lanes]
        for piece in self._weights.pieces(name):
            for part, x, w in zip(parts, ready, piece):
                part.append(x @ w.T)
        return [part[0] if len(part) == 1 else np.concatenate(part, axis=1) for part in parts]

    def per_head(self, name: str, inputs: Sequence[F32]) -> list[F32]:
        """x f32[T, H, in] through a stack of H matrices: f32[T, H, out]."""
        role = self._weights.role(name)
        found = []
        for i, (x, stack) in enumerate(zip(inputs, self._weights.stacks(name))):
            by_head = np.matmul(self._activate(i, role, x).transpose(1, 0, 2), stack.transpose(0, 2, 1))
            found.append(np.ascontiguousarray(by_head.transpose(1, 0, 2)))
        return found

    def vectors(self, name: str) -> list[F32]:
        return self._weights.vectors(name)

    def cached(self, rows: Sequence[F32]) -> list[F32]:
        return [round_cache(x, lane.kv_dtype) for x, lane in zip(rows, self._lanes)]

    def queries(self, rows: Sequence[F32]) -> list[F32]:
        return [round_queries(x, lane.kv_dtype) for x, lane in zip(rows, self._lanes)]

    def _ffn(self, prefix: str, h: Sequence[F32]) -> list[F32]:
        gate, up = self.linear(prefix + "gate_proj.weight", h), self.linear(prefix + "up_proj.weight", h)
        return self.linear(prefix + "down_proj.weight", [self._spec.inner.apply(g, u) for g, u in zip(gate, up)])

    # ---- experts ----

    def _experts(self, layer: int, h: list[F32]) -> list[F32]:
        spec, prefix = self._spec, f"model.layers.{layer}."
        routes = spec.gate.forward(self, prefix, self._x if spec.gate.reads_residual else h)
        inputs = [self._activate(i, "expert", x) for i, x in enumerate(h)]
        mixed = [np.zeros_like(x) for x in h]
        # Ascending ids: the order in which the engine adds.
        for expert in range(spec.n_experts):
            self._progress(1)
            places = [np.nonzero(ids == expert) for ids, _ in routes]
            if not any(len(rows) for rows, _ in places):
                continue
            gate, up, down = self._weights.expert(layer, expert)
            on_gate, on_up, on_down = self._weights.biases(layer, expert) or (np.float32(0.0),) * 3
            for i, (rows, k) in enumerate(places):
                if not len(rows):
                    continue
                x = inputs[i][rows]
                inner = self._activate(i, "expert", spec.inner.apply(x @ gate[i].T + on_gate, x @ up[i].T + on_up))
                mixed[i][rows] += routes[i][1][rows, k][:, None] * (inner @ down[i].T + on_down)
        if spec.n_shared:
            prefix += "mlp.shared_experts."
            shares = self._ffn(prefix, h)
            if spec.has_shared_gate:
                gates = self.linear(prefix + "own_gate.weight", h)
                shares = [share * sigmoid(gate) for share, gate in zip(shares, gates)]
            for out, share in zip(mixed, shares):
                out += share
        return mixed


def rms_norm(x: F32, w: F32, eps: float) -> F32:
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    scaled: F32 = x * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * w
    return scaled
