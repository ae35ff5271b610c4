"""What the numpy forms of a layer's parts are given: the forward pass of ``colibri quality``, seen from inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.model.tensors import F32


class Lanes(Protocol):
    """The numpy forward pass of several roundings of a model at once: a list has one f32 array per lane.

    Rows are positions of independent sequences, one after the other.
    """

    positions: NDArray[np.int64]
    spans: Sequence[slice[int, int, Any]]
    """The rows of each sequence."""
    carried: dict[str, Any]
    """What a layer leaves for later ones, by name."""

    def linear(self, name: str, inputs: Sequence[F32]) -> list[F32]:
        """x f32[T, in] times W^T."""

    def per_head(self, name: str, inputs: Sequence[F32]) -> list[F32]:
        """x f32[T, H, in] through a stack of H matrices: f32[T, H, out]."""

    def norm(self, name: str, rows: Sequence[F32], eps: float) -> list[F32]:
        """RMSNorm over the last axis."""

    def vectors(self, name: str) -> list[F32]:
        """A vector of each lane."""

    def cached(self, rows: Sequence[F32]) -> list[F32]:
        """What each lane's KV cache keeps of these rows."""

    def queries(self, rows: Sequence[F32]) -> list[F32]:
        """Queries as they meet each lane's KV cache."""


def causal(lanes: Lanes, window: int = 0) -> list[NDArray[np.bool_]]:
    """Per sequence, which keys each row may see: [rows, keys]; ``window`` keys at most, its own included (0: all)."""
    found = []
    for span in lanes.spans:
        n = span.stop - span.start
        seen = np.tri(n, dtype=np.bool_)
        found.append(seen & ~np.tri(n, k=-window, dtype=np.bool_) if window else seen)
    return found
