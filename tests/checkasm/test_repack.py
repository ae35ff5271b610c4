"""Row-major matrices into tile16, and reads that are put together from ranges: bytes against a few lines of numpy."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from native.library import NativeError, lib
from native.matrix import repack, repack_matrix, scale_bytes, weight_bytes
from native.memory import HugeBuffer
from native.reader import ENDED_FN, STARTING_FN, ReadDone, Reader, ReadExtent, open_direct, uring_refusal
from shared.container.pack import unpack_quants

ENGINES = ["threads", pytest.param("uring", marks=pytest.mark.skipif(bool(uring_refusal()), reason="no io_uring"))]
SIZES = [(1, 1), (16, 64), (17, 65), (48, 136), (33, 127), (5, 300), (256, 192)]


def row_major(
    fmt: str, out: int, in_: int, group: int, is_f16: bool, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(packed bytes, scale bytes, q i8[out, in], scales f32[out, n]), the extremes of q among them."""
    rng = np.random.default_rng(seed)
    n = -(-in_ // group) if group else 1
    scales = (rng.uniform(1e-4, 2e-1, (out, n)) * rng.choice([1, 1e-3], (out, n))).astype(np.float32)
    if is_f16:
        scales = scales.astype(np.float16).astype(np.float32)
    stored = scales.astype(np.float16) if is_f16 else scales
    if fmt == "q8":
        q = rng.integers(-128, 128, (out, in_), dtype=np.int8)
        packed = q.view(np.uint8)
    else:
        q = rng.integers(-8, 8, (out, in_), dtype=np.int8)
        wide = np.concatenate([q, rng.integers(-8, 8, (out, in_ % 2), dtype=np.int8)], axis=1)
        nibbles = (wide + 8).astype(np.uint8)
        packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed.reshape(-1), stored.reshape(-1).view(np.uint8), q, scales


@pytest.mark.parametrize(("out", "in_"), SIZES)
@pytest.mark.parametrize(("fmt", "group"), [("q4", 0), ("q4", 64), ("q4", 128), ("q8", 0)])
@pytest.mark.parametrize("is_f16", [False, True])
def test_every_quant_and_scale(fmt: str, group: int, out: int, in_: int, is_f16: bool) -> None:
    packed, stored, q, scales = row_major(fmt, out, in_, group, is_f16, out * in_)
    n_weight, n_scale = weight_bytes(fmt, out, in_), scale_bytes(fmt, out, in_)
    raw = np.concatenate([np.zeros(3, np.uint8), packed, stored])  # at no multiple of anything
    made = np.full(64 + n_weight + n_scale + 64, 0xEE, np.uint8)
    given = (3, 3 + packed.size), (64, 64 + n_weight)
    repack([repack_matrix(fmt, out, in_, group, is_f16, *given)], raw, made)
    assert (made[:64] == 0xEE).all() and (made[-64:] == 0xEE).all()
    weight, scale = made[64 : 64 + n_weight], made[64 + n_weight : -64]
    found_q, found_s = unpack_quants(weight, scale, fmt, out, in_)
    assert np.array_equal(found_q, q)
    if fmt == "q8":
        assert np.array_equal(found_s, scales[:, 0])
        return
    wide = np.repeat(scales, (group or 64 * -(-in_ // 64)) // 64, axis=1)[:, : -(-in_ // 64)]
    assert np.array_equal(found_s, wide.astype(np.float16).astype(np.float32))
    padding = unpack_quants(weight, scale, fmt, -(-out // 16) * 16, -(-in_ // 64) * 64)[0]
    assert not padding[out:].any() and not padding[:, in_:].any()


def test_scales_are_rounded_as_numpy_rounds_them() -> None:
    """Every f16 and what lies between, the denormal ones too."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate([halves, middles, np.nextafter(middles, 1), np.nextafter(middles, 0), -halves])
    values = np.concatenate([values, np.float32([65519.0, 1e-30, 0.0, -0.0])])
    raw = np.concatenate([np.full(values.size, 0x88, np.uint8), values.view(np.uint8)])
    made = np.zeros(weight_bytes("q4", values.size, 2) + scale_bytes("q4", values.size, 2), np.uint8)
    at = weight_bytes("q4", values.size, 2)
    repack([repack_matrix("q4", values.size, 2, 0, False, (0, values.size), (0, at))], raw, made)
    found = unpack_quants(made[:at], made[at:], "q4", values.size, 2)[1][:, 0]
    assert np.array_equal(found, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65520.0])
def test_scales_that_can_not_be(bad: float) -> None:
    raw = np.concatenate([np.full(32, 0x88, np.uint8), np.float32([bad]).view(np.uint8)])
    made = np.zeros(1 << 12, np.uint8)
    with pytest.raises(ValueError, match="a scale is NaN, infinite, or too large"):
        repack([repack_matrix("q4", 1, 64, 0, False, (0, 32), (0, 2048))], raw, made)


@pytest.mark.parametrize(
    ("fmt", "out", "in_", "group"), [("f32", 16, 64, 0), ("q8", 16, 64, 64), ("q4", 16, 64, 32), ("q4", 0, 64, 0)]
)
def test_what_can_not_be_repacked(fmt: str, out: int, in_: int, group: int) -> None:
    with pytest.raises(NativeError):
        repack(
            [repack_matrix(fmt, out, in_, group, False, (0, 0), (0, 0))],
            np.zeros(9999, np.uint8),
            np.zeros(9999, np.uint8),
        )


# ---- reads of several ranges ----------------------------------------------------------------------------------------


class Record:
    """A file in which weights and scales of two matrices lie apart, at odd places, and the bytes they become."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.path = path
        shapes = [("q4", 48, 8192, 64), ("q8", 40, 4160, 0)]
        content = [rng.integers(0, 256, 5000 + 13 * seed, np.uint8)]
        self.ranges: list[tuple[int, int]] = []  # offset, bytes: weight, scale, weight, scale
        made = np.zeros(1 << 21, np.uint8)
        self.matrices = []
        self.at: list[int] = []
        end = target = 0
        for fmt, out, in_, group in shapes:
            packed, stored, *_ = row_major(fmt, out, in_, group, False, seed + out)
            for part in (packed, stored):
                self.ranges.append((sum(map(len, content)), part.size))
                content += [part, rng.integers(0, 256, 777, np.uint8)]
                self.at.append(-(-end // 4096) * 4096 + self.ranges[-1][0] % 4096)
                end = self.at[-1] + part.size
            to = target, target + weight_bytes(fmt, out, in_)
            self.matrices.append(repack_matrix(fmt, out, in_, group, False, (self.at[-2], self.at[-1]), to))
            whole = np.concatenate([packed, stored])
            repack([repack_matrix(fmt, out, in_, group, False, (0, packed.size), to)], whole, made)
            target = -(-(to[1] + scale_bytes(fmt, out, in_)) // 64) * 64
        content.pop()  # the last scales end with the file, inside a sector
        path.write_bytes(np.concatenate(content).tobytes())
        self.wanted = made[:target]
        self.stage_bytes = -(-end // 4096) * 4096 + 4096

    def extents(self, fd: int) -> list[ReadExtent]:
        return [ReadExtent(offset, n, at, fd) for (offset, n), at in zip(self.ranges, self.at)]


@pytest.fixture
def target() -> Iterator[HugeBuffer]:
    with HugeBuffer(16 << 20) as buffer:
        buffer.array[:] = 0xEE
        yield buffer


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Record, int]]:
    record = Record(tmp_path / "file")
    if request.param:
        try:
            fd = open_direct(record.path)
        except OSError:
            pytest.skip("no direct reads here")
    else:
        fd = os.open(record.path, os.O_RDONLY)
    yield record, fd
    os.close(fd)


def take_all(reader: Reader, n: int) -> list[ReadDone]:
    found: list[ReadDone] = []
    while len(found) < n:
        select.select([reader.fd], [], [], 20)
        found += reader.take()
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_ranges_become_a_record(opened: tuple[Record, int], target: HugeBuffer, engine: str) -> None:
    """More reads than stages, demand and guesses mixed, beside plain ones."""
    record, fd = opened
    size = 1 << 20
    with HugeBuffer(2 * record.stage_bytes) as stages, Reader(4, 16384, engine=engine) as reader:
        reader.stages(stages.address, 2, record.stage_bytes)
        for i in range(12):
            reader.submit_extents(
                i, record.extents(fd), record.matrices, target.address + i * size, speculative=i % 3 > 0
            )
        reader.submit(99, fd, 0, 8192, target.address + 15 * size)
        done = {d.tag: d for d in take_all(reader, 13)}
    assert all(d.error == 0 and not d.cancelled and d.bytes == d.wanted for d in done.values())
    for i in range(12):
        assert np.array_equal(target.array[i * size : i * size + record.wanted.size], record.wanted), i
    assert target.array[15 * size : 15 * size + 8192].tobytes() == record.path.read_bytes()[:8192]


@pytest.mark.parametrize("engine", ENGINES)
def test_promoted_and_cancelled(opened: tuple[Record, int], target: HugeBuffer, engine: str) -> None:
    """Stages come back whatever becomes of a read: afterwards all of them can be used again."""
    record, fd = opened
    size = 1 << 20
    with HugeBuffer(record.stage_bytes) as stages, Reader(2, 4096, engine=engine) as reader:
        reader.stages(stages.address, 1, record.stage_bytes)
        for round_ in range(20):
            for i in range(4):
                reader.submit_extents(
                    10 * round_ + i, record.extents(fd), record.matrices, target.address + i * size, i > 0
                )
            reader.promote(10 * round_ + 3)
            reader.cancel(10 * round_ + round_ % 4)
            done = {d.tag % 10: d for d in take_all(reader, 4)}
            for i in range(4):
                assert done[i].error == 0
                assert not done[i].cancelled or i == round_ % 4
        reader.submit_extents(999, record.extents(fd), record.matrices, target.address + 8 * size)
        assert take_all(reader, 1)[0].error == 0
    assert np.array_equal(target.array[8 * size : 8 * size + record.wanted.size], record.wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_short_reads_and_faults(opened: tuple[Record, int], target: HugeBuffer, engine: str) -> None:
    record, fd = opened
    rng = np.random.default_rng(3)
    is_broken = False

    def ended(_offset: int, n: int, at: int, result: int) -> int:
        if is_broken:
            return -errno.ENXIO
        left = int(rng.integers(1, n + 1)) if rng.random() < 0.15 and result == n else result
        if 0 < left < n:
            ctypes.memset(at + left, 0xEE, n - left)
        return left

    hooks = STARTING_FN(lambda *_: None), ENDED_FN(ended)
    lib.cb_reader_hooks_for_test(*(ctypes.cast(hook, ctypes.c_void_p) for hook in hooks))
    try:
        with HugeBuffer(record.stage_bytes) as stages, Reader(1, 65536, engine=engine) as reader:
            reader.stages(stages.address, 1, record.stage_bytes)
            reader.submit_extents(1, record.extents(fd), record.matrices, target.address)
            assert take_all(reader, 1)[0].error == 0
            assert np.array_equal(target.array[: record.wanted.size], record.wanted)
            is_broken = True
            reader.submit_extents(2, record.extents(fd), record.matrices, target.address)
            assert take_all(reader, 1)[0].error == errno.ENXIO
            is_broken = False
            reader.submit_extents(3, record.extents(fd), record.matrices, target.address)
            assert take_all(reader, 1)[0].error == 0
    finally:
        lib.cb_reader_hooks_for_test(None, None)


def test_files_that_end_and_scales_that_can_not_be(tmp_path: Path, target: HugeBuffer) -> None:
    record = Record(tmp_path / "file")
    data = bytearray(record.path.read_bytes())
    offset, _ = record.ranges[1]
    data[offset : offset + 4] = np.float32([np.nan]).tobytes()
    record.path.write_bytes(data)
    fd = os.open(record.path, os.O_RDONLY)
    with HugeBuffer(record.stage_bytes) as stages, Reader(2, 65536) as reader:
        reader.stages(stages.address, 1, record.stage_bytes)
        reader.submit_extents(1, record.extents(fd), record.matrices, target.address)
        assert take_all(reader, 1)[0].error == errno.EILSEQ
        os.truncate(record.path, len(data) - 1)
        reader.submit_extents(2, record.extents(fd), record.matrices, target.address)
        assert take_all(reader, 1)[0].error == errno.ENODATA
    os.close(fd)


def test_requests_outside_the_contract(tmp_path: Path, target: HugeBuffer) -> None:
    record = Record(tmp_path / "file")
    fd = os.open(record.path, os.O_RDONLY)
    extents = record.extents(fd)
    with HugeBuffer(record.stage_bytes) as stages, Reader(2, 65536) as reader:
        with pytest.raises(NativeError):
            reader.submit_extents(1, extents, record.matrices, target.address)  # no stages yet
        for wrong in (
            (stages.address + 1, 1, 4096),
            (stages.address, 0, 4096),
            (stages.address, 1, 4095),
            (0, 1, 4096),
        ):
            with pytest.raises(NativeError):
                reader.stages(*wrong)
        reader.stages(stages.address, 1, record.stage_bytes)
        with pytest.raises(NativeError):
            reader.stages(stages.address, 1, record.stage_bytes)
        for ranges, matrices in (
            ([], record.matrices),
            (extents, []),
            ([ReadExtent(0, 4096, record.stage_bytes - 4095, fd)], record.matrices),
            ([ReadExtent(0, 0, 0, fd)], record.matrices),
            ([ReadExtent(-1, 10, 0, fd)], record.matrices),
            (extents, [repack_matrix("q8", 16, 64, 64, False, (0, 0), (0, 0))]),
            (extents * 5, record.matrices),
        ):
            with pytest.raises(NativeError):
                reader.submit_extents(2, ranges, matrices, target.address)
    os.close(fd)
