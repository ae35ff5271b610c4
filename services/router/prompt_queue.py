"""Which prompts are turned into tokens next, and which took too long. Pure: no process, no clock, no text.

A few run at once, so that a short prompt need not wait for a long one: one long, two short that began just now, four in
all. Where the process died, the prompts it worked on are tried again one by one, and one with which it died twice is refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

SHORT_BYTES: Final = 1 << 16
YOUNG_S: Final = 1.0
MAX_YOUNG: Final = 2
MAX_RUNNING: Final = 4
MAX_BYTES: Final = 64 << 20
"""All texts that wait or run together."""
MAX_CPU_S: Final = 20.0
"""What one prompt may cost. A million tokens take a few seconds; a template that never ends takes everything."""
MAX_WALL_S: Final = 120.0
"""Longer without having used its time: the process does not get on, and not because of the text."""
MAX_DEATHS: Final = 2
PAUSE_S: Final = 0.5
"""A longer pause between two looks was a pause of ours (a suspended machine), not of the job."""


@dataclass(eq=False)
class Job:
    """One prompt. ``work`` is what the process gets; ``note`` belongs to whoever submitted it."""

    request: str
    n_bytes: int
    work: Any
    note: Any
    n_deaths: int = 0
    ran_s: float = 0.0
    cpu_from_s: float = 0.0


class PromptQueue:
    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._next_number = 1
        self._n_bytes = 0

    @property
    def n_open(self) -> int:
        """Jobs that somebody waits for."""
        return len(self._waiting) + sum(bool(job.request) for job in self._running.values())

    @property
    def running(self) -> dict[int, Job]:
        """By the number under which the process knows them; those whose client has left included."""
        return self._running

    def find(self, request: str) -> Job | None:
        return next((job for job in (*self._running.values(), *self._waiting) if job.request == request), None)

    def has_room(self, n_bytes: int) -> bool:
        return self._n_bytes + n_bytes <= MAX_BYTES

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._n_bytes += job.n_bytes

    def drop(self, request: str) -> Job | None:
        """The client has left. What runs goes on running, for nobody (its request's name is gone)."""
        job = self.find(request)
        if job is None:
            return None
        if job in self._waiting:
            self._waiting.remove(job)
            self._n_bytes -= job.n_bytes
        else:
            job.request = ""
        return job

    def start(self, cpu_s: float) -> list[tuple[int, Job]]:
        """What to hand to the process now. ``cpu_s``: the time it has used so far."""
        out = []
        while (job := self._choose()) is not None:
            self._waiting.remove(job)
            job.ran_s, job.cpu_from_s = 0.0, cpu_s
            number, self._next_number = self._next_number, self._next_number + 1
            self._running[number] = job
            out.append((number, job))
        return out

    def _choose(self) -> Job | None:
        running = self._running.values()
        if any(job.n_deaths for job in running):
            return None
        suspect = next((job for job in self._waiting if job.n_deaths), None)
        if suspect is not None:
            return None if running else suspect
        if len(running) >= MAX_RUNNING:
            return None
        has_long = any(job.n_bytes > SHORT_BYTES for job in running)
        n_young = sum(job.n_bytes <= SHORT_BYTES and job.ran_s < YOUNG_S for job in running)
        for job in self._waiting:
            if not (has_long if job.n_bytes > SHORT_BYTES else n_young >= MAX_YOUNG):
                return job
        return None

    def finish(self, number: int) -> Job | None:
        """The process has answered. None: it was not asked (its predecessor was)."""
        job = self._running.pop(number, None)
        if job is not None:
            self._n_bytes -= job.n_bytes
        return job

    def pass_time(self, dt_s: float, cpu_s: float) -> bool:
        """Some time has gone by. True: a job has had enough, so the process has to be ended (``end``)."""
        for job in self._running.values():
            job.ran_s += min(dt_s, PAUSE_S)
        return any(self._is_costly(job, cpu_s) or job.ran_s > MAX_WALL_S for job in self._running.values())

    @staticmethod
    def _is_costly(job: Job, cpu_s: float) -> bool:
        return cpu_s - job.cpu_from_s > MAX_CPU_S

    def end(self, cpu_s: float, *, is_ours: bool) -> list[Job]:
        """The process is gone, ``is_ours``: because ``pass_time`` said so. Returns the jobs to refuse; others run again."""
        refused, again = [], []
        for job in self._running.values():
            if is_ours and self._is_costly(job, cpu_s):
                refused.append(job)
                continue
            if not is_ours or job.ran_s > MAX_WALL_S:
                job.n_deaths += 1
            if job.request and job.n_deaths < MAX_DEATHS:
                again.append(job)
            else:
                refused.append(job)
        self._running = {}
        self._waiting.extendleft(reversed(again))
        self._n_bytes -= sum(job.n_bytes for job in refused)
        return refused

    def clear(self) -> list[Job]:
        """Everything that somebody waits for; nothing is left but what runs for nobody."""
        left = [job for job in (*self._running.values(), *self._waiting) if job.request]
        for job in left:
            self.drop(job.request)
        return left
