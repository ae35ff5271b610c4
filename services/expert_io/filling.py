"""Free slots are filled with what was used most before, in idle disk time. Pure; who was used is told (``history.py``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from services.expert_io.slots import Slot, SlotTable
from shared.experts.residency import Key


class Filling:
    """One per store. ``n_at_once``: reads in flight."""

    def __init__(self, table: SlotTable, n_at_once: int) -> None:
        self._table = table
        self._n_at_once = n_at_once
        self.in_flight: set[Key] = set()
        self.n_read = 0
        self._waiting: deque[Key] = deque()

    def plan(self, expected: Mapping[Key, float]) -> None:
        """``expected``: the warmest first; as many as there are slots are worth reading."""
        self._waiting.clear()
        self._waiting.extend(list(expected)[: self._table.capacity])

    def coldest_first(self, found: Mapping[int, Key]) -> dict[int, Key]:
        """Slots with their experts, in the order in which they were used least."""
        warmth = {key: -place for place, key in enumerate(self._waiting)}
        return dict(sorted(found.items(), key=lambda item: warmth.get(item[1], -len(warmth))))

    def reads(self) -> Iterator[Slot]:
        """Slots to read into, the warmest experts first, by speculative reads: demand stops them at their next piece."""
        while self._waiting and len(self.in_flight) < self._n_at_once:
            if not self._table.has_free:
                self._waiting.clear()
                break
            key = self._waiting.popleft()
            if self._table.find(key):
                continue
            slot = self._table.take_for_filling(key)
            assert slot is not None
            self.in_flight.add(key)
            yield slot

    def ended(self, key: Key) -> bool:
        """Any read ended. True when it was one of these: the next may start."""
        if key not in self.in_flight:
            return False
        self.in_flight.remove(key)
        self.n_read += 1
        return True
