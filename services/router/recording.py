"""What the router writes down for tests and measurements.

``record_logits = FILE``: one MessagePack map per row, in the order of computation; every prompt row has its logits
computed then too. ``record_routing = FILE``: the gates' choices (``shared/experts/traces.py``), written by a thread of its
own, so that a slow disk delays no layer.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgpack
import numpy as np
from numpy.typing import NDArray

from services.router.drafting import DraftPlan
from services.router.scheduler import MainPlan
from shared.container.reader import Container
from shared.errors import ConfigError
from shared.experts.traces import SpanNote, TraceHeader, TraceWriter, layer_record, lost_record, step_record
from shared.files import open_file
from shared.log import Log
from shared.step.stages import StepKind

MAX_PENDING_BYTES = 8 << 20
"""Routing records that wait for the disk; beyond it they are counted as lost."""
CLOSE_S = 5.0
"""How long the end of the service waits for the disk."""


class LogitRecorder:
    """Appends ``{request, position, token, n_prompt, logits}``; ``logits`` are the row's f32 bytes, ``token`` its input."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        except OSError as error:
            raise ConfigError(f"record_logits: {path} can't be written: {error.strerror}") from None

    def record(self, plan: MainPlan, logits: NDArray[np.float32]) -> None:
        """logits f32[L, V] of a finished step."""
        for span in plan.spans:
            skipped = span.n_rows - span.n_logits
            for i in range(span.n_logits):
                self._file.write(
                    msgpack.packb(
                        {
                            "request": span.sequence.request,
                            "position": span.position + skipped + i,
                            "token": span.tokens[skipped + i],
                            "n_prompt": span.sequence.n_prompt,
                            "logits": np.ascontiguousarray(logits[span.logit_first + i]).tobytes(),
                        }
                    )
                )
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RoutingRecorder:
    """Writes a routing trace. ``begin`` and ``choice`` cost microseconds: the file is another thread's affair."""

    def __init__(self, path: Path, header: TraceHeader, log: Log) -> None:
        self._writer = TraceWriter(path, header)
        self._log = log
        self._wake = threading.Condition()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._n_lost = 0
        self._is_closed = False
        self._step = -1
        self._spans: list[SpanNote] = []
        self._thread = threading.Thread(target=self._write, name="record-routing", daemon=True)
        self._thread.start()

    def begin(self, step: int, kind: StepKind, spans: list[SpanNote]) -> None:
        """The rows of a step that is about to run, and of the draft steps that are chained to it."""
        self._step, self._spans = step, spans
        self._put(step_record(step, kind, spans))

    def choice(self, step: int, layer: int, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """ids i32[T, K], weights f32[T, K] of a layer; copied."""
        if step > self._step:
            self.begin(step, StepKind.DRAFT, self._spans)
        self._put(layer_record(step, layer, ids, weights))

    def _put(self, record: bytes) -> None:
        with self._wake:
            if self._pending_bytes + len(record) > MAX_PENDING_BYTES:
                self._n_lost += 1
                return
            if self._n_lost:
                self._pending.append(lost_record(self._n_lost))
                self._n_lost = 0
            self._pending.append(record)
            self._pending_bytes += len(record)
            self._wake.notify()

    def _write(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._is_closed)
                records, self._pending, self._pending_bytes = self._pending, [], 0
            if not records:
                return
            try:
                self._writer.write(records)
            except OSError as error:  # the disk is full: the model goes on without its trace
                self._log.error("record_routing_stopped", reason=error.strerror or str(error))
                with self._wake:
                    self._pending, self._pending_bytes = [], MAX_PENDING_BYTES
                return

    def close(self) -> None:
        """Writes what waits and closes the file."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._writer.close()


def trace_header(container: Container, model: str, with_mtp: bool) -> TraceHeader:
    """What a trace says about the model; the MTP layer is in it only when somebody drafts with it."""
    spec = container.spec
    records = {
        layer: file.record_bytes for layer, file in container.experts.items() if layer < spec.n_layers or with_mtp
    }
    return TraceHeader(
        model=model,
        fingerprint=container.fingerprint,
        n_experts=spec.n_experts,
        gate_k=spec.gate_k,
        record_bytes=records,
    )


def span_notes(plan: MainPlan) -> list[SpanNote]:
    """The rows of a main step, for the trace."""
    return [SpanNote(s.sequence.request, s.n_rows, s.position, s.is_prefill) for s in plan.spans]


def draft_notes(plan: DraftPlan) -> list[SpanNote]:
    """The rows of a draft step that need experts: the newest of each sequence that drafts."""
    return [SpanNote(s.sequence.request, 1, s.position + s.n_rows - 1, False) for s in plan.drafting]
