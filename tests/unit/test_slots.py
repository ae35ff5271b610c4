"""The slot table and the layer visit: nobody waits for ever, nothing in use is taken away, guesses stay modest."""

from __future__ import annotations

import random

import pytest

from services.expert_io.slots import Slot, SlotTable, Tier
from services.expert_io.states import NEXT, READING, SlotState
from services.expert_io.visit import Visit
from shared.errors import StoreError
from shared.experts.residency import POLICIES, KeepAll, passing_limit
from tests.support import inside

LAYERS = range(8)


def table_of(n_slots: int, policy: str = "next-use", n_reserved: int = 0) -> SlotTable:
    return SlotTable([Tier("ram", n_slots, max(n_slots, n_reserved))], POLICIES[policy](n_slots, LAYERS))


def begin(
    table: SlotTable, step: int, layer: int, experts: list[int], passing: dict[int, float] | None = None
) -> Visit:
    """A visit that has looked at the slots."""
    visit = Visit(table, step, layer)
    visit.look_up(dict.fromkeys(experts, 1), passing or {})
    return visit


def land(table: SlotTable, visit: Visit, slot: Slot) -> None:
    table.landed(slot)
    if slot.key:
        visit.landed(slot)


def drive(visit: Visit, table: SlotTable, rng: random.Random) -> list[int]:
    """Play the disk and the kernels in random order until the visit is done; returns experts in order of computation."""
    assert visit.found
    in_flight = [*visit.more_reads(), *visit.found.late]
    computed: list[int] = []
    for _ in range(10_000):
        table.check()
        visit.check(())
        if visit.is_done:
            return computed
        if visit.has_ready and (not in_flight or rng.random() < 0.5):
            experts, slots = visit.take_ready(rng.randint(1, 3))
            for slot in slots:
                assert slot.state is SlotState.HELD
            visit.computed(experts)
            computed += experts
            in_flight += visit.more_reads()
        elif in_flight:
            land(table, visit, in_flight.pop(rng.randrange(len(in_flight))))
            in_flight += visit.more_reads()
        else:
            raise AssertionError("the visit is stuck")
    raise AssertionError("the visit does not end")


def guess(table: SlotTable, key: tuple[int, int], *, chance: float | None = None) -> Slot | None:
    taken = table.take_for_guess(key, chance=chance)
    return taken and taken.slot


def is_held(table: SlotTable) -> bool:
    return any(slot.state in (SlotState.HELD, SlotState.AWAITED) for slot in table.slots)


def test_waves_with_fewer_slots_than_experts() -> None:
    for n_slots in (1, 2, 5, 9):
        rng = random.Random(n_slots)
        table = table_of(n_slots)
        for layer in range(4):
            experts = sorted(rng.sample(range(64), 20))
            run = begin(table, 0, layer, experts)
            assert sorted(drive(run, table, rng)) == experts
            assert not is_held(table)
            assert table.n_used <= n_slots


def test_resident_experts_are_hits_and_each_is_loaded_once() -> None:
    table = table_of(8)
    rng = random.Random(0)
    drive(begin(table, 0, 0, [1, 2, 3]), table, rng)
    run = begin(table, 1, 0, [2, 3, 4])
    assert drive(run, table, rng)
    assert run.found and (run.found.n_hits, run.found.missing) == (2, (4,))


def test_victims_are_the_least_used_first() -> None:
    table = table_of(3)
    rng = random.Random(0)
    for _ in range(3):
        drive(begin(table, 0, 0, [1]), table, rng)
    drive(begin(table, 0, 0, [2, 3]), table, rng)
    drive(begin(table, 0, 1, [7]), table, rng)
    assert table.find((0, 1)) is not None
    assert table.find((1, 7)) is not None


def test_a_guess_takes_free_slots_but_never_a_warmer_one() -> None:
    table = table_of(2)
    rng = random.Random(0)
    drive(begin(table, 0, 0, [1]), table, rng)
    first = guess(table, (1, 5))
    assert first is not None
    table.landed(first)
    # Both slots are taken: an unknown expert is not warmer than the used one, and as cold as the unused guess.
    assert guess(table, (1, 6)) is None
    assert table.find((0, 1)) is not None


def test_a_guess_displaces_only_what_is_less_likely_wanted_than_itself() -> None:
    rng = random.Random(0)
    for name, known in (("next-use", True), ("lfu", True), ("lru", False)):
        table = table_of(1, name)
        for step in range(8):
            drive(begin(table, step, 0, [1]), table, rng)  # wanted in every step: a chance of about a half by now
        if known:
            assert 0.3 < table.policy.chance((0, 1)) < 0.7
            assert table.take_for_guess((1, 5), chance=0.2) is None
        taken = table.take_for_guess((1, 5), chance=0.8)
        assert taken is not None and taken.evicted == (0, 1), name


