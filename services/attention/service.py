"""attention's shell: a step's rows through all layers, pausing at each MoE layer for the experts.

Owns the residual stream of the step in flight, the dense weights and the KV segment's use. Knows nothing of tokens'
meaning, of gates or of where experts lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from native.kernels import ffn_forward, linear, rmsnorm, soft_cap
from native.library import PHASES, NativeError, dispatch_text
from services.attention.weights import DenseWeights
from shared.container.layer_weights import attention_step
from shared.errors import ErrorCode, unknown_message
from shared.memory.big_memory import Home
from shared.memory.segments import KV
from shared.messages.attention import EmbedWanted, HeadWanted, StepAbandoned, StepPlan
from shared.messages.drafter import EmbedReady, HeadReady
from shared.messages.layer import EMBEDDING, HiddenReady, LayerFailed, Mixed
from shared.messages.router import InputReady, LogitsReady
from shared.run.service import Service, ServiceContext
from shared.step.frame import Frame
from shared.step.stages import Stage
from shared.step.workplace import Workplace
from shared.wire.protocols import ControlBus

ATTENTION_PARTS = tuple(Stage[name.upper()] for name in PHASES)
"""As the pool counts them."""


@dataclass
class StepRun:
    """The step in flight: all layers below ``layer`` are done; at a MoE layer the experts' answer is awaited."""

    plan: StepPlan
    layer: int = 0
    is_waiting: bool = False
    n_faults: int = 0


