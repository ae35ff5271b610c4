"""The slot table and the layer visit: nobody waits for ever, nothing in use is taken away, guesses stay modest."""

from __future__ import annotations

import random

import pytest

from services.expert_io.layer_run import LayerRun
from services.expert_io.slots import SlotState, SlotTable
from shared.experts.residency import POLICIES, KeepAll, passing_limit

LAYERS = range(8)


def table_of(n_slots: int, policy: str = "next-use") -> SlotTable:
    return SlotTable(n_slots, POLICIES[policy](n_slots, LAYERS))


def drive(run: LayerRun, table: SlotTable, rng: random.Random) -> list[int]:
    """Play the disk and the kernels in random order until the visit is done; returns experts in order of computation."""
    promote, orders = run.start(), list(run.more_reads())
    in_flight = [o.slot for o in orders] + list(promote)
    computed = []
    for _ in range(10_000):
        if run.is_done:
            return computed
        if run.has_ready and (not in_flight or rng.random() < 0.5):
            taken = run.take_ready(rng.randint(1, 3))
            for _, slot in taken:
                assert slot.state is SlotState.RESIDENT and slot.pins > 0
            run.computed([e for e, _ in taken])
            computed += [e for e, _ in taken]
            in_flight += [o.slot for o in run.more_reads()]
        elif in_flight:
            slot = in_flight.pop(rng.randrange(len(in_flight)))
            table.loaded(slot)
            assert slot.key is not None
            run.arrived(slot.key)
            in_flight += [o.slot for o in run.more_reads()]
        else:
            raise AssertionError("the visit is stuck")
    raise AssertionError("the visit does not end")


def test_waves_with_fewer_slots_than_experts() -> None:
    for n_slots in (1, 2, 5, 9):
        rng = random.Random(n_slots)
        table = table_of(n_slots)
        for layer in range(4):
            experts = sorted(rng.sample(range(64), 20))
            run = LayerRun(0, layer, experts, table)
            assert sorted(drive(run, table, rng)) == experts
            assert all(slot.pins == 0 for slot in table.slots)
            assert table.n_used <= n_slots


def test_resident_experts_are_hits_and_each_is_loaded_once() -> None:
    table = table_of(8)
    rng = random.Random(0)
    drive(LayerRun(0, 0, [1, 2, 3], table), table, rng)
    run = LayerRun(1, 0, [2, 3, 4], table)
    assert drive(run, table, rng)
    assert (run.counters.hits, run.counters.misses) == (2, 1)


def test_victims_are_the_least_used_first() -> None:
    table = table_of(3)
    rng = random.Random(0)
    for _ in range(3):
        drive(LayerRun(0, 0, [1], table), table, rng)
    drive(LayerRun(0, 0, [2, 3], table), table, rng)
    drive(LayerRun(0, 1, [7], table), table, rng)
    assert table.find((0, 1)) is not None
    assert table.find((1, 7)) is not None


def test_a_guess_takes_free_slots_but_never_a_warmer_one() -> None:
    table = table_of(2)
    rng = random.Random(0)
    drive(LayerRun(0, 0, [1], table), table, rng)
    guess = table.acquire((1, 5), is_guess=True)
    assert guess is not None
    table.loaded(guess)
    # Both slots are taken: an unknown expert is not warmer than the used one, but may replace the unused guess... which
    # is exactly as cold as itself, so it may not.
    assert table.acquire((1, 6), is_guess=True) in (None, guess)
    assert table.find((0, 1)) is not None


def test_a_guess_displaces_only_what_is_less_likely_wanted_than_itself() -> None:
    rng = random.Random(0)
    for name, known in (("next-use", True), ("lfu", True), ("lru", False)):
        table = table_of(1, name)
        for step in range(8):
            drive(LayerRun(step, 0, [1], table), table, rng)  # wanted in every step: a chance of about a half by now
        if known:
            assert 0.3 < table.policy.chance((0, 1)) < 0.7
            assert table.acquire((1, 5), is_guess=True, chance=0.2) is None
        assert table.acquire((1, 5), is_guess=True, chance=0.8) is not None, name
        assert table.last_evicted == (0, 1)


def test_a_guess_leaves_first_once_its_layer_did_not_want_it_and_not_before() -> None:
    rng = random.Random(0)
    for is_past in (False, True):
        table = table_of(3)
        drive(LayerRun(0, 0, [1], table), table, rng)
        guess = table.acquire((1, 5), is_guess=True)
        assert guess is not None
        table.loaded(guess)
        layer = 1 if is_past else 2
        drive(LayerRun(0, layer, [2], table), table, rng)
        drive(LayerRun(0, 3, [3], table), table, rng)
        assert (table.find((1, 5)) is None) == is_past
        assert (table.find((0, 1)) is not None and table.find((layer, 2)) is not None) == is_past
        assert table.n_guesses_wasted == int(is_past)


