"""The slot table: which expert lies in which slot, and who must leave. Pure: no reads, no memory, no clock.

An expert is a key ``(layer, expert)``. A slot is free, loading, or resident; a slot with pins can't be a victim. Among the
others a policy chooses (``shared/residency.py``). Guesses (speculative loads) may only displace what is less likely wanted;
one that nobody asked for when its layer came is the first to leave, before that it is left alone as long as others can go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from shared.residency import Key, Policy


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
    is_guess: bool = False  # loaded on a hint and not yet asked for
    is_likely: bool = False  # a guess that was nearly certain (read ahead for a prompt)
    is_doomed: bool = False  # its read was cancelled; free when the completion arrives


class SlotTable:
    """All slots."""

    def __init__(self, n_slots: int, policy: Policy) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self.policy = policy
        self._of_key: dict[Key, Slot] = {}
        self._free = list(range(n_slots - 1, -1, -1))
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
        return len(self.slots) - len(self._free)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def n_open_guesses(self) -> int:
        """Slots with guesses that may still turn out right."""
        return len(self._guesses) + len(self._fresh)

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

    def loaded(self, slot: Slot) -> None:
        """The slot's read is complete."""
        slot.state = SlotState.RESIDENT
        if self._guesses.pop(slot.index, None):
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
