"""Who is tokenised next, who took too long, and what the death of the process costs."""

from __future__ import annotations

from services.router.prompt_queue import MAX_CPU_S, MAX_RUNNING, MAX_WALL_S, SHORT_BYTES, YOUNG_S, Job, PromptQueue


def queue_of(*sizes: int) -> tuple[PromptQueue, list[Job]]:
    made = PromptQueue()
    jobs = [Job(f"r{idx}", size, None, f"note{idx}") for idx, size in enumerate(sizes)]
    for job in jobs:
        made.submit(job)
    return made, jobs


def names(started: list[tuple[int, Job]]) -> list[str]:
    return [job.request for _, job in started]


LONG = SHORT_BYTES + 1


def test_short_prompts_pass_long_ones_and_keep_their_order() -> None:
    queue, _ = queue_of(LONG, LONG, 1, 1, 1)
    assert names(queue.start(0)) == ["r0", "r2", "r3"]
    queue.finish(2)
    assert names(queue.start(0)) == ["r4"]
    queue.finish(1)
    assert names(queue.start(0)) == ["r1"]


def test_short_prompts_that_take_long_do_not_hold_others_back_until_all_places_are_taken() -> None:
    queue, _ = queue_of(*[1] * 9)
    n_running = len(queue.start(0))
    while n_running < MAX_RUNNING:
        for _ in range(int(YOUNG_S / 0.25) + 1):
            assert not queue.pass_time(0.25, 0)
        n_running += len(queue.start(0))
    assert n_running == MAX_RUNNING
    queue.pass_time(YOUNG_S, 0)
    assert not queue.start(0)


def test_a_prompt_that_costs_too_much_is_refused_and_its_neighbours_run_again() -> None:
    queue, jobs = queue_of(LONG, 1)
    queue.start(0)
    queue.finish(2)
    queue.submit(Job("late", 1, None, None))
    queue.start(MAX_CPU_S - 1)
    assert not queue.pass_time(0.1, MAX_CPU_S)
    assert queue.pass_time(0.1, MAX_CPU_S + 0.1)
    assert queue.end(MAX_CPU_S + 0.1, is_ours=True) == [jobs[0]]
    assert names(queue.start(0)) == ["late"]


def test_a_process_that_does_not_get_on_costs_nobody_his_request_at_once() -> None:
    queue, _ = queue_of(1)
    queue.start(0)
    while not queue.pass_time(0.5, 0):
        pass
    assert queue.end(0, is_ours=True) == []
    assert names(queue.start(0)) == ["r0"]


def test_a_pause_of_everybody_is_not_counted() -> None:
    queue, _ = queue_of(1)
    queue.start(0)
    assert not queue.pass_time(10 * MAX_WALL_S, 0)


def test_after_a_death_the_suspects_run_alone_and_only_the_culprit_is_refused() -> None:
    queue, jobs = queue_of(LONG, 1, 1, 1)
    assert names(queue.start(0)) == ["r0", "r1", "r2"]
    assert queue.end(0, is_ours=False) == []
    assert names(queue.start(0)) == ["r0"]
    assert queue.end(0, is_ours=False) == [jobs[0]]
    for name, number in (("r1", 5), ("r2", 6), ("r3", 7)):
        assert names(queue.start(0)) == [name]
        assert queue.finish(number)
    assert not queue.n_open and not queue.start(0)


def test_who_leaves_is_forgotten_waiting_or_running() -> None:
    queue, _ = queue_of(LONG, LONG)
    queue.start(0)
    assert queue.drop("r1") and queue.drop("r0") and not queue.drop("r0")
    assert not queue.n_open and queue.find("r0") is None
    assert queue.finish(1)
    assert queue.finish(1) is None
    assert not queue.start(0)


def test_the_bytes_of_all_texts_are_bounded() -> None:
    queue, _ = queue_of(60 << 20)
    assert queue.has_room(1 << 20) and not queue.has_room(5 << 20)
    queue.start(0)
    queue.finish(1)
    assert queue.has_room(64 << 20)
