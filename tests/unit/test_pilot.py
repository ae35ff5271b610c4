"""Guesses: what each outcome is worth, and that trials stop a predictor that costs time and try it again."""

from __future__ import annotations

import itertools
import random

from services.expert_io.pilot import FIRST_REST_STEPS, MAX_ROUNDS, MIN_ROUNDS, Guess, Hints, PilotAccount, PilotTrial

MS = 1_000_000
STEPS = itertools.count()


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


def test_recall_and_precision_are_kept_per_signal() -> None:
    account = PilotAccount()
    account.hinted(1, {0: (1, 2, 3), 1: (2, 4)}, {2, 3, 4, 5})
    account.hinted(1, {0: (1,)}, {1})
    account.hinted(2, {1: ()}, {7})
    assert account.recall_of == {(1, 0): (3, 5), (1, 1): (2, 4), (2, 1): (0, 1)}
    assert (account.totals.right, account.totals.wanted) == (3, 6)
    rng = random.Random(2)
    for _ in range(600):  # the first place of signal 1 is right in 9 of 10 cases, its second in 1 of 10
        union = {e for e, share in ((8, 0.9), (9, 0.1)) if rng.random() < share}
        account.hinted(3, {0: tuple(range(20, 60)), 1: (8, 9)}, union)
    assert account.chance(Guess((3, 8), 1, 0)) > 0.75
    assert account.chance(Guess((3, 9), 1, 1)) < 0.25
    assert account.chance(Guess((3, 59), 0, 39)) < 0.01


def test_a_better_hint_replaces_what_is_unread_and_a_layer_that_asks_ends_it() -> None:
    hints = Hints()
    hints.add(5, 1, (4, 2), 0)
    assert [(g.key, g.place) for g in hints.unread] == [((1, 4), 0), ((1, 2), 1)]
    hints.unread.popleft()
    hints.add(5, 1, (7, 4), 1)
    assert [(g.key, g.signal, g.place) for g in hints.unread] == [((1, 7), 1, 0), ((1, 4), 1, 1)]
    assert hints.close(5, 0) == {}
    assert len(hints.unread) == 2
    assert hints.close(5, 1) == {0: (4, 2), 1: (7, 4)}
    assert not hints.unread
    hints.add(6, 1, (1,), 0)
    assert hints.close(7, 1) == {}  # of an abandoned step
    assert hints.close(6, 1) == {}


def play(
    trial: PilotTrial, n_layers: int, n: int, on_ns: int, off_ns: int, rng: random.Random, drift_ns: int = 0
) -> int:
    """n steps; returns how many of them guessed."""
    n_on = 0
    for i in range(n):
        n_on += trial.is_on
        step = next(STEPS)
        for _ in range(n_layers):
            trial.visited(step, int((on_ns if trial.is_on else off_ns) * rng.uniform(0.7, 1.3)) - i * drift_ns)
    return n_on


def until_decided(
    trial: PilotTrial, n_layers: int, on_ns: int, off_ns: int, rng: random.Random, drift_ns: int = 0
) -> int:
    """The steps of one trial; half of them guess."""
    n = n_on = 0
    while not trial.rest_left:
        n_on += play(trial, n_layers, 1, on_ns, off_ns, rng, drift_ns)
        n += 1
    assert 2 * n_on == n and n % 4 == 0 and MIN_ROUNDS <= n // 4 <= MAX_ROUNDS
    return n


def test_a_trial_keeps_what_is_faster_and_tries_again_ever_more_rarely() -> None:
    rng = random.Random(0)
    for on_ns, off_ns, expected in ((8 * MS, 12 * MS, True), (12 * MS, 8 * MS, False)):
        trial = PilotTrial(7)
        rest = FIRST_REST_STEPS
        for _ in range(3):
            assert until_decided(trial, 7, on_ns, off_ns, rng) == 4 * MIN_ROUNDS, "such a difference is clear at once"
            assert trial.is_on == expected and trial.rest_left == rest
            assert play(trial, 7, rest - 1, on_ns, off_ns, rng) == (rest - 1) * expected
            play(trial, 7, 1, on_ns, off_ns, rng)
            rest *= 2


def test_a_predictor_that_becomes_good_gets_its_chance_and_the_other_way_round() -> None:
    rng = random.Random(1)
    trial = PilotTrial(5)
    for on_ns, off_ns in ((12 * MS, 8 * MS), (8 * MS, 12 * MS), (12 * MS, 8 * MS)):
        until_decided(trial, 5, on_ns, off_ns, rng)
        assert trial.is_on == (on_ns < off_ns)
        play(trial, 5, trial.rest_left, on_ns, off_ns, rng)


def test_a_small_gain_is_found_among_much_noise_and_a_small_loss_too() -> None:
    """6 % beside visits that vary by 30 %: most trials must be right, whichever way it is."""
    rng = random.Random(3)
    for on_ns, off_ns in ((94, 100), (100, 94)):
        right = 0
        for _ in range(100):
            trial = PilotTrial(6)
            until_decided(trial, 6, on_ns * MS, off_ns * MS, rng)
            right += trial.is_on == (on_ns < off_ns)
        assert right >= 95


def test_no_gain_means_no_guesses() -> None:
    rng = random.Random(4)
    n_on = 0
    for _ in range(100):
        trial = PilotTrial(6)
        until_decided(trial, 6, 100 * MS, 100 * MS, rng)
        n_on += trial.is_on
    assert n_on <= 40


def test_a_drift_or_a_few_long_visits_decide_nothing() -> None:
    """Slots that fill make every step faster than the one before; that must not look like the merit of who comes later."""
    trial = PilotTrial(5)
    until_decided(trial, 5, 20 * MS, 22 * MS, random.Random(2), drift_ns=MS // 20)
    assert trial.is_on
    trial = PilotTrial(5)
    i = 0
    while not trial.rest_left:
        trial.visited(i // 5, 500 * MS if trial.is_on and i % 150 == 9 else 8 * MS if trial.is_on else 10 * MS)
        i += 1
    assert trial.is_on


def test_an_abandoned_step_counts_for_nothing() -> None:
    trial = PilotTrial(3)
    trial.visited(1, 9 * MS)
    trial.visited(1, 9 * MS)
    for step in range(2, 2 + 4 * MIN_ROUNDS):
        assert not trial.rest_left
        for _ in range(3):
            trial.visited(step, 8 * MS if trial.is_on else 10 * MS)
    assert trial.is_on and trial.rest_left
