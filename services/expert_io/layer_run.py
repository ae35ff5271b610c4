"""One layer's visit to the expert store: which experts wait, load, are ready, are done. Pure: events in, actions out.

Works in waves by itself: when the batch-union is larger than the slots, experts are loaded as computed ones give
their slots back. Experts that only rows of a prompt want come last and may hold a part of the slots at once, so that a prompt
does not push out what others decode with. Whatever arrives first is computed first; the sum over experts is ordered later, by
id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.expert_io.slots import Slot, SlotState, SlotTable
from shared.experts.residency import Key, passing_limit


@dataclass(frozen=True)
class ReadOrder:
    """Read ``slot.key`` into the slot."""

    slot: Slot


@dataclass
class LayerCounters:
    """How the union of one visit was found."""

    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    useful_guesses: int = 0
    useful_ahead: int = 0


@dataclass
class LayerRun:
    """State of one visit. ``experts`` is the batch-union in ascending order. ``right_guesses``, ``wrong_guesses`` (those that
    lie in slots) and ``missing`` tell what ``start`` found.

    ``passing``: those that no decode row wants, with the share of the prompt's rows that chose them.
    """

    step: int
    layer: int
    experts: list[int]
    table: SlotTable
    passing: Mapping[int, float] = field(default_factory=dict)
    counters: LayerCounters = field(default_factory=LayerCounters)
    right_guesses: list[Key] = field(default_factory=list)
    wrong_guesses: list[Key] = field(default_factory=list)
    missing: tuple[int, ...] = ()
    _pending: deque[int] = field(default_factory=deque)
    _ready: list[int] = field(default_factory=list)
    _loading: dict[int, Slot] = field(default_factory=dict)
    _held: dict[int, Slot] = field(default_factory=dict)
    _passing_loaded: set[int] = field(default_factory=set)  # of those held: loaded by this visit
    n_done: int = 0

    @property
    def is_alone(self) -> bool:
        """No row decodes."""
        return len(self.passing) == len(self.experts)

    @property
    def passing_limit(self) -> int:
        return passing_limit(self.table.capacity, self.is_alone)

    def start(self) -> list[Slot]:
        """First look at the table: guessed reads to promote. ``more_reads`` has what is to be read."""
        self.table.visit(self.layer, not self.is_alone)
        promote = []
        later: list[int] = []
        for expert in self.experts:
            slot = self.table.find((self.layer, expert))
            if slot is None:
                (later if expert in self.passing else self._pending).append(expert)
                continue
            if slot.is_guess and slot.is_likely:
                self.counters.useful_ahead += 1
            elif slot.is_guess:
                self.counters.useful_guesses += 1
                self.right_guesses.append((self.layer, expert))
            if slot.state is SlotState.RESIDENT:
                self.counters.hits += 1
                self._ready.append(expert)
            else:
                self.counters.late_hits += 1
                self._loading[expert] = slot
                promote.append(slot)
            self._hold(expert, slot, is_hit=True)
        self._pending.extend(later)
        self.wrong_guesses = self.table.looked_up(self.layer)
        self.missing = tuple(self._pending)
        self.counters.misses = len(self.missing)
        return promote

    def more_reads(self) -> Iterator[ReadOrder]:
        """Reads for pending experts as far as slots can be had; issue each as it comes, for the disk may idle."""
        while self._pending:
            expert = self._pending[0]
            is_passing = expert in self.passing
            if is_passing and len(self._passing_loaded) >= self.passing_limit and not self.table.has_free:
                break
            slot = self.table.acquire((self.layer, expert), is_guess=False)
            if slot is None:
                break
            self._pending.popleft()
            self._hold(expert, slot, is_hit=False)
            if is_passing:
                self._passing_loaded.add(expert)
            self._loading[expert] = slot
            yield ReadOrder(slot)

    def _hold(self, expert: int, slot: Slot, *, is_hit: bool) -> None:
        self.table.touch(slot, self.passing.get(expert), is_hit=is_hit)
        self.table.pin(slot)
        self._held[expert] = slot

    def _let_go(self, expert: int) -> None:
        self.table.unpin(self._held.pop(expert))
        self._passing_loaded.discard(expert)

    def arrived(self, key: Key) -> None:
        """A read of this layer is complete."""
        if key[0] == self.layer and key[1] in self._loading:
            del self._loading[key[1]]
            self._ready.append(key[1])

    def failed(self, key: Key) -> bool:
        """A read failed for good; its expert counts as done. False when this visit did not wait for it."""
        if key[0] != self.layer or key[1] not in self._loading:
            return False
        del self._loading[key[1]]
        self._let_go(key[1])
        self.n_done += 1
        return True

    def take_ready(self, limit: int) -> list[tuple[int, Slot]]:
        """Up to ``limit`` experts that can be computed now, ascending."""
        self._ready.sort()
        taken, self._ready = self._ready[:limit], self._ready[limit:]
        return [(expert, self._held[expert]) for expert in taken]

    def computed(self, experts: list[int]) -> None:
        """These were computed; their slots may be taken by others."""
        for expert in experts:
            self._let_go(expert)
        self.n_done += len(experts)

    def abandon(self) -> None:
        """Let go of every slot; reads in flight go on and become resident."""
        for expert in list(self._held):
            self._let_go(expert)
        self._pending.clear()
        self._ready.clear()
        self._loading.clear()

    @property
    def has_pending(self) -> bool:
        """Experts still wait for a slot."""
        return bool(self._pending)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def is_starved(self) -> bool:
        """Experts wait for slots while no read is in flight and nothing is ready: guesses must make room."""
        return bool(self._pending) and not self._loading and not self._ready

    @property
    def is_waiting(self) -> bool:
        """Only reads can bring this visit further."""
        return bool(self._loading) and not self._ready

    @property
    def is_done(self) -> bool:
        return self.n_done == len(self.experts)
