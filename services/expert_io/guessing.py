"""Reads before anybody asks: PILOT's guesses for the coming layer of decode rows, and reading ahead into a prompt's next layer.

Both use idle disk time alone (the read pool serves demand first) and hold a bounded part of the slots. What guesses are worth
and whether to guess at all is decided in ``pilot.py``; this chooses what is read next. Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from services.expert_io.events import Hinted
from services.expert_io.pilot import Hints, PilotAccount, PilotTrial
from services.expert_io.slots import Slot, SlotTable
from services.expert_io.visit import Found, Visit
from shared.experts.residency import Key

# Guesses hold at most this share of the slots at a time until they turn out right or wrong.
GUESS_SHARE = 0.25
# Guesses in flight: enough that the disk does not wait for us between two, few enough to stop at once.
GUESS_READS = 2
# A prompt that wants at least this share of a layer's experts will want as many of the next: they are read ahead unasked.
AHEAD_SHARE = 0.5


class Guessing:
    """One per store. ``layers``: those with experts; guesses and trials are about the ones below ``n_layers``.

    As long as a visit waits for slots, nothing is read that nobody asked for.
    """

    def __init__(self, table: SlotTable, layers: tuple[int, ...], n_layers: int, n_experts: int) -> None:
        self._table, self._layers, self._n_layers, self._n_experts = table, layers, n_layers, n_experts
        self._hints = Hints()
        self.account = PilotAccount()
        self.trial = PilotTrial(max(1, sum(layer < n_layers for layer in layers)))
        self.n_reads = 0
        self.n_ahead_reads = 0
        self._ahead: deque[Key] = deque()  # of the next layer, in file order
        self._ahead_room = 0

    def hinted(self, event: Hinted, visit: Visit | None) -> bool:
        """The router guesses experts of a layer. False: unknown, or too late because that layer's visit has its choice."""
        if event.layer not in self._layers:
            return False
        if visit and visit.rows is not None and (event.step, event.layer) <= (visit.step, visit.layer):
            return False
        self._hints.add(event.step, event.layer, event.experts, event.signal)
        return True

    def judge(self, visit: Visit, found: Found, now_ns: int) -> list[Slot]:
        """A layer's choice is known: its guesses are booked and the next layer planned. Returns those being read in vain."""
        account = self.account
        assert visit.rows is not None
        named = self._hints.close(visit.step, visit.layer)
        if named:
            account.hinted(visit.layer, named, visit.rows)
        for key in found.right:
            account.used(key, now_ns)
        for key in found.wrong:
            account.wrong(key, now_ns, is_reading=False, is_awaited=False)
        for expert in found.missing:
            account.missed((visit.layer, expert))
        in_vain = []
        if self._table.n_guesses_in_flight:
            for slot in self._table.guesses_in_flight():
                if slot.key and slot.key[0] == visit.layer:
                    account.wrong(slot.key, now_ns, is_reading=True, is_awaited=visit.is_waiting)
                    in_vain.append(slot)
        self._plan_ahead(visit)
        return in_vain

    def _plan_ahead(self, visit: Visit) -> None:
        """Prefill streams the layers: the disk goes on with the next one while this one computes and the next attends."""
        self._ahead.clear()
        if len(visit.passing) < AHEAD_SHARE * self._n_experts:
            return
        self._ahead_room = visit.passing_limit
        following = next((layer for layer in self._layers if visit.layer < layer < self._n_layers), None)
        if following is not None:
            self._ahead.extend((following, expert) for expert in range(self._n_experts))

    def forget(self) -> None:
        """The visit was abandoned: its prompt may not go on."""
        self._ahead.clear()

    def has_reads(self, visit: Visit | None) -> bool:
        """Whether ``reads`` may have something."""
        return bool(self._hints.unread or self._ahead) and (visit is None or not visit.has_pending)

    def reads(self, visit: Visit | None, now_ns: int) -> Iterator[Slot]:
        """Slots to read into, as many as there is room for."""
        if visit is None or not visit.has_pending:
            yield from self._guesses(now_ns)
            yield from self._read_ahead()

    def _guesses(self, now_ns: int) -> Iterator[Slot]:
        """Keeps a few guesses in flight as long as there are any worth their slot."""
        unread, table = self._hints.unread, self._table
        while unread and self.trial.is_on and table.n_guesses_in_flight < GUESS_READS:
            if table.n_open_guesses >= int(table.capacity * GUESS_SHARE):
                return
            guess = unread.popleft()
            if guess.key[1] >= self._n_experts or table.find(guess.key):
                continue
            taken = table.take_for_guess(guess.key, chance=self.account.chance(guess))
            if taken is None:
                unread.clear()  # those behind are less likely still
                return
            self.account.started(guess.key, now_ns, taken.evicted)
            self.n_reads += 1
            yield taken.slot

    def _read_ahead(self) -> Iterator[Slot]:
        table = self._table
        while self._ahead and table.n_open_guesses < self._ahead_room:
            key = self._ahead.popleft()
            if table.find(key):
                continue
            taken = table.take_for_guess(key, is_likely=True)
            if taken is None:
                return
            self.n_ahead_reads += 1
            yield taken.slot

    def summary(self) -> dict[str, Any]:
        """For the log: what guesses saved and cost, and (layer, signal, recall)."""
        totals = self.account.totals
        recall = [(*at, round(right / n, 3)) for at, (right, n) in sorted(self.account.recall_of.items())]
        return {"saved_ms": totals.saved_ns // 1_000_000, "lost_ms": totals.lost_ns // 1_000_000, "recall": recall}
