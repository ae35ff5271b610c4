"""How far a container's tensors are from the checkpoint's: pure sums over pieces, and the loop that feeds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from shared.container.pack import F32

Pieces = Iterable[tuple[F32, F32]]
"""(values of the source, values of the container) of the same part of a tensor."""


@dataclass
class ErrorSums:
    """Accumulates over pieces. ``relative`` is the RMS of the difference over the RMS of the source."""

    n_values: int = 0
    square_error: float = 0.0
    square: float = 0.0
    largest_error: float = 0.0
    n_tensors: int = 0

    def add(self, source: F32, found: F32) -> None:
        difference = np.subtract(found, source, dtype=np.float64)
        self.n_values += source.size
        self.square_error += float(np.vdot(difference, difference))
        self.square += float(np.sum(np.square(source, dtype=np.float64)))
        # max() would drop a NaN that comes second
        worst = float(np.abs(difference).max(initial=0.0))
        self.largest_error = worst if math.isnan(worst) else max(self.largest_error, worst)

    def join(self, other: ErrorSums) -> None:
        """Adds what was found of another tensor."""
        self.n_values += other.n_values
        self.square_error += other.square_error
        self.square += other.square
        self.largest_error = (
            other.largest_error if math.isnan(other.largest_error) else max(self.largest_error, other.largest_error)
        )
        self.n_tensors += 1

    @property
    def relative(self) -> float:
        if self.square_error == 0.0:
            return 0.0
        return math.sqrt(self.square_error / self.square) if self.square else math.inf

    @property
    def rms(self) -> float:
        return math.sqrt(self.square_error / self.n_values) if self.n_values else 0.0


@dataclass(frozen=True)
class TensorError:
    """One tensor of the container beside its origin."""

    name: str
    role: str
    format: str
    sums: ErrorSums


@dataclass
class ErrorReport:
    """Per role (and format), and the worst tensors by relative error, worst first."""

    n_worst: int = 10
    roles: dict[tuple[str, str], ErrorSums] = field(default_factory=dict)
    worst: list[TensorError] = field(default_factory=list)
    n_tensors: int = 0

    def add(self, found: TensorError) -> None:
        self.roles.setdefault((found.role, found.format), ErrorSums()).join(found.sums)
        self.n_tensors += 1
        if found.sums.relative == 0.0:
            return
        self.worst.append(found)
        # A NaN is worse than any number.
        self.worst.sort(key=lambda e: (not math.isnan(e.sums.relative), -e.sums.relative, e.name))
        del self.worst[self.n_worst :]


def tensor_error(name: str, role: str, fmt: str, pieces: Pieces) -> TensorError:
    """Adds up one tensor, a piece at a time."""
    sums = ErrorSums()
    for source, found in pieces:
        sums.add(source, found)
    return TensorError(name, role, fmt, sums)


def measure(
    tensors: Iterator[tuple[str, str, str, Pieces]], n_worst: int, progress: Callable[[int], None] = lambda _: None
) -> ErrorReport:
    """(name, role, format, pieces) of every tensor -> the report. ``progress`` gets the number of values just done."""
    report = ErrorReport(n_worst)
    for name, role, fmt, pieces in tensors:
        found = tensor_error(name, role, fmt, pieces)
        report.add(found)
        progress(found.sums.n_values)
    return report