class AttentionService(Service):
    """See the module docstring."""

    name = "attention"
    receives = (StepPlan, EmbedWanted, HeadWanted, StepAbandoned, Mixed)

    def load(self, ctx: ServiceContext[ControlBus]) -> dict[str, str]:
        self._ctx = ctx
        self._bus = ctx.bus
        config = ctx.config
        ctx.set_stage("load dense part")
        self._weights = weights = DenseWeights(
            Path(config.model_dir), Home.of(config, ctx.log), embedding_on_disk=config.embedding_on_disk
        )
        self._spec = spec = weights.spec
        self._place = place = Workplace(config, self.name, spec)
        place.keep(weights)
        self._pool, self._counters, self._timer = place.pool, place.counters, place.timer
        self._has_pilot = config.pilot == "on"
        self._n_states, self._n_drafts = config.max_sequences, config.n_drafts
        frame = place.frame(0)
        self._pilot_rows = len(frame.layer_input)
        n_rows = len(frame.token)
        self._x = np.empty((n_rows, spec.hidden), np.float32)
        self._final = np.empty((n_rows, spec.hidden), np.float32)
        # What the kernels index with is copied: after an abort the router fills the frame while this step is being left.
        self._position, self._seq = np.empty_like(frame.position), np.empty_like(frame.seq)
        self._table, self._state = np.empty_like(frame.block_table), np.empty_like(frame.state)
        # One set of rows serves all layers of a step; only the cache below it changes.
        self._rows, self._caches = attention_step(spec.main_attention, config, self._x, place.segment(KV))
        # Beside the experts: the branch's share of the layer in flight, and room to norm in.
        self._share, self._scratch = (
            np.empty((n_rows if spec.branch else 0, spec.hidden), np.float32) for _ in range(2)
        )
        self._run: StepRun | None = None
        return {"kernels": dispatch_text(), "dense_bytes": str(weights.n_bytes), "memory": weights.describe()}

    def is_idle(self) -> bool:
        return self._run is None

    def close(self) -> None:
        self._place.close()

    # -- messages --------------------------------------------------------------------------------------------

    def handle(self, msg: Any, sender: str) -> None:
        if isinstance(msg, Mixed):
            self._on_mixed(msg)
        elif isinstance(msg, StepPlan):
            self._on_plan(msg)
        elif isinstance(msg, (EmbedWanted, HeadWanted)):
            try:
                self._help_drafter(msg)
            except NativeError as error:
                failed = LayerFailed(msg.step, self._spec.mtp_layer, (), ErrorCode.KERNEL_FAILED, str(error))
                self._bus.post("router", failed)
        elif isinstance(msg, StepAbandoned):
            if self._run and self._run.plan.step < msg.before:
                self._run = None
        else:
            raise unknown_message(self.name, msg, sender)

    def _help_drafter(self, msg: EmbedWanted | HeadWanted) -> None:
        frame = self._place.frame(msg.frame)
        self._timer.continue_step(frame, msg.step)
        if isinstance(msg, EmbedWanted):
            with self._timer.stage(Stage.EMBED, self._spec.mtp_layer):
                self._embed(msg.step, frame, msg.n_rows, frame.embed)
            self._counters.add("embeds", msg.n_rows)
            self._bus.post("drafter", EmbedReady(msg.step))
        else:
            with self._timer.stage(Stage.HEAD, self._spec.mtp_layer):
                self._head(frame, frame.final, msg.n_logits)
            self._bus.post("drafter", HeadReady(msg.step))

    def _on_plan(self, plan: StepPlan) -> None:
        if self._run and plan.step < self._run.plan.step:
            return
        frame = self._place.frame(plan.frame)
        self._timer.begin_step(frame, plan.step)
        n = plan.n_rows
        self._counters.add("steps", 1)
        self._counters.add("rows", n)
        table = self._table[: plan.n_sequences]
        self._position[:n] = frame.position[:n]
        self._seq[:n] = frame.seq[:n]
        table[:] = frame.block_table[: plan.n_sequences]
        self._state[: plan.n_sequences] = frame.state[: plan.n_sequences]
        self._rows.set_rows(n, self._position, self._seq, table, frame.hidden)
        self._rows.set_states(self._state, self._n_states, self._n_drafts)
        self._run = StepRun(plan)
        try:
            with self._timer.stage(Stage.EMBED):
                self._run.n_faults = self._embed(plan.step, frame, plan.n_rows, self._x)
            self._advance(self._run, frame)
        except NativeError as error:
            self._fail(error)

    def _on_mixed(self, msg: Mixed) -> None:
        run = self._run
        if run is None or not run.is_waiting or (msg.step, msg.layer) != (run.plan.step, run.layer):
            return
        frame = self._place.frame(run.plan.frame)
        n = run.plan.n_rows
        try:
            with self._timer.stage(Stage.RESIDUAL, run.layer):
                self._join(run.layer, frame.mixed[:n], self._x[:n])
            run.is_waiting = False
            run.n_faults += msg.n_faults
            run.layer += 1
            self._advance(run, frame)
        except NativeError as error:
            self._fail(error)

    def _join(self, layer: int, mixed: np.ndarray, x: np.ndarray) -> None:
        """x f32[T, D] after the layer, from the experts' rows."""
        branch, n = self._weights.branches.get(layer), len(x)
        if branch is None:
            np.add(x, mixed, out=x)
        else:
            branch.finish(self._pool, self._share[:n], mixed, self._scratch[:n], x)

    def _fail(self, error: NativeError) -> None:
        run, self._run = self._run, None
        if run:
            self._bus.post("router", LayerFailed(run.plan.step, run.layer, (), ErrorCode.KERNEL_FAILED, str(error)))

    # -- layers ----------------------------------------------------------------------------------------------

    def _advance(self, run: StepRun, frame: Frame) -> None:
        """Run layers until the experts are needed or the step is complete."""
        n, spec = run.plan.n_rows, self._spec
        while run.layer < spec.n_layers:
            layer = run.layer
            if layer not in self._weights.dense_ffn and self._wants_input(n):
                frame.layer_input[:n] = self._x[:n]
                self._bus.send("router", InputReady(run.plan.step, layer, run.plan.frame, n))
            with self._timer.stage(Stage.ATTENTION, layer):
                self._weights.layers[layer].run(self._pool, self._rows, self._caches[layer])
                self._timer.divide(ATTENTION_PARTS, self._pool.take_phases())
            ffn = self._weights.dense_ffn.get(layer)
            if ffn is None:
                run.is_waiting = True
                if spec.gate.reads_residual:
                    frame.residual[:n] = self._x[:n]
                ready = HiddenReady(run.plan.step, layer, run.plan.frame, n)
                self._bus.post("router", ready)
                self._bus.post("expert_io", ready)
                self._run_beside(layer, n)
                return
            with self._timer.stage(Stage.DENSE_FFN, layer):
                ffn_forward(self._pool, ffn, frame.hidden[:n], self._x[:n], add=True)
            run.layer += 1
        self._complete(run, frame)

    def _run_beside(self, layer: int, n: int) -> None:
        """What needs no expert, while these work."""
        branch = self._weights.branches.get(layer)
        if branch is not None:
            with self._timer.stage(Stage.DENSE_FFN, layer):
                branch.begin(self._pool, self._x[:n], self._scratch[:n], self._share[:n])

    def _wants_input(self, n_rows: int) -> bool:
        """Whether the router guesses experts from a layer's input now."""
        return self._has_pilot and n_rows <= self._pilot_rows and not self._place.store_counters.get("pilot_paused")

    def _complete(self, run: StepRun, frame: Frame) -> None:
        n = run.plan.n_rows
        final = frame.final if run.plan.want_final else self._final
        with self._timer.stage(Stage.HEAD):
            rmsnorm(self._pool, self._x[:n], self._weights.final_norm, self._spec.rms_eps, final[:n])
            self._head(frame, final, run.plan.n_logits)
        self._run = None
        self._bus.post("router", LogitsReady(run.plan.step, run.n_faults))

    def _head(self, frame: Frame, final: np.ndarray, n_logits: int) -> None:
        """logits of the wanted rows of final f32[T, D]."""
        if not n_logits:
            return
        rows = np.ascontiguousarray(final[frame.logit_row[:n_logits]])
        logits = frame.logits[:n_logits]
        linear(self._pool, self._weights.head, rows, logits)
        if self._spec.logit_cap:
            soft_cap(self._pool, self._spec.logit_cap, logits)
        self._counters.add("heads", n_logits)

    def _embed(self, step: int, frame: Frame, n_rows: int, out: np.ndarray) -> int:
        """Embeds the frame's tokens; returns how many faults the router was told of."""
        faults = self._weights.embed(frame.token[:n_rows], out[:n_rows])
        if self._spec.embedding_scale != 1.0:
            np.multiply(out[:n_rows], np.float32(self._spec.embedding_scale), out=out[:n_rows])
        for sentence, rows in faults.items():
            self._ctx.log.error("embedding_read_failed", reason=sentence)
            self._bus.post("router", LayerFailed(step, EMBEDDING, rows, ErrorCode.EMBEDDING_READ_FAILED, sentence))
        return len(faults)
