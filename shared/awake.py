"""How a watchdog notices that it was itself that stood still: a suspended machine, a frozen container, a SIGSTOP to all.

Everything that gives up after a time measures that time here. Pure: the clock is an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAKE_GRACE_S = 10.0
"""So long after a pause of our own nobody else is judged: others may still be waking."""


class AwakeClock:
    """Time that passes only while this process runs. It has to be read more often than every ``longest_s`` seconds.

    A longer gap between two readings is a pause, and counts as ``longest_s``. Steps of the clock backwards count as nothing.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._read_at = clock()
        self._awake_s = self._read_at
        self._woke_at = float("-inf")
        self.slept_s = 0.0
        """All pauses so far."""
        self.n_pauses = 0

    def now(self) -> float:
        """Seconds; at first as the clock has them, later behind it by ``slept_s``."""
        at = self._clock()
        passed = max(0.0, at - self._read_at)
        self._read_at = at
        self._awake_s += min(passed, self._longest_s)
        if passed > self._longest_s:
            self.slept_s += passed - self._longest_s
            self.n_pauses += 1
            self._woke_at = self._awake_s
        return self._awake_s

    def skip(self) -> None:
        """What passed since the last reading was one long piece of work, no pause: it counts as nothing."""
        self._read_at = self._clock()

    @property
    def is_waking(self) -> bool:
        """A pause has ended less than ``WAKE_GRACE_S`` ago, by the last reading."""
        return self._awake_s - self._woke_at < WAKE_GRACE_S


class Countdown:
    """A time limit of a loop that waits in steps of at most ``STEP_S``."""

    STEP_S = 0.5
    _LONGEST_S = 2.0
    """A step may be late on a busy machine."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._awake = AwakeClock(self._LONGEST_S, clock)
        self._end = self._awake.now() + seconds

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - self._awake.now())

    @property
    def step_s(self) -> float:
        """How long the next wait may be."""
        return min(self.left_s, self.STEP_S)
