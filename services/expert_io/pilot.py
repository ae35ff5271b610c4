"""Guessed reads: which come next, what they saved and cost, and trials that decide whether to go on. Pure: times are given.

Hints name experts of a coming layer, the likeliest first, from two signals (``shared/messages/expert_io.py``). A guess is read
only when the disk would idle, a few at a time; the rest of a hint is forgotten when its layer asks or a better hint comes.

A guess is *useful* when its layer asks for it: it saved as much as was already read by then. A guess is *wasted* when its layer
does not: then the disk worked for nothing, which costs only what others had to wait for. That is the time from the layer's
demand until a cancelled piece has let go of the disk, and the reading time of an expert that was displaced for the guess and
asked for soon after.

The account does not see everything (guesses take processor time, and reads overlap), so it does not decide. Trials do: steps
with and without guesses take turns, on, off, off, on, so that a drift cancels, until the difference is clear. Only when steps
with guesses were shorter does guessing go on; the verdict holds for a while, twice as long each time it is confirmed.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from shared.experts.residency import Key

ROUND = (True, False, False, True)
MIN_ROUNDS, MAX_ROUNDS = 6, 24
SURE = 2.5
"""The mean gain of a round must be this many of its standard errors away from none, or MAX_ROUNDS are played."""
TRIM = 0.1
"""Part of the rounds that is left out at either end: other work on the machine."""
MIN_GAIN = 0.01
"""A gain below this part of the time is none."""
FIRST_REST_STEPS = 256
MAX_REST_STEPS = 16384
MAX_DISPLACED = 256
FIRST_PRECISION = 0.5
PRECISION_GUESSES = 64
"""Over how many guesses the precision is a mean, roughly."""
N_SIGNALS = 2
MAX_PLACES = 16
"""Places of a hint whose precision is told apart; those behind count as the last."""


@dataclass
class PilotTotals:
    """Growing totals, for the counters."""

    saved_ns: int = 0
    lost_ns: int = 0
    wanted: int = 0
    """experts that layers with a hint asked for"""
    right: int = 0
    """those of them that the hint had named"""


@dataclass(frozen=True, slots=True)
class Guess:
    """An expert that a hint names at ``place`` (0: the likeliest)."""

    key: Key
    signal: int
    place: int


class Hints:
    """The newest hints of the coming layer, and what of them is still to be read."""

    def __init__(self) -> None:
        self.unread: deque[Guess] = deque()
        self._heard: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}  # layer -> signal -> (step, experts)

    def add(self, step: int, layer: int, experts: tuple[int, ...], signal: int) -> None:
        """A hint came; it replaces what earlier ones left unread."""
        self._heard.setdefault(layer, {})[signal] = step, experts
        self.unread = deque(Guess((layer, expert), signal, place) for place, expert in enumerate(experts))

    def close(self, step: int, layer: int) -> dict[int, tuple[int, ...]]:
        """The layer asks: returns what each signal had named for this step; nothing of it is to be read any more."""
        if self.unread and self.unread[0].key[0] == layer:
            self.unread.clear()
        return {signal: named for signal, (of, named) in self._heard.pop(layer, {}).items() if of == step}


class PilotTrial:
    """Decides by measurement whether guesses are worth it: ``is_on`` says so for now. ``n_layers``: visits per step."""

    def __init__(self, n_layers: int) -> None:
        self.is_on = ROUND[0]
        self.rest_left = 0
        """Steps until the next trial; 0: one is under way."""
        self._n_layers = n_layers
        self._step = -1
        self._n_visits = 0
        self._step_ns = 0
        self._round: list[int] = []
        self._gains: list[int] = []  # of each round: time without guesses less time with them
        self._without_ns = 0
        self._rest = FIRST_REST_STEPS
        self._verdict: bool | None = None

    def visited(self, step: int, duration_ns: int) -> None:
        """A visit of decode rows ended, so long after the one before it in its step."""
        if step != self._step:  # what an abandoned one left
            self._step, self._step_ns, self._n_visits = step, 0, 0
        self._step_ns += duration_ns
        self._n_visits += 1
        if self._n_visits == self._n_layers:
            self._stepped(self._step_ns)

    def _stepped(self, took_ns: int) -> None:
        if self.rest_left:
            self.rest_left -= 1
            if not self.rest_left:
                self.is_on = ROUND[0]
            return
        self._round.append(took_ns)
        if len(self._round) == len(ROUND):
            without_ns = sum(ns for ns, is_on in zip(self._round, ROUND, strict=True) if not is_on)
            self._gains.append(2 * without_ns - sum(self._round))
            self._without_ns += without_ns
            self._round.clear()
            if self._decide():
                return
        self.is_on = ROUND[len(self._round)]

    def _decide(self) -> bool:
        n = len(self._gains)
        if n < MIN_ROUNDS:
            return False
        n_left_out = int(n * TRIM)
        kept = sorted(self._gains)[n_left_out : n - n_left_out]
        mean = statistics.fmean(kept)
        if n < MAX_ROUNDS and abs(mean) < SURE * statistics.stdev(kept) / math.sqrt(len(kept)):
            return False
        verdict = mean > MIN_GAIN * self._without_ns / n
        self._rest = min(2 * self._rest, MAX_REST_STEPS) if verdict == self._verdict else FIRST_REST_STEPS
        self._verdict = self.is_on = verdict
        self.rest_left = self._rest
        self._gains.clear()
        self._without_ns = 0
        return True


class PilotAccount:
    """What guesses were worth. One per store."""

    def __init__(self) -> None:
        self.totals = PilotTotals()
        self.recall_of: dict[tuple[int, int], tuple[int, int]] = {}
        """(layer, signal) -> (experts that the hint named and the gate chose, experts that the gate chose)"""
        self._started: dict[Key, int] = {}
        self._read_ns: dict[Key, int] = {}
        self._displaced: OrderedDict[Key, None] = OrderedDict()
        self._lost_since: dict[Key, int] = {}
        self._mean_read_ns = 0.0
        self._precision = [[FIRST_PRECISION] * MAX_PLACES for _ in range(N_SIGNALS)]

    # -- events ----------------------------------------------------------------------------------------------

    def hinted(self, layer: int, named: dict[int, tuple[int, ...]], union: Collection[int]) -> None:
        """A layer that had hints (signal -> experts) wants ``union``. The totals are about the best signal."""
        for signal, experts in named.items():
            right = 0
            of_place = self._precision[signal]
            for place, expert in enumerate(experts):
                is_right = expert in union
                right += is_right
                place = min(place, MAX_PLACES - 1)
                of_place[place] += (is_right - of_place[place]) / PRECISION_GUESSES
            before = self.recall_of.get((layer, signal), (0, 0))
            self.recall_of[layer, signal] = (before[0] + right, before[1] + len(union))
            if signal == max(named):
                self.totals.right += right
                self.totals.wanted += len(union)

    def chance(self, guess: Guess) -> float:
        """How likely the gate will choose it, by how its signal and place did of late."""
        return self._precision[guess.signal][min(guess.place, MAX_PLACES - 1)]

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
            self.totals.lost_ns += max(0, end_ns - since)

    def used(self, key: Key, now_ns: int) -> None:
        """The gate asked for a guess."""
        started = self._started.pop(key, None)
        if started is None:
            return
        # Finished: the whole read is saved. On its way: what it is ahead of a read that would start now.
        self.totals.saved_ns += self._read_ns.pop(key, min(now_ns - started, int(self._mean_read_ns)))

    def wrong(self, key: Key, now_ns: int, *, is_reading: bool, is_awaited: bool) -> None:
        """The layer did not ask for a guess. ``is_reading``: it keeps the disk busy; ``is_awaited``: while reads are due."""
        if self._started.pop(key, None) is None:
            return
        self._read_ns.pop(key, None)
        if is_reading and is_awaited:
            self._lost_since[key] = now_ns

    def missed(self, key: Key) -> None:
        """A demand read is needed; if a guess displaced the expert, that is the guess's fault."""
        if key in self._displaced:
            del self._displaced[key]
            self.totals.lost_ns += int(self._mean_read_ns)
