"""Times the matrix kernels beside what memory can deliver in the same run: ``python -m bench.kernels [--quick]``.

Decode reads every weight once, so its measure is bytes per second against a plain read of as many bytes (libc memchr on
all threads). Prefill computes, so its measure is multiply-adds per second. Each figure is the best of several runs;
nothing else should load the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from native.kernels import ExpertJobs, Ffn, ffn, linear
from native.library import Pool, available_isas, dispatch_text, isa_limit
from native.matrix import ACT_F32, Matrix, matrix, scale_bytes, weight_bytes
from native.memory import HugeBuffer

HIDDEN, INNER, CHOSEN = 6144, 2048, 8
VARIANTS = [("q4", None), ("q8", None), ("q8", ACT_F32), ("bf16", None), ("f32", None)]

libc = ctypes.CDLL(None)
libc.memchr.restype = ctypes.c_void_p
libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def best_of(run: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Shortest of at least `least` runs and about `seconds` of them."""
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


class Weights:
    """Packed matrices one after another in a huge buffer, filled with random bytes and harmless scales."""

    def __init__(self, n_bytes: int) -> None:
        self.buffer = HugeBuffer(n_bytes)
        self.used = 0
        block = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        array = self.buffer.array
        for begin in range(0, n_bytes, block.size):
            end = min(begin + block.size, n_bytes)
            array[begin:end] = block[: end - begin]

    def take(self, n_bytes: int) -> np.ndarray:
        begin, self.used = self.used, self.used + -(-n_bytes // 64) * 64
        return self.buffer.array[begin : begin + n_bytes]

    def matrix(self, fmt: str, out: int, in_: int, act: int | None = None) -> Matrix:
        weight = self.take(weight_bytes(fmt, out, in_))
        if fmt == "f32":
            weight.view(np.float32)[:] = 0.5
        elif fmt == "bf16":
            weight.view(np.uint16)[:] = 0x3F00
        if fmt not in ("q4", "q8"):
            return matrix(weight, None, fmt, out, in_, act)
        scale = self.take(scale_bytes(fmt, out, in_))
        scale.view(np.float16 if fmt == "q4" else np.float32)[:] = 0.01
        return matrix(weight, scale, fmt, out, in_, act)


def matrix_bytes(m: Matrix, fmt: str) -> int:
    return weight_bytes(fmt, m.out, m.in_) + scale_bytes(fmt, m.out, m.in_)


def read_bandwidth(buffer: np.ndarray, n_threads: int, seconds: float) -> float:
    """Bytes per second of reading `buffer` once on n threads. The byte searched for must not occur."""
    piece = buffer.size // n_threads
    address = buffer.ctypes.data
    with ThreadPoolExecutor(n_threads) as threads:

        def read() -> None:
            futures = [threads.submit(libc.memchr, address + i * piece, 0xFF, piece) for i in range(n_threads)]
            assert not any(f.result() for f in futures)

        return n_threads * piece / best_of(read, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--threads", type=int, default=0, help="kernel threads (0: one per usable core)")
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 1.5
    rng = np.random.default_rng(2)

    with Pool(options.threads) as pool:
        print(f"threads {pool.n_threads}, rungs {','.join(available_isas())}\n{dispatch_text()}\n")
        plain = HugeBuffer(400 << 20)
        plain.array[:] = 1
        bandwidth = read_bandwidth(plain.array, pool.n_threads, seconds)
        print(f"plain read of {plain.array.size >> 20} MiB: {bandwidth / 1e9:.1f} GB/s")

        # decode: 8 of 16 experts in turn, so that none is in a cache when its time comes
        record = sum(
            weight_bytes("q4", o, i) + scale_bytes("q4", o, i) for o, i in [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)]
        )
        weights = Weights(2 * CHOSEN * (record + 4096))
        experts: list[Ffn] = [
            ffn(
                weights.matrix("q4", INNER, HIDDEN),
                weights.matrix("q4", INNER, HIDDEN),
                weights.matrix("q4", HIDDEN, INNER),
            )
            for _ in range(2 * CHOSEN)
        ]
        h = rng.standard_normal((1, HIDDEN)).astype(np.float32)
        parts = np.zeros((CHOSEN, HIDDEN), np.float32)
        jobs, row, turn = ExpertJobs(CHOSEN, CHOSEN), np.zeros(1, np.int32), [0]

        def decode() -> None:
            jobs.clear()
            turn[0] ^= CHOSEN
            for i in range(CHOSEN):
                jobs.add(experts[turn[0] + i], row, np.array([i], np.int32))
            jobs.run(pool, h, parts)

        elapsed = best_of(decode, 2 * seconds, 6)
        rate = CHOSEN * record / elapsed
        again = read_bandwidth(plain.array, pool.n_threads, seconds)
        bandwidth = max(bandwidth, again)
        print(
            f"expert_ffn q4, {CHOSEN} experts x 1 row, cold: {elapsed * 1e6:.0f} us, {rate / 1e9:.1f} GB/s, "
            f"{rate / bandwidth:.2f} of a plain read ({bandwidth / 1e9:.1f} GB/s)\n"
        )

        print("linear                    1 row cold            128 rows")
        for fmt, act in VARIANTS:
            n = max(2, (160 << 20) // weight_bytes(fmt, INNER, HIDDEN))
            several = Weights(n * (weight_bytes(fmt, INNER, HIDDEN) + scale_bytes(fmt, INNER, HIDDEN) + 4096))
            matrices = [several.matrix(fmt, INNER, HIDDEN, act) for _ in range(n)]
            y, tall = np.zeros((1, INNER), np.float32), rng.standard_normal((128, HIDDEN)).astype(np.float32)
            wide = np.zeros((128, INNER), np.float32)

            def one_row(matrices: list[Matrix] = matrices, y: np.ndarray = y) -> None:
                for m in matrices:
                    linear(pool, m, h, y)

            def many_rows(m: Matrix = matrices[0], x: np.ndarray = tall, out: np.ndarray = wide) -> None:
                linear(pool, m, x, out)

            cold = best_of(one_row, seconds) / n
            rate = matrix_bytes(matrices[0], fmt) / cold
            many = best_of(many_rows, seconds)
            kind = "f32" if matrices[0].act == ACT_F32 else "q8"
            print(
                f"{fmt:>4} x {kind:<4} [{INNER}, {HIDDEN}] {cold * 1e6:7.0f} us {rate / 1e9:5.1f} GB/s "
                f"{rate / bandwidth:5.2f}   {many * 1e3:7.1f} ms {128 * INNER * HIDDEN / many / 1e9:6.1f} Gmac/s"
            )
            several.buffer.close()

        if not options.quick:
            print("\nrungs, q4 [256, 2048] in cache, 1 and 16 rows")
            small = Weights(weight_bytes("q4", 256, 2048) + scale_bytes("q4", 256, 2048) + 4096)
            m = small.matrix("q4", 256, 2048)
            for isa in available_isas():
                isa_limit(isa)
                for rows in (1, 16):
                    x, out = rng.standard_normal((rows, 2048)).astype(np.float32), np.zeros((rows, 256), np.float32)
                    elapsed = best_of(lambda x=x, out=out: linear(pool, m, x, out), 0.3)  # type: ignore[misc]
                    print(
                        f"{isa:>12} {rows:3} rows {elapsed * 1e6:9.1f} us {rows * 256 * 2048 / elapsed / 1e9:7.2f} Gmac/s"
                    )
            isa_limit(available_isas()[-1])


if __name__ == "__main__":
    main()
