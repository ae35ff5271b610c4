"""Figures of several rounds as a table: a line for each figure, a column for each setting. Formats only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Round = TypeVar("Round")


@dataclass(frozen=True)
class Figure(Generic[Round]):
    """One line. ``of``: its value in a round; ``form``: a format specification ("" before a unit)."""

    name: str
    of: Callable[[Round], float]
    form: str = ".2f"


def table(figures: Sequence[Figure[Round]], settings: Mapping[str, Sequence[Round]]) -> list[str]:
    """Medians, and least to most behind them where there are several rounds."""
    rows = [["", *settings]]
    for figure in figures:
        rows.append(
            [figure.name, *(spread([figure.of(r) for r in rounds], figure.form) for rounds in settings.values())]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median (least to most)."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def summary(figures: Mapping[str, Callable[[Round], float]], rounds: Sequence[Round]) -> dict[str, Any]:
    """Name -> {"median", "least", "most"}."""
    out = {}
    for name, of in figures.items():
        values = [of(r) for r in rounds]
        out[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return out
