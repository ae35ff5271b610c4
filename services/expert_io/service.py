"""expert_io's shell: layers asked for, experts read and run, the mixed rows handed on.

Owns one layer visit at a time (a step is at one layer). Between two pieces of work it looks at its messages, so a gate
result that arrives while the shared expert runs has its reads started at once.
"""

from __future__ import annotations

import time
from collections import deque
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
from services.expert_io.pilot import Hints, PilotAccount, PilotTrial
from services.expert_io.slots import Slot, SlotState, SlotTable
from services.expert_io.store import ExpertStore, ReadFault
from shared.big_memory import SHARED_EXPERTS, Home
from shared.container.format import owner_of
from shared.container.reader import Container
from shared.counters import Counters
from shared.frame import Frame, FrameSet, frame_dims
from shared.layer_weights import DensePart, ffn_of
from shared.lifecycle import Service, ServiceContext
from shared.messages.attention import StepAbandoned
from shared.messages.control import Ram, RamWanted
from shared.messages.expert_io import ExpertsWanted, PilotHint
from shared.messages.layer import HiddenReady, LayerFailed, Mixed
from shared.residency import Key, make_policy
from shared.segments import Segment
from shared.stages import Stage, StepTimer, pack_found
from shared.usage import WRITE_EVERY_S, UsageHistory, load_usage, save_usage

