"""Stage rows add up; the trace ring loses only what it says."""

from __future__ import annotations

import time

import numpy as np
import pytest

from shared.step.stages import ADDITIVE, ROW, Stage, StepTimer, TraceRing

ROW_DTYPE = np.dtype(
    [("start_ns", "<i8"), ("end_ns", "<i8"), ("bytes", "<i8"), ("step", "<i8"), ("stage", "<i4"), ("layer", "<i4")]
)


class FakeFrame:
    def __init__(self, n_rows: int = 64) -> None:
        self.stage = np.zeros((5, n_rows), ROW_DTYPE)
        self.stage_count = np.zeros((5, 8), np.int64)

    def rows(self, service: int) -> np.ndarray:
        return self.stage[service][: self.stage_count[service][0]]


def test_row_layout_is_that_of_the_header() -> None:
    from native.frame import STAGE_DTYPE

    assert STAGE_DTYPE.itemsize == ROW.size
    packed = np.frombuffer(ROW.pack(1, 2, 3, 4, 5, 6), STAGE_DTYPE)[0]
    values = [int(packed[name]) for name in ("start_ns", "end_ns", "bytes", "step", "stage", "layer")]
    assert values == [1, 2, 3, 4, 5, 6]


def test_nested_stages_are_cut_out_and_rows_sum_to_the_wall_time() -> None:
    frame = FakeFrame()
    timer = StepTimer("attention")
    timer.begin_step(frame, 7)  # type: ignore[arg-type]
    begin = time.monotonic_ns()
    with timer.stage(Stage.ATTENTION, 3):
        time.sleep(0.01)
        with timer.stage(Stage.DENSE_FFN, 3) as block:
            time.sleep(0.02)
            block.n_bytes = 55
        time.sleep(0.01)
    wall = time.monotonic_ns() - begin
    rows = frame.rows(2)
    assert [Stage(s) for s in rows["stage"]] == [Stage.ATTENTION, Stage.DENSE_FFN, Stage.ATTENTION]
    assert rows["bytes"].tolist() == [0, 55, 0]
    assert (rows["step"] == 7).all()
    assert (rows["layer"] == 3).all()
    assert (rows["start_ns"][1:] == rows["end_ns"][:-1]).all(), "no gap and no overlap"
    total = int((rows["end_ns"] - rows["start_ns"]).sum())
    assert total <= wall
    assert total > wall * 0.9


def test_a_divided_stage_keeps_what_its_parts_leave() -> None:
    frame = FakeFrame()
    timer = StepTimer("attention")
    timer.begin_step(frame, 7)  # type: ignore[arg-type]
    timer.begin(Stage.ATTENTION, 3)
    time.sleep(0.01)
    timer.divide((Stage.PROJECTIONS, Stage.INDEXER, Stage.SCORES, Stage.VALUES), (2_000_000, 0, 3_000_000, 10**12))
    timer.end()
    rows = frame.rows(2)
    stages = [Stage(s) for s in rows["stage"]]
    assert stages == [Stage.PROJECTIONS, Stage.SCORES, Stage.VALUES, Stage.ATTENTION], "a part without time has no row"
    assert (rows["end_ns"] - rows["start_ns"])[:2].tolist() == [2_000_000, 3_000_000]
    assert (rows["start_ns"][1:] == rows["end_ns"][:-1]).all(), "no gap and no overlap, though a part claims too much"
    assert (rows["layer"] == 3).all()


def test_new_step_starts_at_row_zero_and_chained_step_goes_on() -> None:
    frame = FakeFrame()
    timer = StepTimer("drafter")
    for step in (1, 2):
        timer.begin_step(frame, step)  # type: ignore[arg-type]
        timer.record(Stage.DRAFT, 0, 10, 20)
    assert frame.rows(4)["step"].tolist() == [2]
    timer.begin_step(frame, 2)  # type: ignore[arg-type]
    assert timer.n_rows == 1, "the same step again keeps its rows"
    timer.continue_step(frame, 3)  # type: ignore[arg-type]
    timer.record(Stage.DRAFT, 0, 20, 30)
    assert frame.rows(4)["step"].tolist() == [2, 3]


def test_full_block_counts_what_found_no_room() -> None:
    frame = FakeFrame(2)
    timer = StepTimer("router")
    timer.begin_step(frame, 1)  # type: ignore[arg-type]
    for n in range(5):
        timer.record(Stage.GATE, n, n, n + 1)
    assert frame.stage_count[1][:2].tolist() == [2, 3]


def test_overlapping_stages_are_named() -> None:
    assert Stage.IO_READ not in ADDITIVE
    assert Stage.STEP not in ADDITIVE
    assert Stage.IO_WAIT in ADDITIVE


def make_rows(start: int, n: int) -> np.ndarray:
    rows = np.zeros(n, ROW_DTYPE)
    rows["start_ns"] = np.arange(start, start + n)
    rows["end_ns"] = rows["start_ns"] + 1
    return rows


def make_ring(capacity: int) -> TraceRing:
    ring = TraceRing(bytearray(TraceRing.HEAD_BYTES + capacity * TraceRing.ROW_BYTES))
    assert ring.capacity == capacity
    assert ring.dtype.itemsize == TraceRing.ROW_BYTES
    return ring


def test_ring_gives_what_was_written_since() -> None:
    ring = make_ring(10)
    ring.append(1, make_rows(0, 4))
    count, rows, lost = ring.read_since(0)
    assert (count, rows["start_ns"].tolist(), lost) == (4, [0, 1, 2, 3], 0)
    assert (rows["service"] == 1).all()
    ring.append(3, make_rows(4, 2))
    count, rows, lost = ring.read_since(count)
    assert (count, rows["start_ns"].tolist(), rows["service"].tolist(), lost) == (6, [4, 5], [3, 3], 0)
    assert len(ring.read_since(count)[1]) == 0


@pytest.mark.parametrize("steps", [(7, 9), (25,), (10, 10, 3)])
def test_ring_that_went_round_says_how_much_is_lost(steps: tuple[int, ...]) -> None:
    ring = make_ring(10)
    written = 0
    for n in steps:
        ring.append(0, make_rows(written, n))
        written += n
    _, rows, lost = ring.read_since(0)
    assert rows["start_ns"].tolist() == list(range(written - 10, written))
    assert lost == written - 10
