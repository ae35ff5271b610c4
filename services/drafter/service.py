"""The drafter's shell: absorbs what the main model accepted, guesses on, one MTP pass per draft.

A pass needs others' help: embedding rows and logits from attention, experts from expert_io, the gate from the router;
so it is a small state machine. Only a sequence's last row goes through the experts: the other rows are there to fill
the layer's KV cache, which depends on their inputs alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native.library import NativeError, dispatch_text
from native.sampling import sample
from services.drafter.mtp import MtpLayer
from shared.container.reader import Container
from shared.errors import ErrorCode, unknown_message
from shared.memory.big_memory import Home
from shared.memory.segments import MTP_KV
from shared.messages.attention import EmbedWanted, HeadWanted, StepAbandoned
from shared.messages.drafter import DraftWanted, EmbedReady, HeadReady
from shared.messages.layer import HiddenReady, LayerFailed, Mixed
from shared.messages.router import DraftReady
from shared.run.service import Service, ServiceContext
from shared.step.frame import Frame
from shared.step.stages import Stage
from shared.step.workplace import Workplace
from shared.wire.protocols import ControlBus


class Awaits(IntEnum):
    """What the pass in progress needs next."""

    EMBED = 0
    MIXED = 1
    HEAD = 2


@dataclass
class Draft:
    """One DraftWanted being served. ``position``, ``seq`` belong to the rows of the pass in progress; copies, because the
    router may fill the frame for its next step while this one is being left."""

    wanted: DraftWanted
    awaits: Awaits
    rows: NDArray[np.int32]  # places in the layer's x of the rows that draft
    position: NDArray[np.int32]
    seq: NDArray[np.int32]
    table: NDArray[np.int32]
    n_done: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # sequences whose logits were no numbers: they draft no further

    @property
    def step(self) -> int:
        return self.wanted.step + self.n_done


class DrafterService(Service):
    """See the module docstring."""

    name = "drafter"
    receives = (DraftWanted, EmbedReady, HeadReady, Mixed, StepAbandoned)

    def load(self, ctx: ServiceContext[ControlBus]) -> dict[str, str]:
        self._ctx = ctx
        self._bus = ctx.bus
        config = ctx.config
        container = Container.open(Path(config.model_dir), with_copies=False)
        self._spec = spec = container.spec
        self._place = place = Workplace(config, self.name, spec)
        self._pool, self._counters, self._timer = place.pool, place.counters, place.timer
        self._draft: Draft | None = None
        self._mtp: MtpLayer | None = None
        if not config.n_drafts:
            return {"drafts": "off"}
        ctx.set_stage("load MTP layer")
        max_rows = len(place.frame(0).token)
        home = Home.of(config, ctx.log)
        kv = place.segment(MTP_KV)
        self._mtp = place.keep(MtpLayer(container, place.pool, kv, config, max_rows, home))
        return {"kernels": dispatch_text(), "drafts": str(config.n_drafts), "memory": self._mtp.describe()}

    def is_idle(self) -> bool:
        return self._draft is None

    def close(self) -> None:
        self._place.close()

    def handle(self, msg: Any, sender: str) -> None:
        draft = self._draft
        try:
            if isinstance(msg, DraftWanted):
                self._begin(msg)
            elif isinstance(msg, StepAbandoned):
                if draft and draft.wanted.step < msg.before:
                    self._draft = None
            elif not isinstance(msg, (EmbedReady, Mixed, HeadReady)):
                raise unknown_message(self.name, msg, sender)
            elif draft is None or msg.step != draft.step:
                return
            elif isinstance(msg, EmbedReady) and draft.awaits is Awaits.EMBED:
                self._attend(draft)
            elif isinstance(msg, Mixed) and draft.awaits is Awaits.MIXED:
                self._finish_pass(draft)
            elif isinstance(msg, HeadReady) and draft.awaits is Awaits.HEAD:
                self._take_tokens(draft)
        except NativeError as error:
            self._draft = None
            step = draft.step if draft else getattr(msg, "step", 0)
            self._bus.post("router", LayerFailed(step, self._spec.mtp_layer, (), ErrorCode.KERNEL_FAILED, str(error)))

    def _begin(self, msg: DraftWanted) -> None:
        frame = self._place.frame(msg.frame)
        self._timer.begin_step(frame, msg.step)
        rows = frame.logit_row[: msg.n_logits].copy()
        self._draft = Draft(
            msg,
            Awaits.EMBED,
            rows,
            frame.position[: msg.n_rows].copy(),
            frame.seq[: msg.n_rows].copy(),
            frame.block_table[: msg.n_sequences].copy(),
            tokens=[[] for _ in range(msg.n_logits)],
        )
        self._bus.post("attention", EmbedWanted(msg.step, msg.frame, msg.n_rows))

    def _attend(self, draft: Draft) -> None:
        """The layer's attention half; then the drafting rows, and only they, go to the experts."""
        assert self._mtp is not None
        frame = self._frame(draft)
        layer = self._spec.mtp_layer
        n = len(draft.position)
        with self._timer.stage(Stage.DRAFT, layer):
            self._mtp.attend(frame.embed[:n], frame.final[:n], draft.position, draft.seq, draft.table)
            self._counters.add("rows", n)
            if not draft.wanted.n_logits:
                self._answer(draft)
                return
            frame.hidden[: len(draft.rows)] = self._mtp.hidden[draft.rows]
        draft.awaits = Awaits.MIXED
        ready = HiddenReady(draft.step, layer, draft.wanted.frame, len(draft.rows))
        self._bus.post("router", ready)
        self._bus.post("expert_io", ready)

    def _finish_pass(self, draft: Draft) -> None:
        assert self._mtp is not None
        frame = self._frame(draft)
        n = len(draft.rows)
        with self._timer.stage(Stage.DRAFT, self._spec.mtp_layer):
            self._mtp.finish(draft.rows, frame.mixed[:n], frame.final[:n])
            frame.logit_row[:n] = np.arange(n, dtype=np.int32)
        draft.awaits = Awaits.HEAD
        self._bus.post("attention", HeadWanted(draft.step, draft.wanted.frame, n))

    def _take_tokens(self, draft: Draft) -> None:
        frame = self._frame(draft)
        n = len(draft.rows)
        newest = [sample(frame.logits[i], 0.0, 1.0, 0.0) for i in range(n)]
        draft.ended.update(i for i, token in enumerate(newest) if token < 0)
        for i in set(range(n)) - draft.ended:
            draft.tokens[i].append(newest[i])
        draft.n_done += 1
        if draft.n_done == draft.wanted.n_drafts or len(draft.ended) == n:
            self._answer(draft)
            return
        # The next pass is fed its own output: token, state and position move on by one.
        draft.position = draft.position[draft.rows] + np.int32(1)
        draft.seq = draft.seq[draft.rows]
        draft.rows = np.arange(n, dtype=np.int32)
        frame.token[:n] = [max(0, token) for token in newest]
        draft.awaits = Awaits.EMBED
        self._bus.post("attention", EmbedWanted(draft.step, draft.wanted.frame, n))

    def _answer(self, draft: Draft) -> None:
        self._draft = None
        self._counters.add("drafts", 1)
        self._counters.add("tokens", sum(len(tokens) for tokens in draft.tokens))
        self._bus.post("router", DraftReady(draft.wanted.step, tuple(tuple(tokens) for tokens in draft.tokens)))

    def _frame(self, draft: Draft) -> Frame:
        return self._place.frame(draft.wanted.frame)
