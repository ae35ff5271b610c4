"""The account of guessed reads: what they saved, what they cost, and whether to go on. Pure: times come from the caller.

A guess is *useful* when its layer asks for it: it saved as much as was already read by then. A guess is *wasted* when its layer
does not: then the disk worked for nothing, which costs only what others had to wait for. That is the time from the layer's
demand until a cancelled piece has let go of the disk, and the reading time of an expert that was displaced for the guess and
asked for soon after. When an interval ends with a loss, guessing pauses, twice as long each time, and is then tried again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.residency import Key

INTERVAL_GUESSES = 64
"""Guesses whose outcome is known, after which the account is looked at."""
FIRST_PAUSE_VISITS = 256
MAX_PAUSE_VISITS = 1 << 16
MAX_DISPLACED = 256
FIRST_PRECISION = 0.5
PRECISION_GUESSES = 64
"""Over how many guesses the precision is a mean, roughly."""


@dataclass
class PilotTotals:
    """Growing totals, for the counters."""

    saved_ns: int = 0
    lost_ns: int = 0
    wanted: int = 0
    """experts that layers with a hint asked for"""
    right: int = 0
    """those of them that the hint had named"""


class PilotAccount:
    """One per store."""

    def __init__(self) -> None:
        self.totals = PilotTotals()
        self.recall_of: dict[int, tuple[int, int]] = {}
        """layer -> (experts that the hint named and the gate chose, experts that the gate chose)"""
        self._started: dict[Key, int] = {}
        self._read_ns: dict[Key, int] = {}
        self._displaced: OrderedDict[Key, None] = OrderedDict()
        self._lost_since: dict[Key, int] = {}
        self._mean_read_ns = 0.0
        self._net_ns = 0
        self._n_known = 0
        self._pause = FIRST_PAUSE_VISITS
        self._visits_off = 0
        self.precision = FIRST_PRECISION
        """How likely a guess that is read turns out right, by those of late."""

    @property
    def is_on(self) -> bool:
        """Whether hints are worth reads now."""
        return self._visits_off == 0

    # -- events ----------------------------------------------------------------------------------------------

    def hinted(self, layer: int, hint: set[int], union: set[int]) -> None:
        """A layer that had a hint wants ``union``."""
        right = len(hint & union)
        self.totals.right += right
        self.totals.wanted += len(union)
        before = self.recall_of.get(layer, (0, 0))
        self.recall_of[layer] = (before[0] + right, before[1] + len(union))

    def visited(self) -> None:
        """A layer visit has ended: a pause goes on."""
        if self._visits_off:
            self._visits_off -= 1

    def started(self, key: Key, now_ns: int, displaced: Key | None) -> None:
        """A guessed read was issued; its slot held ``displaced``."""
        self._started[key] = now_ns
        if displaced is not None:
            self._displaced[displaced] = None
            self._displaced.move_to_end(displaced)
            if len(self._displaced) > MAX_DISPLACED:
                self._displaced.popitem(last=False)

    def read_ended(self, key: Key, start_ns: int, end_ns: int) -> None:
        """Any read ended, guessed or not."""
        self._mean_read_ns += 0.1 * ((end_ns - start_ns) - self._mean_read_ns)
        if key in self._started:
            self._read_ns[key] = end_ns - start_ns
        since = self._lost_since.pop(key, None)
        if since is not None:
            self._lose(max(0, end_ns - since))

    def used(self, key: Key, now_ns: int) -> None:
        """The gate asked for a guess."""
        started = self._started.pop(key, None)
        if started is None:
            return
        self.precision += (1.0 - self.precision) / PRECISION_GUESSES
        # Finished: the whole read is saved. On its way: what it is ahead of a read that would start now.
        self._gain(self._read_ns.pop(key, min(now_ns - started, int(self._mean_read_ns))))
        self._known()

    def wrong(self, key: Key, now_ns: int, *, is_reading: bool, is_awaited: bool) -> None:
        """The layer did not ask for a guess. ``is_reading``: it keeps the disk busy; ``is_awaited``: while reads are due."""
        if self._started.pop(key, None) is None:
            return
        self._read_ns.pop(key, None)
        self.precision -= self.precision / PRECISION_GUESSES
        if is_reading and is_awaited:
            self._lost_since[key] = now_ns
        self._known()

    def missed(self, key: Key) -> None:
        """A demand read is needed; if a guess displaced the expert, that is the guess's fault."""
        if key in self._displaced:
            del self._displaced[key]
            self._lose(int(self._mean_read_ns))

    def _gain(self, ns: int) -> None:
        self.totals.saved_ns += ns
        self._net_ns += ns

    def _lose(self, ns: int) -> None:
        self.totals.lost_ns += ns
        self._net_ns -= ns

    def _known(self) -> None:
        self._n_known += 1
        if self._n_known < INTERVAL_GUESSES:
            return
        if self._net_ns <= 0:
            self._visits_off = self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_VISITS)
        else:
            self._pause = FIRST_PAUSE_VISITS
        self._net_ns = 0
        self._n_known = 0
