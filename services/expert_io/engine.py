"""What an expert engine is: it holds experts in slots and computes with them. Which ones, ``StoreState`` decides.

An engine does what it is told in its own way and tells by events what became of it, at once or later. It may keep its slots in
RAM (``cpu_engine.py``), in a device or on another host; nothing in the deciders knows. ``engines.py`` lists those in use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from native.kernels import Rows
from native.library import Pool
from services.expert_io.events import Compute, Event, Read
from services.expert_io.slots import Tier
from shared.container.reader import Container
from shared.experts.residency import Key
from shared.memory.big_memory import Home
from shared.run.config import GroupConfig


@dataclass(frozen=True)
class EngineSetup:
    """What engines are made from. ``layers``: those whose experts may be asked for; ``warn`` takes an event and its facts."""

    config: GroupConfig
    container: Container
    layers: tuple[int, ...]
    pool: Pool
    home: Home | None
    warn: Callable[..., None]


@dataclass(slots=True)
class Work:
    """The rows of one visit, for ``ExpertEngine.start``.

    Expert ``e``, with ``b = begin_of[e]`` and ``n = n_rows_of[e]``, takes the rows ``rows[b : b + n]`` of ``hidden`` and writes
    its results to the rows ``places[b : b + n]`` of ``parts``. Shapes: rows, places i32[T * K], hidden f32[T, D], parts
    f32[T * K, D]. ``rows`` and ``places`` may be other visits' as soon as ``start`` has returned; ``hidden`` and ``parts`` are
    the engine's until it says Computed.
    """

    rows: NDArray[np.int32]
    places: NDArray[np.int32]
    rows_at: int
    places_at: int
    parts: Rows
    hidden: Rows
    layer: int = -1
    begin_of: Mapping[int, int] = field(default_factory=dict)
    n_rows_of: Mapping[int, int] = field(default_factory=dict)


class ExpertEngine(ABC):
    """One tier of slots and who computes with them. All calls come from expert_io's one thread, and none may wait for long.

    ``slots``: its share of all slots' numbers. ``fds`` become readable when ``take`` has something.
    """

    name: ClassVar[str]
    is_in_budget: ClassVar[bool] = False
    """The group's memory budget (``--ram``, ``colibri ram``) says how many slots it has."""

    slots: range
    fds: Sequence[int] = ()

    @classmethod
    @abstractmethod
    def tier(cls, config: GroupConfig, n_slots: int) -> Tier:
        """Its slots in this group; ``n_slots`` is what the budget allows. None at all: it has nothing to do."""

    @abstractmethod
    def read(self, order: Read) -> None:
        """Bring an expert into a slot. Ends with ReadLanded, ReadFailed or ReadCancelled of the order's generation."""

    @abstractmethod
    def promote(self, slot: int) -> None:
        """The slot's read is waited for now, if it is still under way."""

    @abstractmethod
    def cancel(self, slot: int) -> None:
        """End the slot's read soon, if it is still under way; its end is told all the same."""

    @abstractmethod
    def give_back(self, slots: Sequence[int]) -> None:
        """These slots hold nothing any more and are not used until something is read into them."""

    @abstractmethod
    def start(self, order: Compute, work: Work) -> None:
        """Run experts. Ends with Computed or ComputeFailed; there is one order at a time."""

    @abstractmethod
    def take(self, now_ns: int) -> Sequence[Event]:
        """What became of orders since the last call, in the order of happening; never waits."""

    def residents(self) -> dict[int, Key]:
        """Slot -> expert that an earlier process left whole; asked once, before anything else."""
        return {}

    def facts(self) -> dict[str, str]:
        """What was learnt while starting, for log and status."""
        return {}

    def totals(self) -> dict[str, int]:
        """Growing totals, by the names of the shared counters."""
        return {}

    def gauges(self) -> dict[str, int]:
        """States of this moment, by the names of the shared counters."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends what is under way and gives everything back."""
