"""The account of guesses: what each outcome is worth, and that a losing predictor is stopped and tried again."""

from __future__ import annotations

import random

from services.expert_io.pilot import FIRST_PAUSE_VISITS, INTERVAL_GUESSES, PilotAccount

MS = 1_000_000


def test_a_finished_guess_saves_its_read_and_one_on_its_way_what_it_is_ahead() -> None:
    account = PilotAccount()
    account.started((1, 5), 0, None)
    account.read_ended((1, 5), 1 * MS, 9 * MS)
    account.used((1, 5), 50 * MS)
    assert account.totals.saved_ns == 8 * MS
    for _ in range(200):
        account.read_ended((9, 9), 0, 8 * MS)  # demand reads: how long a read takes
    account.started((1, 6), 100 * MS, None)
    account.used((1, 6), 103 * MS)
    assert account.totals.saved_ns == 11 * MS
    account.started((1, 7), 100 * MS, None)
    account.used((1, 7), 900 * MS)  # it waited behind others: it can't have saved more than a read
    assert 18 * MS <= account.totals.saved_ns <= 19 * MS
    account.used((1, 8), 900 * MS)  # never guessed
    assert account.totals.lost_ns == 0


def test_a_wrong_guess_costs_what_others_waited_for_and_what_it_pushed_out() -> None:
    account = PilotAccount()
    for _ in range(200):
        account.read_ended((9, 9), 0, 8 * MS)
    for key in ((1, 1), (1, 2), (1, 3)):
        account.started(key, 0, (5, key[1]))
    account.wrong((1, 1), 10 * MS, is_reading=True, is_awaited=True)
    account.read_ended((1, 1), 0, 12 * MS)
    assert account.totals.lost_ns == 2 * MS
    account.wrong((1, 2), 10 * MS, is_reading=True, is_awaited=False)
    account.wrong((1, 3), 10 * MS, is_reading=False, is_awaited=True)
    account.read_ended((1, 2), 0, 12 * MS)
    assert account.totals.lost_ns == 2 * MS
    account.missed((5, 2))
    assert 9 * MS < account.totals.lost_ns <= 10 * MS + MS
    before = account.totals.lost_ns
    account.missed((5, 2))
    account.missed((6, 2))
    assert account.totals.lost_ns == before


def test_recall_is_kept_per_layer() -> None:
    account = PilotAccount()
    account.hinted(1, {1, 2, 3}, {2, 3, 4, 5})
    account.hinted(1, {1}, {1})
    account.hinted(2, set(), {7})
    assert account.recall_of == {1: (3, 5), 2: (0, 1)}
    assert (account.totals.right, account.totals.wanted) == (3, 6)


def guess(account: PilotAccount, n: int, share_right: float, rng: random.Random) -> None:
    for i in range(n):
        key = (1, i)
        account.started(key, 0, (2, i))
        account.read_ended(key, 0, 8 * MS)
        if rng.random() < share_right:
            account.used(key, 9 * MS)
        else:
            account.wrong(key, 9 * MS, is_reading=False, is_awaited=False)
            account.missed((2, i))


def test_a_losing_predictor_pauses_longer_each_time_and_gets_another_chance() -> None:
    rng = random.Random(0)
    account = PilotAccount()
    pauses = []
    for _ in range(3):
        guess(account, INTERVAL_GUESSES, 0.05, rng)
        n = 0
        while not account.is_on:
            account.visited()
            n += 1
        pauses.append(n)
    assert pauses == [FIRST_PAUSE_VISITS, 2 * FIRST_PAUSE_VISITS, 4 * FIRST_PAUSE_VISITS]
    guess(account, INTERVAL_GUESSES, 0.95, rng)
    assert account.is_on
    guess(account, INTERVAL_GUESSES, 0.0, rng)
    assert not account.is_on
    for _ in range(FIRST_PAUSE_VISITS):
        account.visited()
    assert account.is_on, "a gain made the next pause short again"


def test_the_precision_follows_what_guesses_turn_out_to_be() -> None:
    account = PilotAccount()
    rng = random.Random(2)
    for share in (0.8, 0.1):
        guess(account, 400, share, rng)
        assert abs(account.precision - share) < 0.12


def test_a_good_predictor_is_never_stopped() -> None:
    account = PilotAccount()
    rng = random.Random(1)
    for _ in range(20):
        guess(account, INTERVAL_GUESSES, 0.75, rng)
        assert account.is_on
    assert account.totals.saved_ns > account.totals.lost_ns
