"""How much of a sweep over sizes, rungs and precisions runs: all of it under `make test-all`, otherwise where it matters."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TypeVar

IS_FULL = bool(os.environ.get("COLIBRI_TEST_ALL"))

T = TypeVar("T")


def sparse(values: Sequence[T], at_least: Collection[T]) -> Sequence[T]:
    """All of ``values`` in a full run, otherwise ``at_least``: those at which a tile, a block or a group ends or begins."""
    assert set(at_least) <= set(values)
    return values if IS_FULL else [value for value in values if value in at_least]
