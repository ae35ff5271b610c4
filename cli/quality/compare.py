"""Distances between two distributions over the vocabulary, fed in pieces of the vocabulary. Pure.

The head of a large model gives more logits than fit in memory for a whole text, so nothing here needs all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.container.pack import F32

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class Distribution:
    """softmax of rows of logits that arrive piece by piece: normaliser, best entry and the logit of each row's target."""

    def __init__(self, targets: I64) -> None:
        n = len(targets)
        self._targets, self._first = targets, 0
        self.best = np.full(n, -1, np.int64)
        self._peak = np.full(n, -np.inf)
        self._sum = np.zeros(n)
        self._target = np.full(n, np.nan)

    def add(self, logits: F64) -> tuple[F64, F64]:
        """f64[T, n] of the next n entries. Returns (exp(logits - peak) so far, what earlier sums must be scaled by)."""
        rows = np.arange(len(logits))
        at = logits.argmax(axis=1)
        found = logits[rows, at]
        is_better = found > self._peak
        self.best[is_better] = self._first + at[is_better]
        peak = np.maximum(self._peak, found)
        scale = np.exp(self._peak - peak)
        terms = np.exp(logits - peak[:, None])
        self._sum = self._sum * scale + terms.sum(axis=1)
        self._peak = peak
        local = self._targets - self._first
        is_here = (local >= 0) & (local < logits.shape[1])
        self._target[is_here] = logits[rows[is_here], local[is_here]]
        self._first += logits.shape[1]
        return terms, scale

    @property
    def total(self) -> F64:
        """Sum of the last ``terms`` and all earlier ones, relative to the peak."""
        return self._sum

    @property
    def log_normaliser(self) -> F64:
        total: F64 = self._peak + np.log(self._sum)
        return total

    @property
    def losses(self) -> F64:
        """-log p(target) f64[T]; NaN where a row has no target."""
        found: F64 = self.log_normaliser - self._target
        return found


class Comparison:
    """A reference distribution and the others, row by row. ``targets`` i64[T]: the next token, -1 where there is none."""

    def __init__(self, targets: I64, n_others: int) -> None:
        self.reference = Distribution(targets)
        self.others = [Distribution(targets) for _ in range(n_others)]
        self._cross = [np.zeros(len(targets)) for _ in range(n_others)]

    def add(self, reference: F32, others: Sequence[F32]) -> None:
        """The next n entries of the vocabulary: logits f32[T, n] of the reference and of each other."""
        z = reference.astype(np.float64)
        terms, scale = self.reference.add(z)
        for i, other in enumerate(others):
            y = other.astype(np.float64)
            self.others[i].add(y)
            self._cross[i] = self._cross[i] * scale + np.sum(terms * (z - y), axis=1)

    def scores(self, i: int) -> Scores:
        """What the i-th other distribution costs against the reference."""
        p, q = self.reference, self.others[i]
        divergence = self._cross[i] / p.total - p.log_normaliser + q.log_normaliser
        return Scores.of(divergence, q.best == p.best, p.losses, q.losses)


@dataclass(frozen=True)
class Scores:
    """Means over rows. Divergences in nats; an ``_error`` is the standard error of a mean, as if rows were independent."""

    n_rows: int
    kl_mean: float
    kl_error: float
    kl_p99: float
    kl_max: float
    top1: float
    """Share of rows in which both prefer the same token."""
    perplexity: float
    perplexity_of_source: float
    loss_change: float
    """Mean of -log q(next) + log p(next): what a token of the text costs more."""
    loss_change_error: float

    @staticmethod
    def of(divergence: F64, is_same: npt.NDArray[np.bool_], source_losses: F64, losses: F64) -> Scores:
        """From f64[T] each; losses are NaN where a row has no next token (the source's logits are finite)."""
        has_target = ~np.isnan(source_losses)
        change = (losses - source_losses)[has_target]
        n = len(change)
        # Rounding can take an exact 0 a little below it; a divergence is never negative.
        kl = np.where(divergence < 0, 0.0, divergence)
        return Scores(
            n_rows=len(kl),
            kl_mean=float(kl.mean()),
            kl_error=_standard_error(kl),
            kl_p99=float(np.quantile(kl, 0.99)),
            kl_max=float(kl.max()),
            top1=float(is_same.mean()),
            perplexity=_exp(float(losses[has_target].mean())) if n else math.nan,
            perplexity_of_source=_exp(float(source_losses[has_target].mean())) if n else math.nan,
            loss_change=float(change.mean()) if n else math.nan,
            loss_change_error=_standard_error(change),
        )


def _standard_error(x: F64) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def _exp(x: float) -> float:
    return math.inf if x >= 700 else math.exp(x)
