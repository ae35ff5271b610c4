"""The slot table: which expert lies in which slot, and who must leave. Pure: no reads, no memory, no clock.

An expert is a key ``(layer, expert)``. A slot is free, loading, or resident; a slot with pins can't be a victim. Among the
others a policy chooses (``shared/experts/residency.py``). Guesses (speculative loads) may only displace what is
less likely wanted; one that nobody asked for when its layer came is the first to leave, before that it is left alone as
long as others can go.

The capacity may change at any time. A slot that is too many leaves at once, or as soon as nobody works with it and no read
fills it; its memory then goes back to the system (``take_gone``), and the slot is absent until the capacity grows again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from shared.experts.residency import Key, Policy


class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0
    LOADING = 1
    RESIDENT = 2
    ABSENT = 3


@dataclass(slots=True)
class Slot:
    """One slot. ``generation`` grows with every new tenant, so that a late completion can't be taken for another's."""

    index: int
    state: SlotState = SlotState.FREE
    key: Key | None = None
    generation: int = 0
    pins: int = 0
    is_guess: bool = False  # loaded on a hint and not yet asked for
    is_likely: bool = False  # a guess that was nearly certain (read ahead for a prompt)
    is_doomed: bool = False  # its read was cancelled; free when the completion arrives
    is_leaving: bool = False  # beyond the capacity: absent as soon as it is let go


class SlotTable:
    """All slots: ``capacity`` of them may be in use, out of ``n_reserved`` that have an address."""

    def __init__(self, capacity: int, policy: Policy, n_reserved: int = 0) -> None:
        n_slots = capacity
        self.slots = [Slot(i) for i in range(max(capacity, n_reserved))]
        self.capacity = capacity
        self.policy = policy
        self._of_key: dict[Key, Slot] = {}
        self._free = list(range(n_slots - 1, -1, -1))
        self._absent = list(range(len(self.slots) - 1, n_slots - 1, -1))
        for index in self._absent:
            self.slots[index].state = SlotState.ABSENT
        self._leaving: set[int] = set()
        self._gone: list[int] = []
        # Guesses, oldest first: loading; resident and still to come; resident although their layer did not want them.
        self._guesses: dict[int, Slot] = {}
        self._fresh: dict[int, Slot] = {}
        self._stale: dict[int, Slot] = {}
        self.last_evicted: Key | None = None  # by the last ``acquire``, None when a slot was free
        self.n_evicted = 0
        self.n_guesses_wasted = 0  # cancelled, or evicted without ever being asked for
        self.n_ahead_wasted = 0  # the same of likely ones

    def find(self, key: Key) -> Slot | None:
        return self._of_key.get(key)

    @property
    def n_used(self) -> int:
        """Slots that hold or load an expert."""
        return len(self.slots) - len(self._absent) - len(self._free)

    @property
    def n_leaving(self) -> int:
        """Slots beyond the capacity that somebody still works with."""
        return len(self._leaving)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def n_open_guesses(self) -> int:
        """Slots with guesses that may still turn out right."""
        return len(self._guesses) + len(self._fresh)

    def resize(self, capacity: int, *, is_by_policy: bool) -> list[Slot]:
        """Changes the capacity at once. Returns guesses in flight that are too many: the caller dooms and cancels them.

        ``is_by_policy``: the policy says who leaves; else the slots with the highest numbers, so that the memory that stays
        is in one piece.
        """
        assert 0 < capacity <= len(self.slots)
        self.capacity = capacity
        self.policy.resize(capacity)
        n_more = capacity - (len(self.slots) - len(self._absent) - len(self._leaving))
        going: Iterable[Slot]
        if is_by_policy:
            staying = [*sorted(self._leaving), *sorted(self._absent)][: max(n_more, 0)]
            going = itertools.islice(self._least_wanted(), max(-n_more, 0))
        else:
            staying = list(range(capacity))
            going = self.slots[capacity:]
        self._come_back(staying)
        in_flight = []
        for slot in going:
            if slot.state is SlotState.ABSENT or self._leave(slot):
                continue
            slot.is_leaving = True
            self._leaving.add(slot.index)
            if slot.index in self._guesses:
                in_flight.append(slot)
        self._free = [index for index in self._free if self.slots[index].state is SlotState.FREE]
        return in_flight

    def _come_back(self, indices: list[int]) -> None:
        for index in indices:
            slot = self.slots[index]
            slot.is_leaving = False
            if slot.state is SlotState.ABSENT:
                slot.state = SlotState.FREE
                self._free.append(index)
        self._leaving.difference_update(indices)
        self._absent = [index for index in self._absent if self.slots[index].state is SlotState.ABSENT]

    def _least_wanted(self) -> Iterator[Slot]:
        """Slots in the order in which they should leave. Each that can leave must have left before the next is asked for."""
        yield from [self.slots[index] for index in sorted(self._free, reverse=True)]
        while (found := self._victim(None)) is not None:
            yield found
        yield from list(self._guesses.values())
        yield from [slot for slot in self.slots if slot.state is not SlotState.ABSENT and not slot.is_leaving]

    def _leave(self, slot: Slot) -> bool:
        """Makes a slot absent if nobody needs it."""
        if slot.state is SlotState.LOADING or slot.pins:
            return False
        if slot.state is SlotState.RESIDENT:
            self._forget(slot)
            self.n_evicted += 1
        self._leaving.discard(slot.index)
        slot.is_leaving = False
        slot.state = SlotState.ABSENT
        slot.key = None
        slot.is_guess = False
        self._absent.append(slot.index)
        self._gone.append(slot.index)
        return True

    def take_gone(self) -> list[int]:
        """Slots that became absent since the last call: their memory can be given back."""
        gone, self._gone = self._gone, []
        return gone

    def replace_policy(self, policy: Policy) -> None:
        """Another policy from now on; the caller has told it what it may know."""
        self.policy = policy
        for slot in self.slots:
            if slot.state is SlotState.RESIDENT and not slot.pins and slot.key and not slot.is_guess:
                policy.add(slot.key)

    def visit(self, layer: int, is_decode: bool) -> None:
        """A layer's visit begins."""
        self.policy.visit(layer, is_decode)

    def looked_up(self, layer: int) -> list[Key]:
        """The visit has found what it wants: returns the resident guesses for this layer that it left, which were wrong."""
        wrong = []
        for index, slot in list(self._fresh.items()):
            if slot.key and slot.key[0] == layer:
                self._stale[index] = self._fresh.pop(index)
                wrong.append(slot.key)
        return wrong

    def touch(self, slot: Slot, prompt_share: float | None = None, *, is_hit: bool) -> None:
        """The gate asked for the slot's expert; ``prompt_share`` as in ``Policy.asked``."""
        assert slot.key is not None
        self.policy.asked(slot.key, prompt_share, is_hit)
        if slot.is_guess:
            slot.is_guess = False
            self._drop_guess(slot)

    def pin(self, slot: Slot) -> None:
        """Somebody works with the slot."""
        assert slot.key is not None
        slot.pins += 1
        self.policy.discard(slot.key)

    def unpin(self, slot: Slot) -> None:
        slot.pins -= 1
        if slot.is_leaving and self._leave(slot):
            return
        if not slot.pins and slot.state is SlotState.RESIDENT and slot.key is not None:
            self.policy.add(slot.key)

    def acquire(self, key: Key, *, is_guess: bool, chance: float | None = None, is_likely: bool = False) -> Slot | None:
        """A slot for ``key``, now LOADING and unpinned; None when every slot is needed.

        A guess may displace what is less likely wanted than itself: ``chance``, by default what the policy knows of the key.
        ``is_likely``: a nearly certain one may displace anything. How many guesses there are is the caller's affair.
        """
        assert key not in self._of_key
        self.last_evicted = None
        if self._free:
            slot = self.slots[self._free.pop()]
        else:
            if not is_guess:
                found = self._victim(None)
            elif is_likely:
                found = self._victim(math.inf)
            else:
                found = self._victim(self.policy.chance(key) if chance is None else chance)
            if found is None:
                return None
            slot = found
            self.last_evicted = slot.key
            self._forget(slot)
            self.n_evicted += 1
        slot.state = SlotState.LOADING
        slot.key = key
        slot.generation += 1
        slot.pins = 0
        slot.is_guess = is_guess
        slot.is_likely = is_likely
        slot.is_doomed = False
        self._of_key[key] = slot
        if is_guess:
            self._guesses[slot.index] = slot
        return slot

    def adopt(self, residents: Mapping[int, Key], *, is_by_policy: bool) -> None:
        """Of a fresh table: slots that hold experts already, of an earlier process; slot -> expert, the coldest first.

        Where they are more than the capacity some leave at once; ``is_by_policy`` as with ``resize``.
        """
        kept = list(residents.items())
        kept = kept[-self.capacity :] if is_by_policy else [(i, key) for i, key in kept if i < self.capacity]
        holds = dict(kept)
        empty = [i for i in range(len(self.slots) - 1, -1, -1) if i not in holds]
        n_absent = len(self.slots) - self.capacity
        self._absent, self._free = empty[:n_absent], empty[n_absent:]
        self._gone += [i for i in residents if i not in holds]
        for i in self._absent:
            self.slots[i].state = SlotState.ABSENT
        for i in self._free:
            self.slots[i].state = SlotState.FREE
        for i, key in kept:
            slot = self.slots[i]
            slot.state = SlotState.RESIDENT
            slot.key = key
            self._of_key[key] = slot
            self.policy.add(key)

    def loaded(self, slot: Slot) -> None:
        """The slot's read is complete."""
        slot.state = SlotState.RESIDENT
        was_guess = self._guesses.pop(slot.index, None)
        if slot.is_leaving and self._leave(slot):
            return
        if was_guess:
            self._fresh[slot.index] = slot
        elif not slot.pins and slot.key is not None:
            self.policy.add(slot.key)

    def doom(self, slot: Slot) -> None:
        """The slot's read was cancelled: nobody may find it; its memory is free when ``release`` is called."""
        if slot.key is not None:
            self._of_key.pop(slot.key, None)
        slot.is_doomed = True
        self._waste(slot)
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
        if slot.is_leaving:
            self._leave(slot)
        else:
            self._free.append(slot.index)

    def guesses_in_flight(self) -> list[Slot]:
        """Slots that load on a hint, least promising (oldest) first."""
        return list(self._guesses.values())

    def _forget(self, slot: Slot) -> None:
        if slot.key is not None:
            self._of_key.pop(slot.key, None)
            self.policy.evicted(slot.key)
        if slot.is_guess:
            self._waste(slot)
            self._drop_guess(slot)

    def _waste(self, slot: Slot) -> None:
        if slot.is_likely:
            self.n_ahead_wasted += 1
        else:
            self.n_guesses_wasted += 1

    def _drop_guess(self, slot: Slot) -> None:
        for guesses in (self._guesses, self._fresh, self._stale):
            guesses.pop(slot.index, None)

    def _victim(self, below: float | None) -> Slot | None:
        """``below``: the chance of a guess, None for a demand."""
        if self._stale:
            return next(iter(self._stale.values()))
        key = self.policy.victim()
        if below is not None:
            return self._of_key[key] if key and self.policy.chance(key) < below else None
        if key:
            return self._of_key[key]
        return next(iter(self._fresh.values()), None)
