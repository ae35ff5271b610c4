"""One layer's visit to the expert store: which experts wait, load, are ready, are done. Pure: it opens nothing.

Works in waves by itself: when the visit wants more experts than there are slots, they are loaded as computed ones give
their slots back. Experts that only rows of a prompt want come last and may hold a part of the slots at once, so that a prompt
does not push out what others decode with. Whatever arrives first is computed first; the sum over experts is ordered later, by
id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from services.expert_io.slots import Slot, SlotTable, Taken
from services.expert_io.states import AWAITED, HELD, RESIDENT
from shared.errors import StoreError
from shared.experts.residency import Key, passing_limit


class Found(NamedTuple):
    """What the first look at the slots found. ``late``: reads on their way, which are waited for now."""

    n_hits: int
    late: list[Slot]
    missing: tuple[int, ...]
    right: list[Key]
    """guesses of the predictor that were right"""
    n_right_ahead: int
    wrong: list[Key]
    """guesses for this layer that lie in slots and that it does not want"""


class Visit:
    """State of one visit, from the rows in the frame to their sum."""

    __slots__ = (
        "_awaited",
        "_held",
        "_passing_loaded",
        "_pending",
        "_ready",
        "_table",
        "begin_ns",
        "found",
        "is_timed",
        "layer",
        "n_done",
        "n_rows",
        "n_shared_done",
        "passing",
        "rows",
        "step",
    )

    def __init__(
        self, table: SlotTable, step: int, layer: int, n_rows: int = 1, begin_ns: int = 0, *, has_shared: bool = False
    ) -> None:
        """``has_shared``: the layer has a shared expert, which all rows pass."""
        self._table = table
        self.step, self.layer, self.n_rows, self.begin_ns = step, layer, n_rows, begin_ns
        self.n_shared_done = 0 if has_shared else n_rows
        self.is_timed = False
        self.rows: Mapping[int, int] | None = None
        """expert, ascending -> how many rows want it; None before the gate's answer"""
        self.passing: Mapping[int, float] = {}
        self.found: Found | None = None
        self.n_done = 0
        self._pending: deque[int] = deque()
        self._ready: list[int] = []
        self._awaited: dict[int, Slot] = {}
        self._held: dict[int, Slot] = {}  # in slots that are ready, being computed or awaited
        self._passing_loaded: set[int] = set()  # of those held: loaded by this visit

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """No row decodes."""
        return self.rows is not None and len(self.passing) == len(self.rows)

    @property
    def passing_limit(self) -> int:
        return passing_limit(self._table.capacity, self.is_alone)

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
        return bool(self._pending) and not self._awaited and not self._ready

    @property
    def is_waiting(self) -> bool:
        """Only reads can bring this visit further."""
        return bool(self._awaited) and not self._ready

    @property
    def is_done(self) -> bool:
        """Every expert was computed, or can't be."""
        return self.rows is not None and self.n_done == len(self.rows)

    def holds(self, slot: Slot) -> bool:
        return slot.key is not None and self._held.get(slot.key[1]) is slot

    @property
    def held_slots(self) -> set[int]:
        return {slot.index for slot in self._held.values()}

    # -- events ----------------------------------------------------------------------------------------------

    def look_up(self, rows: Mapping[int, int], passing: Mapping[int, float]) -> Found:
        """The gate's answer is known. ``more_reads`` then has what is to be read."""
        self.rows, self.passing = rows, passing
        table, layer = self._table, self.layer
        table.visit(layer, not self.is_alone)
        n_right_ahead = 0
        late: list[Slot] = []
        right: list[Key] = []
        later: list[int] = []
        held, ready = self._held, self._ready
        for expert in rows:
            slot = table.find((layer, expert))
            if slot is None:
                (later if expert in passing else self._pending).append(expert)
                continue
            if slot.state is not RESIDENT and slot.is_guess:
                if slot.is_likely:
                    n_right_ahead += 1
                else:
                    right.append((layer, expert))
            table.hold(slot, passing.get(expert) if passing else None)
            held[expert] = slot
            if slot.state is HELD:
                ready.append(expert)
            else:
                self._awaited[expert] = slot
                late.append(slot)
        self._pending.extend(later)
        self.found = Found(len(self._ready), late, tuple(self._pending), right, n_right_ahead, table.passed_by(layer))
        return self.found

    def more_reads(self) -> Iterator[Slot]:
        """Slots to read pending experts into, as far as they can be had; issue each as it comes, for the disk may idle."""
        table = self._table
        while self._pending:
            expert = self._pending[0]
            is_passing = expert in self.passing
            if is_passing and len(self._passing_loaded) >= self.passing_limit and not table.has_free:
                return
            taken: Taken | None = table.take_for_visit((self.layer, expert), self.passing.get(expert))
            if taken is None:
                return
            self._pending.popleft()
            self._held[expert] = self._awaited[expert] = taken.slot
            if is_passing:
                self._passing_loaded.add(expert)
            yield taken.slot

    def landed(self, slot: Slot) -> None:
        """A read that this visit may wait for is complete."""
        assert slot.key is not None
        if self._awaited.get(slot.key[1]) is slot:
            del self._awaited[slot.key[1]]
            self._ready.append(slot.key[1])

    def failed(self, slot: Slot) -> bool:
        """A read failed for good; its expert counts as done. False when this visit did not wait for it."""
        assert slot.key is not None
        expert = slot.key[1]
        if self._awaited.get(expert) is not slot:
            return False
        del self._awaited[expert]
        del self._held[expert]
        self._passing_loaded.discard(expert)
        self.n_done += 1
        return True

    def take_ready(self, max_pairs: int, busy: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[Slot, ...]]:
        """Experts to be computed now by one engine, ascending, and their slots; the last one brings them to ``max_pairs`` rows.

        ``busy``: tiers whose engines are at work.
        """
        self._ready.sort()
        held, rows = self._held, self.rows
        assert rows is not None
        tier = None
        experts: list[int] = []
        slots: list[Slot] = []
        n_pairs = 0
        for expert in self._ready:
            slot = held[expert]
            if tier is None and slot.tier not in busy:
                tier = slot.tier
            if slot.tier == tier:
                experts.append(expert)
                slots.append(slot)
                n_pairs += rows[expert]
                if n_pairs >= max_pairs:
                    break
        if len(experts) == len(self._ready):
            self._ready.clear()
        elif experts:
            self._ready = [expert for expert in self._ready if expert not in experts]
        return tuple(experts), tuple(slots)

    def computed(self, experts: Collection[int]) -> list[int]:
        """These were computed, or can't be; their slots may be taken by others. Returns slots that are absent now."""
        gone = []
        for expert in experts:
            slot = self._held.pop(expert)
            if self._table.let_go(slot):
                gone.append(slot.index)
        if self._passing_loaded:
            self._passing_loaded.difference_update(experts)
        self.n_done += len(experts)
        return gone

    def abandon(self, in_use: Collection[int]) -> list[int]:
        """Lets go of every slot but those ``in_use`` by an engine; reads in flight go on and become resident."""
        gone = []
        for slot in self._held.values():
            if slot.index not in in_use and self._table.let_go(slot):
                gone.append(slot.index)
        self._held.clear()
        self._pending.clear()
        self._ready.clear()
        self._awaited.clear()
        return gone

    def check(self, being_computed: Collection[int]) -> None:
        """The invariants of this visit; raises StoreError."""
        table = self._table
        for expert, slot in self._held.items():
            state = AWAITED if expert in self._awaited else HELD
            if slot.key != (self.layer, expert) or slot.state is not state:
                raise table.fault(slot, f"the visit of layer {self.layer} has its expert {expert} there, {state.name}")
        known = [*self._ready, *self._awaited, *being_computed]
        if len(known) != len(set(known)) or set(known) != set(self._held):
            raise StoreError(f"ready, awaited and being computed are {known}, held {sorted(self._held)}")
        n_known = len(self._held) + len(self._pending) + self.n_done
        if self.rows is not None and n_known != len(self.rows):
            raise StoreError(f"{n_known} of {len(self.rows)} experts of the visit are held, pending or done")
