"""Which copy of a record is read next: the one that is expected to be there first. Pure: no reads, no clock.

Places are directories, numbered; each lies on a drive. A drive's rate is measured from its own reads: bytes over the time in
which at least one was under way, recent reads counting more. A read goes where what waits there and itself are done soonest. So
two drives under load share the reads in proportion to their rates, and a single read goes to the faster one.

A place whose reads fail several times in a row rests, longer each time, and is then tried again. A record found damaged
in one place is not read from there again while another has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.experts.residency import Key

HALF_LIFE_READS = 32
PROBE_EVERY = 128
"""A drive that was passed over so many times gets one read, or nobody would learn that it is not slow any more."""
ERRORS_TO_REST = 3
FIRST_REST_NS = 5_000_000_000
LONGEST_REST_NS = 600_000_000_000


@dataclass
class _Drive:
    demand_bytes: int = 0
    guess_bytes: int = 0
    n_passed_over: int = 0
    read_bytes: float = 0.0
    read_ns: float = 0.0
    last_end_ns: int = 0

    @property
    def rate(self) -> float:
        """Bytes per nanosecond, 0 while unknown."""
        return self.read_bytes / self.read_ns if self.read_ns else 0.0


@dataclass
class _Place:
    drive: int
    n_errors: int = 0  # in a row
    rest_ns: int = FIRST_REST_NS
    rests_until_ns: int = 0
    damaged: set[Key] = field(default_factory=set)


class CopyChooser:
    """``drives[i]``: the drive of place ``i``, any number. Times are of one monotonic clock."""

    def __init__(self, drives: Sequence[int]) -> None:
        self._drives = {drive: _Drive() for drive in drives}
        self._places = [_Place(drive) for drive in drives]
        self._keep = 2.0 ** (-1.0 / HALF_LIFE_READS)

    def choose(self, key: Key, places: Sequence[int], n_bytes: int, now_ns: int, *, is_guess: bool) -> int:
        """One of ``places`` (not empty) for a record of ``n_bytes``, now queued there: report its end by ``ended``."""
        if len(places) == 1:
            chosen = places[0]
        else:
            chosen = self._best(self._usable(key, places, now_ns), n_bytes, is_guess)
        drive = self._drives[self._places[chosen].drive]
        drive.n_passed_over = 0
        if is_guess:
            drive.guess_bytes += n_bytes
        else:
            drive.demand_bytes += n_bytes
        return chosen

    def _usable(self, key: Key, places: Sequence[int], now_ns: int) -> Sequence[int]:
        """The places that are neither known to be bad nor at rest; if there is none, those that rest; else all."""
        sound = [i for i in places if key not in self._places[i].damaged]
        return [i for i in sound if self._places[i].rests_until_ns <= now_ns] or sound or places

    def _best(self, places: Sequence[int], n_bytes: int, is_guess: bool) -> int:
        best_rate = max((drive.rate for drive in self._drives.values()), default=0.0) or 1.0
        best, best_time = -1, float("inf")
        seen: set[int] = set()
        for place in places:
            number = self._places[place].drive
            if number in seen:
                continue
            seen.add(number)
            drive = self._drives[number]
            drive.n_passed_over += 1
            waiting = drive.demand_bytes + (drive.guess_bytes if is_guess else 0)  # guesses give way to demand
            time = (waiting + n_bytes) / (drive.rate or best_rate)
            if drive.n_passed_over > PROBE_EVERY:
                time = 0.0
            if time < best_time:
                best, best_time = place, time
        return best

    def promoted(self, place: int, n_bytes: int) -> None:
        """A guessed read is waited for now."""
        drive = self._drives[self._places[place].drive]
        drive.guess_bytes -= n_bytes
        drive.demand_bytes += n_bytes

    def ended(self, place: int, n_bytes: int, n_read: int, start_ns: int, end_ns: int, *, is_guess: bool) -> None:
        """A read of ``n_bytes`` is over: ``n_read`` came between the times. A drive's reads in the order of their ends."""
        drive = self._drives[self._places[place].drive]
        if is_guess:
            drive.guess_bytes -= n_bytes
        else:
            drive.demand_bytes -= n_bytes
        span = end_ns - max(start_ns, drive.last_end_ns)
        drive.last_end_ns = max(drive.last_end_ns, end_ns)
        if n_read and span >= 0:
            drive.read_bytes = drive.read_bytes * self._keep + n_read
            drive.read_ns = drive.read_ns * self._keep + span

    def succeeded(self, place: int) -> None:
        """A read from this place came whole."""
        found = self._places[place]
        found.n_errors = 0
        found.rest_ns = FIRST_REST_NS

    def failed(self, place: int, now_ns: int) -> int:
        """A read from this place failed. Returns the nanoseconds that it rests now: 0 if it does not, -1 if it did already."""
        found = self._places[place]
        if now_ns < found.rests_until_ns:
            return -1
        found.n_errors += 1
        if found.n_errors < ERRORS_TO_REST:
            return 0
        rest_ns = found.rest_ns
        found.rests_until_ns = now_ns + rest_ns
        found.rest_ns = min(2 * rest_ns, LONGEST_REST_NS)
        return rest_ns

    def found_damaged(self, place: int, key: Key) -> None:
        """This record's bytes in this place are not those that were written."""
        self._places[place].damaged.add(key)

    def n_damaged(self) -> int:
        return sum(len(place.damaged) for place in self._places)

    def n_resting(self, now_ns: int) -> int:
        return sum(place.rests_until_ns > now_ns for place in self._places)

    def rate(self, drive: int) -> float:
        """Bytes per second measured lately, 0 while unknown."""
        return 1e9 * self._drives[drive].rate