# One native call takes at most this many (row, expert) pairs, so that messages and reads are looked at in between.
PAIRS_PER_CALL = 256
SHARED_ROWS_PER_CALL = 128
FEW_PAIRS = 32
# Guesses hold at most this share of the slots at a time until they turn out right or wrong.
GUESS_SHARE = 0.25
# Guesses in flight: enough that the disk does not wait for us between two, few enough to stop at once.
GUESS_READS = 2
# Reads that fill free slots while the disk is idle: enough to keep it busy, few enough to be forgotten soon.
WARM_READS = 2
# A prompt that wants at least this share of a layer's experts will want as many of the next: they are read ahead unasked.
AHEAD_SHARE = 0.5


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
        self._load_usage()
        self._adopt()
        self._pilot = PilotAccount()
        self._last_end = (-1, 0)  # of the last visit: step, time
        self._trial = PilotTrial(max(1, sum(layer < spec.n_layers for layer in self._layers)))
        self._ahead: deque[Key] = deque()  # of the next layer, in file order
        self._ahead_room = 0
        self._hints = Hints()
        self._frames_segment = Segment.attach(config.run_id, "frames")
        self._frames = FrameSet(self._frames_segment.buf, frame_dims(config, spec), config.n_frames)
        self._counters_segment = Segment.attach(config.run_id, "counters")
        self._counters = Counters(self._counters_segment.buf, "expert_io")
        self._before = self._counters.read()  # of our predecessors
        self._timer = StepTimer("expert_io")
        n_rows = len(self._frames.frame(0).token)
        self._parts = np.empty((n_rows * spec.gate_k, spec.hidden), np.float32)
        self._shared_out = np.zeros((n_rows, spec.hidden), np.float32)
        self._order = np.tile(np.arange(spec.gate_k, dtype=np.int32), (n_rows, 1))
        self._jobs = ExpertJobs(max(spec.n_experts, 1), n_rows * spec.gate_k)
        self._visit: Visit | None = None
        self._early: ExpertsWanted | None = None
        self._counters.set("slots", n_slots)
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
        self._warm_up()
        if time.monotonic() >= self._save_at:
            self._save_usage()

    def close(self) -> None:
        self._save_usage()
        if self._pilot.recall_of:
            recall = [(*at, round(right / n, 3)) for at, (right, n) in sorted(self._pilot.recall_of.items())]
            totals = self._pilot.totals
            saved_ms, lost_ms = totals.saved_ns // 1_000_000, totals.lost_ns // 1_000_000
            self._ctx.log.info("pilot_account", saved_ms=saved_ms, lost_ms=lost_ms, recall=recall)
        self._store.close()
        self._pool.close()
        self._part.close()
        self._frames_segment.close()
        self._counters_segment.close()

    # -- the budget ------------------------------------------------------------------------------------------

    def change_ram(self, msg: RamWanted) -> Ram:
        n_before = self._table.capacity
        answer = self._budget.answer(msg, self._table, self._expected, self._doom)
        self._give_back()
        if self._table.capacity != n_before:
            self._counters.set("slots", answer.n_slots)
            self._ctx.log.info("ram_changed", budget_bytes=answer.budget_bytes, slots=answer.n_slots, before=n_before)
            self._plan_warm_up()
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
            self._on_hint(msg)
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
            self._judge_guesses(visit, run)
            self._plan_ahead(run)
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

    # -- guesses ---------------------------------------------------------------------------------------------

    def _on_hint(self, msg: PilotHint) -> None:
        if msg.layer not in self._layers:
            return
        visit = self._visit
        if visit and visit.run and (msg.step, msg.layer) <= (visit.step, visit.layer):
            return  # too late
        self._hints.add(msg.step, msg.layer, msg.experts, msg.signal)
        self._read_guesses()

    def _read_guesses(self) -> None:
        """Keeps a few guesses in flight, at the disk's second priority, as long as there are any worth their slot."""
        if self._visit and self._visit.run and self._visit.run.has_pending:
            return
        unread, table = self._hints.unread, self._table
        while unread and self._trial.is_on and len(table.guesses_in_flight()) < GUESS_READS:
            if table.n_open_guesses >= int(table.capacity * GUESS_SHARE):
                return
            guess = unread.popleft()
            if guess.key[1] >= self._spec.n_experts or table.find(guess.key):
                continue
            slot = table.acquire(guess.key, is_guess=True, chance=self._pilot.chance(guess))
            if slot is None:
                unread.clear()  # those behind are less likely still
                return
            self._pilot.started(guess.key, time.monotonic_ns(), table.last_evicted)
            self._store.start_read(slot, speculative=True)
            self._counters.add("pilot_reads", 1)

    def _plan_ahead(self, run: LayerRun) -> None:
        """Prefill streams the layers: the disk goes on with the next one while this one computes and the next attends."""
        self._ahead.clear()
        self._ahead_room = run.passing_limit
        if len(run.passing) < AHEAD_SHARE * self._spec.n_experts:
            return
        following = next((layer for layer in self._layers if run.layer < layer < self._spec.n_layers), None)
        if following is not None:
            self._ahead.extend((following, expert) for expert in range(self._spec.n_experts))
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Reads ahead as far as the room goes, once nobody waits for a slot."""
        run = self._visit.run if self._visit else None
        if run and run.has_pending:
            return
        while self._ahead and self._table.n_open_guesses < self._ahead_room:
            key = self._ahead.popleft()
            if self._table.find(key):
                continue
            slot = self._table.acquire(key, is_guess=True, is_likely=True)
            if slot is None:
                return
            self._store.start_read(slot, speculative=True)
            self._counters.add("ahead_reads", 1)

    def _judge_guesses(self, visit: Visit, run: LayerRun) -> None:
        """Books what the guesses for this layer were worth and stops those that are still being read in vain."""
        now = time.monotonic_ns()
        named = self._hints.close(visit.step, visit.layer)
        if named:
            self._pilot.hinted(visit.layer, named, set(run.experts))
        for key in run.right_guesses:
            self._pilot.used(key, now)
        for key in run.wrong_guesses:
            self._pilot.wrong(key, now, is_reading=False, is_awaited=False)
        for expert in run.missing:
            self._pilot.missed((visit.layer, expert))
        for slot in self._table.guesses_in_flight():
            if slot.key and slot.key[0] == visit.layer:
                self._pilot.wrong(slot.key, now, is_reading=True, is_awaited=run.is_waiting)
                self._doom(slot)

    def _doom(self, slot: Slot) -> None:
        self._table.doom(slot)
        self._store.cancel(slot)

    # -- usage -----------------------------------------------------------------------------------------------

    def _load_usage(self) -> None:
        """What the model's experts were used for before orders the first victims and the filling of free slots."""
        self._usage: UsageHistory | None = None
        self._save_at = float("inf")
        self._to_warm: deque[Key] = deque()
        self._warming: set[Key] = set()
        self._n_warmed = 0
        path = self._ctx.config.usage_path
        if path is None or not self._layers:
            return
        fingerprint = self._ctx.config.fingerprint
        self._usage, why_empty = load_usage(Path(path), fingerprint, self._layers, self._spec.n_experts)
        if why_empty:
            self._ctx.log.warning("usage_history_ignored", path=path, reason=why_empty)
        self._save_at = time.monotonic() + WRITE_EVERY_S
        self._table.policy.restore(self._expected())
        self._plan_warm_up()

    def _plan_warm_up(self) -> None:
        """Free slots are filled with what was used most, while the disk has nothing better to do."""
        self._to_warm.clear()
        self._to_warm.extend(list(self._expected())[: self._table.capacity])

    def _expected(self) -> dict[Key, float]:
        """Uses per step by experience, most used first."""
        return self._usage.expected() if self._usage else {}

    def _adopt(self) -> None:
        """Experts that an earlier process left in named memory are resident from the start."""
        found = self._store.residents(self._layers)
        warmth = {key: -place for place, key in enumerate(self._to_warm)}
        coldest_first = sorted(found.items(), key=lambda item: warmth.get(item[1], -len(warmth)))
        self._table.adopt(dict(coldest_first), is_by_policy=self._budget.is_by_policy)

    @staticmethod
    def _count_usage(usage: UsageHistory, run: LayerRun) -> None:
        weights = [run.passing.get(e, 1.0) for e in run.experts] if run.passing else 1.0
        usage.count(run.layer, run.experts, weights)

    def _save_usage(self) -> None:
        """Writes the history if there is anything new in it."""
        if self._usage is None:
            return
        self._save_at = time.monotonic() + WRITE_EVERY_S
        if not self._usage.has_news:
            return
        path = self._ctx.config.usage_path
        assert path is not None
        try:
            save_usage(Path(path), self._ctx.config.fingerprint, self._usage)
        except OSError as error:
            self._ctx.log.warning("usage_history_off", path=path, reason=error.strerror or str(error))
            self._usage = None

    def _warm_up(self) -> None:
        """Fills free slots, the warmest experts first, by speculative reads: a demand read stops them at their next piece."""
        while self._to_warm and len(self._warming) < WARM_READS:
            if not self._table.has_free:
                self._to_warm.clear()
                break
            key = self._to_warm.popleft()
            if self._table.find(key):
                continue
            slot = self._table.acquire(key, is_guess=False)
            assert slot is not None
            self._store.start_read(slot, speculative=True)
            self._warming.add(key)

    def _end_warm(self, slot: Slot) -> None:
        """A read ended; if it was one of ours, the next may start."""
        if slot.key not in self._warming:
            return
        self._warming.remove(slot.key)
        self._n_warmed += 1
        self._counters.add("warm_reads", 1)
        self._warm_up()
        if not self._warming:
            self._ctx.log.info("warmed", experts=self._n_warmed, resident=self._table.n_used)

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
            guesses = self._table.guesses_in_flight()
            for slot in guesses:
                self._doom(slot)
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
        self._issue(run.more_reads())
        self._read_ahead()

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
            self._report_non_finite(visit, frame)
        for row, fault in visit.failed_rows.items():
            self._ctx.bus.post("router", LayerFailed(visit.step, visit.layer, row, fault.code, fault.message))
        self._visit = None
        now = time.monotonic_ns()
        # With the attention before it, whose cores a guess borrows; a step's first layer has head and sampling before it.
        before = self._last_end if self._last_end[0] == visit.step else (visit.step, visit.begin_ns)
        took_ns, self._last_end = now - before[1], (visit.step, now)
        self._ctx.bus.post(visit.sender, Mixed(visit.step, visit.layer, visit.frame_number))
        # From here on attention computes, and nobody waits for what is only counted.
        assert visit.run
        self._account(visit.run)
        if self._usage:
            self._count_usage(self._usage, visit.run)
        if visit.is_trial:
            self._trial.visited(visit.step, took_ns)
        has_all = self._table.n_used >= self._n_experts  # then a guess can't tell the store anything
        self._counters.set("pilot_paused", int(has_all or not self._trial.is_on))

    def _report_non_finite(self, visit: Visit, frame: Frame) -> None:
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
        self._ahead.clear()
        if visit and visit.run:
            visit.run.abandon()
            self._give_back()
            self._account(visit.run)

    # -- reads -----------------------------------------------------------------------------------------------

    def _on_reads(self) -> None:
        for slot, done, fault in self._store.finished():
            visit = self._visit
            self._timer.record(Stage.IO_READ, slot.key[0] if slot.key else -1, done.start_ns, done.end_ns, done.bytes)
            self._end_warm(slot)
            if slot.key:
                self._pilot.read_ended(slot.key, done.start_ns, done.end_ns)
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
        self._read_guesses()
        self._read_ahead()
        self._publish()

    def _publish(self) -> None:
        """What the read pool and the slot table count themselves goes into the shared counters."""
        counters = self._store.counters()
        for name, total in (
            ("bytes_demand", counters.bytes_demand),
            ("bytes_speculative", counters.bytes_speculative),
            ("reads", counters.n_reads),
            ("retries", counters.n_retries),
            ("io_busy_ns", counters.busy_ns),
            ("evictions", self._table.n_evicted),
            ("pilot_wasted", self._table.n_guesses_wasted),
            ("ahead_wasted", self._table.n_ahead_wasted),
            ("pilot_saved_ns", self._pilot.totals.saved_ns),
            ("pilot_lost_ns", self._pilot.totals.lost_ns),
            ("pilot_wanted", self._pilot.totals.wanted),
            ("pilot_right", self._pilot.totals.right),
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
                visit.failed_rows.setdefault(row, fault)
        assert slot.state is SlotState.LOADING
        self._table.release(slot)

    def _frame(self, visit: Visit) -> Frame:
        return self._frames.frame(visit.frame_number)
