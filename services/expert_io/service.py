"""expert_io's shell: layers asked for, experts read and run, the mixed rows handed on.

Owns one layer visit at a time (a step is at one layer). Between two pieces of work it looks at its messages, so a gate
result that arrives while the shared expert runs has its reads started at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.kernels import ExpertJobs, Ffn, expert_reduce, ffn_forward
from native.library import Pool, dispatch_text
from native.reader import Reader
from services.expert_io.budget import Budget
from services.expert_io.layer_run import LayerRun, ReadOrder
from services.expert_io.prefetch import Prefetch
from services.expert_io.slots import Slot, SlotState, SlotTable
from services.expert_io.store import ExpertStore, ReadFault
from services.expert_io.warm_up import WarmUp
from shared.container.format import owner_of
from shared.container.layer_weights import DensePart, ffn_of
from shared.container.reader import Container
from shared.experts.residency import make_policy
from shared.memory.big_memory import SHARED_EXPERTS, Home
from shared.memory.segments import Segment
from shared.messages.attention import StepAbandoned
from shared.messages.control import Ram, RamWanted
from shared.messages.expert_io import ExpertsWanted, PilotHint
from shared.messages.layer import HiddenReady, LayerFailed, Mixed
from shared.run.lifecycle import Service, ServiceContext
from shared.step.counters import Counters
from shared.step.frame import Frame, FrameSet, frame_dims
from shared.step.stages import Stage, StepTimer, pack_found

# One native call takes at most this many (row, expert) pairs, so that messages and reads are looked at in between.
PAIRS_PER_CALL = 256
SHARED_ROWS_PER_CALL = 128
FEW_PAIRS = 32
ROWS_PER_MESSAGE = 8192  # so that a long prompt whose every row is faulty stays below the largest frame


@dataclass
class Visit:
    """One layer of one step, from HiddenReady to Mixed."""

    step: int
    layer: int
    frame_number: int
    n_rows: int
    sender: str
    n_shared_done: int = 0
    run: LayerRun | None = None
    begin_ns: int = 0
    is_trial: bool = False  # decode rows alone, with a predictor at work
    rows_of: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = field(default_factory=dict)
    failed_rows: dict[int, ReadFault] = field(default_factory=dict)
    wait_start_ns: int = 0


class ExpertIoService(Service):
    """See the module docstring."""

    name = "expert_io"
    receives = (HiddenReady, ExpertsWanted, PilotHint, StepAbandoned)

    def load(self, ctx: ServiceContext) -> dict[str, str]:
        self._ctx = ctx
        config = ctx.config
        # colibri-up has refused mirrors that don't fit; one that broke since must not end a process that can do without.
        container = Container.open(
            Path(config.model_dir),
            config.mirrors,
            on_bad_mirror=lambda error: ctx.log.warning("mirror_left_out", reason=str(error)),
        )
        self._spec = spec = container.spec
        self._pool = Pool(config.n_threads)
        self._layers = tuple(layer for layer in spec.moe_layers if layer < spec.n_layers or config.n_drafts)
        ctx.set_stage("load shared experts")
        home = Home.of(config, ctx.log)
        self._part = DensePart(
            container,
            lambda e: owner_of(e.name, spec) == "shared" and int(e.name.split(".")[2]) in self._layers,
            SHARED_EXPERTS,
            home,
        )
        self._shared: dict[int, Ffn] = {}
        if spec.n_shared:
            self._shared = {
                layer: ffn_of(self._part.tensors, f"model.layers.{layer}.mlp.shared_experts.") for layer in self._layers
            }
        ctx.set_stage("allocate slots")
        self._budget = Budget(config, spec.gate_k)
        n_slots = self._budget.n_slots
        n_reserved = max(config.n_slots, config.reserved_slots)
        policy = make_policy(config.cache_policy, n_slots, self._layers, spec.n_experts)
        self._table = SlotTable(n_slots, policy, n_reserved)
        self._n_experts = len(self._layers) * spec.n_experts
        new_reader = partial(Reader, config.read_depth, config.read_piece_bytes, engine=config.read_engine)
        self._store = ExpertStore(
            container, self._layers, n_reserved, config.slot_bytes, config.direct_io, new_reader, ctx.log.warning, home
        )
        if not self._store.is_direct:
            reason = config.read_note if config.direct_io == "off" else "a file system has no direct reads"
            ctx.log.info("reads_buffered", path=config.model_dir, reason=reason or "direct_io is off")
        for reader in self._store.readers:
            ctx.bus.add_fd(reader.fd, self._on_reads)
        self._frames_segment = Segment.attach(config.run_id, "frames")
        self._frames = FrameSet(self._frames_segment.buf, frame_dims(config, spec), config.n_frames)
        self._counters_segment = Segment.attach(config.run_id, "counters")
        self._counters = Counters(self._counters_segment.buf, "expert_io")
        self._before = self._counters.read()  # of our predecessors
        self._prefetch = Prefetch(self._table, self._store, self._counters, spec, self._layers)
        self._warm_up = WarmUp(config, self._table, self._store, self._counters, ctx.log, self._layers, spec.n_experts)
        # Experts that an earlier process left in named memory are resident from the start.
        left = self._warm_up.coldest_first(self._store.residents(self._layers))
        self._table.adopt(left, is_by_policy=self._budget.is_by_policy)
        self._timer = StepTimer("expert_io")
        n_rows = len(self._frames.frame(0).token)
        self._parts = np.empty((n_rows * spec.gate_k, spec.hidden), np.float32)
        self._shared_out = np.zeros((n_rows, spec.hidden), np.float32)
        self._order = np.tile(np.arange(spec.gate_k, dtype=np.int32), (n_rows, 1))
        self._jobs = ExpertJobs(max(spec.n_experts, 1), n_rows * spec.gate_k)
        self._visit: Visit | None = None
        self._last_end = (-1, 0)  # of the last visit: step, time
        self._told: tuple[int, set[int]] = (-1, set())  # rows of this step that the router knows to be faulty
        self._early: ExpertsWanted | None = None
        self._counters.set("slots", n_slots)
        self._counters.set("resident", self._table.n_used)
        self._counters.set("pilot_paused", 0)
        return {
            "kernels": dispatch_text(),
            "slots": str(n_slots),
            "cache_policy": policy.name,
            "reads": "direct" if self._store.is_direct else "buffered",
            "read_engine": self._store.readers[0].engine,
            "read_pieces": f"{config.read_depth} x {config.read_piece_bytes}",
            "memory": self._store.slab.describe(),
            "adopted": str(self._table.n_used),
        }

    def tick(self) -> None:
        self._give_back()
        self._warm_up.tick()

    def close(self) -> None:
        self._warm_up.save()
        if self._prefetch.account.recall_of:
            self._ctx.log.info("pilot_account", **self._prefetch.summary())
        self._store.close()
        self._pool.close()
        self._part.close()
        self._frames_segment.close()
        self._counters_segment.close()

    # -- the budget ------------------------------------------------------------------------------------------

    def change_ram(self, msg: RamWanted) -> Ram:
        n_before = self._table.capacity
        answer = self._budget.answer(msg, self._table, self._warm_up.expected, self._prefetch.stop)
        self._give_back()
        if self._table.capacity != n_before:
            self._counters.set("slots", answer.n_slots)
            self._ctx.log.info("ram_changed", budget_bytes=answer.budget_bytes, slots=answer.n_slots, before=n_before)
            self._warm_up.plan()
        if self._visit and self._visit.run:
            self._issue(self._visit.run.more_reads())
        return answer

    def _give_back(self) -> None:
        """The memory of slots that are too many goes back to the system."""
        gone = self._table.take_gone()
        if gone:
            self._store.give_back(gone)
            self._publish()

    # -- messages --------------------------------------------------------------------------------------------

    def handle(self, msg: Any, sender: str) -> None:
        if isinstance(msg, HiddenReady):
            self._begin(msg, sender)
        elif isinstance(msg, ExpertsWanted):
            self._on_wanted(msg)
        elif isinstance(msg, PilotHint):
            self._prefetch.hinted(msg, self._visit.run if self._visit else None)
        elif isinstance(msg, StepAbandoned) and self._visit and self._visit.step < msg.before:
            self._abandon()

    def _begin(self, msg: HiddenReady, sender: str) -> None:
        if self._visit:
            if msg.step < self._visit.step:
                return
            self._abandon()
        self._visit = Visit(msg.step, msg.layer, msg.frame, msg.n_rows, sender, begin_ns=time.monotonic_ns())
        # Chained drafts share a frame and must not overwrite each other's rows.
        begin = self._timer.begin_step if msg.layer < self._spec.n_layers else self._timer.continue_step
        begin(self._frame(self._visit), msg.step)
        early, self._early = self._early, None
        if early and (early.step, early.layer) == (msg.step, msg.layer):
            self._on_wanted(early)

    def _on_wanted(self, msg: ExpertsWanted) -> None:
        visit = self._visit
        if visit is None or (msg.step, msg.layer) > (visit.step, visit.layer):
            self._early = msg  # the router was faster than attention's own message
            return
        if (msg.step, msg.layer) != (visit.step, visit.layer) or visit.run:
            return
        frame = self._frame(visit)
        visit.is_trial = self._ctx.config.pilot != "off" and not msg.n_prefill and visit.layer < self._spec.n_layers
        with self._timer.stage(Stage.UNION, visit.layer) as stage:
            experts = self._batch_union(visit, frame.gate_id[: visit.n_rows])
            passing = self._passing(visit, msg.n_prefill)
            visit.run = run = LayerRun(visit.step, visit.layer, experts, self._table, passing)
            for slot in run.start():
                self._store.promote(slot)
            self._issue(run.more_reads())
            self._prefetch.visit_began(run)
            counters = visit.run.counters
            stage.n_bytes = pack_found(counters.hits, counters.late_hits, counters.misses)

    def _account(self, run: LayerRun) -> None:
        """What a visit found, booked once it is over."""
        counters = run.counters
        self._counters.add("hits", counters.hits)
        self._counters.add("late_hits", counters.late_hits)
        self._counters.add("misses", counters.misses)
        self._counters.add("pilot_useful", counters.useful_guesses)
        self._counters.add("ahead_useful", counters.useful_ahead)

    def _batch_union(self, visit: Visit, gate_id: NDArray[np.int32]) -> list[int]:
        """The distinct experts, ascending; fills ``rows_of``: expert -> (rows, places in parts)."""
        flat = gate_id.ravel()
        k = self._spec.gate_k
        if len(flat) <= FEW_PAIRS:  # decode: plain loops beat a dozen array operations
            places_of: dict[int, list[int]] = {}
            for place, expert in enumerate(flat.tolist()):
                places_of.setdefault(expert, []).append(place)
            for expert, found in places_of.items():
                visit.rows_of[expert] = (np.array([p // k for p in found], np.int32), np.array(found, np.int32))
            return sorted(places_of)
        places = np.argsort(flat, kind="stable").astype(np.int32)
        distinct, starts = np.unique(flat[places], return_index=True)
        ends = np.append(starts[1:], len(flat))
        rows = places // k
        union: list[int] = distinct.tolist()
        for expert, start, end in zip(union, starts.tolist(), ends.tolist(), strict=True):
            visit.rows_of[expert] = (rows[start:end], places[start:end])
        return union

    @staticmethod
    def _passing(visit: Visit, n_prefill: int) -> dict[int, float]:
        """The experts that no decode row wants, with the share of the prompt's rows (the last ones) that chose them."""
        if not n_prefill:
            return {}
        n_decode = visit.n_rows - n_prefill
        return {e: len(rows) / n_prefill for e, (rows, _) in visit.rows_of.items() if rows[0] >= n_decode}

    def _issue(self, orders: Iterable[ReadOrder]) -> None:
        for order in orders:
            self._store.start_read(order.slot, speculative=False)

    # -- work ------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """One piece of work; True while there is more that needs no event."""
        visit = self._visit
        if visit is None:
            return False
        run = visit.run
        if run is None:
            # Where experts will have to be read, the shared one fills the time of waiting for them.
            return self._table.n_used >= self._n_experts and self._run_shared(visit)
        if run.has_ready:
            self._end_wait(visit)
            self._run_ready(visit, run)
            return True
        if self._run_shared(visit):
            return True
        if run.is_done:
            self._end_wait(visit)
            self._reduce(visit)
            return False
        if run.is_starved:
            self._prefetch.stop_all()
        if not visit.wait_start_ns:
            visit.wait_start_ns = time.monotonic_ns()
        return False

    def _end_wait(self, visit: Visit) -> None:
        if visit.wait_start_ns:
            self._timer.record(Stage.IO_WAIT, visit.layer, visit.wait_start_ns, time.monotonic_ns())
            self._counters.add("io_wait_ns", time.monotonic_ns() - visit.wait_start_ns)
            visit.wait_start_ns = 0

    def _run_shared(self, visit: Visit) -> bool:
        """A part of the shared expert's rows. True when it did something."""
        ffn = self._shared.get(visit.layer)
        if ffn is None or visit.n_shared_done == visit.n_rows:
            return False
        self._end_wait(visit)
        rows = slice(visit.n_shared_done, min(visit.n_rows, visit.n_shared_done + SHARED_ROWS_PER_CALL))
        with self._timer.stage(Stage.SHARED_FFN, visit.layer):
            ffn_forward(self._pool, ffn, self._frame(visit).hidden[rows], self._shared_out[rows], add=False)
        visit.n_shared_done = rows.stop
        return True

    def _run_ready(self, visit: Visit, run: LayerRun) -> None:
        """Experts that lie in slots, as many as one native call should take."""
        taken: list[int] = []
        n_pairs = 0
        self._jobs.clear()
        with self._timer.stage(Stage.EXPERT_FFN, visit.layer) as stage:
            while n_pairs < PAIRS_PER_CALL:
                ready = run.take_ready(1)
                if not ready:
                    break
                expert, slot = ready[0]
                rows, places = visit.rows_of[expert]
                self._jobs.add(self._store.ffn(slot), rows, places)
                taken.append(expert)
                n_pairs += len(rows)
            self._jobs.run(self._pool, self._frame(visit).hidden, self._parts)
            stage.n_bytes = len(taken) * self._store.slab.slot_bytes
        self._counters.add("expert_runs", len(taken))
        self._counters.add("expert_rows", n_pairs)
        run.computed(taken)
        self._give_back()
        with self._timer.stage(Stage.SLOTS, visit.layer):
            self._issue(run.more_reads())
            self._prefetch.go_on(run)

    def _reduce(self, visit: Visit) -> None:
        frame = self._frame(visit)
        n = visit.n_rows
        for row in visit.failed_rows:
            self._parts[row * self._spec.gate_k : (row + 1) * self._spec.gate_k] = 0.0
        with self._timer.stage(Stage.REDUCE, visit.layer):
            bad = expert_reduce(
                self._pool,
                self._parts,
                frame.gate_weight[:n],
                self._order[:n],
                self._shared_out[:n] if self._shared else None,
                frame.mixed[:n],
            )
        if bad >= 0:
            self._find_non_finite(visit, frame)
        n_faults = self._tell_faults(visit)
        self._visit = None
        now = time.monotonic_ns()
        # With the attention before it, whose cores a guess borrows; a step's first layer has head and sampling before it.
        before = self._last_end if self._last_end[0] == visit.step else (visit.step, visit.begin_ns)
        took_ns, self._last_end = now - before[1], (visit.step, now)
        self._ctx.bus.post(visit.sender, Mixed(visit.step, visit.layer, visit.frame_number, n_faults))
        # From here on attention computes, and nobody waits for what is only counted.
        assert visit.run
        self._account(visit.run)
        self._warm_up.count(visit.run)
        if visit.is_trial:
            self._prefetch.trial.visited(visit.step, took_ns)
        has_all = self._table.n_used >= self._n_experts  # then a guess can't tell the store anything
        self._counters.set("pilot_paused", int(has_all or not self._prefetch.trial.is_on))

    def _tell_faults(self, visit: Visit) -> int:
        """Tells the router which rows have no true result, each once a step; returns in how many messages."""
        if self._told[0] != visit.step:
            self._told = (visit.step, set())
        told = self._told[1]
        rows_of: dict[tuple[str, str], list[int]] = {}
        for row, fault in sorted(visit.failed_rows.items()):
            if row not in told:
                rows_of.setdefault((fault.code, fault.message), []).append(row)
        told.update(visit.failed_rows)
        n_told = 0
        for (code, message), rows in rows_of.items():
            for first in range(0, len(rows), ROWS_PER_MESSAGE):
                part = tuple(rows[first : first + ROWS_PER_MESSAGE])
                self._ctx.bus.post("router", LayerFailed(visit.step, visit.layer, part, code, message))
                n_told += 1
        return n_told

    def _find_non_finite(self, visit: Visit, frame: Frame) -> None:
        """Name the expert whose output is not finite and stop it from spreading."""
        n, k = visit.n_rows, self._spec.gate_k
        for row in np.flatnonzero(~np.isfinite(frame.mixed[:n]).all(axis=1)).tolist():
            parts = self._parts[row * k : (row + 1) * k]
            culprits = np.flatnonzero(~np.isfinite(parts).all(axis=1))
            who = f"expert {int(frame.gate_id[row, culprits[0]])}" if len(culprits) else "the shared expert or the sum"
            frame.mixed[row] = 0.0
            visit.failed_rows.setdefault(
                row,
                ReadFault(
                    (visit.layer, -1),
                    "non_finite",
                    f"The output of {who} in layer {visit.layer} is not finite for one row. The request was ended; others "
                    "go on.",
                ),
            )

    def _abandon(self) -> None:
        visit, self._visit = self._visit, None
        self._prefetch.forget()
        if visit and visit.run:
            visit.run.abandon()
            self._give_back()
            self._account(visit.run)

    # -- reads -----------------------------------------------------------------------------------------------

    def _on_reads(self) -> None:
        visit = self._visit
        if visit is None or visit.run is None or visit.wait_start_ns:
            self._take_reads()
            return
        with self._timer.stage(Stage.SLOTS, visit.layer):
            self._take_reads()

    def _take_reads(self) -> None:
        for slot, done, fault in self._store.finished():
            visit = self._visit
            self._timer.record(Stage.IO_READ, slot.key[0] if slot.key else -1, done.start_ns, done.end_ns, done.bytes)
            self._warm_up.read_ended(slot)
            if slot.key:
                self._prefetch.account.read_ended(slot.key, done.start_ns, done.end_ns)
            if slot.is_doomed or done.cancelled:
                self._table.release(slot)
            elif fault is None:
                self._table.loaded(slot)
                if visit and visit.run and slot.key:
                    visit.run.arrived(slot.key)
            else:
                self._read_failed(visit, slot, fault)
            if visit and visit.run:
                self._issue(visit.run.more_reads())
        self._give_back()
        self._prefetch.go_on(self._visit.run if self._visit else None)
        self._publish()

    def _publish(self) -> None:
        """What the read pool and the slot table count themselves goes into the shared counters."""
        counters, totals = self._store.counters(), self._prefetch.account.totals
        for name, total in (
            ("bytes_demand", counters.bytes_demand),
            ("bytes_speculative", counters.bytes_speculative),
            ("reads", counters.n_reads),
            ("retries", counters.n_retries),
            ("io_busy_ns", counters.busy_ns),
            ("evictions", self._table.n_evicted),
            ("pilot_wasted", self._table.n_guesses_wasted),
            ("ahead_wasted", self._table.n_ahead_wasted),
            ("pilot_saved_ns", totals.saved_ns),
            ("pilot_lost_ns", totals.lost_ns),
            ("pilot_wanted", totals.wanted),
            ("pilot_right", totals.right),
            ("copy_faults", self._store.n_copy_faults),
        ):
            self._counters.set(name, self._before[name] + total)
        self._counters.set("resident", self._table.n_used)
        self._counters.set("copies_damaged", self._store.n_copies_damaged)
        self._counters.set("places_resting", self._store.n_places_resting)

    def _read_failed(self, visit: Visit | None, slot: Slot, fault: ReadFault) -> None:
        self._counters.add("read_errors", 1)
        self._ctx.log.error("expert_read_failed", layer=fault.key[0], expert=fault.key[1], reason=fault.message)
        if visit and visit.run and visit.run.failed(fault.key):
            for row in visit.rows_of[fault.key[1]][0].tolist():
                # Of several the lowest expert's, so that the order of reads does not show.
                visit.failed_rows[row] = min(visit.failed_rows.get(row, fault), fault, key=lambda f: f.key)
        assert slot.state is SlotState.LOADING
        self._table.release(slot)

    def _frame(self, visit: Visit) -> Frame:
        return self._frames.frame(visit.frame_number)
