"""The numbers of a layer visit: whose rows want which expert, the shared expert, the sum, and what is not finite in it.

Computes what it is told to and decides nothing. One visit at a time; the routed experts are the engines' affair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from native.kernels import Ffn, Rows, expert_reduce, ffn_forward, gate_rows
from native.library import Pool, address
from native.matrix import ACT_F32, Matrix
from services.expert_io.engine import Work
from shared.container.format import owner_of
from shared.container.layer_weights import DensePart
from shared.container.reader import Container
from shared.errors import ErrorCode
from shared.memory.big_memory import Home
from shared.memory.named_file import SHARED_EXPERTS
from shared.messages.layer import HiddenReady
from shared.model.spec import ModelSpec
from shared.model.tensors import matrix_of
from shared.step.frame import Frame, FrameSet

FEW_PAIRS = 32
ROWS_PER_FAULT = 8192  # so that a long prompt whose every row is faulty stays below the largest frame
FEW_ROWS = 16
"""Up to so many rows the parts of frames are made once and kept."""


class SharedExperts:
    """The shared expert of every layer that has one, in memory."""

    def __init__(self, container: Container, layers: tuple[int, ...], home: Home | None) -> None:
        spec = container.spec
        self.part = DensePart(
            container,
            lambda e: owner_of(e.name, spec) == "shared" and int(e.name.split(".")[2]) in layers,
            SHARED_EXPERTS,
            home,
        )
        self.of_layer: dict[int, Ffn] = {}
        self.gates: dict[int, Matrix] = {}
        """Those that have one: rows are multiplied with its sigmoid."""
        for layer in layers if spec.n_shared else ():
            prefix, tensors = f"model.layers.{layer}.mlp.shared_experts.", self.part.tensors
            self.of_layer[layer] = spec.inner.kernel(prefix, tensors)
            if spec.has_shared_gate:
                self.gates[layer] = matrix_of(tensors[f"{prefix}own_gate.weight"], ACT_F32)

    def close(self) -> None:
        self.part.close()


class Failure(NamedTuple):
    """Why a row can't go on; ``expert`` -1 where it is not a read that failed."""

    expert: int
    code: ErrorCode
    message: str


class Fault(NamedTuple):
    """Rows that have no true result, for one reason."""

    rows: tuple[int, ...]
    code: ErrorCode
    message: str


@dataclass
class Sum:
    """The arrays of one sum, cut to the visit's rows."""

    weight: Rows
    order: Rows
    shared: Rows | None
    mixed: Rows


@dataclass
class RowsOf:
    """A frame's arrays as the kernels take them."""

    hidden: Rows
    weight: Rows
    mixed: Rows
    sums: dict[int, Sum] = field(default_factory=dict)


