"""The gates of all MoE layers, and PILOT: the guess which experts the next layer will want.

A gate scores experts on the layer's post-attention state; its choice is exact. PILOT guesses twice, as the residual stream
mostly outlives what a layer adds to it: the *next* layer's gate on this layer's state (one expert phase and one attention
early), and a layer's gate on its own input (one attention early, and better). Guesses steer reads only, never text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from native.kernels import rmsnorm
from native.library import Pool
from shared.container.layer_weights import DensePart
from shared.container.reader import Container
from shared.memory.big_memory import Home
from shared.memory.named_file import GATES
from shared.model.spec import ModelSpec


def gate_names(spec: ModelSpec) -> list[str]:
    """Dense tensors that the router needs."""
    names = []
    for layer in spec.moe_layers:
        prefix = f"model.layers.{layer}."
        names += [prefix + tensor.name for tensor in spec.gate.tensors(spec.hidden)]
        if not spec.gate.reads_residual:
            names.append(prefix + spec.attention[layer].hidden_norm)
    return names


class GateSet:
    """All gates, ready to score. Holds the weights' memory."""

    def __init__(self, container: Container, pool: Pool, pilot: str, pilot_rows: int, home: Home | None = None) -> None:
        spec = container.spec
        wanted = set(gate_names(spec))
        self._part = DensePart(container, lambda entry: entry.name in wanted, GATES, home)
        self._tensors = self._part.tensors
        self._spec = spec
        self._pool = pool
        self._pilot = pilot
        self._pilot_rows = pilot_rows
        self._gates = {layer: spec.gate.kernel(f"model.layers.{layer}.", self._tensors) for layer in spec.moe_layers}
        self._next = {a: b for a, b in zip(spec.moe_layers, spec.moe_layers[1:], strict=False) if b < spec.n_layers}
        self._ratio: dict[int, NDArray[np.float32]] = {}
        if not spec.gate.reads_residual:
            self._ratio = {
                layer: self._norm(after) / _nonzero(self._norm(layer)) for layer, after in self._next.items()
            }
        # Guesses at random are for tests: text must not change (promise 1).
        self._random = np.random.default_rng(1)

    def _norm(self, layer: int) -> NDArray[np.float32]:
        """Of the norm that makes the state which the layer's gate reads."""
        return self._tensors[f"model.layers.{layer}.{self._spec.attention[layer].hidden_norm}"].weight

    def choose(
        self, layer: int, hidden: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]
    ) -> list[int]:
        """hidden f32[T, D], or the residual stream for gates that read it -> ids i32[T, K] ascending, weights f32[T, K].

        Returns the rows whose scores are not finite; their choice is experts 0..K-1 with weight 0, so that the step
        can go on for the others.
        """
        gate = self._gates[layer]
        if gate.forward(self._pool, hidden, ids, weights) < 0:
            return []
        bad = []
        for row in range(len(hidden)):
            part = slice(row, row + 1)
            if gate.forward(self._pool, hidden[part], ids[part], weights[part]) >= 0:
                bad.append(row)
                ids[row] = np.arange(self._spec.gate_k, dtype=np.int32)
                weights[row] = 0.0
        return bad

    def guess_next(self, layer: int, hidden: NDArray[np.float32]) -> tuple[int, tuple[int, ...]] | None:
        """(next MoE layer, its likely experts, likeliest first) from this layer's ``hidden``, None: nothing to say."""
        after = self._next.get(layer)
        if self._pilot == "off" or after is None or len(hidden) > self._pilot_rows:
            return None
        if self._pilot == "random":
            n = min(self._spec.n_experts, self._spec.gate_k * len(hidden))
            return after, tuple(int(e) for e in self._random.choice(self._spec.n_experts, n, replace=False))
        if self._spec.gate.reads_residual:
            return after, self._likely(after, hidden)
        return after, self._likely(after, np.ascontiguousarray(hidden * self._ratio[layer]))

    def guess_own(self, layer: int, layer_input: NDArray[np.float32]) -> tuple[int, ...]:
        """The likely experts of ``layer``, likeliest first, from the residual stream before its attention."""
        if self._spec.gate.reads_residual:
            return self._likely(layer, layer_input)
        normed = np.empty_like(layer_input)
        rmsnorm(self._pool, layer_input, self._norm(layer), self._spec.rms_eps, normed)
        return self._likely(layer, normed)

    def _likely(self, layer: int, state: NDArray[np.float32]) -> tuple[int, ...]:
        ids = np.empty((len(state), self._spec.gate_k), np.int32)
        weights = np.empty((len(state), self._spec.gate_k), np.float32)
        if self._gates[layer].forward(self._pool, state, ids, weights) >= 0:
            return ()
        score: dict[int, float] = {}
        for expert, weight in zip(ids.ravel().tolist(), weights.ravel().tolist(), strict=True):
            score[expert] = score.get(expert, 0.0) + weight
        return tuple(sorted(score, key=lambda e: (-score[e], e)))


def _nonzero(w: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(w) < 1e-6, np.float32(1e-6), w)