def test_a_guess_gives_way_when_nothing_else_can() -> None:
    table = table_of(1)
    guess = table.acquire((1, 5), is_guess=True)
    assert guess is not None
    table.loaded(guess)
    drive(LayerRun(0, 0, [2], table), table, random.Random(0))
    assert table.find((0, 2)) is not None and table.n_guesses_wasted == 1


def test_a_prompt_takes_only_its_share_from_those_who_decode() -> None:
    """Experts that only prompt rows want pass through a few slots; those of decode rows stay, whatever the policy."""
    n_slots, n_experts = 100, 64
    limit = passing_limit(n_slots, is_alone=False)
    for name in POLICIES:
        rng = random.Random(1)
        table = table_of(n_slots, name)
        warm = {layer: rng.sample(range(n_experts), 12) for layer in LAYERS}
        for step in range(20):
            for layer in LAYERS:
                drive(LayerRun(step, layer, sorted(warm[layer]), table), table, rng)
        assert table.n_used == 96
        for layer in LAYERS:
            passing = {e: 0.5 for e in range(n_experts) if e not in warm[layer][:2]}
            run = LayerRun(30, layer, list(range(n_experts)), table, passing)
            assert sorted(drive(run, table, rng)) == list(range(n_experts))
            assert run.counters.misses <= n_experts - 2, "each expert is read at most once"
        kept = sum(table.find((layer, e)) is not None for layer in LAYERS for e in warm[layer])
        assert kept >= 96 - limit, name


def test_a_prompt_uses_free_slots_without_a_limit_and_never_stands_still() -> None:
    rng = random.Random(2)
    table = table_of(64)
    run = LayerRun(0, 0, list(range(40)), table, dict.fromkeys(range(40), 0.1))
    run.start()
    orders = list(run.more_reads())
    assert len(orders) == 40
    for n_slots in (1, 2, 3):
        table = table_of(n_slots)
        run = LayerRun(0, 0, list(range(40)), table, dict.fromkeys(range(40), 1.0))
        assert sorted(drive(run, table, rng)) == list(range(40))


def test_a_doomed_read_keeps_its_slot_until_it_has_ended() -> None:
    table = table_of(1)
    guess = table.acquire((0, 1), is_guess=True)
    assert guess is not None
    table.doom(guess)
    assert table.find((0, 1)) is None
    assert table.n_guesses_wasted == 1
    assert table.acquire((0, 2), is_guess=False) is None, "the slot's memory is still being written"
    table.release(guess)
    assert table.acquire((0, 2), is_guess=False) is guess


def test_a_late_guess_is_promoted_not_read_again() -> None:
    table = table_of(4)
    guess = table.acquire((0, 1), is_guess=True)
    assert guess is not None
    run = LayerRun(0, 0, [1, 2], table)
    promote, orders = run.start(), list(run.more_reads())
    assert promote == [guess]
    assert [o.slot.key for o in orders] == [(0, 2)]
    assert (run.counters.late_hits, run.counters.useful_guesses, run.counters.misses) == (1, 1, 1)
    assert not table.guesses_in_flight()


def test_a_failed_read_counts_as_done_for_the_visit() -> None:
    table = table_of(4)
    run = LayerRun(0, 0, [1, 2], table)
    run.start()
    orders = list(run.more_reads())
    assert run.failed((0, 1))
    table.release(orders[0].slot)
    table.loaded(orders[1].slot)
    run.arrived((0, 2))
    run.computed([e for e, _ in run.take_ready(4)])
    assert run.is_done


def test_an_abandoned_visit_lets_go_of_every_slot() -> None:
    table = table_of(3)
    run = LayerRun(0, 0, [1, 2, 3, 4], table)
    run.start()
    orders = list(run.more_reads())
    run.abandon()
    assert all(slot.pins == 0 for slot in table.slots)
    for order in orders:
        table.loaded(order.slot)
    assert drive(LayerRun(1, 0, [7, 8], table), table, random.Random(1)) is not None


def test_the_guesses_in_flight_are_those_that_load_on_a_hint() -> None:
    rng = random.Random(3)
    table = table_of(6)
    for step in range(2000):
        slot = rng.choice(table.slots)
        key = (0, rng.randrange(20))
        if rng.random() < 0.4 and table.find(key) is None:
            table.acquire(key, is_guess=rng.random() < 0.6)
        elif slot.state is SlotState.LOADING and slot.is_doomed:
            table.release(slot)
        elif slot.state is SlotState.LOADING:
            rng.choice((table.loaded, lambda s: table.touch(s, is_hit=True), table.doom, table.release))(slot)
        elif slot.state is SlotState.RESIDENT:
            table.touch(slot, is_hit=True)
            table.pin(slot)
            table.unpin(slot)
        loading = {s.index for s in table.slots if s.state is SlotState.LOADING and s.is_guess and not s.is_doomed}
        assert {s.index for s in table.guesses_in_flight()} == loading, step


# ---- another capacity while the table is in use -------------------------------------------------------------------


