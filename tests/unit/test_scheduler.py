"""The scheduler's rules: what runs together, what a finished step changes, what drafts may do."""

from __future__ import annotations

from services.router.scheduler import Scheduler
from services.router.sequences import Sequence
from services.router.text_stream import TextStream
from shared.messages.router import Sampling


def make_scheduler(**overrides: int | bool) -> Scheduler:
    settings: dict[str, int | bool] = dict(n_blocks=16, max_sequences=4, prefill_chunk=8, max_rows=32, max_logits=16)
    return Scheduler(**(settings | overrides))  # type: ignore[arg-type]


def make_sequence(name: str, n_prompt: int, max_tokens: int = 8, eos: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(
        request=name,
        n_prompt=n_prompt,
        tokens=list(range(100, 100 + n_prompt)),
        max_tokens=max_tokens,
        sampling=Sampling(),
        text=TextStream(None),
        eos_ids=eos,
    )


def count_up(sequence: Sequence, logit_row: int, position: int) -> int:
    return position


def test_prefill_is_cut_into_chunks_and_only_the_last_has_logits() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_sequence("a", 20))
    lengths, logits = [], []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        lengths.append(plan.n_rows)
        logits.append(plan.n_logits)
        scheduler.complete(plan, count_up)
    assert lengths == [8, 8, 4]
    assert logits == [0, 0, 1]
    assert scheduler.running[0].tokens[-1] == 20


def test_positions_are_consecutive_over_chunks() -> None:
    scheduler = make_scheduler(prefill_chunk=7)
    scheduler.submit(make_sequence("a", 20))
    positions = []
    while (plan := scheduler.plan()) and plan.is_prefill:
        span = plan.spans[0]
        positions += range(span.position, span.position + span.n_rows)
        scheduler.complete(plan, count_up)
    assert positions == list(range(20))


def test_decode_rows_ride_with_one_prefill_chunk() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_sequence("a", 3))
    plan = scheduler.plan()
    assert plan
    scheduler.complete(plan, count_up)
    scheduler.submit(make_sequence("b", 20))
    scheduler.submit(make_sequence("c", 20))
    plan = scheduler.plan()
    assert plan
    assert [(s.sequence.request, s.n_rows, s.is_prefill) for s in plan.spans] == [("a", 1, False), ("b", 8, True)]
    assert [s.first for s in plan.spans] == [0, 1]


def test_drafts_count_only_while_they_equal_the_chosen_token() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 4)
    scheduler.submit(sequence)
    scheduler.complete(scheduler.plan(), count_up)  # type: ignore[arg-type]
    assert sequence.tokens[-1] == 4
    sequence.drafts = [5, 6, 99, 8]
    plan = scheduler.plan()
    assert plan is not None
    assert plan.spans[0].tokens == (4, 5, 6, 99, 8)
    [advance] = scheduler.complete(plan, count_up)
    # 5 and 6 are accepted, then the model's own 7 replaces 99.
    assert advance.new_tokens == [5, 6, 7]
    assert advance.n_kept_rows == 3
    assert sequence.n_cached == len(sequence.tokens) - 1
    assert (sequence.n_drafted, sequence.n_accepted) == (4, 2)


def test_wrong_drafts_never_enter_the_answer() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 4, max_tokens=10)
    scheduler.submit(sequence)
    while not sequence.finish_reason:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.complete(plan, count_up)
        sequence.drafts = [1000, 1001]
    assert sequence.tokens[4:] == list(range(4, 14))
    assert sequence.n_accepted == 0


def test_drafts_stop_at_the_length_limit() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 4, max_tokens=3)
    scheduler.submit(sequence)
    scheduler.complete(scheduler.plan(), count_up)  # type: ignore[arg-type]
    sequence.drafts = [5, 6, 7, 8]
    plan = scheduler.plan()
    assert plan is not None
    assert plan.n_rows == 2  # two more tokens may be generated: one draft at most is of use
    scheduler.complete(plan, count_up)
    assert sequence.tokens[4:] == [4, 5, 6]
    assert sequence.finish_reason == "length"


def test_an_end_token_inside_accepted_drafts_ends_the_answer() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 4, max_tokens=10, eos=frozenset({6}))
    scheduler.submit(sequence)
    scheduler.complete(scheduler.plan(), count_up)  # type: ignore[arg-type]
    sequence.drafts = [5, 6, 7]
    [advance] = scheduler.complete(scheduler.plan(), count_up)  # type: ignore[arg-type]
    assert advance.new_tokens == [5, 6]
    assert sequence.finish_reason == "stop"


def test_blocks_are_reserved_for_the_longest_answer_and_given_back() -> None:
    scheduler = make_scheduler(n_blocks=4)
    first = make_sequence("a", 60, max_tokens=100)  # 160 positions: 3 blocks
    second = make_sequence("b", 60, max_tokens=100)
    scheduler.submit(first)
    scheduler.submit(second)
    assert [s.request for s in scheduler.running] == ["a"]
    assert len(first.blocks) == 3
    scheduler.remove(first)
    assert [s.request for s in scheduler.running] == ["b"]
    assert sorted(second.blocks) == [0, 1, 2]


def test_rows_and_logits_stay_within_the_frame() -> None:
    scheduler = make_scheduler(max_sequences=8, max_logits=5, max_rows=10, n_blocks=64)
    sequences = [make_sequence(str(i), 1, max_tokens=50) for i in range(6)]
    for sequence in sequences:
        sequence.drafts = [1, 2, 3]
        scheduler.submit(sequence)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.n_logits <= 5
    assert plan.n_rows <= 10
    assert all(s.n_logits == s.n_rows for s in plan.spans)


def test_everything_runs_in_the_end_whatever_the_chunk() -> None:
    for chunk in (1, 3, 8):
        scheduler = make_scheduler(prefill_chunk=chunk, n_blocks=64)
        sequences = [make_sequence(str(i), 1 + 5 * i) for i in range(6)]
        for sequence in sequences:
            scheduler.submit(sequence)
        for _ in range(200):
            plan = scheduler.plan()
            if plan is None:
                break
            for advance in scheduler.complete(plan, count_up):
                if advance.sequence.finish_reason:
                    scheduler.remove(advance.sequence)
        assert all(s.n_generated == 8 for s in sequences)
        assert scheduler.is_idle


def test_all_logits_mode_gives_every_prompt_row() -> None:
    scheduler = make_scheduler(all_logits=True, max_logits=6)
    scheduler.submit(make_sequence("a", 10))
    seen = 0
    while (plan := scheduler.plan()) and plan.is_prefill:
        assert plan.n_logits == plan.n_rows <= 6
        seen += plan.n_logits
        scheduler.complete(plan, count_up)
    assert seen == 10
