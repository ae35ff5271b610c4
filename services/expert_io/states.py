"""The states of a slot and the moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class SlotState(IntEnum):
    """What a slot is to the store; every slot is in one of these states at any time::

        ABSENT ◄── shrunk, grown ──► FREE ◄── evicted, or a read that failed ── all below

        FREE ── wanted ───► AWAITED ─── landed ───► HELD ◄── wanted, let go ──► RESIDENT
                             │   ▲                  ▲  ▲                           ▲
                    abandoned│   │wanted            │  │                           │
                             ▼   │                  │  │                           │
        FREE ── filled ───► FILLING ── landed ──────│──│───────────────────────────┘
                                                    │  └────── wanted ─────────┐
                                                    │wanted                    │
        FREE ── guessed ──► GUESSING ─ landed ──► GUESSED ── passed by ──► STALE
                             │   │
                             │   └─ wanted ─────► AWAITED
                             └──── called off ──► CANCELLED ── ended ──► FREE

    A slot beyond the capacity (``is_leaving``) becomes ABSENT where it would have become FREE or RESIDENT. What an earlier
    process left whole begins as RESIDENT.
    """

    ABSENT = 0
    """beyond the capacity: it has no memory"""
    FREE = 1
    """it has memory and no expert"""
    FILLING = 2
    """being read, and nobody waits for it: for a free slot, or for a visit that was abandoned"""
    AWAITED = 3
    """being read, and the visit waits for it"""
    GUESSING = 4
    """being read on a guess that nobody has asked for"""
    CANCELLED = 5
    """its read was called off but may still be writing: nobody finds an expert here"""
    RESIDENT = 6
    """an expert that nobody uses at the moment: who must leave is chosen among these"""
    HELD = 7
    """an expert that the visit works with"""
    GUESSED = 8
    """an expert that was guessed; its layer is still to come"""
    STALE = 9
    """an expert that was guessed and that its layer did not want: the first to leave"""


ABSENT, FREE, FILLING, AWAITED, GUESSING, CANCELLED, RESIDENT, HELD, GUESSED, STALE = SlotState

NEXT: Mapping[SlotState, frozenset[SlotState]] = {
    ABSENT: frozenset({FREE}),
    FREE: frozenset({ABSENT, FILLING, AWAITED, GUESSING, RESIDENT}),
    FILLING: frozenset({AWAITED, RESIDENT, FREE, ABSENT}),
    AWAITED: frozenset({HELD, FILLING, FREE, ABSENT}),
    GUESSING: frozenset({AWAITED, GUESSED, CANCELLED, FREE, ABSENT}),
    CANCELLED: frozenset({FREE, ABSENT}),
    RESIDENT: frozenset({HELD, FREE, ABSENT}),
    HELD: frozenset({RESIDENT, ABSENT}),
    GUESSED: frozenset({HELD, STALE, FREE, ABSENT}),
    STALE: frozenset({HELD, FREE, ABSENT}),
}
"""The arrows of the drawing."""
ALLOWED = [sum(1 << to for to in NEXT[state]) for state in SlotState]

READING = frozenset({FILLING, AWAITED, GUESSING, CANCELLED})
"""A read fills the slot."""
BUSY = READING | {HELD}
"""The slot can't be had at once."""
GUESSES = (GUESSING, GUESSED, STALE)
FINDABLE = frozenset(SlotState) - {ABSENT, FREE, CANCELLED}
