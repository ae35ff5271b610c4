"""Which connections there are, and which have to go so that others are served. Pure: no sockets, no clock of its own.

A connection is *busy* from the last byte of a request to the last byte of its answer, else *silent*: it has said nothing, or
sends a request slowly, or waits for its next one. Silent ones are cheap to open and hold a descriptor each, so there is room
for a limited number, and the one that has been silent longest leaves first. Runs in the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class LobbyLimits:
    """``max_open`` connections, of them ``max_silent`` silent. ``n_kept``: for what must always be answered, e.g. health;
    so many fewer connections may wait for answers of the engine."""

    max_open: int = 1024
    max_silent: int = 256
    n_kept: int = 32

    @classmethod
    def of_descriptors(cls, n_free: int) -> LobbyLimits:
        """What ``n_free`` descriptors allow."""
        full = cls()
        max_open = min(full.max_open, max(MIN_OPEN, n_free))
        return cls(max_open, min(full.max_silent, max_open // 2), min(full.n_kept, max_open // 4))

    @property
    def max_busy(self) -> int:
        return self.max_open - self.n_kept


MIN_OPEN = 16


class Lobby(Generic[C]):
    """``C`` is whatever stands for a connection (hashable)."""

    def __init__(self, limits: LobbyLimits | None = None) -> None:
        self.limits = limits or LobbyLimits()
        self._silent: dict[C, float] = {}
        """Since when; in this order."""
        self._busy: set[C] = set()

    def __iter__(self) -> Iterator[C]:
        yield from list(self._silent)
        yield from list(self._busy)

    @property
    def n_open(self) -> int:
        return len(self._silent) + len(self._busy)

    def enter(self, connection: C, now: float) -> list[C]:
        """A new connection. Returns who has to go; ``connection`` itself when all others are busy."""
        out: list[C] = []
        limits = self.limits
        if self.n_open >= limits.max_open or len(self._silent) >= limits.max_silent:
            oldest = next(iter(self._silent), connection)
            out.append(oldest)
            self._silent.pop(oldest, None)
        if connection not in out:
            self._silent[connection] = now
        return out

    def begin(self, connection: C) -> None:
        """Its request is complete: somebody waits for an answer."""
        if self._silent.pop(connection, None) is not None:
            self._busy.add(connection)

    def rest(self, connection: C, now: float) -> None:
        """Its answer is complete."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._silent[connection] = now

    def leave(self, connection: C) -> None:
        self._silent.pop(connection, None)
        self._busy.discard(connection)