def test_a_guess_leaves_first_once_its_layer_did_not_want_it_and_not_before() -> None:
    rng = random.Random(0)
    for is_past in (False, True):
        table = table_of(3)
        drive(begin(table, 0, 0, [1]), table, rng)
        guessed = guess(table, (1, 5))
        assert guessed is not None
        table.landed(guessed)
        layer = 1 if is_past else 2
        drive(begin(table, 0, layer, [2]), table, rng)
        drive(begin(table, 0, 3, [3]), table, rng)
        assert (table.find((1, 5)) is None) == is_past
        assert (table.find((0, 1)) is not None and table.find((layer, 2)) is not None) == is_past
        assert table.n_guesses_wasted == int(is_past)


def test_a_guess_gives_way_when_nothing_else_can() -> None:
    table = table_of(1)
    guessed = guess(table, (1, 5))
    assert guessed is not None
    table.landed(guessed)
    drive(begin(table, 0, 0, [2]), table, random.Random(0))
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
                drive(begin(table, step, layer, sorted(warm[layer])), table, rng)
        assert table.n_used == 96
        for layer in LAYERS:
            passing = {e: 0.5 for e in range(n_experts) if e not in warm[layer][:2]}
            run = begin(table, 30, layer, list(range(n_experts)), passing)
            assert sorted(drive(run, table, rng)) == list(range(n_experts))
            assert run.found and len(run.found.missing) <= n_experts - 2, "each expert is read at most once"
        kept = sum(table.find((layer, e)) is not None for layer in LAYERS for e in warm[layer])
        assert kept >= 96 - limit, name


def test_a_prompt_uses_free_slots_without_a_limit_and_never_stands_still() -> None:
    rng = random.Random(2)
    table = table_of(64)
    run = begin(table, 0, 0, list(range(40)), dict.fromkeys(range(40), 0.1))
    assert len(list(run.more_reads())) == 40
    for n_slots in (1, 2, 3):
        table = table_of(n_slots)
        run = begin(table, 0, 0, list(range(40)), dict.fromkeys(range(40), 1.0))
        assert sorted(drive(run, table, rng)) == list(range(40))


def test_a_doomed_read_keeps_its_slot_until_it_has_ended() -> None:
    table = table_of(1)
    guessed = guess(table, (0, 1))
    assert guessed is not None
    table.call_off(guessed)
    assert table.find((0, 1)) is None
    assert table.n_guesses_wasted == 1
    assert table.take_for_visit((0, 2), None) is None, "the slot's memory is still being written"
    table.free(guessed)
    taken = table.take_for_visit((0, 2), None)
    assert taken and taken.slot is guessed


def test_a_late_guess_is_promoted_not_read_again() -> None:
    table = table_of(4)
    guessed = guess(table, (0, 1))
    assert guessed is not None
    run = begin(table, 0, 0, [1, 2])
    assert run.found and run.found.late == [guessed]
    assert [slot.key for slot in run.more_reads()] == [(0, 2)]
    assert (run.found.n_hits, run.found.right, run.found.missing) == (0, [(0, 1)], (2,))
    assert not table.guesses_in_flight()


def test_a_failed_read_counts_as_done_for_the_visit() -> None:
    table = table_of(4)
    run = begin(table, 0, 0, [1, 2])
    first, second = run.more_reads()
    assert run.failed(first)
    table.free(first)
    land(table, run, second)
    run.computed(run.take_ready(4)[0])
    assert run.is_done


def test_an_abandoned_visit_lets_go_of_every_slot() -> None:
    table = table_of(3)
    run = begin(table, 0, 0, [1, 2, 3, 4])
    slots = list(run.more_reads())
    run.abandon(())
    assert not is_held(table)
    for slot in slots:
        table.landed(slot)
    assert drive(begin(table, 1, 0, [7, 8]), table, random.Random(1)) is not None


def test_the_guesses_in_flight_are_those_that_load_on_a_hint() -> None:
    rng = random.Random(3)
    table = table_of(6)
    for step in range(2000):
        slot = rng.choice(table.slots)
        key = (0, rng.randrange(20))
        if rng.random() < 0.4 and table.find(key) is None:
            if rng.random() < 0.6:
                table.take_for_guess(key)
            else:
                table.take_for_visit(key, None)
        elif slot.state is SlotState.CANCELLED:
            table.free(slot)
        elif slot.state is SlotState.GUESSING:
            rng.choice((table.landed, lambda s: table.hold(s, None), table.call_off, table.free))(slot)
        elif slot.state in READING:
            rng.choice((table.landed, table.free, table.let_go if slot.state is SlotState.AWAITED else table.landed))(
                slot
            )
        elif slot.state is SlotState.HELD:
            table.let_go(slot)
        elif slot.state not in (SlotState.FREE, SlotState.ABSENT):
            table.hold(slot, None)
            table.let_go(slot)
        table.check()
        loading = {s.index for s in table.slots if s.state is SlotState.GUESSING}
        assert {s.index for s in table.guesses_in_flight()} == loading, step


