"""The slot table: which expert lies in which slot, who must leave, how it came to that. Pure: no reads, no memory, no clock.

An expert is a key ``(layer, expert)``. A slot that a visit holds or a read fills can't be a victim; among the others a policy
chooses (``shared/experts/residency.py``). Guesses may only displace what is less likely wanted; one that nobody asked for when
its layer came is the first to leave, before that it is left alone as long as others can go.

Slots belong to tiers, the memories of the expert engines, and are numbered through all of them. The capacity of a tier may
change at any time. A surplus slot leaves at once, or as soon as nobody works with it and no read fills it; then it is
absent until the capacity grows again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from services.expert_io.events import Event
from services.expert_io.states import (
    ABSENT,
    ALLOWED,
    AWAITED,
    BUSY,
    CANCELLED,
    FILLING,
    FINDABLE,
    FREE,
    GUESSED,
    GUESSES,
    GUESSING,
    HELD,
    RESIDENT,
    STALE,
    SlotState,
)
from services.expert_io.stories import N_SHOWN, N_TOLD, Stories, name_of
from shared.errors import StoreError
from shared.experts.residency import KeepAll, Key, Policy


class Tier(NamedTuple):
    """The slots of one engine: ``capacity`` of them may be in use, out of ``n_reserved`` that have an address."""

    name: str
    capacity: int
    n_reserved: int


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. ``generation`` grows with every new tenant, so that a late completion can't be taken for another's."""

    index: int
    tier: int
    state: SlotState
    key: Key | None = None
    generation: int = 0
    is_likely: bool = False  # a guess that was nearly certain (read ahead for a prompt)
    is_leaving: bool = False  # beyond the capacity: absent as soon as it is let go

    @property
    def is_guess(self) -> bool:
        """It has an expert that nobody has asked for since it was guessed."""
        return self.state in GUESSES


class Taken(NamedTuple):
    """A slot for a new tenant, and who had to leave it."""

    slot: Slot
    evicted: Key | None


class Resized(NamedTuple):
    """``gone``: slots that are absent now. ``in_flight``: surplus slots that a guess is being read into."""

    gone: list[int]
    in_flight: list[Slot]


