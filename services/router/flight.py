"""The step in flight: what starts it, which messages belong to it, what its loss or failure costs. Pure: events in,
instructions out.

A step is *main* (rows through all layers) or *draft* (the drafter absorbs what the main step accepted and guesses on). One
is in flight at a time. What comes to nothing, because a peer was lost or failed, runs again as a new step: the KV cache is
rewritten with the same bits. Owns the numbers of steps and calls ``Scheduler`` and ``Drafting``, which decide what is in
them. Does not know frames, sockets or gates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.router.drafting import Drafting, DraftPlan
from services.router.group import RingView
from services.router.scheduler import Advance, MainPlan, Scheduler
from services.router.sequences import Fault, Sequence
from shared.errors import ErrorCode
from shared.messages.gateway import FinishReason

MAIN_FRAME, DRAFT_FRAME = 0, 1
MAX_REPLAYS = 3
"""A step that ends its peers each time must not be tried for ever."""
APART_FROM = 2
"""From this replay on each sequence runs alone: the one that ends its peers must not take its neighbours along."""

BEFORE_EXPERTS, EXPERTS = 0, 1
"""Who found a fault in a layer: the gate (or the embedding) looks first."""


@dataclass
class Flight:
    """A step that the ring works on. A draft step with n drafts owns the numbers ``step`` .. ``step + n - 1``."""

    step: int
    n_steps: int
    plan: MainPlan | DraftPlan
    start_ns: int
    n_replays: int = 0
    n_faults_heard: int = 0
    n_faults_sent: int | None = None  # known once the step is computed
    _faults: dict[int, tuple[tuple[int, int], Fault]] = field(default_factory=dict)

    @property
    def frame(self) -> int:
        return MAIN_FRAME if isinstance(self.plan, MainPlan) else DRAFT_FRAME

    @property
    def n_prefill(self) -> int:
        return self.plan.n_prefill if isinstance(self.plan, MainPlan) else 0

    def covers(self, step: int) -> bool:
        return self.step <= step < self.step + self.n_steps

    def mark(self, rows: Iterable[int], layer: int, found_by: int, fault: Fault) -> None:
        """These rows have no true result from this place on; of several faults the first place counts."""
        for row in rows:
            known = self._faults.get(row)
            if known is None or (layer, found_by) < known[0]:
                self._faults[row] = ((layer, found_by), fault)

    def is_marked(self, row: int, layer: int) -> bool:
        """Whether the row has had a fault before this layer."""
        return row in self._faults and self._faults[row][0][0] < layer

    @property
    def faults(self) -> Mapping[int, Fault]:
        """Row -> its fault."""
        return {row: fault for row, (_, fault) in self._faults.items()}


# -- instructions


@dataclass(frozen=True)
class RunMain:
    """Fill the main frame and tell attention."""

    flight: Flight
    plan: MainPlan


@dataclass(frozen=True)
class RunDraft:
    """Fill the draft frame and tell the drafter."""

    flight: Flight
    plan: DraftPlan


@dataclass(frozen=True)
class Abandon:
    """Every peer forgets the steps below this number."""

    before: int


@dataclass(frozen=True)
class Deliver:
    """New tokens for whoever asked."""

    advances: tuple[Advance, ...]


@dataclass(frozen=True)
class End:
    """The one final answer of a request."""

    sequence: Sequence


@dataclass(frozen=True)
class Landed:
    """A step is complete; its stages can be gathered."""

    flight: Flight


@dataclass(frozen=True)
class AskersGone:
    """Whoever asked is gone: prompts that are not read yet are nobody's."""


@dataclass(frozen=True)
class Note:
    """A line for the log."""

    event: str
    fields: Mapping[str, object]


@dataclass(frozen=True)
class Replayed:
    """A step runs again."""

    step: int
    n_rows: int
    n_replays: int


Instruction = RunMain | RunDraft | Abandon | Deliver | End | Landed | AskersGone | Note | Replayed

Choose = Callable[[Sequence, int, int], int | Fault]