# ---- another capacity while the table is in use -------------------------------------------------------------------


def present(table: SlotTable) -> list[int]:
    return [slot.index for slot in table.slots if slot.state is not SlotState.ABSENT]


@pytest.mark.parametrize("is_by_policy", [True, False])
def test_a_smaller_table_lets_the_surplus_go_at_once(is_by_policy: bool) -> None:
    table = table_of(8, "lru", n_reserved=12)
    rng = random.Random(0)
    for layer, experts in enumerate(([1, 2], [1, 2], [3, 4])):
        drive(begin(table, 0, layer, experts), table, rng)
    gone, in_flight = table.resize(0, 3, is_by_policy=is_by_policy)
    assert in_flight == [] and sorted(gone) == sorted(set(range(8)) - set(present(table)))
    assert len(present(table)) == table.n_used == 3 and table.n_leaving == 0
    if is_by_policy:  # the longest unused left, the free ones before them
        assert {slot.key for slot in table.slots if slot.key} == {(1, 2), (2, 3), (2, 4)}
    else:
        assert present(table) == [0, 1, 2]
    assert table.resize(0, 12, is_by_policy=is_by_policy) == ([], [])
    assert len(present(table)) == 12 and table.n_used == 3
    table.check()


def test_slots_in_use_leave_when_they_are_let_go() -> None:
    table = table_of(6)
    run = begin(table, 0, 0, [1, 2, 3, 4, 5])
    slots = list(run.more_reads())
    land(table, run, slots[0])
    guessed = guess(table, (1, 9))
    assert guessed is not None
    assert table.resize(0, 2, is_by_policy=True) == ([], [guessed])
    assert table.n_leaving == 4 and len(present(table)) == 6
    table.call_off(guessed)
    table.check()
    assert table.free(guessed), "it is absent now"
    for slot in slots[1:]:
        land(table, run, slot)
    gone = run.computed(run.take_ready(9)[0])
    assert run.is_done and table.n_leaving == 0 and len(present(table)) == table.n_used == 2
    assert len(gone) == 3
    table.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_by_policy", [True, False])
def test_visits_go_on_while_the_capacity_changes(policy: str, is_by_policy: bool) -> None:
    rng = random.Random(policy)
    table = table_of(16, policy, n_reserved=24)
    doomed = []
    for step in range(150):
        experts = sorted(rng.sample(range(32), rng.randint(1, 20)))
        run = begin(table, step, rng.choice(LAYERS), experts, {e: 0.1 for e in experts if rng.random() < 0.5})
        assert run.found
        in_flight = [*run.more_reads(), *run.found.late]
        for _ in range(1000):
            table.check()
            run.check(())
            if run.is_done:
                break
            action = rng.random()
            if action < 0.1:
                for guessed in table.resize(0, rng.randint(1, 24), is_by_policy=is_by_policy).in_flight:
                    table.call_off(guessed)
                    doomed.append(guessed)
            elif action < 0.2:
                key = (rng.choice(LAYERS), rng.randrange(32))
                if table.find(key) is None and table.take_for_guess(key):
                    assert table.find(key)
            elif run.has_ready and action < 0.6:
                run.computed(run.take_ready(rng.randint(1, 3))[0])
            elif in_flight and action < 0.9:
                land(table, run, in_flight.pop(rng.randrange(len(in_flight))))
            else:
                for slot in table.slots:
                    if slot.state is SlotState.CANCELLED:
                        table.free(slot)
                if run.is_starved:
                    for guessed in table.guesses_in_flight():
                        table.call_off(guessed)
                        doomed.append(guessed)
            in_flight += run.more_reads()
        else:
            raise AssertionError("the visit is stuck")
        for slot in table.slots:
            if slot.state is SlotState.CANCELLED:
                table.free(slot)
        for guessed in table.guesses_in_flight():
            table.landed(guessed)
        table.passed_by(run.layer)
        table.check()
        assert table.n_leaving == 0 and len(present(table)) == table.capacity
        assert is_by_policy or present(table) == list(range(table.capacity))
        keys = [slot.key for slot in table.slots if slot.key]
        assert len(keys) == len(set(keys)) == table.n_used
    assert doomed


