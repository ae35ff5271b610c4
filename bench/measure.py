"""Times calls and the machine's limits in turn, because a shared machine drifts within seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.roofline import BenchError, Bound, Limits, Work, bound_of
from bench.weights import ALIGN
from native.library import Pool
from native.memory import HugeBuffer
from native.probe import ops_rate, read_rate

MIB = 1 << 20
COLD_FACTOR = 4
"""Data is cold when this many times the last cache's size has been read since."""
PIECES = 8
"""Short samples are less often interrupted by other work than one long one; their median is what counts."""
PROBE_ITEMS = 25
"""Per thread and sample; about a millisecond."""
Samples = dict[str, list[float]]
"""Limit -> its samples."""


@dataclass(frozen=True)
class Case:
    """One kernel at one size: ``run`` makes one call that does ``work``, on data that is cold unless ``name`` says so."""

    family: str
    name: str
    work: Work
    run: Callable[[], object]
    memory: tuple[np.ndarray, ...] = ()
    """u8 arrays that ``run`` reads from, touched right before it is measured."""


@dataclass(frozen=True)
class Measurement:
    """Medians of one case, and of the limits that were measured before, between and after its calls."""

    family: str
    name: str
    work: Work
    ns: float
    n_runs: int
    limits: Limits
    bound: Bound
    best_ns: float
    """The fastest call, and the least time under the best samples of the limits: on a busy machine less disturbed."""
    best_bound: Bound
    first_touch: float = 1.0
    """Time of reading the case's memory once, over that of reading it again right away."""

    @property
    def share(self) -> float:
        """Of what the machine could do: the least time over the time taken."""
        return self.bound.ns / self.ns

    @property
    def best_share(self) -> float:
        return self.best_bound.ns / self.best_ns

    @property
    def memory_share(self) -> float:
        """Of the read bandwidth alone, whatever sets the bound."""
        return self.work.n_bytes / self.limits.bytes_s * 1e9 / self.ns


def last_cache_bytes(cpus: Iterable[int] | None = None, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all last-level caches of these processors (default: all); 32 MiB where the system does not say."""
    found: dict[str, int] = {}
    numbers = cpus if cpus is not None else (int(p.name[3:]) for p in root.glob("cpu[0-9]*"))
    for cpu in numbers:
        levels = sorted((root / f"cpu{cpu}" / "cache").glob("index[0-9]*"))
        for index in levels[-1:]:
            try:
                size, shared = (index / "size").read_text().strip(), (index / "shared_cpu_list").read_text().strip()
            except OSError:
                continue
            unit = {"K": 1 << 10, "M": MIB, "G": 1 << 30}.get(size[-1:], 1)
            found[shared] = int(size.rstrip("KMG")) * unit
    return sum(found.values()) or 32 * MIB


@dataclass
class Meter:
    """Measures cases on one pool. ``seconds`` is spent on each case in ``rounds`` pieces with a sample of the limits between.

    ``plain`` is the memory that the bandwidth is measured with: many times the caches, filled.
    """

    pool: Pool
    plain: HugeBuffer
    seconds: float = 2.0
    rounds: int = 5
    samples: Samples = field(default_factory=dict)
    """Every sample of every limit of the whole run, for the summary."""

    def sample(self, kinds: Iterable[str]) -> Samples:
        """A few short samples of the bandwidth ("memory") and of these kinds of arithmetic."""
        array = self.plain.array
        step = array.size // PIECES // ALIGN * ALIGN
        # Each pass reads all of it, so that no piece is still in a cache when its turn comes again.
        passes = [
            [read_rate(self.pool, array[i * step : (i + 1) * step], ahead) for i in range(PIECES)]
            for ahead in (False, True)
        ]
        found = {"memory": max(passes, key=statistics.median)}
        for kind in kinds:
            found[kind] = [ops_rate(self.pool, kind, PROBE_ITEMS * self.pool.n_threads) for _ in range(PIECES)]
        for name, rates in found.items():
            self.samples.setdefault(name, []).extend(rates)
        return found

    def touch(self, memory: Iterable[np.ndarray]) -> float:
        """Reads all of it twice; time of the first pass over that of the second.

        A host may take memory back that idled for a minute: its first touch then takes several times as long.
        """
        passes = [0.0, 0.0]
        for array in memory:
            plain = array[: array.size // ALIGN * ALIGN]
            for i in range(len(passes)):
                passes[i] += plain.size / read_rate(self.pool, plain, True)
        return passes[0] / passes[1] if passes[1] else 1.0

    def measure(self, case: Case) -> Measurement:
        """Median over at least one call a round. The first call of all warms code and scratch up and does not count."""
        first_touch = self.touch(case.memory)
        case.run()
        kinds = sorted(case.work.ops)
        taken, times = [self.sample(kinds)], []
        for _ in range(self.rounds):
            until = time.perf_counter() + self.seconds / self.rounds
            while True:
                begin = time.perf_counter_ns()
                case.run()
                end = time.perf_counter_ns()
                times.append(end - begin)
                if end / 1e9 >= until:
                    break
            taken.append(self.sample(kinds))
        if min(times) <= 0:
            raise BenchError(f"{case.family} {case.name}: the clock did not move during a call")
        limits, best = limits_of(taken, statistics.median), limits_of(taken, max)
        return Measurement(
            case.family, case.name, case.work, statistics.median(times), len(times), limits,
            bound_of(case.work, limits), min(times), bound_of(case.work, best), first_touch,
        )  # fmt: skip

    def summary(self) -> Limits:
        """Medians over the whole run."""
        if not self.samples:
            self.sample(())
        return _limits({name: statistics.median(rates) for name, rates in self.samples.items()})


def limits_of(samples: list[Samples], choose: Callable[[list[float]], float]) -> Limits:
    """The median or another choice of samples that all have the same names."""
    return _limits({name: choose([rate for one in samples for rate in one[name]]) for name in samples[0]})


def _limits(rates: dict[str, float]) -> Limits:
    return Limits(rates["memory"], {name: rate for name, rate in rates.items() if name != "memory"})
