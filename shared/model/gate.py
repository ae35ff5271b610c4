"""The gate of a MoE layer, how a row's experts are chosen and weighed: description, tensors, kernel and numpy form."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from native.kernels import Gate as GateKernel
from native.matrix import ACT_F32
from shared.model.tensors import F32, PlannedTensor, Tensors, matrix_of, planned_matrix, planned_vector

SCORINGS = ("sigmoid",)
_WEIGHT = "mlp.gate.weight"
_CHOICE_BIAS = "mlp.gate.e_score_correction_bias"

Routes = tuple[NDArray[np.int64], F32]
"""ids [T, K], ascending, and weights f32 [T, K] of the chosen experts."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """z = h W^T; s = scoring(z); the k largest of s + choice bias are chosen, out of the best groups alone if there are groups.

    Weights are s of the chosen, divided by their sum if ``norm_topk``, times ``scaling``.
    """

    n_experts: int
    k: int
    scoring: str = "sigmoid"
    n_group: int = 1
    topk_group: int = 1
    norm_topk: bool
    scaling: float = 1.0
    has_choice_bias: bool = False
    """Added to the scores to choose, never to weigh."""

    def tensors(self, hidden: int) -> Iterator[PlannedTensor]:
        """Names are below the layer."""
        yield planned_matrix(_WEIGHT.removesuffix(".weight"), "exact", self.n_experts, hidden)
        if self.has_choice_bias:
            yield planned_vector(_CHOICE_BIAS, self.n_experts)

    def kernel(self, prefix: str, tensors: Tensors) -> GateKernel:
        """``prefix``: of the layer's tensors, ``model.layers.L.``."""
        return GateKernel(
            matrix_of(tensors[prefix + _WEIGHT], ACT_F32),
            tensors[prefix + _CHOICE_BIAS].weight if self.has_choice_bias else None,
            self.k,
            self.n_group,
            self.topk_group,
            self.norm_topk,
            self.scaling,
        )

    def scores_name(self, prefix: str) -> str:
        """The matrix that gives ``choose`` its scores."""
        return prefix + _WEIGHT

    def bias_name(self, prefix: str) -> str | None:
        """The vector that ``choose`` takes, if there is one."""
        return prefix + _CHOICE_BIAS if self.has_choice_bias else None

    def choose(self, z: F32, bias: F32 | None) -> Routes:
        """The kernel's choice in numpy, from z f32[T, E] and the choice bias f32[E]."""
        score = self._scored(z)
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
        return ids, (weights * np.float32(self.scaling)).astype(np.float32)

    def _scored(self, z: F32) -> F32:
        with np.errstate(over="ignore"):
            return np.asarray(np.float32(1.0) / (np.float32(1.0) + np.exp(-z)), np.float32)
