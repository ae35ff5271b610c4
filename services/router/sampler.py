"""From logits to a token. The one place that knows what the fields of ``Sampling`` do. Runs in the router."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from native.sampling import sample, uniform
from shared.messages.router import Sampling


def choose_token(logits: NDArray[np.float32], how: Sampling, position: int) -> int | None:
    """The token of ``position`` from logits f32[V], by the random number that belongs to (seed, position).

    None: the logits hold NaN, +infinity or nothing but -infinity. NativeError when a field of ``how`` is out of range.
    """
    u = uniform(how.seed, position) if how.temperature > 0 else 0.0
    token = sample(logits, how.temperature, how.top_p, u)
    return token if token >= 0 else None
