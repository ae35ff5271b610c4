"""The gate of a MoE layer, how a row's experts are chosen and weighed: description, tensors, kernel and numpy form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from native.kernels import Gate as GateKernel
from native.library import Pool
from native.matrix import ACT_F32
from shared.model.lanes import Lanes
from shared.model.tensors import F32, PlannedTensor, Tensors, matrix_of, planned_matrix, planned_vector, stand_ins

_WEIGHT = "mlp.gate.weight"
_CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
_LOGIT_BIAS = "mlp.gate.bias"
_EXPERT_SCALE = "mlp.gate.per_expert_scale"

Routes = tuple[NDArray[np.int64], F32]
"""ids [T, K], ascending, and weights f32 [T, K] of the chosen experts."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """z = h W^T + logit bias; s = scoring(z); the k largest of s + choice bias are chosen, out of the best groups alone.

    Weights are s of the chosen, divided by their sum if ``norm_topk``, times ``scaling`` and the experts' own scale.
    """

    n_experts: int
    k: int
    scoring: str
    """"sigmoid", or "softmax" over all experts. With ``norm_topk`` the latter is the softmax over the chosen alone."""
    n_group: int = 1
    topk_group: int = 1
    norm_topk: bool
    scaling: float = 1.0
    has_choice_bias: bool = False
    """Added to the scores to choose, never to weigh."""
    has_logit_bias: bool = False
    has_expert_scale: bool = False

    @property
    def _vectors(self) -> dict[str, str]:
        """The vectors that are there: what they do -> their name below the layer."""
        there = {
            "bias": (_CHOICE_BIAS, self.has_choice_bias),
            "logit_bias": (_LOGIT_BIAS, self.has_logit_bias),
            "expert_scale": (_EXPERT_SCALE, self.has_expert_scale),
        }
        return {part: name for part, (name, is_there) in there.items() if is_there}

    def tensors(self, hidden: int) -> Iterator[PlannedTensor]:
        """Names are below the layer."""
        yield planned_matrix(_WEIGHT.removesuffix(".weight"), "exact", self.n_experts, hidden)
        for name in self._vectors.values():
            yield planned_vector(name, self.n_experts)

    def kernel(self, prefix: str, tensors: Tensors) -> GateKernel:
        """``prefix``: of the layer's tensors, ``model.layers.L.``."""
        vectors = {part: tensors[prefix + name].weight for part, name in self._vectors.items()}
        return GateKernel(
            matrix_of(tensors[prefix + _WEIGHT], ACT_F32),
            vectors.pop("bias", None),
            self.k,
            self.n_group,
            self.topk_group,
            self.norm_topk,
            self.scaling,
            self.scoring,
            **vectors,
        )

    def measure(self, dry: Pool, hidden: int, n_rows: int) -> None:
        """Its scratch for ``n_rows`` rows."""
        ids, weights = np.empty((n_rows, self.k), np.int32), np.empty((n_rows, self.k), np.float32)
        gate = self.kernel("", stand_ins(self.tensors(hidden)))
        gate.forward(dry, np.empty((n_rows, hidden), np.float32), ids, weights)

    def forward(self, lanes: Lanes, prefix: str, h: Sequence[F32]) -> list[Routes]:
        """The kernel's choice in numpy, for each lane from its rows h f32[T, D]."""
        logits = lanes.linear(prefix + _WEIGHT, h)
        by_lane = {part: lanes.vectors(prefix + name) for part, name in self._vectors.items()}
        return [self.choose(z, **{part: vectors[i] for part, vectors in by_lane.items()}) for i, z in enumerate(logits)]

    def choose(
        self, z: F32, bias: F32 | None = None, logit_bias: F32 | None = None, expert_scale: F32 | None = None
    ) -> Routes:
        """From z f32[T, E] = h W^T and the vectors f32[E] that there are."""
        score = self._scored(z if logit_bias is None else z + logit_bias)
        choice = score if bias is None else score + bias
        if self.n_group > 1:
            groups = choice.copy().reshape(len(choice), self.n_group, -1)
            worth = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
            losers = np.argsort(-worth, axis=1, kind="stable")[:, self.topk_group :]
            np.put_along_axis(groups, losers[:, :, None], -np.inf, axis=1)
            choice = groups.reshape(choice.shape)
        ids = np.sort(np.argsort(-choice, axis=1, kind="stable")[:, : self.k], axis=1)
        weights = np.take_along_axis(score, ids, axis=1)
        if self.norm_topk:
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
        weights = (weights * np.float32(self.scaling)).astype(np.float32)
        return ids, weights if expert_scale is None else weights * expert_scale[ids]

    def _scored(self, z: F32) -> F32:
        if self.scoring == "softmax":
            e = np.exp(z - z.max(axis=1, keepdims=True))
            return np.asarray(e / e.sum(axis=1, keepdims=True), np.float32)
        with np.errstate(over="ignore"):
            return np.asarray(np.float32(1.0) / (np.float32(1.0) + np.exp(-z)), np.float32)
