"""The drive's ceiling: plain direct reads, as fast as this file's drive gives them, without any code of ours in between."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from types import TracebackType

from bench.roofline import BenchError
from native.memory import HugeBuffer

MIB = 1 << 20
SHAPES = ((4 * MIB, 2), (2 * MIB, 4))
"""(bytes of a read, threads): what a virtual or NVMe drive is fastest with; the better one counts."""


class DriveCeiling:
    """Samples of one file's drive. ``record_bytes``: reads are consecutive inside records of this size at random places.

    BenchError where the file can't be read past the page cache: there a rate says nothing about the drive.
    """

    def __init__(self, path: Path, record_bytes: int, seed: int = 0) -> None:
        self._n_records = path.stat().st_size // record_bytes
        self._record_bytes = record_bytes
        if not self._n_records:
            raise BenchError(f"{path} is smaller than one record of {record_bytes:,} bytes")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise BenchError(f"{path} can't be opened for direct reads ({error.strerror}); use another drive") from None
        self._buffer = HugeBuffer(max(piece * n for piece, n in SHAPES))
        self._buffer.array[:] = 0
        self._random = random.Random(seed)
        self.samples: list[float] = []

    def sample(self, seconds: float = 0.6) -> float:
        """Bytes per second now: each shape for its part of the time, the better one."""
        rate = max(self._rate(piece, n, seconds / len(SHAPES)) for piece, n in SHAPES)
        self.samples.append(rate)
        return rate

    def _rate(self, piece: int, n_threads: int, seconds: float) -> float:
        piece = min(piece, self._record_bytes)
        counts = [0] * n_threads
        begin = time.perf_counter()
        until = begin + seconds

        def run(which: int, seed: int) -> None:
            rng = random.Random(seed)
            target = self._buffer.array.data[which * piece : (which + 1) * piece]
            while time.perf_counter() < until:
                base = rng.randrange(self._n_records) * self._record_bytes
                for at in range(0, self._record_bytes - piece + 1, piece):
                    counts[which] += os.preadv(self._fd, [target], base + at)

        threads = [threading.Thread(target=run, args=(i, self._random.getrandbits(64))) for i in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - begin)

    def __enter__(self) -> DriveCeiling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self._buffer.close()
