"""Where the time of a step goes: stage names, the additive timer that writes rows into a frame, and the trace ring.

Every engine service times its own work. A nested stage is cut out of the enclosing one, so the rows of one service never
overlap and add up to the time between its first ``begin`` and its last ``end``. Times are CLOCK_MONOTONIC nanoseconds, one
clock for all processes of a host. Imports the standard library alone, until a ``TraceRing`` is made.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from shared.wire.endpoints import SERVICES

if TYPE_CHECKING:
    import numpy as np

    from shared.step.frame import Frame


class Stage(IntEnum):
    """What a row measured. The numbers are in trace files: append, never renumber, and leave 0, 5, 16, 18 and 19 free."""

    # attention
    EMBED = 1
    ATTENTION = 2
    DENSE_FFN = 3
    HEAD = 4
    PROJECTIONS = 24
    """of attention, like the three below; ATTENTION is then what is left: the call itself, angles"""
    INDEXER = 25
    SCORES = 26
    VALUES = 27
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
    # drafter
    DRAFT = 17
    UNION = 20
    """expert_io sorts rows by expert, looks at its slots and issues reads; its ``bytes`` are what it found (``pack_found``)"""
    RESIDUAL = 22
    """attention adds the experts' rows to its residual stream"""
    SLOTS = 23
    """expert_io takes finished reads into its slots and issues further ones, while it does not wait for any"""
    STREAM = 21
    """router hands new tokens to the gateway"""


class StepKind(IntEnum):
    """What a STEP row was about; stands in its ``layer``. Its ``bytes`` are the number of rows."""

    DECODE = 0
    PREFILL = 1
    DRAFT = 2


ADDITIVE: frozenset[Stage] = frozenset(Stage) - {Stage.STEP, Stage.IO_READ}
"""Stages whose rows of one service never overlap."""

COMPUTE: frozenset[Stage] = ADDITIVE - {Stage.IO_WAIT}

KERNELS: frozenset[Stage] = frozenset(
    (Stage.EMBED, Stage.ATTENTION, Stage.PROJECTIONS, Stage.INDEXER, Stage.SCORES, Stage.VALUES, Stage.DENSE_FFN)
) | {Stage.HEAD, Stage.GATE, Stage.SHARED_FFN, Stage.EXPERT_FFN, Stage.DRAFT}
"""Stages that read weights or the cache. The rest is what a group costs beside the arithmetic."""

ROW = struct.Struct("<qqqqii")
"""One ``cb_stage``: start_ns, end_ns, bytes, step, stage, layer."""
NO_LAYER = -1


_FOUND_BITS = 20


def pack_found(hits: int, late_hits: int, misses: int) -> int:
    """How a visit found its experts, as the ``bytes`` of a UNION row."""
    return hits | late_hits << _FOUND_BITS | misses << 2 * _FOUND_BITS


def unpack_found(packed: int) -> tuple[int, int, int]:
    """(hits, late hits, misses) of ``pack_found``."""
    mask = (1 << _FOUND_BITS) - 1
    return packed & mask, packed >> _FOUND_BITS & mask, packed >> 2 * _FOUND_BITS & mask


