"""The read pool: order, priority, cancel, promote, ends of files, errors, and its counters against the kernel's."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from native.library import NativeError, lib
from native.memory import HugeBuffer, hash64
from native.reader import ENDED_FN, STARTING_FN, ReadDone, Reader, uring_refusal
from tests.support.waiting import wait_for

PIECE = 4096 * 4
N_BYTES = 1 << 20


@pytest.fixture
def data_file(tmp_path: Path) -> Iterator[int]:
    """A descriptor of N_BYTES random bytes."""
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, N_BYTES, np.uint8).tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def target() -> Iterator[HugeBuffer]:
    with HugeBuffer(4 << 20) as buffer:
        buffer.array[:] = 0xEE
        yield buffer


class Disk:
    """Between the reader and the system: a log of (offset, bytes) asked for, a gate that holds the answers, and faults by
    script. Both engines really read; a short answer takes the bytes it denies out of the target again."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.faults: dict[int, list[int | str]] = {}  # offset of the call -> errno, "short", "eof", one per attempt
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._hooks = STARTING_FN(self._starting), ENDED_FN(self._ended)

    def _starting(self, offset: int, n: int) -> None:
        with self._lock:
            self.calls.append((offset, n))
        self.started.release()

    def _ended(self, offset: int, n: int, target: int, result: int) -> int:
        self.gate.wait(20)
        with self._lock:
            script = self.faults.get(offset)
            fault = script.pop(0) if script else None
        if fault is None:
            return result
        left = max(1, n // 2) if fault == "short" else 0
        ctypes.memset(target + left, 0xEE, n - left)
        return -fault if isinstance(fault, int) else left

    def install(self) -> None:
        lib.cb_reader_hooks_for_test(*(ctypes.cast(hook, ctypes.c_void_p) for hook in self._hooks))


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    made.install()
    yield made
    made.gate.set()
    lib.cb_reader_hooks_for_test(None, None)


OpenReader = Callable[..., Reader]


@pytest.fixture(params=["threads", "uring"])
def open_reader(request: pytest.FixtureRequest) -> OpenReader:
    """The constructor, for each engine."""
    if request.param == "uring" and (why := uring_refusal()):
        pytest.skip(f"io_uring: {why}")
    return functools.partial(Reader, engine=request.param)


def collect(reader: Reader, n: int, timeout_s: float = 20) -> list[ReadDone]:
    """The next n finished reads, waiting on the descriptor as a service does."""
    done: list[ReadDone] = []
    deadline = time.monotonic() + timeout_s
    while len(done) < n:
        left = deadline - time.monotonic()
        assert left > 0, f"{len(done)} of {n} reads came back within {timeout_s} s"
        if select.select([reader.fd], [], [], left)[0]:
            done += reader.take()
    return done


def content(fd: int, offset: int, n: int) -> bytes:
    return os.pread(fd, n, offset)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_brings_the_right_bytes_and_their_checksum(
    open_reader: OpenReader, n_threads: int, data_file: int, target: HugeBuffer
) -> None:
    wanted = [(1, 0, N_BYTES), (2, 4096, PIECE), (3, 8191, 3 * PIECE + 17), (4, N_BYTES - 1, 1)]
    with open_reader(n_threads, PIECE) as reader:
        for i, (tag, offset, n) in enumerate(wanted):
            reader.submit(tag, data_file, offset, n, target.address + i * N_BYTES, checksum=tag % 2 == 1)
        done = {d.tag: d for d in collect(reader, len(wanted))}
        assert not select.select([reader.fd], [], [], 0)[0], "nothing is left, so the descriptor must be quiet"
        assert reader.take() == []
        for i, (tag, offset, n) in enumerate(wanted):
            expected = content(data_file, offset, n)
            assert target.array[i * N_BYTES : i * N_BYTES + n].tobytes() == expected
            d = done[tag]
            assert (d.bytes, d.wanted, d.error, d.cancelled) == (n, n, 0, False)
            assert d.checksum == (hash64(expected) if tag % 2 == 1 else 0)
            assert 0 < d.start_ns <= d.end_ns <= time.monotonic_ns()
        counters = reader.counters()
        assert counters.bytes_demand == sum(n for _, _, n in wanted)
        assert (counters.bytes_speculative, counters.n_reads, counters.n_retries, counters.n_short) == (0, 4, 0, 0)
    assert target.array[3 * N_BYTES + 1] == 0xEE, "a byte behind the last target was touched"


def test_the_descriptor_stays_readable_until_all_are_taken(
    open_reader: OpenReader, data_file: int, target: HugeBuffer
) -> None:
    n = 150  # more than one batch of take
    with open_reader(2, PIECE) as reader:
        for tag in range(n):
            reader.submit(tag, data_file, 0, 64, target.address + 64 * tag)
        assert sorted(d.tag for d in collect(reader, n)) == list(range(n))
        assert not select.select([reader.fd], [], [], 0)[0]


def test_pieces_are_of_the_size_asked_for_and_demand_reads_in_order(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, 2 * PIECE + 100, target.address)
        reader.submit(2, data_file, 8 * PIECE, PIECE, target.address + N_BYTES)
        assert [d.tag for d in collect(reader, 2)] == [1, 2]
    assert disk.calls == [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 100), (8 * PIECE, PIECE)]


