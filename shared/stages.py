"""Where the time of a step goes: stage names, the additive timer that writes rows into a frame, and the trace ring.

Every engine service times its own work. A nested stage is cut out of the enclosing one, so the rows of one service never
overlap and add up to the time between its first ``begin`` and its last ``end``. Times are CLOCK_MONOTONIC nanoseconds, one
clock for all processes of a host. Imports the standard library alone, until a ``TraceRing`` is made.
"""

from __future__ import annotations

import struct
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from shared.endpoints import SERVICES

from shared.endpoints import SERVICES

if TYPE_CHECKING:
    import numpy as np

    from shared.frame import Frame


class Stage(IntEnum):
    """What a row measured. The numbers are in trace files: append, never renumber."""

    OTHER = 0
    # attention
    EMBED = 1
    ATTENTION = 2
    DENSE_FFN = 3
    HEAD = 4
    MIXED_WAIT = 5
    """attention or drafter waits for the experts of a layer"""
    # router
    PLAN = 6
    GATE = 7
    PILOT = 8
    SAMPLE = 9
    STEP = 10
    """the whole step as the router sees it, from its plan to its tokens; not additive"""
    # expert_io
    SHARED_FFN = 11
    EXPERT_FFN = 12
    REDUCE = 13
    IO_WAIT = 14
    """expert_io has nothing resident to compute with and waits for reads"""
    IO_READ = 15
    """storage is busy with one expert; overlaps with everything, not additive"""
    GATE_WAIT = 16
    """expert_io has the hidden rows and waits for the gate"""
    # drafter
    DRAFT = 17
    DRAFT_WAIT = 18
    """the drafter waits for embedding, head or experts"""
    GRAMMAR = 19
    UNION = 20
    """expert_io sorts rows by expert, looks at its slots and issues reads"""
    STREAM = 21
    """router hands new tokens to the gateway"""


class StepKind(IntEnum):
    """What a STEP row was about; stands in its ``layer``. Its ``bytes`` are the number of rows."""

    DECODE = 0
    PREFILL = 1
    DRAFT = 2


ADDITIVE: frozenset[Stage] = frozenset(Stage) - {Stage.STEP, Stage.IO_READ}
"""Stages whose rows of one service never overlap."""

COMPUTE: frozenset[Stage] = ADDITIVE - {Stage.MIXED_WAIT, Stage.IO_WAIT, Stage.GATE_WAIT, Stage.DRAFT_WAIT}

ROW = struct.Struct("<qqqqii")
"""One ``cb_stage``: start_ns, end_ns, bytes, step, stage, layer."""
NO_LAYER = -1


class StageTimer:
    """Writes the stage rows of one service into its block of the frame of the step in progress.

        timer = StageTimer("attention")
        timer.begin_step(frame, step)                     # rows of this frame start again at 0
        with timer.stage(Stage.ATTENTION, layer): ...     # or begin(stage, layer) ... end()

    Nested stages pause the enclosing one. ``add_bytes`` counts for the innermost. One writer; readers wait for a message.
    Rows that find no room are counted in ``stage_count[service][1]``.
    """

    __slots__ = ("_block", "_bytes", "_capacity", "_count", "_n", "_pending", "_stack", "step")

    def __init__(self, service: str) -> None:
        self._block = SERVICES.index(service)
        self._stack: list[list[int]] = []
        self._pending = (0, NO_LAYER)
        self._bytes = memoryview(b"")
        self._capacity = 0
        self._count: Any = [0] * 8
        self._n = 0
        self.step = 0

    def begin_step(self, frame: Frame, step: int) -> None:
        """From now on rows go into ``frame``, from its row 0. Stages still open are forgotten."""
        self.bind(frame.stage[self._block], frame.stage_count[self._block], step)

    def continue_step(self, frame: Frame, step: int) -> None:
        """As ``begin_step``, but behind the rows that this service already wrote into ``frame`` (a chained draft)."""
        n = int(frame.stage_count[self._block][0])
        self.begin_step(frame, step)
        self._n = n
        self._count[0] = n

    def bind(self, rows: Any, count: Any, step: int) -> None:
        """``rows``: a writable buffer of ``cb_stage``; ``count``: i64[8] cells, [0] rows written, [1] rows without room."""
        self._stack.clear()
        self._bytes = memoryview(rows).cast("B")
        self._capacity = self._bytes.nbytes // ROW.size
        self._count = count
        self._n = 0
        self.step = step
        count[0] = 0
        count[1] = 0

    @property
    def n_rows(self) -> int:
        """Rows written in this frame."""
        return self._n

    def stage(self, stage: int, layer: int = NO_LAYER) -> StageTimer:
        """For ``with``: opens the stage on entry, closes it on exit."""
        self._pending = (stage, layer)
        return self

    def __enter__(self) -> StageTimer:
        stage, layer = self._pending
        self.begin(stage, layer)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, stage: int, layer: int = NO_LAYER) -> None:
        """Opens a stage; the enclosing one pauses."""
        now = time.monotonic_ns()
        if self._stack:
            self._write(self._stack[-1], now)
        self._stack.append([now, self.step, layer, stage, 0])

    def end(self, n_bytes: int = 0) -> int:
        """Closes the innermost stage; the enclosing one goes on. Returns the end in ns."""
        now = time.monotonic_ns()
        opened = self._stack.pop()
        opened[4] += n_bytes
        self._write(opened, now)
        if self._stack:
            self._stack[-1][0] = now
        return now

    def add_bytes(self, n_bytes: int) -> None:
        """Bytes read or touched by the innermost stage."""
        self._stack[-1][4] += n_bytes

    def add(self, stage: int, layer: int, start_ns: int, end_ns: int, n_bytes: int = 0) -> None:
        """A row measured elsewhere (a read by the pool); takes no part in nesting."""
        self._write([start_ns, self.step, layer, stage, n_bytes], end_ns)

    def _write(self, opened: list[int], end_ns: int) -> None:
        start_ns, step, layer, stage, n_bytes = opened
        opened[4] = 0
        if end_ns <= start_ns and not n_bytes:
            return
        n = self._n
        if n >= self._capacity:
            self._count[1] += 1
            return
        ROW.pack_into(self._bytes, n * ROW.size, start_ns, end_ns, n_bytes, step, stage, layer)
        self._n = n + 1
        self._count[0] = n + 1


