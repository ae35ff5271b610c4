"""Times the read pool beside the drive's own rate: ``python -m bench.reads FILE [--depth 4] [--piece-mib 2]``.

FILE is a large file on the drive in question (an expert file will do). Records of --record-mib are read in random order, as
experts are, into huge pages that were touched before; --fresh reads into new ones instead, as a store does that fills its slots
for the first time. The yardstick is plain direct reads of the same pieces by as many threads, without the pool. Everything is
measured in turn, --rounds times, because drives drift: ratios are medians over rounds, never of two different minutes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from native.memory import HugeBuffer
from native.reader import ENGINES, Reader, uring_refusal

MIB = 1 << 20
RECORDS_WAITING = 2
"""As an expert store has at least."""


def plain_rate(fd: int, offsets: list[int], record: int, depth: int, piece: int) -> float:
    """Bytes per second of ``depth`` threads with plain direct reads of ``piece`` bytes that make up these records."""
    with HugeBuffer(depth * piece) as buffer:
        buffer.array[:] = 0
        targets = [buffer.array.data[i * piece : (i + 1) * piece] for i in range(depth)]
        pieces = [at + i for at in offsets for i in range(0, record, piece)]
        left = iter(pieces)  # next() on it is atomic

        def run(which: int) -> int:
            return sum(os.preadv(fd, [targets[which]], offset) for offset in left)

        begin = time.perf_counter()
        with ThreadPoolExecutor(depth) as threads:
            n_bytes = sum(threads.map(run, range(depth)))
        rate = n_bytes / (time.perf_counter() - begin)
        targets.clear()
        return rate


def pool_rate(reader: Reader, fd: int, offsets: list[int], record: int, is_fresh: bool, checksum: bool) -> float:
    """Bytes per second of the pool with a few records waiting."""
    n_slots = len(offsets) if is_fresh else RECORDS_WAITING
    with HugeBuffer(n_slots * record) as buffer:
        if not is_fresh:
            buffer.array[:] = 0
        begin = time.perf_counter()
        submitted = finished = 0
        while finished < len(offsets):
            while submitted < len(offsets) and submitted - finished < RECORDS_WAITING:
                target = buffer.address + submitted % n_slots * record
                reader.submit(submitted, fd, offsets[submitted], record, target, checksum=checksum)
                submitted += 1
            select.select([reader.fd], [], [])
            for done in reader.take():
                if done.error:
                    raise SystemExit(f"record {done.tag}: {os.strerror(done.error)}")
                finished += 1
        return len(offsets) * record / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--engine", choices=[*ENGINES, "both"], default="both")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--piece-mib", type=int, default=2)
    parser.add_argument("--record-mib", type=int, default=20)
    parser.add_argument("--total-mib", type=int, default=640, help="bytes per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="read into memory that was never touched")
    options = parser.parse_args()
    record, piece = options.record_mib * MIB, options.piece_mib * MIB
    if record % piece:
        raise SystemExit("--record-mib must be a multiple of --piece-mib")
    fd = os.open(options.file, os.O_RDONLY | os.O_DIRECT)
    n_records = os.fstat(fd).st_size // record
    if n_records < 2:
        raise SystemExit(f"{options.file} is too small; at least two records of {record} bytes are needed")
    engines = list(ENGINES) if options.engine == "both" else [options.engine]
    if "uring" in engines and (why := uring_refusal()):
        raise SystemExit(f"io_uring: {why}; give --engine threads")
    rng = np.random.default_rng()
    wanted = max(2, options.total_mib // options.record_mib)

    def run_pool(engine: str, checksum: bool) -> Callable[[list[int]], float]:
        def run(offsets: list[int]) -> float:
            with Reader(options.depth, piece, engine=engine) as reader:
                return pool_rate(reader, fd, offsets, record, options.fresh, checksum)

        return run

    def run_plain(offsets: list[int]) -> float:
        return plain_rate(fd, offsets, record, options.depth, piece)

    measured: dict[str, Callable[[list[int]], float]] = {"plain direct reads": run_plain}
    for engine, checksum in itertools.product(engines, (False, True)):
        measured[f"pool, {engine}{', checksums' if checksum else ''}"] = run_pool(engine, checksum)
    rates: dict[str, list[float]] = {name: [] for name in measured}
    for i in range(options.rounds):
        names = list(measured)
        for name in names if i % 2 == 0 else reversed(names):
            offsets = [int(k) * record for k in rng.integers(0, n_records, wanted)]
            rates[name].append(measured[name](offsets))
    plain = rates["plain direct reads"]
    for name, found in rates.items():
        ratio = statistics.median(one / limit for one, limit in zip(found, plain, strict=True))
        print(
            f"{name:26} {statistics.median(found) / 1e9:6.2f} GB/s ({min(found) / 1e9:.2f} to {max(found) / 1e9:.2f}), "
            f"{ratio:.0%} of plain"
        )
    os.close(fd)


if __name__ == "__main__":
    main()
