"""Routing traces: what is written is read back, a torn end is harmless, foreign files are refused and left alone."""

from __future__ import annotations

import threading
from pathlib import Path

import msgpack
import numpy as np
import pytest

from services.router import recording
from services.router.recording import RoutingRecorder
from shared.errors import ConfigError, SchemaError
from shared.experts.traces import (
    SpanNote,
    TraceHeader,
    TraceReader,
    TraceWriter,
    layer_record,
    lost_record,
    step_record,
)
from shared.log import Log
from shared.step.stages import StepKind
from tests.support import inside
from tests.support.waiting import wait_for

HEADER = TraceHeader(model="m", fingerprint="f", n_experts=300, gate_k=2, record_bytes={3: 4096, 4: 8192})
SPANS = [SpanNote("a", 1, 17, False), SpanNote("b", 2, 0, True)]
IDS = np.array([[0, 299], [1, 2], [7, 256]], np.int32)
WEIGHTS = np.array([[0.5, 0.25], [1, 0], [0.125, 2]], np.float32)


def write(path: Path, n_steps: int = 2, first: int = 10) -> None:
    writer = TraceWriter(path, HEADER)
    for step in range(first, first + n_steps):
        writer.write([step_record(step, StepKind.PREFILL, SPANS)])
        writer.write([layer_record(step, layer, (IDS + layer) % 300, WEIGHTS) for layer in (3, 4)])
    writer.close()


def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path)
    reader = TraceReader(path)
    assert reader.header == HEADER and reader.header.layers == (3, 4)
    steps = list(reader)
    assert [(s.step, s.kind, s.n_prefill) for s in steps] == [(10, StepKind.PREFILL, 2), (11, StepKind.PREFILL, 2)]
    assert list(steps[1].spans) == SPANS
    for choice in steps[1].layers:
        np.testing.assert_array_equal(choice.ids, (IDS + choice.layer) % 300)
        np.testing.assert_array_equal(choice.weights, WEIGHTS)
    assert reader.n_lost == 0


def test_a_file_that_ends_anywhere_is_read_up_to_there_and_can_be_continued(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write(whole)
    data = whole.read_bytes()
    header_bytes = len(msgpack.packb(msgpack.unpackb(msgpack.packb(_first(data)), strict_map_key=False)))
    path = tmp_path / "torn"
    for end in range(header_bytes, len(data), 7):
        path.write_bytes(data[:end])
        before = [len(s.layers) for s in TraceReader(path)]
        write(path, 1, first=50)
        steps = list(TraceReader(path))
        assert [len(s.layers) for s in steps[:-1]] == before
        assert (steps[-1].step, len(steps[-1].layers)) == (50, 2)


def _first(data: bytes) -> object:
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    return unpacker.unpack()


def test_lost_records_are_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = TraceWriter(path, HEADER)
    writer.write([layer_record(1, 3, IDS, WEIGHTS), lost_record(5), step_record(2, StepKind.DECODE, SPANS)])
    writer.write([layer_record(2, 4, IDS, WEIGHTS), step_record(3, StepKind.DECODE, SPANS)])
    writer.close()
    reader = TraceReader(path)
    assert [(s.step, [c.layer for c in s.layers]) for s in reader] == [(2, [4])]
    assert reader.n_lost == 5


@pytest.mark.parametrize("content", [b"precious text\n", b"\x81", msgpack.packb({"a": 1}), b"\xc1\xc1"])
def test_foreign_files_are_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        TraceWriter(path, HEADER)
    assert path.read_bytes() == content
    with pytest.raises(ConfigError):
        TraceReader(path)


def test_another_model_another_version_a_second_writer_and_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path)
    with pytest.raises(ConfigError, match="trace of m"):
        TraceWriter(path, TraceHeader(model="m", fingerprint="g", n_experts=300, gate_k=2, record_bytes={3: 1}))
    writer = TraceWriter(path, HEADER)
    with pytest.raises(ConfigError, match="another group"):
        TraceWriter(path, HEADER)
    writer.close()
    with pytest.raises(ConfigError, match="can't be written"):
        TraceWriter(tmp_path / "none" / "trace", HEADER)
    path.write_bytes(path.read_bytes().replace(b"version\x01", b"version\x02", 1))
    with pytest.raises(SchemaError, match="version 2"):
        TraceReader(path)


@pytest.mark.parametrize(
    "record",
    [
        7,
        [],
        [1, 10, 3, b"\0\0", b"\0\0"],
        [1, 10, 5, b"\0\0\0\0", b"\0\0\0\0"],
        [1, 10, 3, b"\xff\xff\0\0", b"\0\0\0\0"],
        [1, 10, 3, b"\0\0\0\0", b""],
        [0, 1, 99, []],
        [0, 1, 0, [["a", 1]]],
        [2, "many"],
    ],
)
def test_damage_in_the_middle_is_named(record: object, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, 1)
    with path.open("ab") as file:
        file.write(msgpack.packb(record))
    with pytest.raises(ConfigError, match="damaged"):
        list(TraceReader(path))


def test_the_recorder_keeps_order_and_counts_what_a_slow_disk_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    disk = threading.Event()
    write_now = TraceWriter.write

    def slow(self: TraceWriter, records: list[bytes]) -> None:
        disk.wait()
        write_now(self, records)

    monkeypatch.setattr(TraceWriter, "write", slow)
    monkeypatch.setattr(recording, "MAX_PENDING_BYTES", 4096)
    recorder = RoutingRecorder(path, HEADER, Log("router"))
    recorder.begin(0, StepKind.DECODE, SPANS)
    for step in range(1000):
        recorder.begin(step, StepKind.DECODE, SPANS)
        recorder.choice(step, 3, IDS, WEIGHTS)
    disk.set()
    wait_for(lambda: not inside.has_pending(recorder), "the disk to take what was waiting")
    recorder.begin(5000, StepKind.DECODE, SPANS)
    recorder.choice(5000, 4, IDS, WEIGHTS)
    recorder.close()
    reader = TraceReader(path)
    steps = [s.step for s in reader]
    assert steps == sorted(steps) and steps[-1] == 5000 and 0 < len(steps) < 1000
    assert 2001 > reader.n_lost > 1000


def test_a_full_disk_ends_the_trace_but_not_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"

    def full(self: TraceWriter, records: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceWriter, "write", full)
    recorder = RoutingRecorder(path, HEADER, Log("router"))
    for step in range(100):
        recorder.begin(step, StepKind.DECODE, SPANS)
    recorder.close()
    assert list(TraceReader(path)) == []
