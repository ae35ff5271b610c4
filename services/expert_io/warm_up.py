"""Experts by what they were used for before: the order of the first victims, and of filling free slots in idle disk time."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from services.expert_io.layer_run import LayerRun
from services.expert_io.slots import Slot, SlotTable
from services.expert_io.store import ExpertStore
from shared.experts.residency import Key
from shared.experts.usage import WRITE_EVERY_S, UsageHistory, load_usage, save_usage
from shared.log import Log
from shared.run.config import GroupConfig
from shared.step.counters import Counters

# Reads at a time: at least so many, and twice the pieces that the drive takes at once.
MIN_READS = 2


class WarmUp:
    """The usage history and the reads that it speaks for. Off, all of it, when the group has no usage path."""

    def __init__(
        self, config: GroupConfig, table: SlotTable, store: ExpertStore, counters: Counters, log: Log,
        layers: tuple[int, ...], n_experts: int,
    ) -> None:  # fmt: skip
        self._config, self._table, self._store, self._counters, self._log = config, table, store, counters, log
        self.usage: UsageHistory | None = None
        self.in_flight: set[Key] = set()
        self._waiting: deque[Key] = deque()
        self._n_read = 0
        pieces = -(-config.slot_bytes // config.read_piece_bytes)
        self._n_at_once = max(MIN_READS, -(-2 * config.read_depth // pieces))
        self._save_at = float("inf")
        if config.usage_path is None or not layers:
            return
        self.usage, why_empty = load_usage(Path(config.usage_path), config.fingerprint, layers, n_experts)
        if why_empty:
            log.warning("usage_history_ignored", path=config.usage_path, reason=why_empty)
        self._save_at = time.monotonic() + WRITE_EVERY_S
        table.policy.restore(self.expected())
        self.plan()

    def expected(self) -> dict[Key, float]:
        """Uses per step by experience, most used first."""
        return self.usage.expected() if self.usage else {}

    def plan(self) -> None:
        """Free slots are to be filled with what was used most."""
        self._waiting.clear()
        self._waiting.extend(list(self.expected())[: self._table.capacity])

    def coldest_first(self, found: dict[int, Key]) -> dict[int, Key]:
        """Slots with their experts, in the order in which they were used least."""
        warmth = {key: -place for place, key in enumerate(self._waiting)}
        return dict(sorted(found.items(), key=lambda item: warmth.get(item[1], -len(warmth))))

    def go_on(self) -> None:
        """Fills free slots, the warmest experts first, by speculative reads: a demand read stops them at their next piece."""
        while self._waiting and len(self.in_flight) < self._n_at_once:
            if not self._table.has_free:
                self._waiting.clear()
                break
            key = self._waiting.popleft()
            if self._table.find(key):
                continue
            slot = self._table.acquire(key, is_guess=False)
            assert slot is not None
            self._store.start_read(slot, speculative=True)
            self.in_flight.add(key)

    def read_ended(self, slot: Slot) -> None:
        """Any read ended; if it was one of ours, the next may start."""
        if slot.key not in self.in_flight:
            return
        self.in_flight.remove(slot.key)
        self._n_read += 1
        self._counters.add("warm_reads", 1)
        self.go_on()
        if not self.in_flight:
            self._log.info("warmed", experts=self._n_read, resident=self._table.n_used)

    def count(self, run: LayerRun) -> None:
        """A visit ended."""
        if self.usage:
            weights = [run.passing.get(e, 1.0) for e in run.experts] if run.passing else 1.0
            self.usage.count(run.layer, run.experts, weights)

    def tick(self) -> None:
        """Called several times a second."""
        self.go_on()
        if time.monotonic() >= self._save_at:
            self.save()

    def save(self) -> None:
        """Writes the history if there is anything new in it."""
        if self.usage is None:
            return
        self._save_at = time.monotonic() + WRITE_EVERY_S
        if not self.usage.has_news:
            return
        path = self._config.usage_path
        assert path is not None
        try:
            save_usage(Path(path), self._config.fingerprint, self.usage)
        except OSError as error:
            self._log.warning("usage_history_off", path=path, reason=error.strerror or str(error))
            self.usage = None
