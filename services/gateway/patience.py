"""A time limit that does not run on while this process itself stands still (a suspended machine, say).

When it wakes, timers are due at once, before anybody has looked at what clients sent meanwhile.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from shared.awake import AwakeClock

STEP_S = 1.0
LATE_S = 2.0
"""No timer of a loop that runs is so late."""


class PatientTimeout:
    """``asyncio.timeout`` by the time that this process was awake; ``cut`` ends it early. Raises TimeoutError."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._awake = AwakeClock(LATE_S, self._loop.time)
        self._end = self._awake.now() + seconds
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        self._limit.reschedule(0.0)

    def _look(self) -> None:
        left_s = self._end - self._awake.now()
        if left_s <= 0:
            self.cut()
        else:
            self._timer = self._loop.call_later(min(STEP_S, left_s), self._look)

    async def __aenter__(self) -> PatientTimeout:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)
