"""What stands between the gate, up and down projection of an expert, of a shared expert and of a dense layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from native.kernels import ExpertJobs, Ffn, ffn, ffn_forward
from native.library import Pool
from native.matrix import ALIGNMENT, Matrix, matrix
from shared.model.tensors import F32, Tensors, matrix_of


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """down(function(gate x + bias, up x + bias)) + bias. g and u are what the first two projections give, L is ``limit``.

    ``function``: "silu" silu(g) * u; "clamped" silu(min(g, L)) * clamp(u); "swiglu", clamped alike, g * sigmoid(1.702 g)
    * (u + 1); "gelu" gelu(g) * u in the form with tanh.
    """

    function: str = "silu"
    limit: float = 0.0
    """Of g from above, of u from both sides; only for "clamped" and "swiglu"."""
    has_biases: bool = False
    """Of routed experts: on all three projections."""

    def ffn(self, gate: Matrix, up: Matrix, down: Matrix, biases: Sequence[F32 | int] | None = None) -> Ffn:
        """The kernel's struct. ``biases``: arrays or addresses, of gate, up and down."""
        return ffn(gate, up, down, self.function, self.limit, biases)

    def kernel(self, prefix: str, tensors: Tensors) -> Ffn:
        """gate, up and down projection below ``prefix`` (a dense layer's ``mlp.`` or ``mlp.shared_experts.``)."""
        gate, up, down = (matrix_of(tensors[f"{prefix}{part}_proj.weight"]) for part in ("gate", "up", "down"))
        return self.ffn(gate, up, down)

    def apply(self, gate: F32, up: F32) -> F32:
        """The same in numpy: f32[T, F] of both projections -> what the down projection is given."""
        if self.function in ("clamped", "swiglu"):
            limit = np.float32(self.limit)
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        if self.function == "swiglu":
            alpha = np.float32(1.702)
            return np.asarray(silu(alpha * gate) * (up + np.float32(1.0)) / alpha, np.float32)
        if self.function == "gelu":
            y = np.float32(math.sqrt(2.0 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
            return np.asarray(gate / 2 * (np.float32(1.0) + np.tanh(y)) * up, np.float32)
        return silu(gate) * up

    def measure(self, dry: Pool, hidden: int, inner: int, n_rows: int) -> None:
        """A shared expert's or a dense layer's scratch for ``n_rows`` rows."""
        x = np.empty((n_rows, hidden), np.float32)
        ffn_forward(dry, _stand_in(hidden, inner), x, x, add=False)

    def measure_experts(self, dry: Pool, hidden: int, inner: int, n_rows: int, n_pairs: int, n_experts: int) -> None:
        """The scratch of a call for ``n_pairs`` (row, expert) pairs: of one expert, or of as many as there are."""
        x, parts, ffn = (
            np.empty((n_rows, hidden), np.float32),
            np.empty((n_pairs, hidden), np.float32),
            _stand_in(hidden, inner),
        )
        rows = np.arange(n_pairs, dtype=np.int32)
        for cut in ([rows], np.array_split(rows, min(n_pairs, n_experts))):
            jobs = ExpertJobs(len(cut), n_pairs)
            for part in cut:
                jobs.add(ffn, part % n_rows, part)
            jobs.run(dry, x, parts)


def _stand_in(hidden: int, inner: int) -> Ffn:
    """Without weights, in the format whose activations take most scratch."""
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    gate, up, down = (matrix(ALIGNMENT, ALIGNMENT, "q8", out, in_) for out, in_ in shapes)
    return ffn(gate, up, down)


def silu(x: F32) -> F32:
    # exp of a large positive number may overflow to infinity: the quotient is then the 0 it should be
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1.0) + np.exp(-x)), np.float32)


def sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(1.0) / (np.float32(1.0) + np.exp(-x)), np.float32)
