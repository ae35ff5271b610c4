"""The router's shell: messages in, decisions of the pure parts, messages out.

Owns the step in flight. Does not know how layers are computed or where experts lie. A step is *main* (rows through all
layers) or *draft* (the drafter absorbs what the main step accepted and guesses on); one is in flight at a time. After
the loss of a peer the same rows run again as a new step: the KV cache is rewritten with the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from native.library import Pool, dispatch_text
from native.sampling import log_softmax, sample, uniform
from services.router.control import ControlPlane
from services.router.gates import GateSet
from services.router.intake import Intake
from services.router.recording import LogitRecorder, RoutingRecorder, draft_notes, span_notes, trace_header
from services.router.scheduler import Advance, Plan, Scheduler
from services.router.sequences import NO_DRAFTS, Sequence
from services.router.tokenizer import ModelTokenizer
from shared.container.reader import Container
from shared.errors import Refused
from shared.memory.big_memory import Home
from shared.memory.segments import Segment
from shared.messages.attention import StepAbandoned, StepPlan
from shared.messages.drafter import DraftWanted
from shared.messages.expert_io import NEXT_LAYER, OWN_INPUT, ExpertsWanted, PilotHint
from shared.messages.gateway import RequestAccepted, RequestDone, RequestRefused, TokenLogprob, TokenOut
from shared.messages.layer import HiddenReady, LayerFailed
from shared.messages.router import Abort, DraftReady, InputReady, LogitsReady, Submit
from shared.model.kv_layout import KV_BLOCK
from shared.run.lifecycle import Service, ServiceContext
from shared.step.counters import Counters
from shared.step.frame import Frame, FrameSet, frame_dims
from shared.step.stages import Stage, StepKind, StepTimer, TraceRing
from shared.wire.endpoints import SERVICES

MAIN_FRAME = 0
DRAFT_FRAME = 1
MAX_WAITING = 256
# A step that ends its peers each time must not be tried for ever.
MAX_REPLAYS = 3


@dataclass
class StepInFlight:
    """The step that the ring works on. A draft step with n drafts owns the numbers ``step`` .. ``step + n - 1``."""

    step: int
    frame: int
    n_steps: int
    plan: Plan
    drafting: list[Sequence]
    start_ns: int
    n_replays: int = 0


class RouterService(Service):
    """See the module docstring."""

    name = "router"
    receives = (Submit, Abort, HiddenReady, InputReady, LogitsReady, DraftReady, LayerFailed)

    # -- life ------------------------------------------------------------------------------------------------

    def attach(self, ctx: ServiceContext) -> None:
        self._control = ControlPlane(ctx, self)

    def load(self, ctx: ServiceContext) -> dict[str, str]:
        self._ctx = ctx
        self._bus = ctx.bus
        config = ctx.config
        self._config = config
        model_dir = Path(config.model_dir)
        container = Container.open(model_dir, with_copies=False)
        self._spec = spec = container.spec
        self._pool = Pool(config.n_threads)
        self._tokenizer = ModelTokenizer(model_dir) if ModelTokenizer.exists(model_dir) else None
        self._intake = Intake(spec, self._tokenizer, config.max_context, is_drafting=config.n_drafts > 0)
        self._frames_segment = Segment.attach(config.run_id, "frames")
        self._frames = FrameSet(self._frames_segment.buf, frame_dims(config, spec), config.n_frames)
        ctx.set_stage("load gates")
        self._gates = GateSet(
            container, self._pool, config.pilot, len(self._frames.frame(0).layer_input), Home.of(config, ctx.log)
        )
        self._trace_segment = Segment.attach(config.run_id, "trace")
        self._trace = TraceRing(self._trace_segment.buf)
        self._counters_segment = Segment.attach(config.run_id, "counters")
        self._counters = Counters(self._counters_segment.buf, "router")
        self._store_counters = Counters(self._counters_segment.buf, "expert_io")
        main = self._frames.frame(MAIN_FRAME)
        self._timer = StepTimer("router")
        self._recorder = LogitRecorder(Path(config.record_logits)) if config.record_logits else None
        self._routing: RoutingRecorder | None = None
        if config.record_routing:
            header = trace_header(container, config.model_name, bool(config.n_drafts))
            self._routing = RoutingRecorder(Path(config.record_routing), header, ctx.log)
        self._scheduler = Scheduler(
            n_blocks=config.n_kv_blocks,
            max_sequences=config.max_sequences,
            prefill_chunk=config.prefill_chunk,
            max_rows=len(main.token),
            max_logits=len(main.logit_row),
            max_waiting=MAX_WAITING,
            all_logits=self._recorder is not None,
        )
        # Numbers of an earlier router's steps must not come again, even when somebody sets the clock back.
        self._next_step = (time.monotonic_ns() // 1_000_000) << 16
        self._flight: StepInFlight | None = None
        self._is_group_ready = False
        self._is_drafter_ready = False
        self._is_draining = False
        return {
            "kernels": dispatch_text(),
            "tokenizer": "yes" if self._tokenizer else "no",
            "n_drafts": str(config.n_drafts),
            "pilot": config.pilot,
        }

    def tick(self) -> None:
        if self._recorder:
            self._recorder.flush()

    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    def begin_drain(self, reason: str) -> None:
        self._is_draining = True

    def cut(self, reason: str) -> int:
        """The drain deadline passed: end what is left with a named error. Returns how many."""
        left = [*self._scheduler.running, *self._scheduler.waiting]
        for sequence in left:
            sequence.error = ("shutting_down", f"The server stopped before the answer was complete ({reason}).")
            self._finish(sequence, "")
        return len(left)

    def close(self) -> None:
        if self._recorder:
            self._recorder.close()
        if self._routing:
            self._routing.close()
        self._pool.close()
        for segment in (self._frames_segment, self._trace_segment, self._counters_segment):
            segment.close()

    @property
    def load_counts(self) -> tuple[int, int]:
        """(running, waiting) requests, for the group state."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    # -- the group -------------------------------------------------------------------------------------------

    def group_changed(self, is_ready: bool, drafter_ready: bool) -> None:
        """The control plane's view changed: attention, expert_io and gateway serve or do not."""
        was_ready, self._is_group_ready = self._is_group_ready, is_ready
        self._is_drafter_ready = drafter_ready
        flight = self._flight
        if flight and flight.frame == DRAFT_FRAME and not (is_ready and drafter_ready):
            # A draft is only a guess: go on without it. The drafter's cache has a gap now.
            for span in flight.plan.spans:
                span.sequence.n_mtp = NO_DRAFTS
            self._end_flight()
        if is_ready and not was_ready and self._flight:
            self._replay(self._flight)
        self._pump()

    def _replay(self, flight: StepInFlight) -> None:
        """The same rows as a new step, unless they have cost too many peers already."""
        if flight.n_replays == MAX_REPLAYS:
            for span in flight.plan.spans:
                if span.sequence in self._scheduler.running:
                    span.sequence.error = span.sequence.error or (
                        "step_lost",
                        f"Attention or expert_io was lost {MAX_REPLAYS + 1} times while it computed this step; the request "
                        "was ended. Their logs in the run directory say why.",
                    )
                    self._finish(span.sequence, "")
            self._end_flight()
            return
        self._ctx.log.info("step_replay", step=flight.step, rows=flight.plan.n_rows, replay=flight.n_replays + 1)
        self._counters.add("replays", 1)
        self._send_main(flight.plan, flight.start_ns, flight.n_replays + 1)

    def peer_lost(self, service: str) -> None:
        """A peer of the ring is gone: what is in flight can't finish; it runs again when the group is ready."""
        if service == "drafter":
            self.group_changed(self._is_group_ready, False)
        elif service == "gateway":
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._abort(sequence, "the gateway is gone")
            self._pump()
        elif service in ("attention", "expert_io"):
            self.group_changed(False, self._is_drafter_ready)

    def peer_changed(self, service: str, incarnation: int) -> None:
        self.peer_lost(service)

    # -- messages --------------------------------------------------------------------------------------------

    def handle(self, msg: Any, sender: str) -> None:
        if isinstance(msg, HiddenReady):
            self._on_hidden(msg)
        elif isinstance(msg, InputReady):
            self._on_input(msg)
        elif isinstance(msg, LogitsReady):
            self._on_logits(msg)
        elif isinstance(msg, DraftReady):
            self._on_draft(msg)
        elif isinstance(msg, Submit):
            self._on_submit(msg)
        elif isinstance(msg, Abort):
            self._on_abort(msg)
        elif isinstance(msg, LayerFailed):
            self._on_failed(msg)

    def _on_submit(self, msg: Submit) -> None:
        if msg.router not in (0, self._ctx.incarnation):
            return  # it was meant for our predecessor; the gateway asks us again
        try:
            if self._is_draining:
                raise Refused("The server is shutting down; try again later.", status=503, code="shutting_down")
            if self._scheduler.find(msg.request):
                raise Refused(f"Request id {msg.request} is in use.", status=409, code="duplicate_request")
            if self._scheduler.is_full:
                raise Refused(
                    f"{MAX_WAITING} requests are waiting already; try again later.", status=429, code="queue_full"
                )
            sequence = self._intake.accept(msg)
        except Refused as refusal:
            self._counters.add("refused", 1)
            self._bus.post(
                "gateway", RequestRefused(msg.request, refusal.status, refusal.code, str(refusal), refusal.param)
            )
            return
        self._counters.add("requests", 1)
        self._counters.add("prompt_tokens", sequence.n_prompt)
        prompt_ids = tuple(sequence.tokens[: sequence.n_prompt]) if msg.want_prompt_ids else ()
        self._bus.post("gateway", RequestAccepted(msg.request, sequence.n_prompt, sequence.max_tokens, prompt_ids))
        self._ctx.log.info(
            "request",
            request=msg.request,
            n_prompt=sequence.n_prompt,
            max_tokens=sequence.max_tokens,
            resumed=len(msg.resume_ids),
        )
        if sequence.finish_reason:  # a resumed answer that was complete but for its last message
            self._done(sequence, "")
            return
        self._scheduler.submit(sequence)
        self._pump()

    def _on_abort(self, msg: Abort) -> None:
        sequence = self._scheduler.find(msg.request)
        if sequence:
            self._abort(sequence, msg.reason)
            self._pump()

    def _abort(self, sequence: Sequence, reason: str) -> None:
        self._ctx.log.info("request_aborted", request=sequence.request, reason=reason)
        sequence.finish_reason = "abort"
        self._done(sequence, "")
        self._scheduler.remove(sequence)
        flight = self._flight
        if flight and not any(span.sequence in self._scheduler.running for span in flight.plan.spans):
            # Nobody waits for this step: the ring leaves it between layers.
            self._end_flight()

    def _on_failed(self, msg: LayerFailed) -> None:
        flight = self._flight
        if flight is None or not flight.step <= msg.step < flight.step + flight.n_steps:
            return
        self._ctx.log.info("layer_failed", step=msg.step, layer=msg.layer, row=msg.row, code=msg.code, text=msg.message)
        if flight.frame == DRAFT_FRAME:
            for span in flight.plan.spans:
                span.sequence.n_mtp = NO_DRAFTS
            self._end_flight()
            self._pump()
            return
        for span in flight.plan.spans:
            if msg.row < 0 or span.first <= msg.row < span.first + span.n_rows:
                span.sequence.error = span.sequence.error or (msg.code, msg.message)
        if msg.row < 0:
            for span in flight.plan.spans:
                if span.sequence in self._scheduler.running:
                    self._finish(span.sequence, "")
            self._end_flight()
            self._pump()

    # -- one layer -------------------------------------------------------------------------------------------

    def _on_hidden(self, msg: HiddenReady) -> None:
        flight = self._flight
        if flight is None or not flight.step <= msg.step < flight.step + flight.n_steps:
            return
        frame = self._frames.frame(msg.frame)
        hidden = frame.hidden[: msg.n_rows]
        with self._timer.stage(Stage.GATE, msg.layer):
            bad = self._gates.choose(msg.layer, hidden, frame.gate_id[: msg.n_rows], frame.gate_weight[: msg.n_rows])
        n_prefill = flight.plan.n_prefill if flight.frame == MAIN_FRAME else 0
        self._bus.post("expert_io", ExpertsWanted(msg.step, msg.layer, msg.frame, msg.n_rows, n_prefill))
        for row in bad:
            self._mark_row(flight, row, msg.layer)
        if not self._store_counters.get("pilot_paused"):  # guesses that cost more than they bring are not even computed
            with self._timer.stage(Stage.PILOT, msg.layer):
                guess = self._gates.guess_next(msg.layer, hidden)
            if guess and not bad:
                self._bus.send("expert_io", PilotHint(msg.step, *guess, signal=NEXT_LAYER))
        if self._routing:
            self._routing.choice(msg.step, msg.layer, frame.gate_id[: msg.n_rows], frame.gate_weight[: msg.n_rows])

    def _on_input(self, msg: InputReady) -> None:
        flight = self._flight
        if flight is None or not flight.step <= msg.step < flight.step + flight.n_steps:
            return
        with self._timer.stage(Stage.PILOT, msg.layer):
            experts = self._gates.guess_own(msg.layer, self._frames.frame(msg.frame).layer_input[: msg.n_rows])
        self._bus.send("expert_io", PilotHint(msg.step, msg.layer, experts, signal=OWN_INPUT))

    def _mark_row(self, flight: StepInFlight, row: int, layer: int) -> None:
        if flight.frame == DRAFT_FRAME:
            return  # a bad draft is rejected by the verification
        for span in flight.plan.spans:
            if span.first <= row < span.first + span.n_rows and span.sequence.error is None:
                position = span.position + row - span.first
                span.sequence.error = (
                    "non_finite",
                    f"The hidden state of position {position} is not finite before the gate of layer {layer}: the weights "
                    "or the input overflow. The request was ended; others go on.",
                )

    # -- steps -----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start the next step if the ring is free."""
        if self._flight or not self._is_group_ready:
            return
        start_ns = time.monotonic_ns()
        plan = self._scheduler.plan()
        if plan:
            self._send_main(plan, start_ns)

    def _take_steps(self, n: int) -> int:
        step = self._next_step
        self._next_step += n
        return step

    def _send_main(self, plan: Plan, start_ns: int, n_replays: int = 0) -> None:
        step = self._take_steps(1)
        frame = self._frames.frame(MAIN_FRAME)
        self._timer.begin_step(frame, step)
        with self._timer.stage(Stage.PLAN):
            row = 0
            for span in plan.spans:
                end = span.first + span.n_rows
                frame.token[span.first : end] = span.tokens
                frame.position[span.first : end] = range(span.position, span.position + span.n_rows)
                frame.seq[span.first : end] = span.table_row
                blocks = span.sequence.blocks
                frame.block_table[span.table_row, : len(blocks)] = blocks
                if span.n_logits:
                    frame.logit_row[row : row + span.n_logits] = range(end - span.n_logits, end)
                    row += span.n_logits
        self._flight = StepInFlight(step, MAIN_FRAME, 1, plan, [], start_ns, n_replays)
        self._counters.add("steps", 1)
        self._counters.add("rows", plan.n_rows)
        if self._routing:
            kind = StepKind.PREFILL if plan.is_prefill else StepKind.DECODE
            self._routing.begin(step, kind, span_notes(plan))
        self._bus.post(
            "attention",
            StepPlan(step, MAIN_FRAME, plan.n_rows, plan.n_logits, len(plan.spans), self._config.n_drafts > 0),
        )

    def _end_flight(self) -> None:
        """Give up the step in flight; peers drop what they have of it."""
        self._flight = None
        message = StepAbandoned(self._next_step)
        for service in ("attention", "expert_io", "drafter"):
            self._bus.send(service, message)

    def _on_logits(self, msg: LogitsReady) -> None:
        flight = self._flight
        if flight is None or msg.step != flight.step or flight.frame != MAIN_FRAME:
            return
        frame = self._frames.frame(MAIN_FRAME)
        with self._timer.stage(Stage.SAMPLE):
            if self._recorder:
                self._recorder.record(flight.plan, frame.logits)
            advances = self._scheduler.complete(flight.plan, self._choose)
        with self._timer.stage(Stage.STREAM):
            for advance in advances:
                self._deliver(advance, frame)
        self._flight = None
        self._finish_trace(frame, flight)
        if not self._send_draft(advances):
            self._pump()

    def _choose(self, sequence: Sequence, logit_row: int, position: int) -> int:
        logits = self._frames.frame(MAIN_FRAME).logits[logit_row]
        params = sequence.sampling
        u = uniform(params.seed, position) if params.temperature > 0 else 0.0
        token = sample(logits, params.temperature, params.top_p, u)
        if token < 0:
            sequence.error = sequence.error or (
                "non_finite",
                f"The logits of position {position - 1} are not finite: the weights or the input overflow.",
            )
            return 0
        return token

    def _deliver(self, advance: Advance, frame: Frame) -> None:
        sequence = advance.sequence
        if sequence.error is not None:
            self._finish(sequence, "")
            return
        self._counters.add("tokens", len(advance.new_tokens))
        if advance.span.n_rows > 1 and not advance.span.is_prefill:
            self._counters.add("drafts", advance.span.n_rows - 1)
            self._counters.add("accepted", len(advance.new_tokens) - 1)
        if advance.new_tokens:
            logprobs: tuple[TokenLogprob, ...] = ()
            first = sequence.n_generated - len(advance.new_tokens)
            if sequence.n_logprobs is not None:
                logprobs = tuple(
                    self._logprob(
                        frame.logits[row], token, sequence.n_logprobs, sequence.text.begins_with_first and idx == 0
                    )
                    for idx, (row, token) in enumerate(zip(advance.logit_rows, advance.new_tokens, strict=True), first)
                )
            self._bus.post(
                "gateway", TokenOut(sequence.request, first, tuple(advance.new_tokens), advance.text, logprobs)
            )
        if sequence.finish_reason:
            self._finish(sequence, "")

    def _logprob(self, logits: Any, token: int, n_top: int, is_start: bool) -> TokenLogprob:
        values = np.empty(len(logits), np.float32)
        log_softmax(logits, values)
        top: tuple[tuple[int, float, bytes], ...] = ()
        if n_top:
            n_top = min(n_top, len(values))
            best = np.argpartition(-values, n_top - 1)[:n_top]
            ordered = sorted(best.tolist(), key=lambda t: (-values[t], t))
            top = tuple((t, float(values[t]), self._piece(t, is_start)) for t in ordered)
        return TokenLogprob(token, float(values[token]), self._piece(token, is_start), top)

    def _piece(self, token: int, is_start: bool) -> bytes:
        return self._tokenizer.piece(token, is_start) if self._tokenizer else b""

    def _finish(self, sequence: Sequence, text: str) -> None:
        self._done(sequence, text)
        self._scheduler.remove(sequence)

    def _done(self, sequence: Sequence, text: str) -> None:
        code, message = sequence.error or ("", "")
        reason = "error" if sequence.error else sequence.finish_reason
        self._counters.add({"error": "failed", "abort": "aborted"}.get(reason, "finished"), 1)
        self._bus.post(
            "gateway",
            RequestDone(
                sequence.request,
                reason,
                sequence.n_prompt,
                sequence.n_generated,
                text,
                code,
                message,
                sequence.n_drafted,
                sequence.n_accepted,
            ),
        )
        self._ctx.log.info(
            "request_done",
            request=sequence.request,
            reason=reason,
            code=code,
            n_generated=sequence.n_generated,
            drafts=sequence.n_drafted,
            accepted=sequence.n_accepted,
        )

    # -- drafts ----------------------------------------------------------------------------------------------

    def _send_draft(self, advances: list[Advance]) -> bool:
        """Let the drafter absorb the accepted rows and guess on. False when there is nothing to do."""
        n_drafts = self._config.n_drafts
        if not n_drafts:
            return False
        main, frame = self._frames.frame(MAIN_FRAME), self._frames.frame(DRAFT_FRAME)
        rows: list[tuple[Advance, Sequence]] = []
        for advance in advances:
            sequence = advance.sequence
            if sequence.finish_reason or sequence.error or not advance.n_kept_rows:
                continue
            if not self._is_drafter_ready or sequence.n_mtp != advance.span.position:
                sequence.n_mtp = NO_DRAFTS  # a gap: its drafts would be guesses from nothing
                continue
            rows.append((advance, sequence))
        if not rows:
            return False
        start_ns = time.monotonic_ns()
        step = self._take_steps(n_drafts)
        self._timer.begin_step(frame, step)
        drafting: list[Sequence] = []
        with self._timer.stage(Stage.PLAN, self._spec.mtp_layer):
            n_rows = 0
            for table_row, (advance, sequence) in enumerate(rows):
                span, kept = advance.span, advance.n_kept_rows
                end = n_rows + kept
                frame.token[n_rows:end] = sequence.tokens[span.position + 1 : span.position + 1 + kept]
                frame.position[n_rows:end] = range(span.position, span.position + kept)
                frame.seq[n_rows:end] = table_row
                frame.block_table[table_row, : len(sequence.blocks)] = sequence.blocks
                frame.final[n_rows:end] = main.final[span.first : span.first + kept]
                sequence.n_mtp += kept
                # Chained drafts write the drafter's cache ahead of the accepted text: they need room in its blocks.
                has_room = sequence.n_mtp + n_drafts <= len(sequence.blocks) * KV_BLOCK
                if not sequence.is_prefilling and has_room and sequence.max_tokens - sequence.n_generated > 1:
                    frame.logit_row[len(drafting)] = end - 1
                    drafting.append(sequence)
                n_rows = end
        plan = Plan(tuple(a.span for a, _ in rows), n_rows, len(drafting), False)
        self._flight = StepInFlight(step, DRAFT_FRAME, n_drafts, plan, drafting, start_ns)
        if self._routing:
            self._routing.begin(step, StepKind.DRAFT, draft_notes(drafting))
        self._bus.post(
            "drafter", DraftWanted(step, DRAFT_FRAME, n_rows, len(drafting), len(rows), n_drafts if drafting else 0)
        )
        return True

    def _on_draft(self, msg: DraftReady) -> None:
        flight = self._flight
        if flight is None or msg.step != flight.step or flight.frame != DRAFT_FRAME:
            return
        for sequence, tokens in zip(flight.drafting, msg.tokens, strict=True):
            sequence.drafts = [t for t in tokens if t < self._spec.vocab]
        self._flight = None
        self._finish_trace(self._frames.frame(DRAFT_FRAME), flight)
        self._pump()

    def _finish_trace(self, frame: Frame, flight: StepInFlight) -> None:
        """Gather every service's stage rows of a finished step, and the whole step as one row."""
        kind = StepKind.DECODE
        if flight.frame == DRAFT_FRAME:
            kind = StepKind.DRAFT
        elif flight.plan.is_prefill:
            kind = StepKind.PREFILL
        self._timer.record(Stage.STEP, kind, flight.start_ns, time.monotonic_ns(), flight.plan.n_rows)
        for idx, service in enumerate(SERVICES):
            rows = frame.stage_rows(service)
            self._trace.append(idx, rows[(rows["step"] >= flight.step) & (rows["step"] < flight.step + flight.n_steps)])