class SlotTable:
    """All slots. Methods that may make a slot absent return whether they did: its memory can be given back."""

    def __init__(self, tiers: Sequence[Tier], policy: Policy) -> None:
        self.tiers = list(tiers)
        self.capacity = sum(tier.capacity for tier in tiers)
        """Slots that may be in use, of all tiers."""
        self.policy = policy
        self.slots: list[Slot] = []
        for number, tier in enumerate(tiers):
            for place in range(max(tier.capacity, tier.n_reserved)):
                self.slots.append(Slot(len(self.slots), number, FREE if place < tier.capacity else ABSENT))
        self._of_key: dict[Key, Slot] = {}
        self._free = [slot.index for slot in reversed(self.slots) if slot.state is FREE]
        self._absent = [slot.index for slot in reversed(self.slots) if slot.state is ABSENT]
        self._leaving: set[int] = set()
        # Guesses by state, oldest first.
        self._guessing: dict[int, Slot] = {}
        self._guessed: dict[int, Slot] = {}
        self._stale: dict[int, Slot] = {}
        self.n_evicted = 0
        self.n_guesses_wasted = 0  # called off, or evicted without ever being asked for
        self.n_ahead_wasted = 0  # the same of likely ones
        self.stimulus = 0
        self.cause: Event | None = None
        """What moves slots at the moment, for their stories."""
        self._stories = Stories()

    # -- questions -------------------------------------------------------------------------------------------

    def find(self, key: Key) -> Slot | None:
        return self._of_key.get(key)

    @property
    def n_used(self) -> int:
        """Slots that hold or load an expert."""
        return len(self.slots) - len(self._absent) - len(self._free)

    def n_used_of(self, tier: int) -> int:
        """The same of one tier."""
        return sum(slot.tier == tier and slot.state not in (ABSENT, FREE) for slot in self.slots)

    @property
    def n_experts(self) -> int:
        """Experts that lie in slots or are on their way there."""
        return len(self._of_key)

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
        return len(self._guessing) + len(self._guessed)

    @property
    def n_stale(self) -> int:
        return len(self._stale)

    def guesses_in_flight(self) -> list[Slot]:
        """Slots that load on a guess, least promising (oldest) first."""
        return list(self._guessing.values())

    @property
    def n_guesses_in_flight(self) -> int:
        return len(self._guessing)

    def count_states(self) -> Counter[SlotState]:
        return Counter(slot.state for slot in self.slots)

    # -- a visit ---------------------------------------------------------------------------------------------

    def visit(self, layer: int, is_decode: bool) -> None:
        """A layer's visit begins."""
        self.policy.visit(layer, is_decode)

    def passed_by(self, layer: int) -> list[Key]:
        """The layer has found what it wants: returns the resident guesses for it that it left, which were wrong."""
        wrong = [slot for slot in self._guessed.values() if slot.key and slot.key[0] == layer]
        for slot in wrong:
            self._stale[slot.index] = self._guessed.pop(slot.index)
            self._move(slot, STALE)
        return [slot.key for slot in wrong if slot.key]

    def hold(self, slot: Slot, prompt_share: float | None) -> None:
        """The gate asked for the slot's expert, and the visit works with it; ``prompt_share`` as in ``Policy.asked``."""
        key, state = slot.key, slot.state
        assert key is not None
        self.policy.asked(key, prompt_share, True)
        if state is RESIDENT:
            self.policy.discard(key)
            self._move(slot, HELD)
            return
        if state is HELD:  # an engine still works for a visit that was abandoned
            return
        self._drop_guess(slot)
        self._move(slot, AWAITED if state is FILLING or state is GUESSING else HELD)

    def take_for_visit(self, key: Key, prompt_share: float | None) -> Taken | None:
        """A slot for an expert that the visit waits for; None when every slot is needed."""
        taken = self._take(key, None)
        if taken:
            self.policy.asked(key, prompt_share, False)
            self._move(taken.slot, AWAITED)
        return taken

    def let_go(self, slot: Slot) -> bool:
        """The visit needs the slot no more; a read under way goes on."""
        if slot.state is AWAITED:
            self._move(slot, FILLING)
            return False
        if slot.is_leaving:
            self._leave(slot)
            return True
        assert slot.key is not None
        self._move(slot, RESIDENT)
        self.policy.add(slot.key)
        return False

    # -- reads that nobody waits for -------------------------------------------------------------------------

    def take_for_filling(self, key: Key) -> Slot | None:
        """A free slot; None when there is none."""
        if not self._free:
            return None
        taken = self._take(key, None)
        assert taken is not None
        self._move(taken.slot, FILLING)
        return taken.slot

    def take_for_guess(self, key: Key, *, chance: float | None = None, is_likely: bool = False) -> Taken | None:
        """A slot for a guess, which may displace what is less likely wanted than itself; None when there is none.

        ``chance``: by default what the policy knows of the key. ``is_likely``: a nearly certain one may displace anything.
        How many guesses there are is the caller's affair.
        """
        if is_likely:
            below = math.inf
        else:
            below = self.policy.chance(key) if chance is None else chance
        taken = self._take(key, below)
        if taken:
            taken.slot.is_likely = is_likely
            self._guessing[taken.slot.index] = taken.slot
            self._move(taken.slot, GUESSING)
        return taken

    def call_off(self, slot: Slot) -> None:
        """A guess's read is to stop: nobody may find it; its slot is free when ``free`` is called."""
        assert slot.key is not None
        del self._of_key[slot.key]
        self._waste(slot)
        del self._guessing[slot.index]
        self._move(slot, CANCELLED)

    # -- what became of reads --------------------------------------------------------------------------------

    def landed(self, slot: Slot) -> bool:
        """The slot's read is complete."""
        assert slot.key is not None
        if slot.state is AWAITED:
            self._move(slot, HELD)
        elif slot.state is GUESSING:
            self._guessed[slot.index] = self._guessing.pop(slot.index)
            self._move(slot, GUESSED)
        elif slot.is_leaving:
            self._leave(slot)
            return True
        else:
            self._move(slot, RESIDENT)
            self.policy.add(slot.key)
        return False

    def free(self, slot: Slot) -> bool:
        """The slot's read failed, or was called off and has ended."""
        if slot.state is not CANCELLED:
            self._forget(slot)
        if slot.is_leaving:
            self._become_absent(slot)
            return True
        self._move(slot, FREE)
        slot.key = None
        self._free.append(slot.index)
        return False

    # -- the capacity ----------------------------------------------------------------------------------------

    def resize(self, tier: int, capacity: int, *, is_by_policy: bool) -> Resized:
        """Changes the capacity at once. The caller calls off the guesses in flight in surplus slots.

        ``is_by_policy``: the policy says who leaves; else the slots with the highest numbers, so that the memory that stays
        is in one piece.
        """
        name, _, n_reserved = self.tiers[tier]
        assert 0 <= capacity <= n_reserved
        self.tiers[tier] = Tier(name, capacity, n_reserved)
        self.capacity = sum(tier.capacity for tier in self.tiers)
        self.policy.resize(self.capacity)
        mine = [slot for slot in self.slots if slot.tier == tier]
        leaving = [slot.index for slot in mine if slot.is_leaving]
        absent = [slot.index for slot in mine if slot.state is ABSENT]
        n_more = capacity - (len(mine) - len(absent) - len(leaving))
        elsewhere = self._hide_other_tiers(tier)
        going: Iterable[Slot]
        if is_by_policy:
            self._come_back([*leaving, *absent][: max(n_more, 0)])
            going = islice(self._least_wanted(mine), max(-n_more, 0))
        else:
            self._come_back(slot.index for slot in mine[:capacity])
            going = mine[capacity:]
        gone, in_flight = [], []
        for slot in going:
            if slot.state in BUSY:
                slot.is_leaving = True
                self._leaving.add(slot.index)
                if slot.state is GUESSING:
                    in_flight.append(slot)
            elif slot.state is not ABSENT:
                self._leave(slot)
                gone.append(slot.index)
        for key in elsewhere:
            self.policy.add(key)
        self._free = [index for index in self._free if self.slots[index].state is FREE]
        return Resized(gone, in_flight)

    def _hide_other_tiers(self, tier: int) -> list[Key]:
        """Takes the candidates of other tiers from the policy; returns them to be added again."""
        if len(self.tiers) == 1:
            return []
        found = [slot.key for slot in self.slots if slot.tier != tier and slot.state is RESIDENT and slot.key]
        for key in found:
            self.policy.discard(key)
        return found

    def _come_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            slot = self.slots[index]
            slot.is_leaving = False
            self._leaving.discard(index)
            if slot.state is ABSENT:
                self._move(slot, FREE)
                self._free.append(index)
        self._absent = [index for index in self._absent if self.slots[index].state is ABSENT]

    def _least_wanted(self, mine: list[Slot]) -> Iterator[Slot]:
        """A tier's slots in the order in which they should leave. Each that can leave must have left before the next."""
        tier = mine[0].tier if mine else 0
        yield from [slot for slot in reversed(mine) if slot.state is FREE]
        yield from [slot for slot in self._stale.values() if slot.tier == tier]
        while (key := self.policy.victim()) is not None:
            yield self._of_key[key]
        yield from [slot for slot in self._guessed.values() if slot.tier == tier]
        yield from [slot for slot in self._guessing.values() if slot.tier == tier]
        yield from [slot for slot in mine if slot.state is not ABSENT and not slot.is_leaving]

    def _leave(self, slot: Slot) -> None:
        """Nobody needs the slot: it becomes absent, with its expert."""
        if slot.state is not FREE:
            self._forget(slot)
            self.n_evicted += 1
        self._become_absent(slot)

    def _become_absent(self, slot: Slot) -> None:
        self._move(slot, ABSENT)
        self._leaving.discard(slot.index)
        slot.is_leaving = False
        slot.key = None
        self._absent.append(slot.index)

    def replace_policy(self, policy: Policy) -> None:
        """Another policy from now on; the caller has told it what it may know."""
        self.policy = policy
        for slot in self.slots:
            if slot.state is RESIDENT and slot.key:
                policy.add(slot.key)

    def adopt(self, tier: int, residents: Mapping[int, Key], *, is_by_policy: bool) -> list[int]:
        """Of a fresh table: slots of a tier that hold experts already, of an earlier process; the coldest come first.

        Where they are more than the capacity some leave at once; ``is_by_policy`` as with ``resize``. Returns those.
        """
        mine = [slot for slot in self.slots if slot.tier == tier]
        capacity = self.tiers[tier].capacity
        kept = list(residents.items())
        if is_by_policy:
            kept = kept[-capacity:] if capacity else []
        else:
            kept = [(i, key) for i, key in kept if i < mine[0].index + capacity]
        holds = dict(kept)
        empty = [slot for slot in reversed(mine) if slot.index not in holds]
        n_absent = len(mine) - capacity
        for slot in empty[:n_absent]:
            slot.state = ABSENT
        for slot in empty[n_absent:]:
            slot.state = FREE
        for index, key in kept:
            slot = self.slots[index]
            slot.state, slot.key = FREE, key
            self._of_key[key] = slot
            self._move(slot, RESIDENT)
            self.policy.add(key)
        self._free = [slot.index for slot in reversed(self.slots) if slot.state is FREE]
        self._absent = [slot.index for slot in reversed(self.slots) if slot.state is ABSENT]
        return [index for index in residents if index not in holds]

    # -- tenants ---------------------------------------------------------------------------------------------

    def _take(self, key: Key, below: float | None) -> Taken | None:
        """A slot with no tenant but ``key``, still FREE; ``below`` as in ``_victim``."""
        assert key not in self._of_key
        evicted = None
        if self._free:
            slot = self.slots[self._free.pop()]
        else:
            found = self._victim(below)
            if found is None:
                return None
            slot = found
            evicted = slot.key
            self._forget(slot)
            self.n_evicted += 1
            self._move(slot, FREE)
        slot.key = key
        slot.generation += 1
        self._of_key[key] = slot
        return Taken(slot, evicted)

    def _victim(self, below: float | None) -> Slot | None:
        """``below``: the chance of a guess, None for a demand."""
        if self._stale:
            return next(iter(self._stale.values()))
        key = self.policy.victim()
        if below is not None:
            return self._of_key[key] if key and self.policy.chance(key) < below else None
        if key:
            return self._of_key[key]
        return next(iter(self._guessed.values()), None)

    def _forget(self, slot: Slot) -> None:
        assert slot.key is not None
        del self._of_key[slot.key]
        self.policy.evicted(slot.key)
        if slot.state is GUESSING or slot.state is GUESSED or slot.state is STALE:
            self._waste(slot)
            self._drop_guess(slot)

    def _waste(self, slot: Slot) -> None:
        if slot.is_likely:
            self.n_ahead_wasted += 1
        else:
            self.n_guesses_wasted += 1

    def _drop_guess(self, slot: Slot) -> None:
        for guesses in (self._guessing, self._guessed, self._stale):
            guesses.pop(slot.index, None)

    # -- moves, stories, invariants --------------------------------------------------------------------------

    def _move(self, slot: Slot, to: SlotState) -> None:
        if not ALLOWED[slot.state] >> to & 1:
            raise self.fault(slot, f"it can't become {to.name}")
        slot.state = to
        self._stories.add((self.stimulus, self.cause, slot.index, to, slot.key))

    def story(self, index: int) -> list[str]:
        """What led to the slot's state, the oldest first, a line each, as far as it is remembered."""
        return self._stories.tell(index, self.cause.now_ns if self.cause else 0)

    def brief_story(self, index: int) -> str:
        """The end of the slot's story in one line."""
        return "; ".join(self.story(index)[-N_TOLD:])

    def describe(self, layer: int, number: int) -> str:
        """For people: the slot of an expert, or with layer -1 the slot of this number, and its story."""
        if layer >= 0:
            slot = self._of_key.get((layer, number))
            if slot is None:
                return f"Expert {number} of layer {layer} lies in no slot."
        elif 0 <= number < len(self.slots):
            slot = self.slots[number]
        else:
            return f"There is no slot {number}: they are numbered from 0 to {len(self.slots) - 1}."
        holds = "nothing" if slot.key is None else f"expert {slot.key[1]} of layer {slot.key[0]}"
        leaving = ", beyond the capacity" if slot.is_leaving else ""
        tier = self.tiers[slot.tier].name
        head = f"Slot {slot.index} ({tier}): {slot.state.name}, {holds}, tenant {slot.generation}{leaving}"
        story = self.story(slot.index)[-N_SHOWN:]
        return "\n  ".join([head, *story] if story else [head, "nothing has happened to it since long"])

    def fault(self, slot: Slot, what: str) -> StoreError:
        """For what must not be: names the slot and tells its story."""
        story = self.brief_story(slot.index) or "nothing is remembered"
        return StoreError(
            f"Slot {slot.index} is {slot.state.name} with {slot.key} in generation {slot.generation}, and {what} "
            f"(#{self.stimulus} {name_of(self.cause)}); this is a fault. Its story: {story}"
        )

    def check(self) -> None:
        """The invariants of this table; raises StoreError with the story of a slot that breaks one."""
        of_state: dict[SlotState, set[int]] = {state: set() for state in SlotState}
        for slot in self.slots:
            of_state[slot.state].add(slot.index)
            has_key = slot.state is not ABSENT and slot.state is not FREE
            if (slot.key is not None) != has_key:
                raise self.fault(slot, "that state and key do not go together")
            if slot.state in FINDABLE and self._of_key.get(slot.key) is not slot:  # type: ignore[arg-type]
                raise self.fault(slot, "its expert is not found there")
            if slot.is_leaving != (slot.index in self._leaving):
                raise self.fault(slot, "whether it leaves is said in two ways")
            if slot.is_leaving and slot.state not in (FILLING, AWAITED, CANCELLED, HELD):
                raise self.fault(slot, "it should have left")
        n_findable = sum(len(of_state[state]) for state in FINDABLE)
        lists = ((self._free, FREE), (self._absent, ABSENT))
        guesses = ((self._guessing, GUESSING), (self._guessed, GUESSED), (self._stale, STALE))
        for indices, state in (*lists, *guesses):
            if len(indices) != len(of_state[state]) or set(indices) != of_state[state]:
                raise StoreError(f"the list of slots that are {state.name} has {indices}, not {of_state[state]}")
        if len(self._of_key) != n_findable:
            raise StoreError(f"{len(self._of_key)} experts can be found in {n_findable} slots")
        for number, tier in enumerate(self.tiers):
            n_there = sum(s.tier == number and s.state is not ABSENT and not s.is_leaving for s in self.slots)
            if n_there != tier.capacity:
                raise StoreError(f"tier {tier.name} has {n_there} slots, but a capacity of {tier.capacity}")
        victim = self.policy.victim()
        if victim is not None and self._of_key[victim].state is not RESIDENT:
            raise self.fault(self._of_key[victim], "the policy would have it leave")
        if victim is None and of_state[RESIDENT] and not isinstance(self.policy, KeepAll):
            raise self.fault(self.slots[min(of_state[RESIDENT])], "the policy does not know it")