def test_demand_goes_before_speculation_which_stops_between_pieces(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.gate.clear()
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, 4 * PIECE, target.address, speculative=True)
        disk.started.acquire()  # its first piece is being read
        reader.submit(2, data_file, 10 * PIECE, 2 * PIECE, target.address + N_BYTES)
        reader.submit(3, data_file, 20 * PIECE, PIECE, target.address + 2 * N_BYTES)
        disk.gate.set()
        assert [d.tag for d in collect(reader, 3)] == [2, 3, 1]
        counters = reader.counters()
    offsets = [offset // PIECE for offset, _ in disk.calls]
    assert offsets == [0, 10, 11, 20, 1, 2, 3]
    assert (counters.bytes_demand, counters.bytes_speculative) == (3 * PIECE, 4 * PIECE)
    assert target.array[: 4 * PIECE].tobytes() == content(data_file, 0, 4 * PIECE)


def test_no_speculative_piece_starts_beside_an_unfinished_demand_read(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    """Also when threads are idle: a guess must not take bandwidth from what somebody waits for."""
    disk.gate.clear()
    with open_reader(4, PIECE) as reader:
        reader.submit(1, data_file, 0, PIECE, target.address)
        reader.submit(2, data_file, PIECE, PIECE, target.address + PIECE, speculative=True)
        disk.started.acquire()
        time.sleep(0.05)
        assert [offset for offset, _ in disk.calls] == [0]
        disk.gate.set()
        assert [d.tag for d in collect(reader, 2)] == [1, 2]


def test_guesses_come_in_smaller_pieces_and_a_promotion_changes_them_on_the_way(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.gate.clear()
    n = 8 * PIECE + 100
    with open_reader(1, 4 * PIECE, PIECE) as reader:
        reader.submit(1, data_file, 0, n, target.address, speculative=True, checksum=True)
        disk.started.acquire()
        assert reader.promote(1)
        disk.gate.set()
        (done,) = collect(reader, 1)
    assert disk.calls == [(0, PIECE), (PIECE, 4 * PIECE), (5 * PIECE, 3 * PIECE + 100)]
    assert (done.bytes, done.checksum) == (n, hash64(content(data_file, 0, n)))


def test_as_many_pieces_as_the_depth_says_are_in_flight(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.gate.clear()
    with open_reader(3, PIECE) as reader:
        reader.submit(1, data_file, 0, 8 * PIECE, target.address)
        reader.submit(2, data_file, 8 * PIECE, PIECE, target.address + N_BYTES)
        wait_for(lambda: len(disk.calls) >= 3, "three pieces on their way")
        time.sleep(0.05)
        assert sorted(offset // PIECE for offset, _ in disk.calls) == [0, 1, 2]
        disk.gate.set()
        assert sorted(d.tag for d in collect(reader, 2)) == [1, 2]


def test_promoted_reads_are_demand(open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer) -> None:
    disk.gate.clear()
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, PIECE, target.address, speculative=True)
        disk.started.acquire()
        reader.submit(2, data_file, PIECE, PIECE, target.address + PIECE, speculative=True)
        reader.submit(3, data_file, 2 * PIECE, PIECE, target.address + 2 * PIECE, speculative=True)
        assert reader.promote(3)
        assert not reader.promote(99)
        disk.gate.set()
        assert [d.tag for d in collect(reader, 3)] == [1, 3, 2]
        assert not reader.promote(3), "finished reads are not pending"
        counters = reader.counters()
    assert (counters.bytes_demand, counters.bytes_speculative) == (PIECE, 2 * PIECE)


def test_a_read_in_flight_can_be_promoted(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    """From then on it holds back other guesses."""
    disk.gate.clear()
    with open_reader(2, PIECE) as reader:
        reader.submit(1, data_file, 0, PIECE, target.address, speculative=True)
        disk.started.acquire()
        assert reader.promote(1)
        reader.submit(2, data_file, PIECE, PIECE, target.address + PIECE, speculative=True)
        time.sleep(0.05)
        assert len(disk.calls) == 1
        disk.gate.set()
        assert [d.tag for d in collect(reader, 2)] == [1, 2]


def test_cancelled_reads_come_back_once_and_start_no_more_pieces(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.gate.clear()
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, 4 * PIECE, target.address, checksum=True)
        disk.started.acquire()
        reader.submit(2, data_file, 8 * PIECE, PIECE, target.address + N_BYTES)
        reader.submit(3, data_file, 9 * PIECE, PIECE, target.address + N_BYTES, speculative=True)
        assert reader.cancel(2)
        assert reader.cancel(3)
        early = collect(reader, 2)  # nothing of theirs was in flight
        assert [(d.tag, d.cancelled, d.bytes) for d in early] == [(2, True, 0), (3, True, 0)]
        assert reader.cancel(1)
        assert reader.take() == [], "its piece is still being written to"
        disk.gate.set()
        (last,) = collect(reader, 1)
        assert (last.tag, last.cancelled, last.bytes, last.checksum) == (1, True, PIECE, 0)
        assert not reader.cancel(1)
        assert len(disk.calls) == 1


def test_tags_are_free_again_when_the_read_has_finished(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.gate.clear()
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, PIECE, target.address)
        with pytest.raises(NativeError, match="tag 1"):
            reader.submit(1, data_file, 0, PIECE, target.address + N_BYTES, speculative=True)
        disk.gate.set()
        collect(reader, 1)
        reader.submit(1, data_file, 0, PIECE, target.address)
        assert collect(reader, 1)[0].error == 0


# ---- faults --------------------------------------------------------------------------------------------------


def test_a_file_that_ends_too_early_is_named(open_reader: OpenReader, data_file: int, target: HugeBuffer) -> None:
    with open_reader(2, PIECE) as reader:
        reader.submit(1, data_file, N_BYTES - PIECE, 2 * PIECE, target.address, checksum=True)
        reader.submit(2, data_file, N_BYTES - 100, 200, target.address + N_BYTES)
        reader.submit(3, data_file, 2 * N_BYTES, 10, target.address + 2 * N_BYTES)
        done = {d.tag: d for d in collect(reader, 3)}
    assert {d.error for d in done.values()} == {errno.ENODATA}
    assert done[1].bytes == PIECE
    assert done[1].checksum == 0


@pytest.mark.parametrize("fault", [errno.EINTR, errno.EAGAIN, errno.EIO, "short"])
def test_transient_faults_are_retried(
    open_reader: OpenReader, fault: int | str, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    piece = 32768
    # A short read of half of what is left goes on from the middle.
    short = {piece: [fault], piece + piece // 2: [fault], piece + 3 * piece // 4: [fault]}
    disk.faults = short if fault == "short" else {piece: [fault] * 3}
    with open_reader(1, piece) as reader:
        reader.submit(1, data_file, 0, 3 * piece, target.address, checksum=True)
        (done,) = collect(reader, 1)
        counters = reader.counters()
    expected = content(data_file, 0, 3 * piece)
    assert (done.error, done.bytes, done.checksum) == (0, 3 * piece, hash64(expected))
    assert target.array[: 3 * piece].tobytes() == expected
    assert counters.n_retries == 3
    assert counters.n_short == (3 if fault == "short" else 0)
    assert counters.bytes_demand == 3 * piece, "each byte was delivered once"


@pytest.mark.parametrize(
    ("fault", "error"), [(errno.EINTR, errno.EINTR), (errno.EIO, errno.EIO), ("short", errno.ENODATA)]
)
def test_the_fourth_fault_in_a_piece_is_final(
    open_reader: OpenReader, fault: int | str, error: int, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    if fault == "short":
        big = 1 << 18
        at = [big + big - (big >> i) for i in range(4)]
        disk.faults = {o: ["short"] for o in at}
    else:
        big, disk.faults = PIECE, {PIECE: [fault] * 4}
    with open_reader(1, big) as reader:
        reader.submit(1, data_file, 0, 4 * big if big == PIECE else 3 * big, target.address)
        reader.submit(2, data_file, 0, 10, target.address + 3 * N_BYTES)
        done = {d.tag: d for d in collect(reader, 2)}
    assert (done[1].error, done[1].bytes) == (error, big)
    assert done[2].error == 0, "one failed read must not disturb another"
    assert max(offset for offset, _ in disk.calls) < 2 * big, "after a fault no further piece of that read starts"


def test_fewer_bytes_once_and_an_error_once_are_invisible_and_for_ever_is_final(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    piece = 1 << 17
    disk.faults = {0: ["short"], piece // 2: [errno.EIO], 2 * piece: [errno.EIO] * 100}
    with open_reader(2, piece) as reader:
        reader.submit(1, data_file, 0, piece, target.address, checksum=True)
        reader.submit(2, data_file, piece, 3 * piece, target.address + N_BYTES, checksum=True)
        done = {d.tag: d for d in collect(reader, 2)}
        counters = reader.counters()
    expected = content(data_file, 0, piece)
    assert (done[1].error, done[1].bytes, done[1].checksum) == (0, piece, hash64(expected))
    assert target.array[:piece].tobytes() == expected
    assert (done[2].error, done[2].wanted, done[2].checksum) == (errno.EIO, 3 * piece, 0)
    assert done[2].bytes < done[2].wanted
    assert (counters.n_retries, counters.n_short) == (2 + 3, 1)


def test_persistent_faults_are_not_retried(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.faults = {0: [errno.EBADF]}
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, PIECE, target.address)
        (done,) = collect(reader, 1)
        assert (done.error, done.bytes) == (errno.EBADF, 0)
        assert reader.counters().n_retries == 0


def test_a_vanished_end_of_file_is_not_read_for_ever(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.faults = {0: ["eof"]}
    with open_reader(1, PIECE) as reader:
        reader.submit(1, data_file, 0, PIECE, target.address)
        assert collect(reader, 1)[0].error == errno.ENODATA
    assert len(disk.calls) == 1


@pytest.mark.parametrize(
    ("fd", "offset", "n", "address"),
    [
        (-1, 0, 10, 4096),
        (None, -1, 10, 4096),
        (None, 0, 0, 4096),
        (None, 0, -5, 4096),
        (None, 0, 10, 0),
        (999, 0, 10, 4096),
    ],
)
def test_arguments_outside_the_contract_are_refused(
    open_reader: OpenReader, fd: int | None, offset: int, n: int, address: int, data_file: int
) -> None:
    with open_reader(1, PIECE) as reader, pytest.raises(NativeError, match="cb_reader_submit"):
        reader.submit(1, data_file if fd is None else fd, offset, n, address)


@pytest.mark.parametrize(("n_threads", "piece"), [(0, PIECE), (65, PIECE), (1, 100), (1, -4096), (1, 2 << 30)])
def test_impossible_pools_are_refused(open_reader: OpenReader, n_threads: int, piece: int) -> None:
    with pytest.raises(NativeError, match="cb_reader_new"):
        open_reader(n_threads, piece)


# ---- io_uring --------------------------------------------------------------------------------------------------

FORBID_URING = """
import ctypes, errno, os, platform, select, struct, sys
from native.memory import HugeBuffer
from native.reader import Reader, uring_refusal

# What a container's filter does: io_uring_setup (425 on every architecture) fails, everything else may go on.
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.{name}), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
program = struct.pack("@HP", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
if libc.prctl(22, 2, program, 0, 0):  # PR_SET_SECCOMP
    print("no seccomp")
    sys.exit()
fd = os.open(sys.argv[1], os.O_RDONLY)
with HugeBuffer(1 << 20) as target, Reader(2, 1 << 16, engine="uring") as reader:
    reader.submit(1, fd, 0, 1 << 20, target.address, checksum=True)
    select.select([reader.fd], [], [], 20)
    (done,) = reader.take()
    print(reader.engine, uring_refusal(), done.error, done.checksum, sep="|")
"""


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS", "EACCES"])
def test_where_io_uring_is_forbidden_the_threads_read(name: str, data_file: int, tmp_path: Path) -> None:
    program = FORBID_URING.replace("{name}", name)
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr
    if found.stdout == "no seccomp\n":
        pytest.skip("this system has no seccomp filters")
    expected = ("threads", os.strerror(getattr(errno, name)), "0", str(hash64(content(data_file, 0, N_BYTES))))
    assert found.stdout.strip() == "|".join(expected)


# ---- counters ------------------------------------------------------------------------------------------------


def test_busy_time_counts_flight_only(open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer) -> None:
    disk.gate.clear()
    with open_reader(2, PIECE) as reader:
        assert reader.counters().busy_ns == 0
        start = time.monotonic_ns()
        reader.submit(1, data_file, 0, 2 * PIECE, target.address)
        disk.started.acquire()
        time.sleep(0.05)
        during = reader.counters().busy_ns
        assert 45e6 < during <= time.monotonic_ns() - start, "time in flight shows before the read ends, once"
        disk.gate.set()
        collect(reader, 1)
        after = reader.counters().busy_ns
        time.sleep(0.05)
        assert reader.counters().busy_ns == after


def io_bytes() -> int:
    """Bytes this process had the storage fetch (block devices only)."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes in /proc/self/io")


def direct_file() -> tuple[Path, int] | None:
    """A file of 8 MiB on a file system with direct reads, and its descriptor; None when there is none here."""
    for folder in (Path.cwd(), Path("/var/tmp"), Path("/tmp")):
        path = folder / f".colibri-direct-{os.getpid()}"
        try:
            path.write_bytes(np.random.default_rng(2).integers(0, 256, 8 << 20, np.uint8).tobytes())
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.fsync(descriptor)
            return path, descriptor
        except OSError:
            path.unlink(missing_ok=True)
    return None


def test_direct_reads_are_counted_as_the_kernel_counts_them(open_reader: OpenReader, target: HugeBuffer) -> None:
    found = direct_file()
    if found is None:
        pytest.skip("no file system with direct reads")
    path, fd = found
    try:
        with open_reader(3, 1 << 20) as reader:
            before = io_bytes()
            reader.submit(1, fd, 0, 3 << 20, target.address, checksum=True)
            reader.submit(2, fd, 4 << 20, 4096, target.address + (3 << 20), speculative=True)
            done = {d.tag: d for d in collect(reader, 2)}
            counters = reader.counters()
            kernel = io_bytes() - before
            assert done[1].checksum == hash64(path.read_bytes()[: 3 << 20])
            assert (counters.bytes_demand, counters.bytes_speculative) == (3 << 20, 4096)
            if kernel:  # some virtual file systems do not account
                assert kernel == counters.bytes_demand + counters.bytes_speculative
            for offset, n, shift in ((1, 4096, 0), (0, 4095, 0), (0, 4096, 8)):
                with pytest.raises(NativeError, match="cb_reader_submit"):
                    reader.submit(9, fd, offset, n, target.address + shift)
            # The file's true end under direct reads: a last partial sector.
            os.truncate(path, (4 << 20) + 100)
            reader.submit(3, fd, 4 << 20, 8192, target.address)
            assert collect(reader, 1)[0].error == errno.ENODATA
    finally:
        os.close(fd)
        path.unlink()


def test_close_waits_for_flight_and_forgets_the_rest(
    open_reader: OpenReader, disk: Disk, data_file: int, target: HugeBuffer
) -> None:
    disk.gate.clear()
    reader = open_reader(2, PIECE)
    fd = reader.fd
    for tag in range(5):
        reader.submit(tag, data_file, 0, 4 * PIECE, target.address)
    disk.started.acquire()
    threading.Timer(0.05, disk.gate.set).start()
    reader.close()
    reader.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(NativeError, match="after close"):
        reader.take()


def test_many_reads_under_promote_and_cancel_each_come_back_once(
    open_reader: OpenReader, data_file: int, target: HugeBuffer
) -> None:
    rng = np.random.default_rng(3)
    n = 2000
    seen: list[ReadDone] = []
    with open_reader(4, 4096) as reader:
        for tag in range(n):
            size = int(rng.integers(1, 20000))
            offset = int(rng.integers(0, N_BYTES - size))
            reader.submit(
                tag, data_file, offset, size, target.address + tag % 64 * 32768, bool(rng.random() < 0.5), True
            )
            if rng.random() < 0.3:
                reader.promote(int(rng.integers(0, tag + 1)))
            if rng.random() < 0.3:
                reader.cancel(int(rng.integers(0, tag + 1)))
            if rng.random() < 0.1:
                seen += reader.take()
        seen += collect(reader, n - len(seen))
        assert reader.counters().n_reads == n
    assert sorted(d.tag for d in seen) == list(range(n))
    assert all(d.cancelled or (d.error == 0 and d.bytes == d.wanted and d.checksum) for d in seen)


def test_new_memory_is_made_ready_ahead_of_the_reads_and_holds_the_right_bytes(
    open_reader: OpenReader, tmp_path: Path
) -> None:
    """Pages of a large target are there before its parts are read; what has landed is not touched again."""
    n = 24 << 20
    path = tmp_path / "large"
    path.write_bytes(np.random.default_rng(5).integers(0, 256, n, np.uint8).tobytes())
    expected = hash64(path.read_bytes())
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(3):
            with HugeBuffer(2 * n) as fresh, open_reader(2, 1 << 20) as reader:
                reader.submit(1, fd, 0, n, fresh.address, checksum=True)
                reader.submit(2, fd, 0, n, fresh.address + n, speculative=True)
                done = {d.tag: d for d in collect(reader, 2)}
                assert (done[1].error, done[1].checksum, done[2].error) == (0, expected, 0)
                assert hash64(fresh.array[:n]) == hash64(fresh.array[n:]) == expected
    finally:
        os.close(fd)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def populates() -> bool:
    """Whether this kernel makes pages ready when asked to (Linux 5.14)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(re.sub(r"\D.*", "", minor))) >= (5, 14)


@pytest.mark.skipif(not populates(), reason="older than Linux 5.14")
def test_waiting_reads_find_their_pages_while_the_first_is_held_up(
    open_reader: OpenReader, disk: Disk, tmp_path: Path
) -> None:
    n = 16 << 20
    path = tmp_path / "large"
    path.write_bytes(bytes(n))
    fd = os.open(path, os.O_RDONLY)
    disk.gate.clear()
    try:
        with HugeBuffer(2 * n) as fresh, open_reader(1, 1 << 20) as reader:
            before = resident_bytes()
            reader.submit(1, fd, 0, n, fresh.address)
            reader.submit(2, fd, 0, n, fresh.address + n)
            wait_for(lambda: resident_bytes() - before > 1.8 * n, "pages ahead of the reads")
            disk.gate.set()
            assert [d.error for d in collect(reader, 2)] == [0, 0]
    finally:
        os.close(fd)