def test_a_policy_that_comes_later_knows_who_may_leave() -> None:
    table = SlotTable([Tier("ram", 4, 4)], KeepAll(4, LAYERS))
    drive(begin(table, 0, 0, [1, 2, 3, 4]), table, random.Random(0))
    policy = POLICIES["next-use"](4, LAYERS)
    policy.restore({(0, 1): 1.0, (0, 3): 0.5})
    table.replace_policy(policy)
    table.resize(0, 2, is_by_policy=True)
    assert {slot.key for slot in table.slots if slot.key} == {(0, 1), (0, 3)}


# ---- states, stories ---------------------------------------------------------------------------------------------


def test_every_state_can_be_reached_and_left() -> None:
    assert set(NEXT) == set(SlotState)
    assert set().union(*NEXT.values()) == set(SlotState)


def test_an_impossible_move_tells_the_slots_story() -> None:
    table = table_of(2)
    slot = guess(table, (3, 7))
    assert slot is not None
    table.landed(slot)
    table.passed_by(3)
    with pytest.raises(
        StoreError, match=r"Slot 0 is STALE with \(3, 7\) .* it can't become STALE .*GUESSING.*GUESSED.*STALE"
    ):
        inside.move(table, slot, SlotState.STALE)


def test_a_broken_table_is_noticed() -> None:
    """The check is not blind: each of these faults is found, with the slot's story where there is a slot to name."""

    def fresh() -> SlotTable:
        table = table_of(4)
        drive(begin(table, 0, 0, [1, 2]), table, random.Random(0))
        guess(table, (1, 1))
        return table

    fresh().check()

    def leave_unsaid(table: SlotTable) -> None:
        table.slots[0].is_leaving = True

    def change_the_capacity(table: SlotTable) -> None:
        table.tiers[0] = Tier("ram", 3, 4)

    def hold_a_candidate(table: SlotTable) -> None:
        slot = table.find((0, 1))
        assert slot
        slot.state = SlotState.HELD

    inner = (inside.lose_a_key, inside.free_twice, inside.forget_guesses)
    for fault in (*inner, leave_unsaid, change_the_capacity, hold_a_candidate):
        table = fresh()
        fault(table)
        with pytest.raises(StoreError):
            table.check()


def test_stories_are_of_one_slot_and_remember_a_bounded_past() -> None:
    table = table_of(2)
    rng = random.Random(0)
    for step in range(3000):
        drive(begin(table, step, 0, [step % 5]), table, rng)
    n_moves, at_most = inside.room_for_moves(table)
    assert n_moves == at_most
    for slot in table.slots:
        story = table.story(slot.index)
        assert story and story[-1].split(": ")[1].startswith(slot.state.name)
        assert len(table.story(slot.index)) < n_moves


def test_a_slot_is_described_by_its_number_or_its_expert() -> None:
    table = table_of(2)
    drive(begin(table, 0, 3, [7]), table, random.Random(0))
    text = table.describe(3, 7)
    assert text == table.describe(-1, 0)
    head, *story = text.splitlines()
    assert head == "Slot 0 (ram): RESIDENT, expert 7 of layer 3, tenant 1"
    assert [line.split(": ")[1].split(",")[0] for line in story] == ["AWAITED", "HELD", "RESIDENT"]
    assert table.describe(-1, 1).splitlines()[0] == "Slot 1 (ram): FREE, nothing, tenant 0"
    assert table.describe(3, 8) == "Expert 8 of layer 3 lies in no slot."
    assert table.describe(-1, 2) == "There is no slot 2: they are numbered from 0 to 1."


def test_slots_of_two_tiers_are_one_table_with_two_capacities() -> None:
    tiers = [Tier("small", 2, 3), Tier("large", 4, 4)]
    table = SlotTable(tiers, POLICIES["lru"](6, LAYERS))
    drive(begin(table, 0, 0, [0, 1, 2, 3, 4, 5]), table, random.Random(0))
    tier_of = {slot.key: slot.tier for slot in table.slots if slot.key}
    assert sorted(tier_of.values()) == [0, 0, 1, 1, 1, 1]
    drive(begin(table, 1, 1, [9]), table, random.Random(0))  # so that one more may leave, wherever it lies
    drive(begin(table, 2, 0, [5]), table, random.Random(0))
    for by_policy in (True, False):
        gone, _ = table.resize(1, 2 - by_policy, is_by_policy=by_policy)
        table.check()
        assert all(table.slots[i].tier == 1 for i in gone), "the other tier keeps what it has"
        assert table.capacity == 2 + 2 - by_policy
    table.resize(0, 3, is_by_policy=True)
    table.check()
    assert [slot.tier for slot in table.slots if slot.state is SlotState.FREE].count(0) == 1
