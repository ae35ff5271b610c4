"""The store's one decider under any sequence of events: nothing is read twice at once, computed unread, lost, or waited for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.expert_io import events as e
from services.expert_io.slots import Tier
from services.expert_io.state import StoreFacts, StoreState
from services.expert_io.states import SlotState
from services.expert_io.visit import Visit
from shared.errors import ErrorCode, StoreError
from shared.experts.residency import POLICIES, Key

N_EXPERTS = 12
LAYERS = (1, 2, 3)


class World:
    """Engines and messages as the decider sees them: carries out instructions and says what became of them, in any order."""

    def __init__(self, tiers: Sequence[Tier], policy: str = "next-use", shared: Sequence[int] = (1, 2)) -> None:
        facts = StoreFacts(LAYERS, 3, N_EXPERTS, policy, frozenset(shared))
        self.expected = {(layer, x): 1.0 / (1 + x) for layer in LAYERS for x in range(0, N_EXPERTS, 2)}
        self.state = StoreState(tiers, facts, self.expected)
        self.now_ns = 1_000
        self.reading: dict[int, e.Read] = {}
        self.speculative: set[int] = set()
        self.cancelled: set[int] = set()
        self.memory: dict[int, Key] = {}
        self.computing: dict[int, e.Compute] = {}
        self.visit_of: dict[int, Visit | None] = {}
        self.step = 0
        self.layer = LAYERS[-1]
        self.n_rows = 0
        self.rows: dict[int, int] = {}
        self.n_shared = 0
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.n_finished = 0
        self.told: list[e.Instruction] = []

    def now(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def tell(self, event: e.Event) -> list[e.Instruction]:
        told = []
        for order in self.state.handle(event):
            told.append(order)
            assert order.stimulus == self.state.stimulus
            self.carry_out(order)
        self.state.check()
        self.told += told
        if any(isinstance(order, e.Finish) for order in told):
            assert self.done | self.failed == set(self.rows) and not self.done & self.failed
            assert self.n_shared == (self.n_rows if self.layer in self.state.facts.shared_layers else 0)
            self.n_finished += 1
            self.tell(e.VisitEnded(self.now()))
        return told

    def carry_out(self, order: e.Instruction) -> None:
        slots = self.state.table.slots
        if isinstance(order, e.Read):
            assert order.slot not in self.reading, "two reads into one slot"
            assert order.key not in {r.key for s, r in self.reading.items() if s not in self.cancelled}, "read twice"
            assert slots[order.slot].tier == order.tier
            assert all(order.slot not in c.slots for c in self.computing.values())
            self.memory.pop(order.slot, None)
            self.reading[order.slot] = order
            if order.is_speculative:
                self.speculative.add(order.slot)
        elif isinstance(order, e.Promote):
            self.speculative.discard(order.slot)
        elif isinstance(order, e.Cancel):
            assert order.slot in self.speculative, "only guesses are called off"
            self.cancelled.add(order.slot)
        elif isinstance(order, e.GiveBack):
            for slot in order.slots:
                assert slot not in self.reading and slots[slot].tier == order.tier
                assert all(slot not in c.slots for c in self.computing.values())
                self.memory.pop(slot, None)
        elif isinstance(order, e.Compute):
            assert order.tier not in self.computing, "one order at a time"
            for expert, slot in zip(order.experts, order.slots, strict=True):
                assert self.memory[slot] == (self.layer, expert), "it is there"
                assert expert in self.rows and expert not in self.done
                assert slots[slot].tier == order.tier
            self.computing[order.tier] = order
            self.visit_of[order.tier] = self.state.visit
        elif isinstance(order, e.ComputeShared):
            assert order.begin == self.n_shared < order.end <= self.n_rows
            self.n_shared = order.end
        elif isinstance(order, e.FailExpert):
            if order.is_wanted:
                assert order.key[0] == self.layer
                self.failed.add(order.key[1])
                self.done.discard(order.key[1])
            assert order.story

    # -- what may happen -------------------------------------------------------------------------------------

    def begin(self, rng: random.Random) -> None:
        if rng.random() < 0.8:  # else again, as after an abandoned visit
            self.layer = LAYERS[(LAYERS.index(self.layer) + 1) % len(LAYERS)]
        self.step += 1
        self.n_rows = rng.choice((1, 1, 2, 200))
        self.rows, self.done, self.failed, self.n_shared = {}, set(), set(), 0
        self.tell(e.VisitBegan(self.now(), self.step, self.layer, self.n_rows))

    def choose(self, rng: random.Random) -> None:
        experts = sorted(rng.sample(range(N_EXPERTS), rng.randint(1, N_EXPERTS)))
        self.rows = {x: rng.randint(1, self.n_rows) for x in experts}
        passing = {x: rng.random() for x in experts if rng.random() < 0.5} if self.n_rows > 2 else {}
        self.tell(e.ExpertsChosen(self.now(), self.step, self.layer, self.rows, passing, self.n_rows == 1))

    def end_read(self, rng: random.Random) -> None:
        slot = rng.choice(sorted(self.reading))
        order = self.reading.pop(slot)
        self.speculative.discard(slot)
        what = (self.now(), slot, order.generation, self.now_ns - 500, self.now_ns, 4096)
        if slot in self.cancelled and rng.random() < 0.7:
            self.cancelled.discard(slot)
            self.tell(e.ReadCancelled(*what))
        elif rng.random() < 0.1:
            self.cancelled.discard(slot)
            self.tell(e.ReadFailed(*what, ErrorCode.EXPERT_READ_FAILED, "the drive is gone"))
        else:  # a cancelled read may be whole before it hears of that
            self.cancelled.discard(slot)
            self.memory[slot] = order.key
            self.tell(e.ReadLanded(*what))

    def end_computing(self, rng: random.Random) -> None:
        tier = rng.choice(sorted(self.computing))
        order = self.computing.pop(tier)
        visit = self.state.visit
        if visit is self.visit_of[tier]:
            self.done |= set(order.experts)
        if rng.random() < 0.1:
            self.tell(e.ComputeFailed(self.now(), tier, order.experts, ErrorCode.KERNEL_FAILED, "the device is gone"))
        else:
            self.tell(e.Computed(self.now(), tier, order.experts))

    def hint(self, rng: random.Random) -> None:
        layer = rng.choice((*LAYERS, 9))
        experts = tuple(rng.sample(range(N_EXPERTS + 2), 4))
        self.tell(e.Hinted(self.now(), self.step, layer, experts, rng.randrange(2)))

    def resize(self, rng: random.Random) -> None:
        table = self.state.table
        tier = rng.randrange(len(table.tiers))
        n_slots = rng.randint(0, table.tiers[tier].n_reserved)
        if table.capacity - table.tiers[tier].capacity + n_slots:
            self.tell(e.CapacityChanged(self.now(), tier, n_slots, rng.random() < 0.5, self.expected))

    def something(self, rng: random.Random) -> None:
        """Any event that may come now."""
        visit = self.state.visit
        may = [self.hint, self.resize]
        may += [lambda _: self.tell(e.Tick(self.now())), lambda _: self.tell(e.Free(self.now()))] * 2
        if visit is None:
            may += [self.begin] * 3
        elif visit.rows is None:
            may += [self.choose] * 3
        if visit and rng.random() < 0.02:
            may = [lambda _: self.tell(e.VisitAbandoned(self.now()))]
        if self.reading:
            may += [self.end_read] * 4
        if self.computing:
            may += [self.end_computing] * 3
        rng.choice(may)(rng)

    def finish(self, rng: random.Random) -> None:
        """No new visit: the one under way comes to its end by what is under way alone."""
        for _ in range(1000):
            visit = self.state.visit
            if visit is None and not self.reading and not self.computing:
                return
            if visit and visit.rows is None:
                self.choose(rng)
            told = self.tell(e.Free(self.now()))
            if self.reading and (not told or rng.random() < 0.5):
                self.end_read(rng)
            elif self.computing:
                self.end_computing(rng)
            else:
                assert told or self.state.visit is None, "the visit is stuck"
        raise AssertionError("the visit does not end")


TIERS = {
    "one": [Tier("ram", 7, 10)],
    "tiny": [Tier("ram", 1, 2)],
    "all": [Tier("ram", 36, 36)],
    "two": [Tier("device", 2, 3), Tier("ram", 5, 8)],
    "one of two is empty": [Tier("device", 0, 3), Tier("ram", 3, 6)],
}


@settings(max_examples=120, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32), tiers=st.sampled_from(sorted(TIERS)), policy=st.sampled_from(sorted(POLICIES)))
def test_any_sequence_of_events_keeps_the_invariants_and_every_visit_ends(seed: int, tiers: str, policy: str) -> None:
    rng = random.Random(seed)
    world = World(TIERS[tiers], policy)
    for _ in range(120):
        world.something(rng)
    world.finish(rng)


def test_long_walks_through_all_states() -> None:
    """The walks above are not blind: together they see every state, every instruction and every kind of end."""
    seen: set[object] = set()
    n_finished = 0
    for seed, (name, policy) in enumerate([(n, p) for n in TIERS for p in POLICIES]):
        rng = random.Random(seed)
        world = World(TIERS[name], policy)
        for _ in range(300):
            world.something(rng)
            seen |= set(world.state.table.count_states())
        world.finish(rng)
        seen |= {type(order) for order in world.told}
        n_finished += world.n_finished
    orders = {kind for kind in vars(e).values() if isinstance(kind, type) and issubclass(kind, e.Instruction)}
    assert seen >= set(SlotState) | orders - {e.Instruction}
    assert n_finished > 100


def visit(world: World, layer: int, experts: Sequence[int]) -> list[e.Instruction]:
    """A visit of one row up to its reads."""
    world.layer, world.n_rows, world.n_shared = layer, 1, 0
    world.rows, world.done, world.failed = dict.fromkeys(experts, 1), set(), set()
    world.step += 1
    world.tell(e.VisitBegan(world.now(), world.step, layer, 1))
    return world.tell(e.ExpertsChosen(world.now(), world.step, layer, world.rows, {}))


def land(world: World, slot: int) -> list[e.Instruction]:
    order = world.reading.pop(slot)
    world.memory[slot] = order.key
    world.speculative.discard(slot)
    return world.tell(e.ReadLanded(world.now(), slot, order.generation, 1, 2, 4096))


def test_a_visit_from_the_gates_answer_to_the_sum() -> None:
    world = World([Tier("ram", 4, 4)])
    reads = visit(world, 1, [3, 5])
    assert [(o.key, o.is_speculative) for o in reads if isinstance(o, e.Read)] == [((1, 3), False), ((1, 5), False)]
    [shared] = world.tell(e.Free(world.now()))
    assert isinstance(shared, e.ComputeShared), "the shared expert fills the time of waiting"
    assert world.tell(e.Free(world.now())) == []
    land(world, 1)
    [compute] = world.tell(e.Free(world.now()))
    assert isinstance(compute, e.Compute) and (compute.experts, compute.slots) == ((5,), (1,))
    assert world.tell(e.Free(world.now())) == [], "the engine is at work and nothing else is there"
    land(world, 0)
    world.done |= {5}
    del world.computing[0]
    world.tell(e.Computed(world.now(), 0, (5,)))
    [compute] = world.tell(e.Free(world.now()))
    assert isinstance(compute, e.Compute) and compute.experts == (3,)
    world.done |= {3}
    del world.computing[0]
    world.tell(e.Computed(world.now(), 0, (3,)))
    [finish] = world.tell(e.Free(world.now()))
    assert isinstance(finish, e.Finish) and world.state.visit is None
    counts = world.state.counts()
    assert (counts["misses"], counts["hits"], counts["expert_runs"], counts["evictions"]) == (2, 0, 2, 0)


def test_a_slot_tells_the_events_that_led_to_its_state() -> None:
    world = World([Tier("ram", 4, 4)])
    world.tell(e.Hinted(world.now(), 1, 1, (7, 8), 0))
    hinted = world.state.stimulus
    land(world, 0)
    visit(world, 1, [7])
    story = world.state.table.story(0)
    assert [line.split(": ")[1] for line in story] == [
        f"{s}, expert 7 of layer 1" for s in ("GUESSING", "GUESSED", "HELD")
    ]
    assert story[0].startswith(f"#{hinted} ") and "Hinted of step 1 layer 1" in story[0]
    assert "ReadLanded" in story[1] and "ExpertsChosen of step 1 layer 1" in story[2]


@pytest.mark.parametrize("generation", [0, 2])
def test_the_end_of_a_read_that_was_never_ordered_is_a_fault_that_tells_the_story(generation: int) -> None:
    world = World([Tier("ram", 4, 4)])
    visit(world, 1, [7])
    with pytest.raises(
        StoreError, match=rf"Slot 0 is AWAITED .* generation {generation} ended in it .* AWAITED, expert 7"
    ):
        world.tell(e.ReadLanded(world.now(), 0, generation, 1, 2, 4096))
    world.state.table.check()


def test_two_engines_work_at_the_same_time_and_the_next_visit_waits_for_one_that_was_left_working() -> None:
    world = World([Tier("device", 1, 1), Tier("ram", 3, 3)], shared=())
    visit(world, 1, [3, 5])
    land(world, 0)
    land(world, 1)
    orders = [*world.tell(e.Free(world.now())), *world.tell(e.Free(world.now()))]
    assert [(o.tier, o.experts) for o in orders if isinstance(o, e.Compute)] == [(0, (3,)), (1, (5,))]
    world.tell(e.VisitAbandoned(world.now()))
    assert {slot.state for slot in world.state.table.slots[:2]} == {SlotState.HELD}, "engines still read there"
    visit(world, 1, [5])
    assert world.tell(e.Free(world.now())) == []
    world.tell(e.VisitAbandoned(world.now()))
    visit(world, 1, [5])
    for tier, expert in ((0, 3), (1, 5)):
        del world.computing[tier]
        world.tell(e.Computed(world.now(), tier, (expert,)))
    [compute] = world.tell(e.Free(world.now()))
    assert isinstance(compute, e.Compute) and (compute.tier, compute.experts) == (1, (5,))


def test_an_engine_that_fails_ends_the_rows_that_want_its_experts_and_nothing_else() -> None:
    world = World([Tier("ram", 4, 4)], shared=())
    visit(world, 1, [3])
    land(world, 0)
    world.tell(e.Free(world.now()))
    del world.computing[0]
    told = world.tell(e.ComputeFailed(world.now(), 0, (3,), ErrorCode.KERNEL_FAILED, "the device is gone"))
    [failed] = [o for o in told if isinstance(o, e.FailExpert)]
    assert failed.is_wanted and (failed.key, failed.code) == ((1, 3), "kernel_failed")
    assert any(isinstance(o, e.Finish) for o in world.tell(e.Free(world.now())))


def test_what_a_predecessor_left_is_resident_and_what_does_not_fit_is_given_back() -> None:
    world = World([Tier("ram", 2, 4)])
    told = world.tell(e.LeftBehind(world.now(), 0, {0: (1, 1), 2: (1, 2), 3: (2, 0)}, True))
    [given] = [o for o in told if isinstance(o, e.GiveBack)]
    assert given.slots == (0,), "the coldest: the usage history has never heard of it"
    assert {slot.key for slot in world.state.table.slots if slot.key} == {(1, 2), (2, 0)}