class StepTimer:
    """Writes the stage rows of one service into its block of the frame of the step in progress.

        timer = StepTimer("attention")
        timer.begin_step(frame, step)
        with timer.stage(Stage.ATTENTION, layer) as block: ...; block.n_bytes = 123

    Nested stages pause the enclosing one. One writer; readers wait for a message. Rows that find no room are counted in
    ``stage_count[service][1]``.
    """

    __slots__ = ("_block", "_bytes", "_capacity", "_count", "_frame", "_n", "_nesting", "_stack", "step")

    def __init__(self, service: str) -> None:
        self._block = SERVICES.index(service)
        self._stack: list[list[int]] = []
        self._nesting = _StageBlock(self)
        self._frame: Any = None
        self._bytes = memoryview(b"")
        self._capacity = 0
        self._count: Any = [0] * 8
        self._n = 0
        self.step = 0

    def begin_step(self, frame: Frame, step: int) -> None:
        """Writes into ``frame`` from now on, from its row 0 when the step is new there. Open stages are forgotten."""
        if frame is not self._frame or step != self.step:
            self._frame = frame
            self.bind(frame.stage[self._block].view("u1"), frame.stage_count[self._block], step)

    def continue_step(self, frame: Frame, step: int) -> None:
        """As ``begin_step``, but behind the rows already there: the next of a chain of draft steps in one frame."""
        if frame is not self._frame:
            self.begin_step(frame, step)
        self.step = step

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

    def stage(self, stage: int, layer: int = NO_LAYER) -> _StageBlock:
        """Opens the stage; a context manager that closes it. Set its ``n_bytes`` inside."""
        self.begin(stage, layer)
        return self._nesting

    def begin(self, stage: int, layer: int = NO_LAYER) -> None:
        """Opens a stage; the enclosing one pauses."""
        now = time.monotonic_ns()
        if self._stack:
            outer = self._stack[-1]
            self._write(outer[0], now, 0, outer[1], outer[2])
        self._stack.append([now, stage, layer])

    def end(self, n_bytes: int = 0) -> int:
        """Closes the innermost stage, the enclosing one goes on; returns the time in ns."""
        now = time.monotonic_ns()
        start_ns, stage, layer = self._stack.pop()
        self._write(start_ns, now, n_bytes, stage, layer)
        if self._stack:
            self._stack[-1][0] = now
        return now

    def divide(self, stages: Sequence[int], times_ns: Sequence[int]) -> None:
        """What the open stage has spent on parts of itself becomes rows of theirs, laid one after another at its begin. Call
        it right before ``end``; what is left stays the open stage's."""
        start_ns, _, layer = outer = self._stack[-1]
        latest = time.monotonic_ns()
        for stage, ns in zip(stages, times_ns):
            if ns > 0:
                end_ns = min(start_ns + ns, latest)
                self._write(start_ns, end_ns, 0, stage, layer)
                start_ns = end_ns
        outer[0] = start_ns

    def record(self, stage: int, layer: int, start_ns: int, end_ns: int, n_bytes: int = 0) -> None:
        """A row of the current step that was measured elsewhere (a read by the pool); takes no part in nesting."""
        self._write(start_ns, end_ns, n_bytes, stage, layer)

    def _write(self, start_ns: int, end_ns: int, n_bytes: int, stage: int, layer: int) -> None:
        if end_ns <= start_ns and not n_bytes:
            return
        n = self._n
        if n >= self._capacity:
            self._count[1] += 1
            return
        ROW.pack_into(self._bytes, n * ROW.size, start_ns, end_ns, n_bytes, self.step, stage, layer)
        self._n = n + 1
        self._count[0] = n + 1


class _StageBlock:
    """Closes the innermost stage of its timer; one object serves all, since stages nest strictly."""

    __slots__ = ("_timer", "n_bytes")

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self.n_bytes = 0

    def __enter__(self) -> _StageBlock:
        self.n_bytes = 0
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.end(self.n_bytes)
        self.n_bytes = 0


class TraceRing:
    """Segment ``trace``: the last rows of all services. The router appends finished steps, tools read without stopping it.

    Bytes: i64 rows ever written, i64 capacity, padding to 64, then rows of ``dtype``. A reader copies rows and then looks at
    the count again: what was overwritten meanwhile is dropped from its copy and reported as lost. Each step ends with one
    row of the router: stage STEP, ``layer`` a StepKind, ``bytes`` the rows it computed.
    """

    HEAD_BYTES = 64
    ROW_BYTES = 48

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
                ("reserved", "<i4"),
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

    def append(self, service: int, rows: np.ndarray) -> None:
        """Adds ``rows`` (of ``native.frame.STAGE_DTYPE``) of one service; of more than ``capacity`` the last ones."""
        import numpy as np

        written = int(self._head[0]) + len(rows)
        rows = rows[-self.capacity :]
        n = len(rows)
        block = np.zeros(n, self.dtype)
        for name in ("start_ns", "end_ns", "bytes", "step", "stage", "layer"):
            block[name] = rows[name]
        block["service"] = service
        self._rows[np.arange(written - n, written) % self.capacity] = block
        self._head[1] = self.capacity
        self._head[0] = written

    def read_since(self, count: int) -> tuple[int, np.ndarray, int]:
        """(new count, copy of the rows written after ``count``, rows lost because the ring went round)."""
        import numpy as np

        written = int(self._head[0])
        first = max(count, written - self.capacity)
        rows = (
            self._rows[np.arange(first, written) % self.capacity].copy() if written > first else self._rows[:0].copy()
        )
        overwritten = max(0, int(self._head[0]) - self.capacity - first)
        if overwritten:
            rows = rows[overwritten:]
        return written, rows, first - count + overwritten
