"""What stands between the gate, up and down projection of an expert, of a shared expert and of a dense layer."""

from __future__ import annotations

import msgspec
import numpy as np

from shared.model.tensors import F32


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """down(function(gate x, up x)). ``function``: "silu" is silu(gate) * up."""

    function: str = "silu"

    def apply(self, gate: F32, up: F32) -> F32:
        """f32[T, F] of both projections -> what the down projection is given."""
        return silu(gate) * up


def silu(x: F32) -> F32:
    # exp of a large positive number may overflow to infinity: the quotient is then the 0 it should be
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1.0) + np.exp(-x)), np.float32)
