"""The router's shell: messages in, decisions of the pure parts, messages out.

Decides nothing: ``flight`` says what the ring does next, ``scheduler`` which rows, ``drafting`` who drafts, ``intake`` who
is served. Here are gates, sampling, frames and sockets. Does not know how layers are computed or where experts lie.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from native.library import dispatch_text
from services.router.answers import Answers
from services.router.control import ControlPlane
from services.router.drafting import Drafting, DraftPlan
from services.router.flight import (
    DRAFT_FRAME,
    MAIN_FRAME,
    Abandon,
    AskersGone,
    Deliver,
    End,
    Flight,
    Flights,
    Instruction,
    Landed,
    Note,
    Replayed,
    RunDraft,
    RunMain,
)
from services.router.frames import fill_draft, fill_main
from services.router.gates import GateSet
from services.router.group import RingView
from services.router.intake import Intake
from services.router.pieces import has_tokenizer, read_pieces
from services.router.prompt_desk import Outcome, PromptDesk, start_prompt_process
from services.router.recording import LogitRecorder, RoutingRecorder, draft_notes, span_notes, trace_header
from services.router.sampler import choose_token
from services.router.scheduler import MainPlan, Scheduler
from services.router.sequences import Fault, Sequence
from services.router.text_stream import PieceOf
from shared.container.reader import Container
from shared.errors import ContainerError, ErrorCode, Refused, unknown_message
from shared.memory.big_memory import Home
from shared.memory.prompt_room import prompt_room_bytes
from shared.memory.segments import TRACE
from shared.messages.attention import StepAbandoned, StepPlan
from shared.messages.base import Msg
from shared.messages.drafter import DraftWanted
from shared.messages.expert_io import NEXT_LAYER, OWN_INPUT, ExpertsWanted, PilotHint
from shared.messages.layer import HiddenReady, LayerFailed
from shared.messages.router import Abort, DraftReady, InputReady, LogitsReady, Submit
from shared.run.config import GroupConfig
from shared.run.forks import Process
from shared.run.service import Service, ServiceContext
from shared.step.stages import Stage, StepKind, TraceRing
from shared.step.workplace import Workplace
from shared.wire.endpoints import SERVICES
from shared.wire.protocols import ControlBus, Sends


class RouterService(Service):
    """See the module docstring."""

    name = "router"
    receives = (Submit, Abort, HiddenReady, InputReady, LogitsReady, DraftReady, LayerFailed)

    # -- life ------------------------------------------------------------------------------------------------

    def __init__(self) -> None:
        self._tell_load: Callable[[], None] = lambda: None
        """Tells the gateway how many requests there are, when that has changed."""
        self._prompts: Process | None = None

    def prepare(self, config: GroupConfig) -> None:
        model_dir = Path(config.model_dir)
        with contextlib.suppress(ContainerError, OSError):  # ``load`` will meet it again, and say so
            if has_tokenizer(model_dir):  # its process loads while we do
                self._prompts = start_prompt_process(model_dir, prompt_room_bytes(config.max_context))

    def attach(self, ctx: ServiceContext[ControlBus]) -> None:
        self._control = ControlPlane(ctx, self)
        self._tell_load = self._control.load_changed

    def load(self, ctx: ServiceContext[ControlBus]) -> dict[str, str]:
        self._ctx = ctx
        self._bus: Sends = ctx.bus
        config = ctx.config
        self._config = config
        model_dir = Path(config.model_dir)
        container = Container.open(model_dir, with_copies=False)
        self._spec = spec = container.spec
        self._place = place = Workplace(config, self.name, spec)
        self._pool, self._counters, self._timer = place.pool, place.counters, place.timer
        self._desk: PromptDesk | None = None
        piece_of: PieceOf | None = None
        if has_tokenizer(model_dir):
            room, at_most = prompt_room_bytes(config.max_context), config.max_context - 1
            self._desk = place.keep(
                PromptDesk(model_dir, room, at_most, ctx.bus, ctx.log, self._on_prompt, self._prompts)
            )
            piece_of = read_pieces(model_dir).of
        self._intake = Intake(spec, piece_of, config.max_context)
        ctx.set_stage("load gates")
        self._gates = GateSet(
            container, self._pool, config.pilot, len(place.frame(0).layer_input), Home.of(config, ctx.log)
        )
        self._trace = TraceRing(place.segment(TRACE))
        main = place.frame(MAIN_FRAME)
        self._recorder: LogitRecorder | None = None
        if config.record_logits:
            self._recorder = place.keep(LogitRecorder(Path(config.record_logits)))
        self._routing: RoutingRecorder | None = None
        if config.record_routing:
            header = trace_header(container, config.model_name, bool(config.n_drafts))
            self._routing = place.keep(RoutingRecorder(Path(config.record_routing), header, ctx.log))
        self._answers = Answers(self._bus, self._counters, ctx.log, piece_of)
        self._scheduler = Scheduler(
            n_blocks=config.n_kv_blocks,
            max_sequences=config.max_sequences,
            prefill_chunk=config.prefill_chunk,
            max_rows=len(main.token),
            max_logits=len(main.logit_row),
            all_logits=self._recorder is not None,
        )
        # Numbers of an earlier router's steps must not come again, even when somebody sets the clock back.
        first_step = (time.monotonic_ns() // 1_000_000) << 16
        drafting = Drafting(config.n_drafts, spec.vocab)
        self._flights = Flights(self._scheduler, drafting, first_step, time.monotonic_ns)
        self._gathered_ns = 0
        if self._desk:
            ctx.set_stage("load tokenizer")
            self._desk.wait_loaded()
        return {
            "kernels": dispatch_text(),
            "tokenizer": f"process {self._desk.pid}" if self._desk else "no",
            "n_drafts": str(config.n_drafts),
            "pilot": config.pilot,
        }

    def tick(self) -> None:
        if self._recorder:
            self._recorder.flush()
        if self._desk:
            self._desk.tick()

    def is_idle(self) -> bool:
        return self._scheduler.is_idle and not self._n_unread

    def begin_drain(self, reason: str) -> None:
        self._intake.is_draining = True

    def cut(self, reason: str) -> int:
        """The drain deadline passed: end what is left with a named error. Returns how many."""
        instructions = self._flights.cut(reason)
        self._carry_out(instructions)
        unread = self._desk.clear() if self._desk else []
        for msg in unread:
            words = f"The server stopped before the prompt was read ({reason})."
            self._answers.refused(msg.request, Refused(words, status=503, code=ErrorCode.SHUTTING_DOWN))
        return sum(isinstance(do, End) for do in instructions) + len(unread)

    def close(self) -> None:
        self._place.close()

    @property
    def load_counts(self) -> tuple[int, int]:
        """(running, waiting) requests, for the group state."""
        return len(self._scheduler.running), len(self._scheduler.waiting) + self._n_unread

    @property
    def _n_unread(self) -> int:
        """Requests whose prompt is not read yet."""
        return self._desk.n_open if self._desk else 0

    def ring_changed(self, view: RingView) -> None:
        """The control plane's view changed: somebody else serves, or no longer."""
        self._carry_out(self._flights.ring_changed(view))

    # -- messages --------------------------------------------------------------------------------------------

    def handle(self, msg: Msg, sender: str) -> None:
        if isinstance(msg, HiddenReady):
            self._on_hidden(msg)
        elif isinstance(msg, InputReady):
            self._on_input(msg)
        elif isinstance(msg, LogitsReady):
            self._flights.computed(msg.step, msg.n_faults)
            self._complete()
        elif isinstance(msg, DraftReady):
            with self._timer.stage(Stage.PLAN, self._spec.mtp_layer):  # the next step's, too
                instructions = self._flights.drafted(msg.step, msg.tokens)
            self._carry_out(instructions)
        elif isinstance(msg, Submit):
            self._on_submit(msg)
        elif isinstance(msg, Abort):
            unread = self._desk.drop(msg.request) if self._desk else None
            if unread:
                self._answers.left(unread, msg.reason)
            self._carry_out(self._flights.aborted(msg.request, msg.reason))
        elif isinstance(msg, LayerFailed):
            self._carry_out(self._flights.failed(msg.step, msg.layer, msg.rows, Fault(msg.code, msg.message)))
            self._complete()
        else:
            raise unknown_message(self.name, msg, sender)

    def _on_submit(self, msg: Submit) -> None:
        if msg.router not in (0, self._ctx.incarnation):
            return  # it was meant for our predecessor; the gateway asks us again
        is_in_use = bool(self._scheduler.find(msg.request) or (self._desk and self._desk.has(msg.request)))
        try:
            self._intake.admit(msg, is_in_use=is_in_use, n_waiting=self.load_counts[1])
            if self._desk and msg.prompt_ids is None:
                self._desk.submit(msg)
                self._tell_load()
                return
        except Refused as refusal:
            self._answers.refused(msg.request, refusal)
            return
        self._on_prompt(msg, list(msg.prompt_ids or ()))

    def _on_prompt(self, msg: Submit, outcome: Outcome) -> None:
        """The prompt is read: its ids, or why it can't be."""
        try:
            if isinstance(outcome, Refused):
                raise outcome
            sequence = self._intake.accept(msg, outcome, self._desk.turn_ends if self._desk else frozenset())
        except Refused as refusal:
            self._tell_load()
            self._answers.refused(msg.request, refusal)
            return
        self._answers.accepted(msg, sequence)
        self._carry_out(self._flights.submitted(sequence))

    # -- one layer -------------------------------------------------------------------------------------------

    def _on_hidden(self, msg: HiddenReady) -> None:
        flight = self._flights.covering(msg.step)
        if flight is None:
            return
        frame = self._place.frame(msg.frame)
        hidden = (frame.residual if self._spec.gate.reads_residual else frame.hidden)[: msg.n_rows]
        with self._timer.stage(Stage.GATE, msg.layer):
            bad = self._gates.choose(msg.layer, hidden, frame.gate_id[: msg.n_rows], frame.gate_weight[: msg.n_rows])
        self._bus.post("expert_io", ExpertsWanted(msg.step, msg.layer, msg.frame, msg.n_rows, flight.n_prefill))
        if bad:
            self._flights.gate_refused(flight, msg.step, msg.layer, bad)
        if not self._place.store_counters.get(
            "pilot_paused"
        ):  # guesses that cost more than they bring are not even computed
            with self._timer.stage(Stage.PILOT, msg.layer):
                guess = self._gates.guess_next(msg.layer, hidden)
            if guess and not bad:
                self._bus.send("expert_io", PilotHint(msg.step, *guess, signal=NEXT_LAYER))
        if self._routing:
            self._routing.choice(msg.step, msg.layer, frame.gate_id[: msg.n_rows], frame.gate_weight[: msg.n_rows])

    def _on_input(self, msg: InputReady) -> None:
        if self._flights.covering(msg.step) is None:
            return
        with self._timer.stage(Stage.PILOT, msg.layer):
            experts = self._gates.guess_own(msg.layer, self._place.frame(msg.frame).layer_input[: msg.n_rows])
        self._bus.send("expert_io", PilotHint(msg.step, msg.layer, experts, signal=OWN_INPUT))

    # -- steps -----------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        finished = self._flights.finished()
        if finished is None:
            return
        flight, plan = finished
        with self._timer.stage(Stage.SAMPLE):
            if self._recorder:
                self._recorder.record(plan, self._place.frame(MAIN_FRAME).logits)
            instructions = self._flights.complete(flight, plan, self._choose)
        self._carry_out(instructions)

    def _choose(self, sequence: Sequence, logit_row: int, position: int) -> int | Fault:
        token = choose_token(self._place.frame(MAIN_FRAME).logits[logit_row], sequence.sampling, position)
        if token is None:
            words = f"The logits of position {position - 1} are not finite: the weights or the input overflow."
            return Fault(ErrorCode.NON_FINITE, words)
        return token

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        self._tell_load()  # first, so that whoever has its answer is counted no more
        for do in instructions:
            if isinstance(do, RunMain):
                self._run_main(do.flight, do.plan)
            elif isinstance(do, RunDraft):
                self._run_draft(do.flight, do.plan)
            elif isinstance(do, Abandon):
                message = StepAbandoned(do.before)
                for service in ("attention", "expert_io", "drafter"):
                    self._bus.send(service, message)
            elif isinstance(do, Deliver):
                with self._timer.stage(Stage.STREAM):
                    self._answers.deliver(do.advances, self._place.frame(MAIN_FRAME).logits)
            elif isinstance(do, End):
                self._answers.done(do.sequence)
            elif isinstance(do, AskersGone):
                if self._desk:
                    self._desk.clear()
            elif isinstance(do, Landed):
                self._finish_trace(do.flight)
            elif isinstance(do, Replayed):
                self._ctx.log.info("step_replay", step=do.step, rows=do.n_rows, replay=do.n_replays)
                self._counters.add("replays", 1)
            elif isinstance(do, Note):
                self._ctx.log.info(do.event, **do.fields)

    def _run_main(self, flight: Flight, plan: MainPlan) -> None:
        frame = self._place.frame(MAIN_FRAME)
        self._timer.begin_step(frame, flight.step)
        with self._timer.stage(Stage.PLAN):
            fill_main(frame, plan)
        self._counters.add("steps", 1)
        self._counters.add("rows", plan.n_rows)
        if self._routing:
            kind = StepKind.PREFILL if plan.is_prefill else StepKind.DECODE
            self._routing.begin(flight.step, kind, span_notes(plan))
        want_final = self._config.n_drafts > 0
        self._bus.post(
            "attention", StepPlan(flight.step, MAIN_FRAME, plan.n_rows, plan.n_logits, len(plan.spans), want_final)
        )

    def _run_draft(self, flight: Flight, plan: DraftPlan) -> None:
        frame = self._place.frame(DRAFT_FRAME)
        self._timer.begin_step(frame, flight.step)
        with self._timer.stage(Stage.PLAN, self._spec.mtp_layer):
            fill_draft(frame, self._place.frame(MAIN_FRAME), plan)
        if self._routing:
            self._routing.begin(flight.step, StepKind.DRAFT, draft_notes(plan))
        n_drafting = len(plan.drafting)
        n_drafts = plan.n_drafts if n_drafting else 0
        self._bus.post(
            "drafter", DraftWanted(flight.step, DRAFT_FRAME, plan.n_rows, n_drafting, len(plan.spans), n_drafts)
        )

    def _finish_trace(self, flight: Flight) -> None:
        """Gather every service's stage rows of a finished step, and the whole step as one row."""
        kind = StepKind.DRAFT
        if isinstance(flight.plan, MainPlan):
            kind = StepKind.PREFILL if flight.plan.is_prefill else StepKind.DECODE
        # Gathering the rows of the step before lies between the steps, even when this one had been decided by then.
        start_ns = max(flight.start_ns, self._gathered_ns)
        self._timer.record(Stage.STEP, kind, start_ns, time.monotonic_ns(), flight.plan.n_rows)
        frame = self._place.frame(flight.frame)
        for idx, service in enumerate(SERVICES):
            rows = frame.stage_rows(service)
            self._trace.append(idx, rows[(rows["step"] >= flight.step) & (rows["step"] < flight.step + flight.n_steps)])
        self._gathered_ns = time.monotonic_ns()
