"""The store's one decider: events in, instructions out. Pure: it reads, computes and sends nothing and looks at no clock.

``StoreState`` joins what decides about one thing each: ``slots.py`` (who has which slot, who leaves), ``visit.py`` (one layer's
visit), ``guessing.py`` with ``pilot.py`` (what to read before it is asked for, and whether that is worth it), ``filling.py``
(what to read in idle time). It knows tiers, not engines: where an expert lies and who computes it makes no difference here.

    for instruction in state.handle(event):
        carry_out(instruction)

Each instruction is to be carried out before the next is asked for: reads come as they are decided, for the drive may be idle.
All of them must be taken. An event's number stands in its instructions and in the stories of the slots that it moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.expert_io.events import (
    Cancel,
    CapacityChanged,
    Compute,
    Computed,
    ComputeFailed,
    ComputeShared,
    Event,
    ExpertsChosen,
    FailExpert,
    Finish,
    Free,
    GiveBack,
    Hinted,
    Instruction,
    LeftBehind,
    Promote,
    Read,
    ReadCancelled,
    ReadFailed,
    ReadLanded,
    SayWarmed,
    Tick,
    VisitAbandoned,
    VisitBegan,
    VisitEnded,
)
from services.expert_io.filling import Filling
from services.expert_io.guessing import Guessing
from services.expert_io.slots import Slot, SlotTable, Tier
from services.expert_io.states import AWAITED, CANCELLED, FILLING, HELD, READING
from services.expert_io.visit import Visit
from shared.errors import StoreError
from shared.experts.residency import POLICIES, KeepAll, Key, make_policy

PAIRS_PER_CALL = 256
"""An engine is given at most about this many (row, expert) pairs at once, so that messages and reads are looked at between."""
SHARED_ROWS_PER_CALL = 128


@dataclass(frozen=True)
class StoreFacts:
    """What does not change while a store lives. ``layers``: those with experts, the ones from ``n_layers`` on being MTP's."""

    layers: tuple[int, ...]
    n_layers: int
    n_experts: int
    cache_policy: str = "next-use"
    shared_layers: frozenset[int] = frozenset()
    n_reads_to_fill: int = 2


@dataclass
class StoreTotals:
    """What happened since the start."""

    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    pilot_useful: int = 0
    ahead_useful: int = 0
    read_errors: int = 0
    expert_runs: int = 0
    expert_rows: int = 0


class _Batch(NamedTuple):
    """What an engine works on."""

    visit: Visit
    experts: tuple[int, ...]
    slots: tuple[Slot, ...]


