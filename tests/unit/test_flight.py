"""Steps in flight: plain events in, instructions out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from services.router.drafting import GAP, Drafting, DraftPlan
from services.router.flight import (
    MAX_REPLAYS,
    Abandon,
    AskersGone,
    Deliver,
    End,
    Flights,
    Instruction,
    Landed,
    Replayed,
    RunDraft,
    RunMain,
)
from services.router.group import RingView
from services.router.scheduler import MainPlan
from services.router.sequences import Fault, Sequence
from shared.messages.layer import EMBEDDING
from tests.unit.test_scheduler import make_scheduler, make_sequence

NAN = Fault("non_finite", "a row is not finite")
ALL = RingView(1, 1, 1, 1)


class Driver:
    """Feeds flights as the shell would; the model counts: the token at position p is p."""

    def __init__(self, n_drafts: int = 0, view: RingView = ALL, **scheduler: int | bool) -> None:
        self.scheduler = make_scheduler(**scheduler)
        self.drafting = Drafting(n_drafts, vocab=1000)
        self.flights = Flights(self.scheduler, self.drafting, 100, count(1).__next__)
        self.bad_logits: dict[int, Fault] = {}
        self.flights.ring_changed(view)

    def submit(self, name: str, n_prompt: int = 3, max_tokens: int = 8) -> Sequence:
        sequence = make_sequence(name, n_prompt, max_tokens)
        self.last = self.flights.submitted(sequence)
        return sequence

    def choose(self, sequence: Sequence, row: int, position: int) -> int | Fault:
        return self.bad_logits.get(position - 1, position)

    def land(self, n_faults: int = 0) -> list[Instruction]:
        """The main step in flight is computed."""
        assert self.flights.current
        self.flights.computed(self.flights.current.step, n_faults)
        finished = self.flights.finished()
        self.last = self.flights.complete(*finished, self.choose) if finished else []
        return self.last

    def drafted(self, *tokens: tuple[int, ...]) -> list[Instruction]:
        assert self.flights.current
        self.last = self.flights.drafted(self.flights.current.step, tokens)
        return self.last

    def failed(self, rows: tuple[int, ...], layer: int = 1, fault: Fault = NAN, step: int = 0) -> list[Instruction]:
        assert self.flights.current
        self.last = self.flights.failed(self.flights.current.step + step, layer, rows, fault)
        return self.last

    def see(self, **peers: int) -> list[Instruction]:
        """Somebody has another incarnation (0: is gone)."""
        self.last = self.flights.ring_changed(replace(self.flights.view, **peers))
        return self.last


def of(instructions: list[Instruction], kind: type[Any]) -> list[Any]:
    return [do for do in instructions if isinstance(do, kind)]


def ended(instructions: list[Instruction]) -> list[tuple[str, str]]:
    """[(request, error code or reason)]"""
    return [
        (do.sequence.request, do.sequence.error.code if do.sequence.error else do.sequence.finish_reason)
        for do in of(instructions, End)
    ]


# ---- steps --------------------------------------------------------------------------------------------------------


def test_one_step_flies_at_a_time_and_messages_find_it_by_its_number() -> None:
    driver = Driver()
    driver.submit("a")
    [run] = of(driver.last, RunMain)
    assert run.flight is driver.flights.covering(100)
    assert driver.flights.covering(99) is driver.flights.covering(101) is None
    driver.submit("b")
    assert not of(driver.last, RunMain)
    out = driver.land()
    assert [type(do) for do in out] == [Deliver, Landed, RunMain]
    assert [span.sequence.request for span in of(out, RunMain)[0].plan.spans] == ["a", "b"]


def test_nothing_flies_without_a_ring() -> None:
    driver = Driver(view=RingView(gateway=1, attention=1))
    driver.submit("a")
    assert not driver.last
    assert of(driver.see(expert_io=1), RunMain)


def test_a_draft_step_follows_and_owns_a_number_for_each_pass() -> None:
    driver = Driver(n_drafts=3)
    sequence = driver.submit("a")
    [run] = of(driver.land(), RunDraft)
    assert [driver.flights.covering(step) is run.flight for step in range(100, 105)] == [False, True, True, True, False]
    assert isinstance(run.plan, DraftPlan) and run.plan.spans[0].tokens == (101, 102, 3)
    [main] = of(driver.drafted((4, 5, 9)), RunMain)
    assert main.plan.spans[0].tokens == (3, 4, 5, 9)
    driver.land()
    assert sequence.tokens[3:] == [3, 4, 5, 6]
    assert (sequence.n_drafted, sequence.n_accepted) == (3, 2)
    assert driver.drafting.held(sequence) == 6


def test_an_answer_that_was_complete_when_it_was_resumed_only_ends() -> None:
    driver = Driver()
    sequence = make_sequence("a", 3)
    sequence.finish_reason = "stop"
    assert ended(driver.flights.submitted(sequence)) == [("a", "stop")]
    assert driver.scheduler.is_idle


def test_an_abort_gives_up_a_step_that_nobody_waits_for() -> None:
    driver = Driver()
    driver.submit("a")
    driver.submit("b")
    out = driver.flights.aborted("a", "test")
    assert ended(out) == [("a", "abort")] and of(out, Abandon) == [Abandon(101)]
    assert of(out, RunMain)[0].flight.step == 101, "b's turn"
    assert driver.flights.aborted("a", "again") == []


def test_an_abort_leaves_a_step_that_others_wait_for() -> None:
    driver = Driver()
    driver.submit("a")
    driver.submit("b")
    driver.land()
    out = driver.flights.aborted("b", "test")
    assert ended(out) == [("b", "abort")] and not of(out, Abandon)
    assert [a.sequence.request for a in of(driver.land(), Deliver)[0].advances] == ["a"]


def test_the_end_of_a_drain_ends_everybody() -> None:
    driver = Driver(max_sequences=1)
    driver.submit("a")
    driver.submit("b")
    assert ended(driver.flights.cut("late")) == [("a", "shutting_down"), ("b", "shutting_down")]
    assert driver.scheduler.is_idle


# ---- faults -------------------------------------------------------------------------------------------------------


def with_drafts(*tokens: int) -> tuple[Driver, Sequence]:
    """A sequence of three tokens and 3, whose next step holds 3 and these drafts."""
    driver = Driver(n_drafts=len(tokens))
    sequence = driver.submit("a")
    driver.land()
    driver.drafted(tokens)
    return driver, sequence


@pytest.mark.parametrize(
    ("drafts", "bad_row", "got"),
    [
        ((4, 5, 6), 0, []),
        ((4, 5, 6), 1, [4]),
        ((4, 5, 6), 3, [4, 5, 6]),
        ((4, 9, 6), 2, None),
        ((9, 5, 6), 1, None),
    ],
)
def test_a_fault_counts_where_accepted_tokens_reach_it(
    drafts: tuple[int, ...], bad_row: int, got: list[int] | None
) -> None:
    driver, sequence = with_drafts(*drafts)
    driver.failed((bad_row,))
    out = driver.land(n_faults=1)
    if got is None:
        assert not ended(out) and sequence.error is None
        return
    assert ended(out) == [("a", "non_finite")]
    [deliver] = of(out, Deliver)
    assert deliver.advances[0].new_tokens == got, "the good tokens before it are delivered"
    assert out.index(deliver) < out.index(of(out, End)[0])


def test_an_end_token_comes_before_a_fault_behind_it() -> None:
    driver, sequence = with_drafts(4, 5)
    sequence.eos_ids = frozenset({5})
    driver.failed((2,))
    assert ended(driver.land(n_faults=1)) == [("a", "stop")]


def test_logits_that_are_no_numbers_count_where_they_are_sampled() -> None:
    driver, sequence = with_drafts(4, 9)
    driver.bad_logits = {5: NAN}
    assert not ended(driver.land())
    assert sequence.tokens[3:] == [3, 4, 5]
    driver.drafted((6, 7))
    assert ended(driver.land()) == [("a", "non_finite")]
    assert sequence.tokens[3:] == [3, 4, 5]


def test_of_several_faults_of_a_row_the_first_place_counts() -> None:
    driver = Driver()
    sequence = driver.submit("a")
    flight = driver.flights.current
    assert flight
    driver.failed((2,), layer=5, fault=Fault("late", ""))
    driver.failed((2,), layer=2, fault=Fault("experts", ""))
    driver.flights.gate_refused(flight, flight.step, 2, [2])
    driver.land(n_faults=2)
    assert sequence.error and sequence.error.code == "non_finite" and "position 2" in sequence.error.message


def test_a_step_waits_for_all_that_is_to_be_known_of_it() -> None:
    driver = Driver()
    driver.submit("a")
    assert driver.land(n_faults=1) == []
    driver.failed((0,))
    assert driver.flights.finished()


def test_a_fault_in_a_prompt_ends_that_request_only() -> None:
    driver = Driver()
    a, b = driver.submit("a"), driver.submit("b", 20)
    driver.land()
    assert driver.flights.current and driver.flights.current.n_prefill == 8
    driver.failed((4, 5))
    assert ended(driver.land(n_faults=1)) == [("b", "non_finite")]
    assert b.n_generated == 0 and a.tokens[3:] == [3, 4]


def test_a_failure_of_a_whole_step_is_looked_for_one_by_one() -> None:
    """Nobody knows whose rows they were: each sequence runs alone and without drafts, then the guilty one ends."""
    driver = Driver(n_drafts=1)
    a, b = driver.submit("a"), driver.submit("b")
    driver.land()
    driver.drafted((4,))
    driver.land()
    assert driver.flights.current and len(driver.flights.current.plan.spans) == 2
    while not isinstance(driver.flights.current.plan, MainPlan):
        driver.drafted((5,), (4,))
    assert [span.n_rows for span in driver.flights.current.plan.spans] == [2, 2]
    out = driver.failed(())
    assert of(out, Abandon) and not ended(out)
    assert [span.tokens for span in driver.flights.current.plan.spans] == [(a.tokens[-1],)]
    assert ended(driver.failed(())) == [("a", "non_finite")]
    assert [span.tokens for span in driver.flights.current.plan.spans] == [(b.tokens[-1],)]
    assert not ended(driver.land())


def test_late_messages_change_nothing() -> None:
    driver = Driver()
    sequence = driver.submit("a")
    driver.land()
    assert driver.flights.failed(100, 1, (0,), NAN) == []
    assert driver.flights.failed(100, 1, (), NAN) == []
    driver.flights.computed(100, 0)
    assert driver.flights.finished() is None and sequence.error is None


# ---- peers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["attention", "expert_io"])
def test_a_lost_step_runs_again_without_drafts(peer: str) -> None:
    driver, sequence = with_drafts(4, 5)
    out = driver.see(**{peer: 0})
    assert of(out, Abandon) and not of(out, RunMain)
    out = driver.see(**{peer: 2})
    assert of(out, Replayed)[0].n_replays == 1
    assert of(out, RunMain)[0].plan.spans[0].tokens == (3,)
    driver.land()
    assert sequence.tokens[3:] == [3, 4]


def test_a_peer_that_was_replaced_unseen_is_lost_too() -> None:
    driver = Driver()
    driver.submit("a")
    assert of(driver.see(attention=2), RunMain)[0].flight.step == 101


def test_who_ends_its_peers_each_time_is_given_up_and_takes_nobody_along() -> None:
    driver = Driver()
    a, b = driver.submit("a"), driver.submit("b")
    driver.land()
    driver.land()
    incarnation, n_lost = 1, 0
    while a in driver.scheduler.running:
        flight = driver.flights.current
        assert flight and n_lost < 20
        if any(span.sequence is a for span in flight.plan.spans):
            incarnation, n_lost = incarnation + 1, n_lost + 1
            driver.see(expert_io=0)
            driver.see(expert_io=incarnation)
        else:
            driver.land()
    assert n_lost == MAX_REPLAYS + 1
    assert a.error and a.error.code == "step_lost" and f"{n_lost} times" in a.error.message
    assert b.error is None and b in driver.scheduler.running


def test_who_was_aborted_while_the_ring_was_away_does_not_run_again() -> None:
    driver = Driver()
    driver.submit("a")
    driver.see(attention=0)
    driver.flights.aborted("a", "test")
    assert driver.see(attention=2) == []
    driver.submit("a")
    assert of(driver.last, RunMain)


def test_a_gateway_that_is_gone_takes_its_requests_along() -> None:
    driver = Driver(max_sequences=1)
    driver.submit("a")
    driver.submit("b")
    out = driver.see(gateway=0)
    assert of(out, AskersGone), "also what is not read yet"
    assert ended(out) == [("a", "abort"), ("b", "abort")] and of(out, Abandon)
    driver.submit("late")  # sent before it died, read afterwards
    assert ended(driver.see(gateway=2)) == [("late", "abort")]
    driver.submit("c")
    assert driver.see(drafter=2) == [] and driver.scheduler.running


def test_the_first_gateway_that_a_new_router_sees_takes_nothing_away() -> None:
    driver = Driver(view=RingView(attention=1, expert_io=1))
    driver.submit("a")
    assert driver.see(gateway=3) == [] and driver.scheduler.running


# ---- drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["attention", "expert_io", "drafter"])
def test_a_lost_draft_step_costs_the_guesses_alone(peer: str) -> None:
    driver = Driver(n_drafts=2)
    sequence = driver.submit("a")
    driver.land()
    driver.see(**{peer: 0})
    driver.see(**{peer: 2})
    assert driver.drafting.held(sequence) == GAP
    while not sequence.finish_reason:
        assert driver.flights.current and isinstance(driver.flights.current.plan, MainPlan)
        driver.land()
    assert sequence.tokens[3:] == list(range(3, 11)) and sequence.n_drafted == 0


def test_nothing_that_fails_in_a_draft_step_ends_anybody() -> None:
    for rows in ((), (0,)):
        driver = Driver(n_drafts=2)
        sequence = driver.submit("a")
        driver.land()
        driver.failed(rows, step=1)
        assert sequence.error is None and driver.drafting.held(sequence) == GAP
        if rows:
            assert of(driver.drafted((4, 5)), RunMain)[0].plan.spans[0].tokens == (3,)


def test_a_fault_of_one_row_stops_the_drafts_of_one_sequence() -> None:
    driver = Driver(n_drafts=2)
    a, b = driver.submit("a"), driver.submit("b")
    driver.land()
    driver.drafted((4, 5))
    driver.land()
    plan = driver.flights.current and driver.flights.current.plan
    assert isinstance(plan, DraftPlan) and [span.sequence for span in plan.drafting] == [a, b]
    driver.failed((1,), step=1)
    assert (driver.drafting.held(a) == GAP, driver.drafting.held(b) == GAP) == (False, True)
    driver.drafted((7, 8), (4, 5))
    assert (a.drafts, b.drafts) == ([7, 8], [])


def test_rows_of_the_first_embedding_are_all_that_is_absorbed() -> None:
    driver = Driver(n_drafts=2)
    a, b = driver.submit("a"), driver.submit("b")
    driver.land()
    driver.drafted((9, 9))
    driver.land()
    driver.failed((1, 2, 3), layer=EMBEDDING)  # row 0 is a's newest, rows 1 to 3 are b's prompt
    assert (driver.drafting.held(a) == GAP, driver.drafting.held(b) == GAP) == (False, True)
    driver.failed((0,), layer=EMBEDDING, step=1)  # in the second pass the first row that drafts
    assert driver.drafting.held(a) == GAP


def test_a_drafter_without_a_guess_is_not_asked_again() -> None:
    driver = Driver(n_drafts=2)
    sequence = driver.submit("a")
    driver.land()
    driver.drafted(())
    assert driver.drafting.held(sequence) == GAP
    assert of(driver.land(), RunMain)


def test_ids_that_are_no_tokens_end_the_guesses_before_them() -> None:
    driver = Driver(n_drafts=3)
    sequence = driver.submit("a")
    driver.land()
    driver.drafted((4, 1000, 6))
    assert driver.flights.current
    assert driver.flights.current.plan.spans[0].tokens == (3, 4)
    assert sequence.error is None


def test_a_drafter_that_was_away_can_not_go_on_with_what_went_on_meanwhile() -> None:
    driver = Driver(n_drafts=1)
    a = driver.submit("a")
    driver.land()
    driver.drafted((4,))
    driver.see(drafter=0)
    driver.land()
    driver.see(drafter=2)
    driver.land()
    assert driver.drafting.held(a) == GAP
    b = driver.submit("b")
    driver.land()  # a's step, which was under way
    driver.land()
    assert driver.drafting.held(b) == 3, "a new sequence starts without a gap"


def test_a_request_whose_name_comes_again_starts_afresh() -> None:
    driver = Driver(n_drafts=1)
    driver.submit("a")
    driver.land()
    driver.flights.aborted("a", "test")
    again = driver.submit("a")
    driver.land()
    assert driver.drafting.held(again) == 3


# ---- any order of events ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_drafts_faults_and_losses_changes_an_answer(seed: int) -> None:
    """Some positions are faulty in each of three sequences. Guesses are right or wrong, peers come and go, steps fail as a
    whole while a wrong guess is in them: every answer is the one without all that."""
    rng = random.Random(seed)
    driver = Driver(n_drafts=3, prefill_chunk=rng.choice([2, 3, 8]))
    sequences = [driver.submit(name, rng.randint(1, 7), max_tokens=9) for name in "abc"]
    faulty = {s.request: set(rng.sample(range(30), rng.choice([0, 0, 1, 3]))) for s in sequences}
    incarnation = 1
    for _ in range(400):
        if driver.scheduler.is_idle:
            break
        flight = driver.flights.current
        assert flight, "nothing flies although requests wait"
        event = rng.random()
        if event < 0.05:
            incarnation += 1
            peer = rng.choice(["attention", "expert_io", "drafter"])
            driver.see(**{peer: 0})
            driver.see(**{peer: incarnation})
        elif isinstance(flight.plan, DraftPlan):
            if event < 0.1:
                driver.failed(rng.choice([(), (0,)]), step=rng.randrange(flight.n_steps))
                continue
            right = [range(len(s.sequence.tokens), 99) for s in flight.plan.drafting]
            driver.drafted(*(tuple(t if rng.random() < 0.7 else 999 for t in tokens[:3]) for tokens in right))
        elif any(999 in span.tokens for span in flight.plan.spans) and event < 0.3:
            driver.failed(())
        else:
            rows = [
                span.first + i
                for span in flight.plan.spans
                for i, token in enumerate(span.tokens)
                if span.position + i in faulty[span.sequence.request] or (token == 999 and rng.random() < 0.5)
            ]
            rng.shuffle(rows)
            for row in rows:
                driver.failed((row,), layer=rng.randint(0, 5))
            driver.land(n_faults=len(rows))
    assert driver.scheduler.is_idle
    for sequence in sequences:
        # The token behind position p is p + 1; the answer ends before the first one whose position is faulty.
        ends = min((p for p in faulty[sequence.request]), default=99)
        n = min(9, max(0, ends + 1 - sequence.n_prompt))
        assert sequence.tokens[sequence.n_prompt :] == list(range(sequence.n_prompt, sequence.n_prompt + n))
        assert (sequence.error is not None) == (n < 9), sequence
