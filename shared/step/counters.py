"""Segment ``counters``: i64[5][64], one block per service, named cells. Monotonic; rates are the reader's business.

One writer per block: the service itself. A restarted service goes on counting where its predecessor stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared.wire.endpoints import ATTENTION, DRAFTER, EXPERT_IO, GATEWAY, ROUTER, SERVICES

if TYPE_CHECKING:
    import numpy as np

N_CELLS = 64
SEGMENT_BYTES = len(SERVICES) * N_CELLS * 8

CELLS: dict[str, tuple[str, ...]] = {
    GATEWAY: (),  # reaches no numpy; it reports through its own HTTP surface
    ROUTER: (
        "steps",
        "rows",
        "prompt_tokens",
        "tokens",
        "requests",
        "refused",
        "finished",
        "aborted",
        "failed",
        "replays",
        "drafts",
        "accepted",
    ),
    ATTENTION: ("steps", "rows", "embeds", "heads"),
    EXPERT_IO: (
        "bytes_demand",
        "bytes_speculative",
        "reads",
        "retries",
        "hits",
        "late_hits",
        "misses",
        "evictions",
        "pilot_useful",
        "pilot_wasted",
        "expert_runs",
        "expert_rows",
        "io_wait_ns",
        "io_busy_ns",
        "slots",
        "resident",
        "pilot_reads",
        "read_errors",
        "warm_reads",
        "pilot_saved_ns",
        "pilot_lost_ns",
        "pilot_wanted",
        "pilot_right",
        "pilot_paused",
        "ahead_reads",
        "ahead_useful",
        "ahead_wasted",
        "copy_faults",
        "copies_damaged",
        "places_resting",
    ),
    DRAFTER: ("drafts", "tokens", "rows"),
}
"""Cells in the order of their place: append, never reorder (tools of an older tree may be attached)."""


class Counters:
    """The cells of one service (its own to write, anybody's to read). ``buf``: the segment ``counters``."""

    def __init__(self, buf: Any, service: str) -> None:
        import numpy as np

        self._place = {name: i for i, name in enumerate(CELLS[service])}
        block = SERVICES.index(service)
        self.cells: np.ndarray = np.frombuffer(buf, dtype="<i8", count=N_CELLS, offset=block * N_CELLS * 8)
        self._fast = memoryview(self.cells.data)  # a single cell costs a third of the array's

    def add(self, name: str, amount: int = 1) -> None:
        self._fast[self._place[name]] += amount

    def set(self, name: str, value: int) -> None:
        """For cells that are states (slots, resident), and for totals that are kept elsewhere."""
        self._fast[self._place[name]] = value

    def get(self, name: str) -> int:
        return int(self._fast[self._place[name]])

    def read(self) -> dict[str, int]:
        """All cells by name, one moment's copy."""
        values = self.cells.copy()
        return {name: int(values[i]) for name, i in self._place.items()}


def read_all(buf: Any) -> dict[str, dict[str, int]]:
    """Every service's cells, for tools."""
    return {service: Counters(buf, service).read() for service in SERVICES if CELLS[service]}


assert all(len(cells) <= N_CELLS for cells in CELLS.values())