class StoreState:
    """See the module docstring. Instructions name slots; ``table.slots`` has them."""

    def __init__(self, tiers: Sequence[Tier], facts: StoreFacts, expected: dict[Key, float] | None = None) -> None:
        """``expected``: uses per step by experience, the warmest first."""
        self.facts = facts
        n_slots = sum(tier.capacity for tier in tiers)
        policy = make_policy(facts.cache_policy, n_slots, facts.layers, facts.n_experts)
        policy.restore(expected or {})
        self.table = SlotTable(tiers, policy)
        self.guessing = Guessing(self.table, facts.layers, facts.n_layers, facts.n_experts)
        self.filling = Filling(self.table, facts.n_reads_to_fill)
        self.filling.plan(expected or {})
        self.visit: Visit | None = None
        self.totals = StoreTotals()
        self.stimulus = 0
        self._n_all = len(facts.layers) * facts.n_experts
        self._batches: dict[int, _Batch] = {}  # by tier
        self._last_end = (-1, 0)  # of the last visit: step, time
        self._handlers: dict[type[Event], Callable[[Any], Iterable[Instruction]]] = {
            VisitBegan: self._visit_began,
            ExpertsChosen: self._experts_chosen,
            Hinted: self._hinted,
            ReadLanded: self._read_ended,
            ReadFailed: self._read_ended,
            ReadCancelled: self._read_ended,
            Free: self._free,
            Computed: self._computed,
            ComputeFailed: self._compute_failed,
            VisitEnded: self._visit_ended,
            VisitAbandoned: self._visit_abandoned,
            LeftBehind: self._left_behind,
            CapacityChanged: self._capacity_changed,
            Tick: self._tick,
        }

    def handle(self, event: Event) -> Iterable[Instruction]:
        """What is to be done about it. Raises StoreError with a slot's story when the event can't be."""
        self.stimulus += 1
        self.table.stimulus, self.table.cause = self.stimulus, event
        return self._handlers[type(event)](event)

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def has_all(self) -> bool:
        """Every expert has a slot or is on its way to one: nothing has to be read any more."""
        return self.table.n_experts == self._n_all

    @property
    def is_computing(self) -> bool:
        """An engine is at work."""
        return bool(self._batches)

    @property
    def has_orphans(self) -> bool:
        """An engine still works for a visit that was abandoned: it may write where the next one's results go."""
        return bool(self._batches) and any(batch.visit is not self.visit for batch in self._batches.values())

    @property
    def is_guessing_paused(self) -> bool:
        """Guesses can't tell the store anything, or are not worth it at present."""
        return self.has_all or not self.guessing.trial.is_on

    def counts(self) -> dict[str, int]:
        """All totals and the present state, by the names of the shared counters."""
        totals, table, guessing = self.totals, self.table, self.guessing
        worth = guessing.account.totals
        return {
            "hits": totals.hits,
            "late_hits": totals.late_hits,
            "misses": totals.misses,
            "pilot_useful": totals.pilot_useful,
            "ahead_useful": totals.ahead_useful,
            "read_errors": totals.read_errors,
            "expert_runs": totals.expert_runs,
            "expert_rows": totals.expert_rows,
            "pilot_reads": guessing.n_reads,
            "ahead_reads": guessing.n_ahead_reads,
            "warm_reads": self.filling.n_read,
            "evictions": table.n_evicted,
            "pilot_wasted": table.n_guesses_wasted,
            "ahead_wasted": table.n_ahead_wasted,
            "pilot_saved_ns": worth.saved_ns,
            "pilot_lost_ns": worth.lost_ns,
            "pilot_wanted": worth.wanted,
            "pilot_right": worth.right,
        }

    # -- a visit ---------------------------------------------------------------------------------------------

    def _visit_began(self, event: VisitBegan) -> Iterable[Instruction]:
        assert self.visit is None, "a visit begins before the last one has ended"
        has_shared = event.layer in self.facts.shared_layers
        self.visit = Visit(self.table, event.step, event.layer, event.n_rows, event.now_ns, has_shared=has_shared)
        return ()

    def _experts_chosen(self, event: ExpertsChosen) -> Iterable[Instruction]:
        visit = self.visit
        assert visit and visit.rows is None and (visit.step, visit.layer) == (event.step, event.layer)
        visit.is_timed = event.is_timed
        found = visit.look_up(event.rows, event.passing)
        totals = self.totals
        totals.hits += found.n_hits
        totals.late_hits += len(found.late)
        totals.misses += len(found.missing)
        totals.pilot_useful += len(found.right)
        totals.ahead_useful += found.n_right_ahead
        stimulus = self.stimulus
        for slot in found.late:
            yield Promote(stimulus, slot.tier, slot.index)
        if found.missing:
            yield from self._reads_for_visit()
        for slot in self.guessing.judge(visit, found, event.now_ns):
            yield self._call_off(slot)
        yield from self._guessed_reads(event)

    def _free(self, event: Free) -> Iterable[Instruction]:
        """One piece of work at a time: experts that are there, then the shared one, then the sum."""
        visit = self.visit
        if visit is None or self.has_orphans:
            return ()
        if visit.rows is None:
            # Where experts will have to be read, the shared one fills the time of waiting for them.
            return self._share(visit) if self.has_all else ()
        if visit.has_ready:
            experts, slots = visit.take_ready(PAIRS_PER_CALL, self._batches)
            if experts:
                tier = slots[0].tier
                self._batches[tier] = _Batch(visit, experts, slots)
                self.totals.expert_runs += len(experts)
                self.totals.expert_rows += sum([visit.rows[expert] for expert in experts])
                return (Compute(self.stimulus, tier, experts, tuple([slot.index for slot in slots])),)
        shared = self._share(visit)
        if shared:
            return shared
        if visit.is_done:
            return (Finish(self.stimulus),)
        if visit.is_starved and not self._batches:
            return [self._call_off(slot) for slot in self.table.guesses_in_flight()]
        return ()

    def _share(self, visit: Visit) -> Iterable[Instruction]:
        begin = visit.n_shared_done
        if begin == visit.n_rows:
            return ()
        visit.n_shared_done = min(visit.n_rows, begin + SHARED_ROWS_PER_CALL)
        return (ComputeShared(self.stimulus, begin, visit.n_shared_done),)

    def _computed(self, event: Computed) -> Iterable[Instruction]:
        visit, experts, slots = self._batches.pop(event.tier)
        if visit is self.visit:
            gone = visit.computed(experts)
        else:
            now = self.visit
            gone = [slot.index for slot in slots if not (now and now.holds(slot)) and self.table.let_go(slot)]
        if gone or (self.visit and self.visit.has_pending) or self.guessing.has_reads(self.visit):
            return self._after_computing(event, gone)
        return ()

    def _after_computing(self, event: Event, gone: list[int]) -> Iterator[Instruction]:
        yield from self._given_back(gone)
        yield from self._reads_for_visit()
        yield from self._guessed_reads(event)

    def _compute_failed(self, event: ComputeFailed) -> Iterator[Instruction]:
        batch = self._batches[event.tier]
        yield from self._computed(event)
        for expert, slot in zip(batch.experts, batch.slots, strict=True):
            key = (batch.visit.layer, expert)
            story = self.table.brief_story(slot.index)
            yield FailExpert(self.stimulus, key, event.code, event.message, batch.visit is self.visit, story)

    def _visit_ended(self, event: VisitEnded) -> Iterable[Instruction]:
        visit, self.visit = self.visit, None
        assert visit and visit.is_done
        # With the attention before it, whose cores a guess borrows; a step's first layer has head and sampling before it.
        begin_ns = self._last_end[1] if self._last_end[0] == visit.step else visit.begin_ns
        self._last_end = (visit.step, event.now_ns)
        if visit.is_timed:
            self.guessing.trial.visited(visit.step, event.now_ns - begin_ns)
        return ()

    def _visit_abandoned(self, event: VisitAbandoned) -> Iterable[Instruction]:
        visit, self.visit = self.visit, None
        self.guessing.forget()
        if visit is None:
            return ()
        in_use = {slot.index for batch in self._batches.values() for slot in batch.slots}
        return self._given_back(visit.abandon(in_use))

    def _being_computed(self, visit: Visit) -> list[int]:
        return [expert for batch in self._batches.values() if batch.visit is visit for expert in batch.experts]

    # -- reads -----------------------------------------------------------------------------------------------

    def _reads_for_visit(self) -> Iterator[Instruction]:
        if self.visit:
            for slot in self.visit.more_reads():
                yield self._read(slot, is_speculative=False)

    def _guessed_reads(self, event: Event) -> Iterable[Instruction]:
        if not self.guessing.has_reads(self.visit):
            return ()
        reads = self.guessing.reads(self.visit, event.now_ns)
        return (self._read(slot, is_speculative=True) for slot in reads)

    def _fills(self) -> Iterator[Instruction]:
        for slot in self.filling.reads():
            yield self._read(slot, is_speculative=True)

    def _read(self, slot: Slot, *, is_speculative: bool) -> Read:
        assert slot.key is not None
        return Read(self.stimulus, slot.tier, slot.index, slot.generation, slot.key, is_speculative)

    def _call_off(self, slot: Slot) -> Cancel:
        self.table.call_off(slot)
        return Cancel(self.stimulus, slot.tier, slot.index)

    def _given_back(self, slots: Sequence[int]) -> list[Instruction]:
        """For slots that are absent now, by tier."""
        of_tier: dict[int, list[int]] = {}
        for index in slots:
            of_tier.setdefault(self.table.slots[index].tier, []).append(index)
        return [GiveBack(self.stimulus, tier, tuple(indices)) for tier, indices in of_tier.items()]

    def _hinted(self, event: Hinted) -> Iterable[Instruction]:
        return self._guessed_reads(event) if self.guessing.hinted(event, self.visit) else ()

    def _read_ended(self, event: ReadLanded) -> Iterator[Instruction]:
        table, slot = self.table, self.table.slots[event.slot]
        if slot.state not in READING or slot.generation != event.generation or slot.key is None:
            raise table.fault(slot, f"a read of generation {event.generation} ended in it")
        visit, key = self.visit, slot.key
        is_filler = self.filling.ended(key)
        if is_filler:
            yield from self._fills()
        self.guessing.account.read_ended(key, event.start_ns, event.end_ns)
        if slot.state is CANCELLED or type(event) is ReadCancelled:
            is_gone = table.free(slot)
        elif not isinstance(event, ReadFailed):
            is_gone = table.landed(slot)
            if visit and slot.state is HELD:
                visit.landed(slot)
        else:
            self.totals.read_errors += 1
            is_wanted = visit is not None and visit.failed(slot)
            story = table.brief_story(slot.index)
            is_gone = table.free(slot)
            yield FailExpert(self.stimulus, key, event.code, event.message, is_wanted, story)
        if is_gone:
            yield from self._given_back([slot.index])
        yield from self._reads_for_visit()
        yield from self._guessed_reads(event)
        if is_filler and not self.filling.in_flight:
            yield SayWarmed(self.stimulus, self.filling.n_read)

    # -- the capacity, idle time -----------------------------------------------------------------------------

    def _left_behind(self, event: LeftBehind) -> Iterable[Instruction]:
        residents = self.filling.coldest_first(event.residents)
        return self._given_back(self.table.adopt(event.tier, residents, is_by_policy=event.is_by_policy))

    def _capacity_changed(self, event: CapacityChanged) -> Iterator[Instruction]:
        table, facts = self.table, self.facts
        before = table.tiers[event.tier].capacity
        if isinstance(table.policy, KeepAll) and event.n_slots < before:
            n_slots = table.capacity - before + event.n_slots
            policy = POLICIES[facts.cache_policy](n_slots, facts.layers)
            policy.restore(event.expected)
            table.replace_policy(policy)
        resized = table.resize(event.tier, event.n_slots, is_by_policy=event.is_by_policy)
        for slot in resized.in_flight:
            yield self._call_off(slot)
        yield from self._given_back(resized.gone)
        if event.n_slots != before:
            self.filling.plan(event.expected)
        yield from self._reads_for_visit()

    def _tick(self, event: Tick) -> Iterable[Instruction]:
        return self._fills()

    # -- invariants ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What always holds between two events; raises StoreError with the story of a slot that breaks it."""
        table, visit = self.table, self.visit
        table.check()
        held: set[int] = set()
        for batch in self._batches.values():
            for expert, slot in zip(batch.experts, batch.slots, strict=True):
                if slot.state is not HELD or slot.key != (batch.visit.layer, expert):
                    raise table.fault(slot, f"an engine computes expert {expert} there")
                held.add(slot.index)
        if visit:
            visit.check(self._being_computed(visit))
            held |= visit.held_slots
        for slot in table.slots:
            if (slot.state is HELD or slot.state is AWAITED) and slot.index not in held:
                raise table.fault(slot, "nobody holds it")
        for key in self.filling.in_flight:
            found = table.find(key)
            if found is None or found.state not in (FILLING, AWAITED):
                raise StoreError(f"expert {key} is said to be on its way into a free slot, but lies in {found}")
        is_stuck = visit and visit.is_starved and not self._batches
        if visit and is_stuck and not any(slot.state in READING for slot in table.slots):
            raise StoreError(f"the visit of layer {visit.layer} waits for slots, and nothing will free one")
