"""expert_io's shell: messages and what engines say become events, ``StoreState``'s instructions are carried out.

Decides nothing: what is read, computed and given up says ``state.py``; the numbers are ``layer_work.py``'s and the engines'.
There is one layer visit at a time (a step is at one layer). Between two pieces of work it looks at its messages, so a gate
result that arrives while the shared expert runs has its reads started at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from native.library import dispatch_text
from services.expert_io import engines
from services.expert_io.budget import Budget
from services.expert_io.engine import EngineSetup, ExpertEngine
from services.expert_io.events import (
    Cancel,
    CapacityChanged,
    Compute,
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
    ReadLanded,
    SayWarmed,
    Tick,
    VisitAbandoned,
    VisitBegan,
    VisitEnded,
)
from services.expert_io.history import History
from services.expert_io.layer_work import LayerWork, SharedExperts
from services.expert_io.state import StoreFacts, StoreState
from shared.container.reader import Container
from shared.errors import CapacityError, unknown_message
from shared.memory.big_memory import Home
from shared.messages.attention import StepAbandoned
from shared.messages.control import Ram, RamWanted
from shared.messages.expert_io import ExpertsWanted, PilotHint
from shared.messages.layer import HiddenReady, LayerFailed, Mixed
from shared.run.service import Service, ServiceContext
from shared.step.stages import Stage, pack_found
from shared.step.workplace import Workplace
from shared.wire.protocols import ControlBus

MIN_READS_TO_FILL = 2
"""Free slots are filled by at least so many reads at a time, and by twice the pieces that the drive takes at once."""
WORK_NS = 300_000
"""Where nothing can have to be read, pieces of work may follow each other so long before messages are looked at."""
AT_VISIT_END = ("hits", "late_hits", "misses", "pilot_useful", "ahead_useful", "expert_runs", "expert_rows")
"""Counters that every visit moves; the others change with reads."""


class ExpertIoService(Service):
    """See the module docstring."""

    name = "expert_io"
    receives = (HiddenReady, ExpertsWanted, PilotHint, StepAbandoned)

    def load(self, ctx: ServiceContext[ControlBus]) -> dict[str, str]:
        self._ctx = ctx
        config = ctx.config
        # colibri-up has refused mirrors that don't fit; one that broke since must not end a process that can do without.
        container = Container.open(
            Path(config.model_dir),
            config.mirrors,
            on_bad_mirror=lambda error: ctx.log.warning("mirror_left_out", reason=str(error)),
        )
        self._spec = spec = container.spec
        self._place = place = Workplace(config, self.name, spec)
        self.counters, self._timer = place.counters, place.timer
        layers = tuple(layer for layer in spec.moe_layers if layer < spec.n_layers or config.n_drafts)
        ctx.set_stage("load shared experts")
        home = Home.of(config, ctx.log)
        self._shared = place.keep(SharedExperts(container, layers, home))
        ctx.set_stage("allocate slots")
        self._budget = Budget(config, spec.gate_k)
        setup = EngineSetup(config, container, layers, place.pool, home, ctx.log.warning)
        self.engines, tiers = engines.open_engines(setup, self._budget.n_slots)
        for engine in self.engines:
            place.keep(engine)
        self._budgeted = next((i for i, engine in enumerate(self.engines) if engine.is_in_budget), None)
        self.history = History(config, ctx.log, layers, spec.n_experts)
        pieces = -(-config.slot_bytes // config.read_piece_bytes)
        facts = StoreFacts(
            layers,
            spec.n_layers,
            spec.n_experts,
            config.cache_policy,
            frozenset(self._shared.of_layer),
            max(MIN_READS_TO_FILL, -(-2 * config.read_depth // pieces)),
        )
        self.state = StoreState(tiers, facts, self.history.expected())
        self._is_predicting = config.pilot != "off"
        self._work = LayerWork(place.frames, spec, self._shared, place.pool)
        self._before = self.counters.read()  # of our predecessors
        self._message: HiddenReady | None = None  # of the visit under way, with its sender
        self._sender = ""
        self._early: ExpertsWanted | None = None
        self._wait_start_ns = 0
        self._has_news = False  # reads that the shared counters do not show yet
        # Experts that an earlier process left in named memory are resident from the start.
        for tier, engine in enumerate(self.engines):
            self._tell(LeftBehind(time.monotonic_ns(), tier, engine.residents(), self._budget.is_by_policy))
            for fd in engine.fds:
                ctx.bus.add_fd(fd, partial(self._on_engine, engine))
        self.publish()
        self.counters.set("pilot_paused", 0)
        found = {key: text for engine in self.engines for key, text in engine.facts().items()}
        if found.get("reads") == "buffered":
            reason = config.read_note if config.direct_io == "off" else "a file system has no direct reads"
            ctx.log.info("reads_buffered", path=config.model_dir, reason=reason or "direct_io is off")
        return {
            "kernels": dispatch_text(),
            "slots": str(self.state.table.capacity),
            "cache_policy": self.state.table.policy.name,
            **found,
            "adopted": str(self.state.table.n_used),
        }

    def tick(self) -> None:
        self._tell(Tick(time.monotonic_ns()))
        self.history.tick()

    def close(self) -> None:
        self.history.save()
        if self.state.guessing.account.recall_of:
            self._ctx.log.info("pilot_account", **self.state.guessing.summary())
        self._place.close()

    # -- messages become events ------------------------------------------------------------------------------

    def handle(self, msg: Any, sender: str) -> None:
        if isinstance(msg, HiddenReady):
            self._on_hidden(msg, sender)
        elif isinstance(msg, ExpertsWanted):
            self._on_wanted(msg)
        elif isinstance(msg, PilotHint):
            self._tell(Hinted(time.monotonic_ns(), msg.step, msg.layer, msg.experts, msg.signal))
        elif isinstance(msg, StepAbandoned):
            if self._message and self._message.step < msg.before:
                self._abandon()
        else:
            raise unknown_message(self.name, msg, sender)

    def _on_hidden(self, msg: HiddenReady, sender: str) -> None:
        if self._message:
            if msg.step < self._message.step:
                return
            self._abandon()
        self._message, self._sender = msg, sender
        self._wait_start_ns = 0
        self._work.begin(msg)
        # Chained drafts share a frame and must not overwrite each other's rows.
        begin = self._timer.begin_step if msg.layer < self._spec.n_layers else self._timer.continue_step
        begin(self._work.frame, msg.step)
        self._tell(VisitBegan(time.monotonic_ns(), msg.step, msg.layer, msg.n_rows))
        early = self._early
        # One for a later visit stays: what attention had sent of a step that was abandoned may come between.
        if early and (early.step, early.layer) <= (msg.step, msg.layer):
            self._early = None
            if (early.step, early.layer) == (msg.step, msg.layer):
                self._on_wanted(early)

    def _on_wanted(self, msg: ExpertsWanted) -> None:
        visit = self.state.visit
        if visit is None or (msg.step, msg.layer) > (visit.step, visit.layer):
            self._early = msg  # the router was faster than attention's own message
            return
        if (msg.step, msg.layer) != (visit.step, visit.layer) or visit.rows is not None:
            return
        is_timed = self._is_predicting and not msg.n_prefill and msg.layer < self._spec.n_layers
        with self._timer.stage(Stage.UNION, msg.layer) as stage:
            rows = self._work.sort()
            passing = self._work.passing(msg.n_prefill)
            self._tell(ExpertsChosen(time.monotonic_ns(), msg.step, msg.layer, rows, passing, is_timed))
            found = visit.found
            if found:
                stage.n_bytes = pack_found(found.n_hits, len(found.late), len(found.missing))

    def _abandon(self) -> None:
        self._message = None
        self._tell(VisitAbandoned(time.monotonic_ns()))

    def change_ram(self, msg: RamWanted) -> Ram:
        table, tier = self.state.table, self._budgeted
        refusal = ""
        if msg.budget_bytes and tier is None:
            refusal = "No expert of this group lies in memory that the budget pays; nothing could change."
        elif msg.budget_bytes and tier is not None:
            before = table.tiers[tier]
            try:
                self._budget.change(msg.budget_bytes, table.n_used_of(tier), before.n_reserved)
            except (CapacityError, OSError) as error:
                refusal = str(error)
            else:
                n_slots, is_by_policy = self._budget.n_slots, self._budget.is_by_policy
                expected = self.history.expected()
                self._tell(CapacityChanged(time.monotonic_ns(), tier, n_slots, is_by_policy, expected))
                self.publish()
                if n_slots != before.capacity:
                    self._ctx.log.info(
                        "ram_changed", budget_bytes=self._budget.n_bytes, slots=n_slots, before=before.capacity
                    )
        states = tuple((state.name, n) for state, n in sorted(table.count_states().items()))
        stories = tuple(table.describe(*slot) for slot in msg.slots)
        budget = self._budget
        return Ram(msg.asker, budget.n_bytes, budget.n_slots, table.n_used, table.n_leaving, refusal, states, stories)

    # -- what engines say --------------------------------------------------------------------------------------

    def _on_engine(self, engine: ExpertEngine) -> None:
        message = self._message
        if message is None or self._wait_start_ns or self.state.visit is None or self.state.visit.rows is None:
            self._hear(engine.take(time.monotonic_ns()))
            return
        with self._timer.stage(Stage.SLOTS, message.layer):
            self._hear(engine.take(time.monotonic_ns()))

    def _hear(self, events: Sequence[Event]) -> None:
        has_read = False
        for event in events:
            if isinstance(event, ReadLanded):
                has_read = True
                key = self.state.table.slots[event.slot].key
                layer = key[0] if key else -1
                self._timer.record(Stage.IO_READ, layer, event.start_ns, event.end_ns, event.n_bytes)
            self._tell(event)
        self._has_news |= has_read
        if has_read and self._message is None:
            self.publish()

    # -- instructions ----------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """What a piece of work leads to may be told while its instruction is carried out: ``Free`` gives one at a time."""
        for instruction in self.state.handle(event):
            self._carry_out(instruction)

    def _carry_out(self, order: Instruction) -> None:
        """The one place where something is done because the store wants it."""
        if isinstance(order, Compute):
            self._compute(order)
        elif isinstance(order, ComputeShared):
            self._timer.begin(Stage.SHARED_FFN, self._work.layer)
            self._work.run_shared(order.begin, order.end)
            self._timer.end()
        elif isinstance(order, Finish):
            self._finish()
        elif isinstance(order, Read):
            self.engines[order.tier].read(order)
        elif isinstance(order, Promote):
            self.engines[order.tier].promote(order.slot)
        elif isinstance(order, Cancel):
            self.engines[order.tier].cancel(order.slot)
        elif isinstance(order, GiveBack):
            self.engines[order.tier].give_back(order.slots)
        elif isinstance(order, FailExpert):
            layer, expert = order.key
            self._ctx.log.error(order.code, layer=layer, expert=expert, reason=order.message, story=order.story)
            if order.is_wanted:
                self._work.fail(expert, order.code, order.message)
        elif isinstance(order, SayWarmed):
            self._ctx.log.info("warmed", experts=order.n_experts, resident=self.state.table.n_used)

    def work(self) -> bool:
        """A piece of work, or more where messages can wait; True while there is more that needs no event."""
        if self._message is None:
            return False
        state = self.state
        begin_ns = now_ns = time.monotonic_ns()
        while True:
            is_at_work = False
            for order in state.handle(Free(now_ns)):
                if self._wait_start_ns:
                    self._end_wait(now_ns)
                self._carry_out(order)
                is_at_work = isinstance(order, (Compute, ComputeShared))
            if not is_at_work:
                if self._message and not self._wait_start_ns and state.visit and state.visit.rows is not None:
                    self._wait_start_ns = time.monotonic_ns()
                return False
            now_ns = time.monotonic_ns()
            if now_ns - begin_ns > WORK_NS or not state.has_all:
                return True

    def _end_wait(self, now_ns: int) -> None:
        self._timer.record(Stage.IO_WAIT, self._work.layer, self._wait_start_ns, now_ns)
        self.counters.add("io_wait_ns", now_ns - self._wait_start_ns)
        self._wait_start_ns = 0

    def _compute(self, order: Compute) -> None:
        engine, timer = self.engines[order.tier], self._timer
        n_bytes = len(order.experts) * self._ctx.config.slot_bytes
        timer.begin(Stage.EXPERT_FFN, self._work.layer)
        engine.start(order, self._work.work)
        if self.state.has_all:  # then little follows from what was computed
            self._hear(engine.take(time.monotonic_ns()))
            timer.end(n_bytes)
            return
        timer.end(n_bytes)
        events = engine.take(time.monotonic_ns())
        if events:
            timer.begin(Stage.SLOTS, self._work.layer)
            self._hear(events)
            timer.end()

    def _finish(self) -> None:
        message, work = self._message, self._work
        assert message is not None
        self._timer.begin(Stage.REDUCE, message.layer)
        work.add_up()
        self._timer.end()
        bus = self._ctx.bus
        faults = work.new_faults(message.step)
        for fault in faults:
            bus.post("router", LayerFailed(message.step, message.layer, fault.rows, fault.code, fault.message))
        self._message = None
        now_ns = time.monotonic_ns()
        bus.post(self._sender, Mixed(message.step, message.layer, message.frame, len(faults)))
        # From here on attention computes, and nobody waits for what is only counted.
        visit = self.state.visit
        self._tell(VisitEnded(now_ns))
        if visit and visit.rows:
            self.history.count(visit.layer, visit.rows, visit.passing)
        if self._has_news:
            self.publish()
        else:
            counts, counters, before = self.state.totals, self.counters, self._before
            for name in AT_VISIT_END:
                counters.set(name, before[name] + getattr(counts, name))
        self.counters.set("pilot_paused", int(self.state.is_guessing_paused))

    def publish(self) -> None:
        """What state and engines count goes into the shared counters."""
        self._has_news = False
        before, counters = self._before, self.counters
        totals = self.state.counts()
        for engine in self.engines:
            for name, total in engine.totals().items():
                totals[name] = totals.get(name, 0) + total
        for name, total in totals.items():
            counters.set(name, before[name] + total)
        gauges: dict[str, int] = {"slots": self.state.table.capacity, "resident": self.state.table.n_used}
        for engine in self.engines:
            for name, value in engine.gauges().items():
                gauges[name] = gauges.get(name, 0) + value
        for name, value in gauges.items():
            counters.set(name, value)