class Flights:
    """See the module docstring. ``first_step``: numbers below belong to earlier routers. ``now_ns`` reads a clock."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting, first_step: int, now_ns: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._next_step = first_step
        self._now_ns = now_ns
        self.view = RingView()
        self._gateway = 0  # the last one that was there
        self._again: deque[tuple[MainPlan, int, int]] = deque()  # plan, replays, start
        self.current: Flight | None = None

    # -- questions

    def covering(self, step: int) -> Flight | None:
        """The flight that a message of this step belongs to; None: it is late."""
        return self.current if self.current and self.current.covers(step) else None

    # -- requests

    def submitted(self, sequence: Sequence) -> list[Instruction]:
        """A request was accepted."""
        if sequence.is_over:  # a resumed answer that was complete but for its last message
            return [End(sequence)]
        self._scheduler.submit(sequence)
        return self._go_on()

    def aborted(self, request: str, reason: str) -> list[Instruction]:
        """Nobody waits for this request any more."""
        sequence = self._scheduler.find(request)
        return [*self._abort(sequence, reason), *self._go_on()] if sequence else []

    def cut(self, reason: str) -> list[Instruction]:
        """The drain's deadline passed: end what is left."""
        error = Fault(ErrorCode.SHUTTING_DOWN, f"The server stopped before the answer was complete ({reason}).")
        out: list[Instruction] = []
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            sequence.error = error
            out += self._end(sequence)
        return out

    def _abort(self, sequence: Sequence, reason: str) -> list[Instruction]:
        sequence.finish_reason = FinishReason.ABORT
        note = Note("request_aborted", {"request": sequence.request, "reason": reason})
        out: list[Instruction] = [note, *self._end(sequence)]
        flight = self.current
        if flight and not any(span.sequence in self._scheduler.running for span in flight.plan.spans):
            out.append(self._give_up())  # nobody waits for this step: the ring leaves it between layers
        return out

    def _end(self, sequence: Sequence) -> list[Instruction]:
        self._scheduler.remove(sequence)
        self._drafting.ended(sequence)
        if sequence.error is None:
            return [End(sequence)]
        facts = {"request": sequence.request, "code": sequence.error.code, "text": sequence.error.message}
        return [Note("request_failed", facts), End(sequence)]

    # -- peers

    def ring_changed(self, view: RingView) -> list[Instruction]:
        """Who serves is not as it was."""
        before, self.view = self.view, view
        self._drafting.has_drafter = view.drafter != 0
        out: list[Instruction] = []
        if self._gateway and view.gateway != self._gateway:
            out.append(AskersGone())
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                out += self._abort(sequence, "the gateway is gone")
        self._gateway = view.gateway or self._gateway
        flight = self.current
        is_ring_other = (view.attention, view.expert_io) != (before.attention, before.expert_io)
        if flight and isinstance(flight.plan, DraftPlan) and (is_ring_other or view.drafter != before.drafter):
            # A draft is only a guess: go on without it.
            self._drafting.lost(flight.plan)
            out.append(self._give_up())
        elif flight and isinstance(flight.plan, MainPlan) and is_ring_other:
            out += [self._give_up(), *self._lost(flight, flight.plan)]
        return out + self._go_on()

    def _lost(self, flight: Flight, plan: MainPlan) -> list[Instruction]:
        n_replays = flight.n_replays + 1
        if n_replays > MAX_REPLAYS:
            words = (
                f"Attention or expert_io was lost {n_replays} times while it computed this step; the request was ended. "
                "Their logs in the run directory say why."
            )
            return self._fail_all(plan, Fault(ErrorCode.STEP_LOST, words))
        self._run_again(flight, plan, n_replays, is_apart=n_replays >= APART_FROM)
        return []

    def _run_again(self, flight: Flight, plan: MainPlan, n_replays: int, *, is_apart: bool) -> None:
        parts = self._scheduler.again(plan, is_apart=is_apart)
        self._again.extendleft((part, n_replays, flight.start_ns) for part in reversed(parts))

    def _fail_all(self, plan: MainPlan, fault: Fault) -> list[Instruction]:
        out: list[Instruction] = []
        for span in plan.spans:
            if span.sequence in self._scheduler.running:
                span.sequence.error = fault
                out += self._end(span.sequence)
        return out

    # -- the step in flight

    def gate_refused(self, flight: Flight, step: int, layer: int, rows: Iterable[int]) -> None:
        """The state of these rows is not finite before the gate of a layer."""
        plan = flight.plan
        if isinstance(plan, DraftPlan):
            self._drafting.failed(plan, step - flight.step, layer, rows)
            return
        for row in rows:
            if flight.is_marked(row, layer):
                continue
            span = next(span for span in plan.spans if span.first <= row < span.first + span.n_rows)
            words = (
                f"The hidden state of position {span.position + row - span.first} is not finite before the gate of layer "
                f"{layer}: the weights or the input overflow. The request was ended; others go on."
            )
            flight.mark([row], layer, BEFORE_EXPERTS, Fault(ErrorCode.NON_FINITE, words))

    def failed(self, step: int, layer: int, rows: tuple[int, ...], fault: Fault) -> list[Instruction]:
        """A service says that rows have no true result, or (no rows) that the step can't go on."""
        flight = self.covering(step)
        if flight is None:
            return []
        plan = flight.plan
        if rows and isinstance(plan, MainPlan):
            flight.mark(rows, layer, EXPERTS, fault)
            flight.n_faults_heard += 1
            return []  # whether it matters shows when accepted tokens reach it
        facts = {"step": step, "layer": layer, "rows": len(rows), "code": fault.code, "text": fault.message}
        out: list[Instruction] = [Note("layer_failed", facts)]
        if isinstance(plan, DraftPlan):
            if rows:
                self._drafting.failed(plan, step - flight.step, layer, rows)
                return out
            self._drafting.lost(plan)
            return [*out, self._give_up(), *self._go_on()]
        out.append(self._give_up())
        has_company = len(plan.spans) > 1 or any(span.has_drafts for span in plan.spans)
        if has_company:
            # Whose fault it is shows when each runs alone and without drafts.
            self._run_again(flight, plan, flight.n_replays, is_apart=True)
        else:
            out += self._fail_all(plan, fault)
        return out + self._go_on()

    def computed(self, step: int, n_faults: int) -> None:
        """Logits are there; so many messages of faults belong to them."""
        flight = self.covering(step)
        if flight and isinstance(flight.plan, MainPlan):
            flight.n_faults_sent = n_faults

    def finished(self) -> tuple[Flight, MainPlan] | None:
        """The main step that can be completed now: all that is to be known of it is known."""
        flight = self.current
        if flight is None or not isinstance(flight.plan, MainPlan) or flight.n_faults_sent is None:
            return None
        return (flight, flight.plan) if flight.n_faults_heard >= flight.n_faults_sent else None

    def complete(self, flight: Flight, plan: MainPlan, choose: Choose) -> list[Instruction]:
        """Take the tokens of a finished step; what follows it."""
        advances = self._scheduler.complete(plan, choose, flight.faults)
        self.current = None
        out: list[Instruction] = [Deliver(tuple(advances)), Landed(flight)]
        for advance in advances:
            if advance.sequence.is_over:
                out += self._end(advance.sequence)
        draft = self._drafting.plan(advances)
        return out + (self._start_draft(draft) if draft else self._go_on())

    def drafted(self, step: int, tokens: Iterable[Iterable[int]]) -> list[Instruction]:
        """The drafter has absorbed the step and guessed."""
        flight = self.current
        if flight is None or step != flight.step or not isinstance(flight.plan, DraftPlan):
            return []
        self._drafting.landed(flight.plan, tokens)
        self.current = None
        return [Landed(flight), *self._go_on()]

    # -- starting

    def _go_on(self) -> list[Instruction]:
        """Start the next step if the ring is free."""
        if self.current or not self.view.is_ring_alive:
            return []
        start_ns = self._now_ns()
        while self._again:
            before, n_replays, start_ns = self._again.popleft()
            for plan in self._scheduler.again(before, is_apart=False):  # less who was aborted meanwhile
                started = self._start_main(plan, start_ns, n_replays)
                return [Replayed(self._next_step - 1, plan.n_rows, n_replays), *started]
        plan_or_none = self._scheduler.plan()
        return self._start_main(plan_or_none, start_ns, 0) if plan_or_none else []

    def _start_main(self, plan: MainPlan, start_ns: int, n_replays: int) -> list[Instruction]:
        self.current = flight = Flight(self._take_steps(1), 1, plan, start_ns, n_replays)
        return [RunMain(flight, plan)]

    def _start_draft(self, plan: DraftPlan) -> list[Instruction]:
        self.current = flight = Flight(self._take_steps(plan.n_drafts), plan.n_drafts, plan, self._now_ns())
        return [RunDraft(flight, plan)]

    def _take_steps(self, n: int) -> int:
        step = self._next_step
        self._next_step += n
        return step

    def _give_up(self) -> Abandon:
        """Peers drop what they have of the step in flight."""
        self.current = None
        return Abandon(self._next_step)
