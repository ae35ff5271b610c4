"""Two processes that take turns on the same cores, as the stages of a step do: does either pay for the other's threads?

One process computes experts, the other a layer of attention, each with a full pool of threads. First each alone, then in
a ring: one call, a byte through a pipe, the other's call, a byte back. A pair in the ring should take what both take alone
plus two wake-ups; threads that spin while they wait would show here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import IO, Any

from bench.attention import attention_cases
from bench.measure import Case
from bench.products import expert_cases
from bench.roofline import BenchError
from bench.sizes import SIZES
from native.library import Pool, isa_current, isa_limit

ROLES = ("experts", "attention")
WORKER = "from bench.sharing import work; work()"
MAX_CALLS = 1000


@dataclass(frozen=True)
class Sharing:
    """Medians in ns: each process's calls alone, and a pair of calls in the ring, handing over included."""

    alone_ns: dict[str, float]
    pair_ns: float
    n_pairs: int

    @property
    def ratio(self) -> float:
        """Time of a pair over the sum of both alone: 1 is perfect."""
        return self.pair_ns / sum(self.alone_ns.values())


def measure_sharing(size: str, n_threads: int, seconds: float, rounds: int, cold_bytes: int) -> Sharing:
    """Starts both processes, runs each alone and both in turn `rounds` times. BenchError when one of them fails."""
    with ExitStack() as stack:
        to_second, to_first = stack.enter_context(_pipe()), stack.enter_context(_pipe())
        workers = {}
        for role, (reads, writes) in zip(ROLES, ((to_first[0], to_second[1]), (to_second[0], to_first[1]))):
            settings = {"role": role, "size": size, "n_threads": n_threads, "isa": isa_current(),
                        "cold_bytes": cold_bytes, "reads": reads, "writes": writes}  # fmt: skip
            workers[role] = stack.enter_context(_worker(settings, (reads, writes)))
        first, second = (workers[role] for role in ROLES)
        once = {role: statistics.median(_ask(worker, "alone", 3)) for role, worker in workers.items()}
        n = max(1, min(MAX_CALLS, int(seconds * 1e9 / rounds / sum(once.values()))))
        alone: dict[str, list[int]] = {role: [] for role in ROLES}
        pairs: list[int] = []
        for _ in range(rounds):
            for role, worker in workers.items():
                alone[role] += _ask(worker, "alone", n)
            _tell(second, "answer", n + 1)
            pairs += _ask(first, "lead", n + 1)[1:]  # the first waits for the other to be there
            _hear(second)
    return Sharing(
        {role: statistics.median(times) for role, times in alone.items()}, statistics.median(pairs), len(pairs)
    )


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


@contextmanager
def _worker(settings: dict[str, Any], fds: tuple[int, int]) -> Iterator[subprocess.Popen[str]]:
    """Ends when its standard input does. Waits until it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER, json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds,
    )  # fmt: skip
    try:
        _hear(process)
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _tell(worker: subprocess.Popen[str], what: str, n: int) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{what} {n}\n")
    worker.stdin.flush()


def _hear(worker: subprocess.Popen[str]) -> list[int]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise BenchError(f"a process of the sharing measurement ended with {worker.wait()} (its words are above)")
    found: list[int] = json.loads(line)
    return found


def _ask(worker: subprocess.Popen[str], what: str, n: int) -> list[int]:
    _tell(worker, what, n)
    return _hear(worker)


# ---- one of the two processes -----------------------------------------------------------------------------------------


def work() -> None:
    """Answers lines of standard input ("alone 5") with a JSON list of times in ns, until it ends."""
    settings = json.loads(sys.argv[1])
    isa_limit(settings["isa"])
    make = {"experts": expert_cases, "attention": attention_cases}[settings["role"]]
    with Pool(settings["n_threads"]) as pool:
        cases = make(pool, SIZES[settings["size"]], settings["cold_bytes"])
        with closing(cases):
            _serve(next(cases), settings["reads"], settings["writes"], sys.stdin, sys.stdout)


def _serve(case: Case, reads: int, writes: int, lines: IO[str], answers: IO[str]) -> None:
    case.run()
    print("[]", file=answers, flush=True)
    for line in lines:
        what, n = line.split()
        turn: Callable[[], bool] = {
            "alone": lambda: _call(case),
            "lead": lambda: _call(case) and _hand_over(writes) and _wait(reads),
            "answer": lambda: _wait(reads) and _call(case) and _hand_over(writes),
        }[what]
        times = []
        for _ in range(int(n)):
            begin = time.perf_counter_ns()
            if not turn():
                return  # the other one is gone
            times.append(time.perf_counter_ns() - begin)
        print(json.dumps(times), file=answers, flush=True)


def _call(case: Case) -> bool:
    case.run()
    return True


def _hand_over(fd: int) -> bool:
    return os.write(fd, b".") == 1


def _wait(fd: int) -> bool:
    return os.read(fd, 1) == b"."
