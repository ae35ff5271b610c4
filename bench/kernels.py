"""``colibri bench kernels``: every kernel family beside the limits of this machine, all measured in one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.attention import attention_cases
from bench.delta import delta_cases
from bench.gqa import gqa_cases
from bench.measure import COLD_FACTOR, MIB, Case, Measurement, Meter, last_cache_bytes
from bench.products import expert_cases, gate_cases, linear_cases
from bench.roofline import Limits
from bench.sharing import Sharing, measure_sharing
from bench.sizes import SIZES, Sizes
from native.library import Pool, available_isas, dispatch_text, isa_current, isa_limit
from native.memory import HugeBuffer
from native.probe import KINDS

FAMILIES: tuple[Callable[[Pool, Sizes, int], Generator[Case, None, None]], ...] = (
    expert_cases, linear_cases, gate_cases, attention_cases, gqa_cases, delta_cases,
)  # fmt: skip
SMALLEST_PLAIN = 256 * MIB
"""Less is read too fast to be timed well, whatever the caches."""


@dataclass(frozen=True)
class Machine:
    """What the figures are true for."""

    processor: str
    n_threads: int
    isa: str
    available_isas: tuple[str, ...]
    dispatch: str
    last_cache_bytes: int
    load: float
    """Runnable processes per processor in the minute before: more than a little makes every figure doubtful."""


@dataclass(frozen=True)
class KernelResults:
    """Everything one run found out."""

    machine: Machine
    size: str
    limits: Limits
    """Medians of the whole run; each measurement has the limits of its own moments."""
    kernels: tuple[Measurement, ...]
    sharing: Sharing


def run_kernels(
    isa: str | None = None,
    n_threads: int = 0,
    is_quick: bool = False,
    size: str = "glm-5.2",
    progress: Callable[[str], None] = lambda _: None,
) -> KernelResults:
    """Measures all families. `isa`: no rung above it; NativeError when the machine does not offer it.

    Takes about two minutes, or half a minute with `is_quick`, and about 1 GB of memory.
    """
    sizes = SIZES[size]
    before = isa_current()
    try:
        if isa:
            isa_limit(isa)
        cache = last_cache_bytes(os.sched_getaffinity(0))
        cold_bytes, seconds, rounds = COLD_FACTOR * cache, *((0.3, 3) if is_quick else (2.0, 5))
        plain_bytes = max(cold_bytes, SMALLEST_PLAIN)
        if size == "tiny":  # only shows that everything works: needs neither time nor memory larger than the caches
            cold_bytes, plain_bytes, seconds, rounds = MIB, 4 * MIB, 0.02, 2
        found = []
        with Pool(n_threads) as pool, HugeBuffer(plain_bytes) as plain:
            plain.array[:] = 1
            machine = Machine(
                _processor(), pool.n_threads, isa_current(), tuple(available_isas()), dispatch_text(), cache,
                os.getloadavg()[0] / len(os.sched_getaffinity(0)),
            )  # fmt: skip
            meter = Meter(pool, plain, seconds, rounds)
            meter.sample(KINDS)
            for family in FAMILIES:
                with closing(family(pool, sizes, cold_bytes)) as cases:
                    for case in cases:
                        progress(f"{case.family}  {case.name}")
                        found.append(meter.measure(case))
            meter.sample(KINDS)
        progress("sharing")
        sharing = measure_sharing(size, machine.n_threads, seconds, rounds, cold_bytes)
        return KernelResults(machine, size, meter.summary(), tuple(found), sharing)
    finally:
        isa_limit(before)


def _processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), os.uname().machine)
