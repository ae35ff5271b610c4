"""Reads before anybody asks: PILOT's guesses for the coming layer of decode rows, and reading ahead into a prompt's next layer.

Both use idle disk time alone (the read pool serves demand first) and hold a bounded part of the slots. What to guess, what
guesses are worth and whether to guess at all is decided in ``pilot.py``; this joins that with slots and reads.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from services.expert_io.layer_run import LayerRun
from services.expert_io.pilot import Hints, PilotAccount, PilotTrial
from services.expert_io.slots import Slot, SlotTable
from services.expert_io.store import ExpertStore
from shared.experts.residency import Key
from shared.messages.expert_io import PilotHint
from shared.model.spec import ModelSpec
from shared.step.counters import Counters

# Guesses hold at most this share of the slots at a time until they turn out right or wrong.
GUESS_SHARE = 0.25
# Guesses in flight: enough that the disk does not wait for us between two, few enough to stop at once.
GUESS_READS = 2
# A prompt that wants at least this share of a layer's experts will want as many of the next: they are read ahead unasked.
AHEAD_SHARE = 0.5


class Prefetch:
    """One per store. ``run`` is the visit's run where there is one: as long as it waits for slots, nothing is read ahead."""

    def __init__(
        self, table: SlotTable, store: ExpertStore, counters: Counters, spec: ModelSpec, layers: tuple[int, ...]
    ) -> None:
        self._table, self._store, self._counters = table, store, counters
        self._spec, self._layers = spec, layers
        self._hints = Hints()
        self.account = PilotAccount()
        self.trial = PilotTrial(max(1, sum(layer < spec.n_layers for layer in layers)))
        self._ahead: deque[Key] = deque()  # of the next layer, in file order
        self._ahead_room = 0

    # -- events ----------------------------------------------------------------------------------------------

    def hinted(self, msg: PilotHint, run: LayerRun | None) -> None:
        """The router guesses experts of a layer; too late when that layer's visit has its choice."""
        if msg.layer in self._layers and not (run and (msg.step, msg.layer) <= (run.step, run.layer)):
            self._hints.add(msg.step, msg.layer, msg.experts, msg.signal)
            self.go_on(run)

    def visit_began(self, run: LayerRun) -> None:
        """A layer's choice is known: its guesses are judged, those still read in vain are stopped, the next is planned."""
        now = time.monotonic_ns()
        account = self.account
        named = self._hints.close(run.step, run.layer)
        if named:
            account.hinted(run.layer, named, set(run.experts))
        for key in run.right_guesses:
            account.used(key, now)
        for key in run.wrong_guesses:
            account.wrong(key, now, is_reading=False, is_awaited=False)
        for expert in run.missing:
            account.missed((run.layer, expert))
        for slot in self._table.guesses_in_flight():
            if slot.key and slot.key[0] == run.layer:
                account.wrong(slot.key, now, is_reading=True, is_awaited=run.is_waiting)
                self.stop(slot)
        self._plan_ahead(run)
        self.go_on(run)

    def forget(self) -> None:
        """The visit was abandoned: its prompt may not go on."""
        self._ahead.clear()

    def stop(self, slot: Slot) -> None:
        """Cancel the slot's read; the slot is free when its completion comes."""
        self._table.doom(slot)
        self._store.cancel(slot)

    def stop_all(self) -> None:
        """Somebody needs the slots that guesses are being read into."""
        for slot in self._table.guesses_in_flight():
            self.stop(slot)

    # -- reads -----------------------------------------------------------------------------------------------

    def go_on(self, run: LayerRun | None) -> None:
        """Issues what there is room for."""
        if run is None or not run.has_pending:
            self._read_guesses()
            self._read_ahead()

    def _read_guesses(self) -> None:
        """Keeps a few guesses in flight as long as there are any worth their slot."""
        unread, table = self._hints.unread, self._table
        while unread and self.trial.is_on and len(table.guesses_in_flight()) < GUESS_READS:
            if table.n_open_guesses >= int(table.capacity * GUESS_SHARE):
                return
            guess = unread.popleft()
            if guess.key[1] >= self._spec.n_experts or table.find(guess.key):
                continue
            slot = table.acquire(guess.key, is_guess=True, chance=self.account.chance(guess))
            if slot is None:
                unread.clear()  # those behind are less likely still
                return
            self.account.started(guess.key, time.monotonic_ns(), table.last_evicted)
            self._store.start_read(slot, speculative=True)
            self._counters.add("pilot_reads", 1)

    def _plan_ahead(self, run: LayerRun) -> None:
        """Prefill streams the layers: the disk goes on with the next one while this one computes and the next attends."""
        self._ahead.clear()
        self._ahead_room = run.passing_limit
        if len(run.passing) < AHEAD_SHARE * self._spec.n_experts:
            return
        following = next((layer for layer in self._layers if run.layer < layer < self._spec.n_layers), None)
        if following is not None:
            self._ahead.extend((following, expert) for expert in range(self._spec.n_experts))

    def _read_ahead(self) -> None:
        while self._ahead and self._table.n_open_guesses < self._ahead_room:
            key = self._ahead.popleft()
            if self._table.find(key):
                continue
            slot = self._table.acquire(key, is_guess=True, is_likely=True)
            if slot is None:
                return
            self._store.start_read(slot, speculative=True)
            self._counters.add("ahead_reads", 1)

    def summary(self) -> dict[str, Any]:
        """For the log: what guesses saved and cost, and (layer, signal, recall)."""
        totals = self.account.totals
        recall = [(*at, round(right / n, 3)) for at, (right, n) in sorted(self.account.recall_of.items())]
        return {"saved_ms": totals.saved_ns // 1_000_000, "lost_ms": totals.lost_ns // 1_000_000, "recall": recall}
