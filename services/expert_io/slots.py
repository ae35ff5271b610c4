"""The slot table: which expert lies in which slot, and who must leave. Pure: no reads, no memory, no clock.

An expert is a key ``(layer, expert)``. A slot is free, loading, or resident; a slot with pins can't be a victim.
Victims are chosen by frequency with decay, then by age: a layer scan, which decode is, defeats plain recency. Guesses
(speculative loads) may only displace what is colder than they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

Key = tuple[int, int]


class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0
    LOADING = 1
    RESIDENT = 2


@dataclass(slots=True)
class Slot:
    """One slot. ``generation`` grows with every new tenant, so that a late completion can't be taken for another's."""

    index: int
    state: SlotState = SlotState.FREE
    key: Key | None = None
    generation: int = 0
    pins: int = 0
    last_used: int = 0
    is_guess: bool = False  # loaded on a hint and not yet asked for
    is_doomed: bool = False  # its read was cancelled; free when the completion arrives


class SlotTable:
    """All slots. ``clock`` counts layer visits; it orders ages and paces the decay of the heat."""

    def __init__(self, n_slots: int, half_life: int) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self._of_key: dict[Key, Slot] = {}
        self._free = list(range(n_slots - 1, -1, -1))
        self._heat: dict[Key, float] = {}
        self._guesses: dict[int, Slot] = {}  # loading on a hint, oldest first
        self._half_life = max(1, half_life)
        self.clock = 0
        self.n_evicted = 0
        self.n_guesses_wasted = 0  # cancelled, or evicted without ever being asked for

    def find(self, key: Key) -> Slot | None:
        return self._of_key.get(key)

    def heat(self, key: Key) -> float:
        return self._heat.get(key, 0.0)

    @property
    def n_used(self) -> int:
        """Slots that hold or load an expert."""
        return len(self.slots) - len(self._free)

    def tick(self) -> None:
        """One layer was visited."""
        self.clock += 1
        if self.clock % self._half_life == 0:
            self._heat = {key: h / 2 for key, h in self._heat.items() if h > 1 / 64}

    def touch(self, slot: Slot) -> None:
        """The gate asked for the slot's expert."""
        assert slot.key is not None
        slot.last_used = self.clock
        slot.is_guess = False
        self._guesses.pop(slot.index, None)
        self._heat[slot.key] = self._heat.get(slot.key, 0.0) + 1.0

    def acquire(self, key: Key, *, is_guess: bool) -> Slot | None:
        """A slot for ``key``, now LOADING and unpinned; None when every slot is needed (or warmer than a guess)."""
        assert key not in self._of_key
        if self._free:
            slot = self.slots[self._free.pop()]
        else:
            found = self._victim(self.heat(key) if is_guess else None)
            if found is None:
                return None
            slot = found
            self._forget(slot)
            self.n_evicted += 1
        slot.state = SlotState.LOADING
        slot.key = key
        slot.generation += 1
        slot.pins = 0
        slot.last_used = self.clock
        slot.is_guess = is_guess
        slot.is_doomed = False
        self._of_key[key] = slot
        if is_guess:
            self._guesses[slot.index] = slot
        return slot

    def loaded(self, slot: Slot) -> None:
        """The slot's read is complete."""
        slot.state = SlotState.RESIDENT
        self._guesses.pop(slot.index, None)

    def doom(self, slot: Slot) -> None:
        """The slot's read was cancelled: nobody may find it; its memory is free when ``release`` is called."""
        if slot.key is not None:
            self._of_key.pop(slot.key, None)
        slot.is_doomed = True
        self.n_guesses_wasted += 1
        self._guesses.pop(slot.index, None)

    def release(self, slot: Slot) -> None:
        """Free a slot whose read failed or was cancelled and has ended."""
        if not slot.is_doomed:
            self._forget(slot)
        slot.state = SlotState.FREE
        slot.key = None
        slot.pins = 0
        slot.is_doomed = False
        slot.is_guess = False
        self._guesses.pop(slot.index, None)
        self._free.append(slot.index)

    def guesses_in_flight(self) -> list[Slot]:
        """Slots that load on a hint, least promising (oldest) first."""
        return list(self._guesses.values())

    def _forget(self, slot: Slot) -> None:
        if slot.key is not None:
            self._of_key.pop(slot.key, None)
        if slot.is_guess:
            self.n_guesses_wasted += 1

    def _victim(self, warmer_than: float | None) -> Slot | None:
        best: Slot | None = None
        best_rank: tuple[float, int] | None = None
        for slot in self.slots:
            if slot.state is not SlotState.RESIDENT or slot.pins:
                continue
            assert slot.key is not None
            # A guess that nobody asked for is colder than anything that was used.
            rank = (-1.0 if slot.is_guess else self._heat.get(slot.key, 0.0), slot.last_used)
            if best_rank is None or rank < best_rank:
                best, best_rank = slot, rank
        if best is None or best_rank is None:
            return None
        if warmer_than is not None and best_rank[0] >= warmer_than:
            return None
        return best