class LayerWork:
    """See the module docstring. ``failed_rows``: rows of the visit that can't go on, and why."""

    def __init__(self, frames: FrameSet, spec: ModelSpec, shared: SharedExperts, pool: Pool) -> None:
        self._frames, self._spec, self._shared, self._pool = frames, spec, shared, pool
        self.failed_rows: dict[int, Failure] = {}
        self.frame: Frame = frames.frame(0)
        self.layer = -1
        self._n_rows = 0
        self._told: tuple[int, set[int]] = (-1, set())  # rows of this step that the router knows to be faulty
        n_rows = len(self.frame.token)
        n_pairs = n_rows * spec.gate_k
        self._parts: NDArray[np.float32] = np.empty((n_pairs, spec.hidden), np.float32)
        self._shared_out = Rows(np.zeros((n_rows, spec.hidden), np.float32))
        self._order = Rows(np.tile(np.arange(spec.gate_k, dtype=np.int32), (n_rows, 1)))
        self._rows_of = [
            RowsOf(Rows(frame.hidden), Rows(frame.gate_weight), Rows(frame.mixed))
            for frame in (frames.frame(number) for number in range(frames.n_frames))
        ]
        self._of_frame = self._rows_of[0]
        rows, places = np.zeros(n_pairs, np.int32), np.zeros(n_pairs, np.int32)
        self.work = Work(rows, places, address(rows), address(places), Rows(self._parts), self._of_frame.hidden)
        # A single row's: every expert has one pair.
        self._one_row = np.zeros(spec.gate_k, np.int32), np.arange(spec.gate_k, dtype=np.int32)

    def begin(self, msg: HiddenReady) -> None:
        """The visit that is meant from now on."""
        self.frame = self._frames.frame(msg.frame)
        self._of_frame = self._rows_of[msg.frame]
        self.layer, self._n_rows = msg.layer, msg.n_rows
        self.work.layer, self.work.hidden = msg.layer, self._of_frame.hidden
        if self.failed_rows:
            self.failed_rows = {}

    # -- who wants whom --------------------------------------------------------------------------------------

    def sort(self) -> dict[int, int]:
        """The gate's answer lies in the frame: sorts its rows by expert. Expert, ascending -> how many rows want it."""
        work, k = self.work, self._spec.gate_k
        gate_id: NDArray[np.int32] = self.frame.gate_id[: self._n_rows]
        flat: list[int] | NDArray[np.int32]
        begin_of: dict[int, int]
        rows_of: dict[int, int]
        if self._n_rows == 1:  # the gate writes a row's experts in ascending order
            flat = gate_id[0].tolist()
            work.rows[:k], work.places[:k] = self._one_row
            begin_of = {expert: place for place, expert in enumerate(flat)}
            rows_of = dict.fromkeys(flat, 1)
        elif gate_id.size <= FEW_PAIRS:  # plain loops beat a dozen array operations
            begin_of, rows_of = {}, {}
            pairs = sorted([(expert, place) for place, expert in enumerate(gate_id.ravel().tolist())])
            for at, (expert, _) in enumerate(pairs):
                begin_of.setdefault(expert, at)
                rows_of[expert] = rows_of.get(expert, 0) + 1
            work.places[: len(pairs)] = [place for _, place in pairs]
            work.rows[: len(pairs)] = [place // k for _, place in pairs]
        else:
            ids = gate_id.ravel()
            places = np.argsort(ids, kind="stable").astype(np.int32)
            distinct, starts = np.unique(ids[places], return_index=True)
            ends = np.append(starts[1:], len(ids))
            work.places[: len(ids)] = places
            work.rows[: len(ids)] = places // k
            begin_of = dict(zip(distinct.tolist(), starts.tolist(), strict=True))
            rows_of = dict(zip(distinct.tolist(), (ends - starts).tolist(), strict=True))
        work.begin_of, work.n_rows_of = begin_of, rows_of
        return rows_of

    def rows_of(self, expert: int) -> NDArray[np.int32]:
        """The rows that want the expert, ascending."""
        begin = self.work.begin_of[expert]
        return self.work.rows[begin : begin + self.work.n_rows_of[expert]]

    def passing(self, n_prefill: int) -> dict[int, float]:
        """The experts that no decode row wants, with the share of the prompt's rows (the last ones) that chose them."""
        if not n_prefill:
            return {}
        n_decode = self._n_rows - n_prefill
        first, begin_of = self.work.rows, self.work.begin_of
        return {e: n / n_prefill for e, n in self.work.n_rows_of.items() if first[begin_of[e]] >= n_decode}

    # -- results ---------------------------------------------------------------------------------------------

    def run_shared(self, begin: int, end: int) -> None:
        """The layer's shared expert on these rows."""
        ffn, gate = self._shared.of_layer[self.layer], self._shared.gates.get(self.layer)
        hidden, out = self._of_frame.hidden.part(begin, end), self._shared_out.part(begin, end)
        ffn_forward(self._pool, ffn, hidden, out, add=False)
        if gate is not None:
            gate_rows(self._pool, gate, hidden, out)

    def fail(self, expert: int, code: ErrorCode, message: str) -> None:
        """The rows that want this expert can't go on."""
        failure = Failure(expert, code, message)
        for row in self.rows_of(expert).tolist():
            # Of several the lowest expert's, so that the order of reads does not show.
            self.failed_rows[row] = min(self.failed_rows.get(row, failure), failure, key=lambda f: f.expert)

    def new_faults(self, step: int) -> list[Fault]:
        """What the router has to know of the rows that failed: each of them once a step."""
        if not self.failed_rows:
            return []
        if self._told[0] != step:
            self._told = (step, set())
        told = self._told[1]
        rows_of: dict[tuple[ErrorCode, str], list[int]] = {}
        for row, failure in sorted(self.failed_rows.items()):
            if row not in told:
                rows_of.setdefault((failure.code, failure.message), []).append(row)
        told.update(self.failed_rows)
        return [
            Fault(tuple(rows[first : first + ROWS_PER_FAULT]), code, message)
            for (code, message), rows in rows_of.items()
            for first in range(0, len(rows), ROWS_PER_FAULT)
        ]

    def add_up(self) -> None:
        """Writes ``mixed``: of every row its experts' results and the shared one's; zeros for a row that failed."""
        n, k = self._n_rows, self._spec.gate_k
        for row in self.failed_rows:
            self._parts[row * k : (row + 1) * k] = 0.0
        of = self._sum(n)
        bad = expert_reduce(self._pool, self.work.parts, of.weight, of.order, of.shared, of.mixed)
        if bad >= 0:
            self._find_non_finite()

    def _sum(self, n: int) -> Sum:
        of_frame = self._of_frame
        made = of_frame.sums.get(n)
        if made is None:
            shared = self._shared_out.part(0, n) if self._shared.of_layer else None
            made = Sum(of_frame.weight.part(0, n), self._order.part(0, n), shared, of_frame.mixed.part(0, n))
            if n <= FEW_ROWS:
                of_frame.sums[n] = made
        return made

    def _find_non_finite(self) -> None:
        """Names the expert whose output is not finite and stops it from spreading."""
        n, k, frame = self._n_rows, self._spec.gate_k, self.frame
        for row in np.flatnonzero(~np.isfinite(frame.mixed[:n]).all(axis=1)).tolist():
            parts = self._parts[row * k : (row + 1) * k]
            culprits = np.flatnonzero(~np.isfinite(parts).all(axis=1))
            who = f"expert {int(frame.gate_id[row, culprits[0]])}" if len(culprits) else "the shared expert or the sum"
            frame.mixed[row] = 0.0
            words = f"The output of {who} in layer {self.layer} is not finite for one row. The request was ended; others go on."
            self.failed_rows.setdefault(row, Failure(-1, ErrorCode.NON_FINITE, words))