class StepKind(IntEnum):
    """In the ``layer`` of a STEP row of the trace: what the step was for."""

    DECODE = 0
    PREFILL = 1
    DRAFT = 2


class TraceRing:
    """Segment ``trace``: the last rows of all services. The router appends finished steps, tools read without stopping it.

    Bytes: i64 rows ever written, i64 capacity, padding to 64, then rows of ``dtype``. A reader copies rows and then looks at
    the count again: what was overwritten meanwhile is dropped from its copy and reported as lost. Each step ends with one
    row of the router: stage STEP, ``layer`` a StepKind, ``rows`` the rows it computed.
    """

    HEAD_BYTES = 64

    def __init__(self, buf: Any) -> None:
        import numpy as np

        self.dtype = np.dtype(
            [
                ("start_ns", "<i8"),
                ("end_ns", "<i8"),
                ("bytes", "<i8"),
                ("step", "<i8"),
                ("stage", "<i4"),
                ("layer", "<i4"),
                ("service", "<i4"),
                ("rows", "<i4"),
            ]
        )
        n_bytes = memoryview(buf).nbytes
        self.capacity = (n_bytes - self.HEAD_BYTES) // self.dtype.itemsize
        self._head = np.frombuffer(buf, dtype="<i8", count=2)
        self._rows = np.frombuffer(buf, dtype=self.dtype, count=self.capacity, offset=self.HEAD_BYTES)

    @property
    def n_written(self) -> int:
        """Rows ever written."""
        return int(self._head[0])

    def append_step(
        self,
        frame: Frame,
        step: int,
        n_steps: int,
        start_ns: int,
        end_ns: int,
        *,
        n_rows: int,
        is_draft: bool = False,
        is_prefill: bool = False,
    ) -> None:
        """Adds what all services wrote into ``frame`` about steps ``step`` .. ``step + n_steps - 1``, and the STEP row."""
        import numpy as np

        parts = []
        for service in range(len(SERVICES)):
            rows = frame.stage[service][: int(frame.stage_count[service][0])]
            rows = rows[(rows["step"] >= step) & (rows["step"] < step + n_steps)]
            part = np.zeros(len(rows), self.dtype)
            for name in ("start_ns", "end_ns", "bytes", "step", "stage", "layer"):
                part[name] = rows[name]
            part["service"] = service
            parts.append(part)
        kind = StepKind.DRAFT if is_draft else StepKind.PREFILL if is_prefill else StepKind.DECODE
        whole = np.zeros(1, self.dtype)
        whole[0] = (start_ns, end_ns, 0, step, Stage.STEP, kind, SERVICES.index("router"), n_rows)
        self.append(np.concatenate([*parts, whole]))

    def append(self, block: np.ndarray) -> None:
        """Adds rows of ``dtype``; of more than ``capacity`` the last ones."""
        import numpy as np

        block = block[-self.capacity :]
        n = len(block)
        written = int(self._head[0])
        self._rows[np.arange(written, written + n) % self.capacity] = block
        self._head[1] = self.capacity
        self._head[0] = written + n

    def read_since(self, count: int) -> tuple[int, np.ndarray, int]:
        """(new count, copy of the rows written after ``count``, rows lost because the ring went round)."""
        import numpy as np

        written = int(self._head[0])
        first = max(count, written - self.capacity)
        rows = self._rows[np.arange(first, written) % self.capacity].copy() if written > first else self._rows[:0].copy()
        overwritten = max(0, int(self._head[0]) - self.capacity - first)
        if overwritten:
            rows = rows[overwritten:]
        return written, rows, first - count + overwritten