def present(table: SlotTable) -> list[int]:
    return [slot.index for slot in table.slots if slot.state is not SlotState.ABSENT]


@pytest.mark.parametrize("is_by_policy", [True, False])
def test_a_smaller_table_lets_the_surplus_go_at_once(is_by_policy: bool) -> None:
    table = SlotTable(8, POLICIES["lru"](8, LAYERS), n_reserved=12)
    rng = random.Random(0)
    for layer, experts in enumerate(([1, 2], [1, 2], [3, 4])):
        drive(LayerRun(0, layer, experts, table), table, rng)
    assert table.take_gone() == []
    assert table.resize(3, is_by_policy=is_by_policy) == []
    assert sorted(table.take_gone()) == sorted(set(range(8)) - set(present(table)))
    assert len(present(table)) == table.n_used == 3 and table.n_leaving == 0
    if is_by_policy:  # the longest unused left, the free ones before them
        assert {slot.key for slot in table.slots if slot.key} == {(1, 2), (2, 3), (2, 4)}
    else:
        assert present(table) == [0, 1, 2]
    table.resize(12, is_by_policy=is_by_policy)
    assert len(present(table)) == 12 and table.n_used == 3 and table.take_gone() == []


def test_slots_in_use_leave_when_they_are_let_go() -> None:
    table = table_of(6)
    run = LayerRun(0, 0, [1, 2, 3, 4, 5], table)
    run.start()
    orders = list(run.more_reads())
    table.loaded(orders[0].slot)
    run.arrived((0, 1))
    guess = table.acquire((1, 9), is_guess=True)
    assert guess is not None
    assert table.resize(2, is_by_policy=True) == [guess]
    assert table.n_leaving == 4 and len(present(table)) == 6
    table.doom(guess)
    table.release(guess)
    assert table.take_gone() == [guess.index]
    for order in orders[1:]:
        assert order.slot.key is not None
        table.loaded(order.slot)
        run.arrived(order.slot.key)
    run.computed([e for e, _ in run.take_ready(9)])
    assert run.is_done and table.n_leaving == 0 and len(present(table)) == table.n_used == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_by_policy", [True, False])
def test_visits_go_on_while_the_capacity_changes(policy: str, is_by_policy: bool) -> None:
    rng = random.Random(policy)
    table = SlotTable(16, POLICIES[policy](16, LAYERS), n_reserved=24)
    doomed = []
    for step in range(150):
        experts = sorted(rng.sample(range(32), rng.randint(1, 20)))
        run = LayerRun(step, rng.choice(LAYERS), experts, table, {e: 0.1 for e in experts if rng.random() < 0.5})
        promote, orders = run.start(), list(run.more_reads())
        in_flight = [o.slot for o in orders] + promote
        for _ in range(1000):
            if run.is_done:
                break
            action = rng.random()
            if action < 0.1:
                for guess in table.resize(rng.randint(1, 24), is_by_policy=is_by_policy):
                    table.doom(guess)
                    doomed.append(guess)
            elif action < 0.2:
                key = (rng.choice(LAYERS), rng.randrange(32))
                if table.find(key) is None and table.acquire(key, is_guess=True):
                    assert table.find(key)
            elif run.has_ready and action < 0.6:
                run.computed([e for e, _ in run.take_ready(rng.randint(1, 3))])
            elif in_flight and action < 0.9:
                slot = in_flight.pop(rng.randrange(len(in_flight)))
                assert slot.key is not None
                key = slot.key
                table.loaded(slot)
                run.arrived(key)
            else:
                for slot in table.slots:
                    if slot.is_doomed and slot.state is SlotState.LOADING:
                        table.release(slot)
                if run.is_starved:
                    for guess in table.guesses_in_flight():
                        table.doom(guess)
                        doomed.append(guess)
            in_flight += [o.slot for o in run.more_reads()]
        else:
            raise AssertionError("the visit is stuck")
        for slot in table.slots:
            if slot.is_doomed and slot.state is SlotState.LOADING:
                table.release(slot)
        for guess in table.guesses_in_flight():
            table.loaded(guess)
        table.looked_up(run.layer)
        assert table.n_leaving == 0 and len(present(table)) == table.capacity
        assert is_by_policy or present(table) == list(range(table.capacity))
        keys = [slot.key for slot in table.slots if slot.key]
        assert len(keys) == len(set(keys)) == table.n_used
    assert doomed


def test_a_policy_that_comes_later_knows_who_may_leave() -> None:
    table = SlotTable(4, KeepAll(4, LAYERS))
    drive(LayerRun(0, 0, [1, 2, 3, 4], table), table, random.Random(0))
    policy = POLICIES["next-use"](4, LAYERS)
    policy.restore({(0, 1): 1.0, (0, 3): 0.5})
    table.replace_policy(policy)
    table.resize(2, is_by_policy=True)
    assert {slot.key for slot in table.slots if slot.key} == {(0, 1), (0, 3)}
