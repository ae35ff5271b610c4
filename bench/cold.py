"""What ``colibri bench decode`` and ``prefill`` share: a group with cold slots, the drive's ceiling around each answer."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.drive import DriveCeiling
from bench.group import Group, Moment, Watch, run_group
from bench.limits import LimitedGroup, drop_cache, memory_limit
from bench.roofline import BenchError
from shared.container.entries import ExpertFile
from shared.container.reader import Container

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """What to start. ``arguments``: of colibri-up; ``limit_bytes`` 0: no limit but the machine's."""

    model: Path
    arguments: tuple[str, ...] = ()
    limit_bytes: int = 0
    max_context: int = 0


@dataclass(frozen=True)
class Place:
    """How the group shared out its memory."""

    n_slots: int
    n_experts: int
    ram_bytes: int
    n_threads: int
    prefill_chunk: int
    limit_bytes: int
    peak_bytes: int | None = None
    """The most that was charged to the limited group."""

    @property
    def slot_share(self) -> float:
        return self.n_slots / self.n_experts

    def text(self) -> str:
        limit = f", limit {self.limit_bytes / 1e9:.2f} GB (page cache counted)" if self.limit_bytes else ""
        return (
            f"{self.n_slots:,} slots for {self.n_experts:,} experts ({self.slot_share:.0%}), {self.ram_bytes / 1e9:.2f} GB "
            f"in all{limit}; {self.n_threads} threads, chunk {self.prefill_chunk}"
        )


def middle_file(container: Container) -> ExpertFile:
    """The expert file that samples of the drive read from."""
    layers = [i for i, file in container.experts.items() if i < container.spec.n_layers and file.copies]
    if not layers:
        raise BenchError(f"{container.path} has no experts, so there is nothing to read")
    return container.experts[layers[len(layers) // 2]]


@contextlib.contextmanager
def cold_group(container: Container, setup: Setup) -> Iterator[tuple[Group, LimitedGroup | None]]:
    """A group that has read no expert yet, under the limit."""
    drop_cache([setup.model])
    arguments = ["--draft", "off", "--max-sequences", "1", "--no-usage-history", *setup.arguments]
    if setup.max_context:
        arguments += ["--max-context", str(min(setup.max_context, container.spec.max_context))]
    with contextlib.ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="colibri-bench-")))
        limit = stack.enter_context(memory_limit(setup.limit_bytes)) if setup.limit_bytes else None
        wrap = limit.command if limit else (lambda command: command)
        group = stack.enter_context(run_group(setup.model, run_dir, container.spec.vocab, arguments, wrap))
        yield group, limit
        if limit and limit.n_killed:
            raise BenchError(
                f"the kernel ended {limit.n_killed} processes of the group: it took more than the limit of "
                f"{limit.limit_bytes:,} bytes"
            )


def place_of(container: Container, group: Group, limit: LimitedGroup | None) -> Place:
    config, spec = group.config, container.spec
    n_layers = sum(layer < spec.n_layers for layer in spec.moe_layers)
    return Place(
        config.n_slots, n_layers * spec.n_experts, config.ram_bytes, config.n_threads, config.prefill_chunk,
        limit.limit_bytes if limit else 0, limit.peak_bytes if limit else None,
    )  # fmt: skip


def dense_layers(container: Container) -> set[int]:
    spec = container.spec
    return set(range(spec.n_layers)) - set(spec.moe_layers)


@dataclass(frozen=True)
class Reads:
    """What expert_io did in a span, by its counters, and what the drive could have done (samples before and after)."""

    seconds: float
    ceiling: float
    """Bytes per second, mean of the sample before and the one after."""
    demand_bytes: int
    speculative_bytes: int
    needed_bytes: int
    """Without guesses that nobody asked for."""
    hits: int
    late_hits: int
    misses: int
    busy_s: float
    """With a read in flight."""
    wait_s: float
    """In which expert_io could do nothing but wait for the drive."""

    @property
    def bytes(self) -> int:
        return self.demand_bytes + self.speculative_bytes

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds

    @property
    def share(self) -> float:
        """Of the ceiling, over the whole time."""
        return self.rate / self.ceiling

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.seconds

    @property
    def busy_rate(self) -> float:
        return self.bytes / self.busy_s if self.busy_s else 0.0

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.seconds

    @property
    def hit_share(self) -> float:
        return self.hits / max(1, self.hits + self.late_hits + self.misses)

    @property
    def floor_s(self) -> float:
        """The time the drive needs at least for what was needed."""
        return self.needed_bytes / self.ceiling

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds, "ceiling_gb_s": self.ceiling / 1e9, "demand_bytes": self.demand_bytes,
            "speculative_bytes": self.speculative_bytes, "needed_bytes": self.needed_bytes, "gb_s": self.rate / 1e9,
            "share": self.share, "hits": self.hits, "late_hits": self.late_hits, "misses": self.misses,
            "busy_share": self.busy_share, "busy_gb_s": self.busy_rate / 1e9, "wait_share": self.wait_share,
            "floor_s": self.floor_s,
        }  # fmt: skip


def reads_between(before: Moment, after: Moment, ceilings: tuple[float, float], record_bytes: int) -> Reads:
    count = after.since(before)
    demand, speculative = count["bytes_demand"], count["bytes_speculative"]
    wasted = (count["pilot_wasted"] + count["ahead_wasted"]) * record_bytes
    return Reads(
        (after.ns - before.ns) / 1e9, sum(ceilings) / 2, demand, speculative, max(0, demand + speculative - wasted),
        count["hits"], count["late_hits"], count["misses"], count["io_busy_ns"] / 1e9, count["io_wait_ns"] / 1e9,
    )  # fmt: skip


@contextlib.contextmanager
def measuring(container: Container, group: Group) -> Iterator[tuple[DriveCeiling, Watch]]:
    """The drive under the model's experts, and the group's own numbers."""
    file = middle_file(container)
    with DriveCeiling(file.path, file.record_bytes) as drive, Watch(group.config) as watch:
        yield drive, watch
