"""Times the read pool beside the drive's own rate: ``python -m bench.reads FILE [--threads 4] [--piece-mib 2]``.

FILE is a large file on the drive in question (an expert file will do). The ceiling is taken before and after, because
drives drift: plain direct reads of 4 MiB by two threads into huge pages, without the pool. Records of --record-mib are
read in random order, as experts are.
"""

from __future__ import annotations

import argparse
import os
import select
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from native.memory import HugeBuffer
from native.reader import Reader

MIB = 1 << 20


def ceiling(fd: int, offsets: list[int], buffer: HugeBuffer) -> float:
    """Bytes per second of two threads with plain direct reads of 4 MiB at these offsets."""
    step = 4 * MIB
    halves = [buffer.array.data[i * step : (i + 1) * step] for i in range(2)]

    def run(which: int) -> int:
        return sum(os.preadv(fd, [halves[which]], offset) for offset in offsets[which::2])

    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        n_bytes = sum(threads.map(run, range(2)))
    return n_bytes / (time.perf_counter() - begin)


def pool_rate(reader: Reader, fd: int, offsets: list[int], record: int, buffer: HugeBuffer, checksum: bool) -> float:
    """Bytes per second of the pool with at most two records waiting, as an expert store has."""
    begin = time.perf_counter()
    submitted = finished = 0
    while finished < len(offsets):
        while submitted < len(offsets) and submitted - finished < 2:
            target = buffer.address + submitted % 2 * record
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
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--piece-mib", type=int, default=2)
    parser.add_argument("--record-mib", type=int, default=20)
    parser.add_argument("--total-mib", type=int, default=1024, help="bytes per measurement")
    options = parser.parse_args()
    record = options.record_mib * MIB
    fd = os.open(options.file, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fd).st_size
    n_records = size // record
    if n_records < 2:
        raise SystemExit(f"{options.file} has {size} bytes; at least two records of {record} are needed")
    rng = np.random.default_rng(1)
    wanted = max(2, options.total_mib // options.record_mib)
    offsets = [int(i) * record for i in rng.integers(0, n_records, wanted)]
    pieces = [int(i) * 4 * MIB for i in rng.integers(0, size // (4 * MIB), options.total_mib // 4)]
    with HugeBuffer(max(2 * record, 8 * MIB)) as buffer:
        buffer.array[:] = 0
        before = ceiling(fd, pieces, buffer)
        with Reader(options.threads, options.piece_mib * MIB) as reader:
            rates = {flag: pool_rate(reader, fd, offsets, record, buffer, flag) for flag in (False, True)}
        after = ceiling(fd, pieces, buffer)
    best = max(before, after)
    print(f"plain direct reads, before and after: {before / 1e9:.2f} and {after / 1e9:.2f} GB/s")
    for flag, rate in rates.items():
        print(
            f"read pool{' with checksums' if flag else '':16} {rate / 1e9:.2f} GB/s, {rate / best:.0%} of the better one"
        )
    os.close(fd)


if __name__ == "__main__":
    main()
