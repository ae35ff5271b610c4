"""The gate of a MoE layer, how a row's experts are chosen and weighed: description, tensors, kernel and numpy form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from native.kernels import Gate as GateKernel
from native.kernels import rmsnorm
from native.library import Pool
from native.matrix import ACT_F32
from shared.model.lanes import Lanes
from shared.model.tensors import F32, PlannedTensor, Tensors, matrix_of, planned_matrix, planned_vector, stand_ins

_WEIGHT = "mlp.gate.weight"
_CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
_LOGIT_BIAS = "mlp.gate.bias"
_NORM = "mlp.gate.norm.weight"
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
    norm_eps: float = 0.0
    """Not 0: h is no ``hidden`` that experts read as well, but the residual stream's rows x, normed with a weight w of the
    gate's own: h = RMSNorm(x) * w * D^-1/2. In main layers alone: a drafter hands over ``hidden``."""

    @property
    def reads_residual(self) -> bool:
        """Whether it is given the residual stream after attention instead of ``hidden``."""
        return self.norm_eps > 0

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
        if self.reads_residual:
            yield planned_vector(_NORM, hidden)

    def kernel(self, prefix: str, tensors: Tensors) -> GateKernel | NormedGate:
        """``prefix``: of the layer's tensors, ``model.layers.L.``."""
        vectors = {part: tensors[prefix + name].weight for part, name in self._vectors.items()}
        kernel = GateKernel(
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
        return NormedGate(kernel, tensors[prefix + _NORM].weight, self.norm_eps) if self.reads_residual else kernel

    def measure(self, dry: Pool, hidden: int, n_rows: int) -> None:
        """Its scratch for ``n_rows`` rows."""
        ids, weights = np.empty((n_rows, self.k), np.int32), np.empty((n_rows, self.k), np.float32)
        gate = self.kernel("", stand_ins(self.tensors(hidden)))
        gate.forward(dry, np.empty((n_rows, hidden), np.float32), ids, weights)

    def forward(self, lanes: Lanes, prefix: str, h: Sequence[F32]) -> list[Routes]:
        """The kernel's choice in numpy, for each lane from the rows f32[T, D] that it reads."""
        if self.reads_residual:
            root = np.float32(h[0].shape[1] ** -0.5)
            h = [x * root for x in lanes.norm(prefix + _NORM, h, self.norm_eps)]
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


class NormedGate:
    """A gate's kernel behind the norm that is its own."""

    def __init__(self, kernel: GateKernel, norm: F32, eps: float) -> None:
        with np.errstate(all="ignore"):  # stand-ins hold anything
            self._norm = norm * np.float32(len(norm) ** -0.5)
        self._kernel, self._eps = kernel, eps

    def forward(self, pool: Pool, x: F32, ids: NDArray[np.int32], weights: F32) -> int:
        """As ``native.kernels.Gate.forward``, from rows of the residual stream."""
        h = np.empty_like(x)
        rmsnorm(pool, x, self._norm, self._eps, h)
        return self._kernel.forward(pool, h, ids, weights)
