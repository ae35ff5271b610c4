"""The choice among copies: shares follow the drives' rates, bad copies are left alone, and a drive may recover."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import pytest

from services.expert_io.copies import ERRORS_TO_REST, FIRST_REST_NS, LONGEST_REST_NS, PROBE_EVERY, CopyChooser

RECORD = 20 << 20
KEY = (3, 7)


class Drives:
    """Simulated drives that read one record after the other; ``rates`` in bytes per second may be changed on the way."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates
        self.now = 0
        self.reads: Counter[int] = Counter()
        self._free_at = [0] * len(rates)
        self._ends: list[tuple[int, int, int]] = []  # end, place, start

    def start(self, place: int) -> None:
        begin = max(self.now, self._free_at[place])
        end = begin + int(RECORD / self.rates[place] * 1e9)
        self._free_at[place] = end
        self.reads[place] += 1
        heapq.heappush(self._ends, (end, place, begin))

    def finish(self, chooser: CopyChooser) -> None:
        """The next end."""
        end, place, begin = heapq.heappop(self._ends)
        self.now = end
        chooser.ended(place, RECORD, RECORD, begin, end, is_guess=False)
        chooser.succeeded(place)

    @property
    def n_open(self) -> int:
        return len(self._ends)


def run(drives: Drives, chooser: CopyChooser, n_reads: int, at_once: int) -> float:
    """Bytes per second with ``at_once`` records always wanted."""
    begin = drives.now
    for _ in range(n_reads):
        while drives.n_open >= at_once:
            drives.finish(chooser)
        drives.start(chooser.choose(KEY, range(len(drives.rates)), RECORD, drives.now, is_guess=False))
    while drives.n_open:
        drives.finish(chooser)
    return n_reads * RECORD / (drives.now - begin) * 1e9


@pytest.mark.parametrize("rates", [[3e9, 3e9], [6e9, 3e9], [1e9, 7e9], [5e9, 0.4e9], [3e9, 2e9, 1e9]])
@pytest.mark.parametrize("at_once", [8, 16])
def test_shares_follow_the_rates_and_the_sum_is_reached(rates: list[float], at_once: int) -> None:
    drives, chooser = Drives(list(rates)), CopyChooser(range(len(rates)))
    run(drives, chooser, 100, at_once)
    drives.reads.clear()
    reached = run(drives, chooser, 4000, at_once)
    if at_once * min(rates) >= sum(rates):  # else not even one read at a time fits the slow one's share
        assert reached >= 0.95 * sum(rates)
        for place, rate in enumerate(rates):
            assert drives.reads[place] / 4000 == pytest.approx(rate / sum(rates), abs=0.02)
    else:
        assert reached >= 0.95 * max(rates), "a slow drive must not slow a fast one"
    for place, rate in enumerate(rates):
        assert chooser.rate(place) == pytest.approx(rate, rel=0.01)


def test_a_single_read_goes_to_the_faster_drive_and_now_and_then_to_the_other() -> None:
    drives, chooser = Drives([6e9, 2e9]), CopyChooser((0, 1))
    run(drives, chooser, 50, 8)
    drives.reads.clear()
    run(drives, chooser, 1000, 1)
    assert 1 <= drives.reads[1] <= 1000 // PROBE_EVERY + 1


def test_a_drive_that_was_slow_for_a_while_gets_its_share_again() -> None:
    drives, chooser = Drives([3e9, 3e9]), CopyChooser((0, 1))
    drives.rates[1] = 0.1e9
    run(drives, chooser, 300, 2)
    drives.rates[1] = 3e9
    run(drives, chooser, 40 * PROBE_EVERY, 2)
    drives.reads.clear()
    assert run(drives, chooser, 1000, 8) >= 0.95 * 6e9


def test_two_places_on_one_drive_are_one_drive() -> None:
    chooser = CopyChooser((5, 5, 9))
    chosen = [chooser.choose(KEY, (0, 1, 2), RECORD, 0, is_guess=False) for _ in range(4)]
    assert chosen == [0, 2, 0, 2]


def test_guesses_do_not_count_for_demand_until_somebody_waits_for_them() -> None:
    chooser = CopyChooser((0, 1))
    assert [chooser.choose(KEY, (0, 1), RECORD, 0, is_guess=True) for _ in range(3)] == [0, 1, 0]
    assert chooser.choose(KEY, (0, 1), RECORD, 0, is_guess=False) == 0
    chooser.ended(0, RECORD, RECORD, 0, 10, is_guess=False)
    chooser.promoted(0, RECORD)
    assert chooser.choose(KEY, (0, 1), RECORD, 10, is_guess=False) == 1


def test_idle_time_between_reads_does_not_count_as_slowness() -> None:
    chooser = CopyChooser((0, 1))
    for i in range(40):
        chooser.choose(KEY, (0,), RECORD, 0, is_guess=False)
        chooser.ended(0, RECORD, RECORD, i * 10**9, i * 10**9 + 10**7, is_guess=False)
    assert chooser.rate(0) == pytest.approx(RECORD * 100)


def test_errors_in_a_row_send_a_place_to_rest_longer_each_time() -> None:
    chooser = CopyChooser((0, 1))
    now = 0
    rests: list[int] = []
    for _ in range(ERRORS_TO_REST - 1):
        assert chooser.failed(0, now) == 0
    while not rests or rests[-1] < LONGEST_REST_NS:
        rests.append(chooser.failed(0, now))
        assert chooser.failed(0, now + 1) == -1, "reads that were still under way do not count"
        assert chooser.n_resting(now) == 1
        assert {chooser.choose(KEY, (0, 1), RECORD, now, is_guess=False) for _ in range(8)} == {1}
        assert chooser.choose(KEY, (0,), RECORD, now, is_guess=False) == 0, "the only copy is tried all the same"
        now += rests[-1]
        assert chooser.n_resting(now) == 0
    assert rests[0] == FIRST_REST_NS and all(b == min(2 * a, LONGEST_REST_NS) for a, b in itertools.pairwise(rests))
    chooser.succeeded(0)
    assert [chooser.failed(0, now) for _ in range(ERRORS_TO_REST)] == [0] * (ERRORS_TO_REST - 1) + [FIRST_REST_NS]


def test_a_damaged_record_is_read_from_another_place_as_long_as_there_is_one() -> None:
    chooser = CopyChooser((0, 1))
    chooser.found_damaged(0, KEY)
    chooser.found_damaged(0, KEY)
    assert chooser.n_damaged() == 1
    assert {chooser.choose(KEY, (0, 1), RECORD, 0, is_guess=False) for _ in range(8)} == {1}
    assert chooser.choose((3, 8), (0, 1), RECORD, 0, is_guess=False) == 0
    for _ in range(ERRORS_TO_REST):
        chooser.failed(1, 0)
    assert chooser.choose(KEY, (0, 1), RECORD, 0, is_guess=False) == 1, "rather one that rests than one that is damaged"
    assert chooser.choose(KEY, (0,), RECORD, 0, is_guess=False) == 0
