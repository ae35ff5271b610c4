"""Collects the stage rows of a time span from the running group's memory, without disturbing it.

Attaches read-only to the segments ``trace`` (stage rows of finished steps) and ``counters``, and compares what expert_io says
it has read with what the kernel counted for that process.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cli.profile.analysis import Facts, Profile, analyse
from cli.profile.storage import StoreFacts
from shared.awake import Countdown
from shared.machine.processes import read_counts
from shared.memory.segments import COUNTERS, TRACE, Segment
from shared.run.client import Answer, ask_status
from shared.run.config import FROZEN_NAME, load_frozen
from shared.step.counters import read_all
from shared.step.stages import TraceRing
from shared.wire.endpoints import EXPERT_IO

POLL_S = 0.05
SETTLE_S = 2.0
STATES = frozenset({"slots", "resident"})
"""Counter cells that are states: shown as they are, not as differences."""


class Profiler:
    """Collects the rows of a time span. Usage: ``start``, let the group work, ``stop``. Raises ConfigError."""

    def __init__(self, run_dir: Path) -> None:
        config = load_frozen(run_dir / FROZEN_NAME)
        self._config = config
        self._segments = [Segment.attach(config.run_id, name, is_readonly=True) for name in (TRACE, COUNTERS)]
        self._ring: TraceRing | None = TraceRing(self._segments[0].buf)
        self._blocks: list[np.ndarray] = []
        self._count = 0
        self._n_lost = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counters: dict[str, dict[str, int]] = {}
        self._io: tuple[int, int] | None = None
        self.rows: np.ndarray | None = None
        """All rows of the span, once stopped."""

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_thread()
        self._ring = None
        for segment in self._segments:
            segment.close()

    def start(self) -> None:
        assert self._ring is not None
        self._io = self._read_io()
        self._counters = read_all(self._segments[1].buf)
        self._count = self._ring.n_written
        self._thread = threading.Thread(target=self._collect, name="collect", daemon=True)
        self._thread.start()

    def stop(self, answer: Answer | None = None) -> Profile:
        """Waits until the last step has been written down, then analyses."""
        self._settle()
        self._end_thread()
        self._take()
        after = read_all(self._segments[1].buf)
        io = self._read_io()
        facts = Facts(
            counters={
                service: {
                    name: value if name in STATES else value - self._counters.get(service, {}).get(name, 0)
                    for name, value in cells.items()
                }
                for service, cells in after.items()
            },
            store=self._store_facts(after.get(EXPERT_IO, {}).get("slots", 0)),
            n_lost=self._n_lost,
        )
        if io is not None and self._io is not None and io[0] == self._io[0]:
            facts.kernel_read_bytes = io[1] - self._io[1]
        if answer is not None:
            facts.n_prompt, facts.n_generated = answer.n_prompt, answer.n_generated
            facts.request_s, facts.first_token_s = answer.total_s, answer.first_token_s
        assert self._ring is not None
        self.rows = np.concatenate(self._blocks) if self._blocks else np.zeros(0, self._ring.dtype)
        return analyse(self.rows, facts)

    def _store_facts(self, n_slots: int) -> StoreFacts:
        config = self._config
        return StoreFacts(
            drive_bytes_s=config.drive_bytes_s,
            is_buffered=config.direct_io == "off",
            pilot=config.pilot,
            slot_bytes=config.slot_bytes,
            n_experts=config.n_experts,
            n_slots=n_slots,
        )

    def _collect(self) -> None:
        while not self._stop.wait(POLL_S):
            self._take()

    def _take(self) -> None:
        assert self._ring is not None
        self._count, rows, n_lost = self._ring.read_since(self._count)
        self._n_lost += n_lost
        if len(rows):
            self._blocks.append(rows)

    def _settle(self) -> None:
        """Returns when nothing has moved for a moment, after SETTLE_S at the latest."""
        limit = Countdown(SETTLE_S)
        before: Any = None
        while not limit.is_over:
            assert self._ring is not None
            now = (self._ring.n_written, read_all(self._segments[1].buf))
            if now == before:
                return
            before = now
            time.sleep(0.15)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _read_io(self) -> tuple[int, int] | None:
        """(pid of expert_io, bytes the kernel read from storage for it)."""
        status = ask_status(self._config)
        pid = next((service.pid for service in status.services if service.service == EXPERT_IO), 0) if status else 0
        counts = read_counts(pid) if pid else None
        return (pid, counts[1]) if counts else None
