"""Whether memory was cold: a host takes back what idled for a minute or so, and its next touch takes several times as long.
Pure; the passes are the caller's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

COLD_FACTOR = 1.5
"""Warm passes differ by less than this on a machine that does nothing else; a cold one takes two to five times as long."""
MOST_PASSES = 4


def is_cold(first_s: float, later_s: Sequence[float]) -> bool:
    """Whether a pass took so much longer than the fastest of the later ones over the same memory that it was cold."""
    return bool(later_s) and first_s >= COLD_FACTOR * min(later_s)


def starts_cold(times_s: Sequence[float]) -> bool:
    """The same for the steps of one answer: its first quarter beside the rest, by medians."""
    n = len(times_s) // 4
    return n > 0 and is_cold(statistics.median(times_s[:n]), [statistics.median(times_s[n:])])


def warm_up(one_pass: Callable[[], float]) -> list[float]:
    """Passes over all weights until one was no longer cold beside the next; their times in seconds. One more pass than is
    needed is the price of knowing."""
    times = [one_pass()]
    while len(times) < MOST_PASSES:
        times.append(one_pass())
        if not is_cold(times[-2], times[-1:]):
            break
    return times


def warm_text(times_s: Sequence[float]) -> str:
    """What to say of these passes, one line."""
    seconds = ", ".join(f"{s:.2f}" for s in times_s)
    if not is_cold(times_s[0], times_s[1:]):
        return f"all weights touched right before ({seconds} s)"
    still = " and still is" if is_cold(times_s[-2], times_s[-1:]) else ", touched until it no longer was"
    return f"memory was cold{still} ({seconds} s a pass)"
