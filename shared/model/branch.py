"""A dense MLP beside a layer's experts, and how both join the residual stream; attention computes it while experts work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from native.kernels import Ffn, ffn_forward, rmsnorm
from native.library import Pool
from shared.model.inner import Inner
from shared.model.lanes import Lanes
from shared.model.tensors import F32, PlannedTensor, Tensors, planned_matrix, planned_vector

_FFN = "mlp."
_INPUT = "pre_feedforward_layernorm.weight"
_OUTPUT = "post_feedforward_layernorm_1.weight"
_EXPERTS = "post_feedforward_layernorm_2.weight"
_BOTH = "post_feedforward_layernorm.weight"
_SCALAR = "layer_scalar"


class DenseBranch(msgspec.Struct, frozen=True, kw_only=True):
    """x after attention, m the experts' sum, N_i norms with weights of their own, s one number a layer:

    x = s (x + N_4(N_2(mlp(N_1 x)) + N_3 m)).
    """

    hidden: int
    width: int
    inner: Inner
    rms_eps: float

    def tensors(self) -> Iterator[PlannedTensor]:
        """Names are below the layer."""
        yield planned_vector(_INPUT, self.hidden)
        for part in ("gate", "up"):
            yield planned_matrix(f"{_FFN}{part}_proj", "shared", self.width, self.hidden)
        yield planned_matrix(f"{_FFN}down_proj", "shared", self.hidden, self.width)
        for name in (_OUTPUT, _EXPERTS, _BOTH):
            yield planned_vector(name, self.hidden)
        yield planned_vector(_SCALAR, 1)

    @property
    def weights_per_row(self) -> int:
        """Weights that a row is multiplied with."""
        return 3 * self.hidden * self.width

    def kernel(self, prefix: str, tensors: Tensors) -> BranchKernel:
        """``prefix``: of the layer's tensors, ``model.layers.L.``."""
        norms = {name: tensors[prefix + name].weight for name in (_INPUT, _OUTPUT, _EXPERTS, _BOTH)}
        mlp = self.inner.kernel(prefix + _FFN, tensors)
        return BranchKernel(mlp, norms, np.float32(tensors[prefix + _SCALAR].weight[0]), self.rms_eps)

    def measure(self, dry: Pool, n_rows: int) -> None:
        """Its scratch for ``n_rows`` rows."""
        self.inner.measure(dry, self.hidden, self.width, n_rows)

    def forward(self, lanes: Lanes, prefix: str, x: Sequence[F32], mixed: Sequence[F32]) -> list[F32]:
        """The kernel's arithmetic in numpy: x f32[T, D] after attention and the experts' sum -> x after the layer."""

        def norm(name: str, rows: Sequence[F32]) -> list[F32]:
            return lanes.norm(prefix + name, rows, self.rms_eps)

        h = norm(_INPUT, x)
        gate, up = (lanes.linear(f"{prefix}{_FFN}{part}_proj.weight", h) for part in ("gate", "up"))
        mlp = lanes.linear(f"{prefix}{_FFN}down_proj.weight", [self.inner.apply(g, u) for g, u in zip(gate, up)])
        both = norm(_BOTH, [a + b for a, b in zip(norm(_OUTPUT, mlp), norm(_EXPERTS, mixed))])
        return [(a + b) * scalar for a, b, scalar in zip(x, both, lanes.vectors(prefix + _SCALAR))]


class BranchKernel:
    """One layer's weights as native structs."""

    def __init__(self, mlp: Ffn, norms: dict[str, F32], scalar: np.float32, eps: float) -> None:
        self._mlp, self._norms, self._scalar, self._eps = mlp, norms, scalar, eps

    def begin(self, pool: Pool, x: F32, scratch: F32, out: F32) -> None:
        """out f32[T, D] = the branch's share from x f32[T, D]; what scratch f32[T, D] holds is lost."""
        rmsnorm(pool, x, self._norms[_INPUT], self._eps, scratch)
        ffn_forward(pool, self._mlp, scratch, out, add=False)
        rmsnorm(pool, out, self._norms[_OUTPUT], self._eps, out)

    def finish(self, pool: Pool, share: F32, mixed: F32, scratch: F32, x: F32) -> None:
        """x f32[T, D] after the layer, from what ``begin`` gave and the experts' sum; scratch as there."""
        rmsnorm(pool, mixed, self._norms[_EXPERTS], self._eps, scratch)
        np.add(share, scratch, out=scratch)
        rmsnorm(pool, scratch, self._norms[_BOTH], self._eps, scratch)
        np.add(x, scratch, out=x)
        np.multiply(x, self._scalar, out=x)
