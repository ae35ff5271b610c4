"""Where the time of steps went: pure analysis of stage rows. Opens nothing.

**Attribution.** The router measures each step as a whole (a STEP row). Inside such a window, at every instant, several
processes may be busy; the instant belongs to the one the others wait for. The ring makes that a fixed order: attention (or
the drafter) computes, else it waits for expert_io, which computes or waits for storage, else expert_io waits for the router.
An instant in which nobody does anything that has a name lies between two rows: a *hop* when they belong to different
processes, else *other*. So the table's rows are disjoint and sum to the time from the first to the last row of each step
(and the hops from and to the router around them); how far that agrees with the router's own measure is the check printed
below the table.

Used by ``colibri profile`` and ``colibri run --profile``. Times in the rows are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cli.profile.storage import ReadFacts, StoreFacts
from shared.step.counters import CELLS
from shared.step.stages import NO_LAYER, Stage, StepKind, unpack_found
from shared.wire.endpoints import ATTENTION, DRAFTER, EXPERT_IO, ROUTER, SERVICES

HOP: Final = "hop"
OTHER: Final = "other"
SLOW_HOP_NS: Final = 150_000
"""A hop to a sleeping process takes 40 to 50 us on a virtual machine, a third of that on a physical one."""

_ORDER: Final = {ATTENTION: 0, DRAFTER: 1, EXPERT_IO: 2, ROUTER: 4}
"""Who is waited for first. Waiting for storage (3) comes behind expert_io's own work and before the router's."""

GROUPS: Final = ("storage", "experts", "attention", "router", "drafter", "hops", "other")
"""What the rows are added up to: who or what was waited for."""


@dataclass(slots=True)
class StageTotal:
    """One row of the table. ``total_ns``: attributed; ``busy_ns``: by the stage's own clock, overlapped or not."""

    service: str
    stage: str
    total_ns: int = 0
    busy_ns: int = 0
    n_bytes: int = 0
    durations: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.service} {self.stage}" if self.service else self.stage

    def percentile(self, q: float) -> float:
        """Of the durations, in ns."""
        return float(np.percentile(self.durations, q)) if self.durations else 0.0

    @property
    def gb_per_s(self) -> float:
        return self.n_bytes / self.busy_ns if self.busy_ns else 0.0


@dataclass(slots=True)
class KindProfile:
    """All steps of one kind (decode, prefill, draft), or of all kinds together."""

    kind: str
    n_steps: int = 0
    n_rows: int = 0
    wall_ns: int = 0
    """By the router's STEP rows."""
    totals: dict[tuple[str, str], StageTotal] = field(default_factory=dict)
    step_ns: list[int] = field(default_factory=list)

    @property
    def sum_ns(self) -> int:
        return sum(total.total_ns for total in self.totals.values())

    @property
    def difference(self) -> float:
        """Of the sum from the wall time, as a share of it."""
        return abs(self.sum_ns - self.wall_ns) / self.wall_ns if self.wall_ns else 0.0

    def group_ns(self) -> dict[str, int]:
        groups: dict[str, int] = dict.fromkeys(GROUPS, 0)
        for (service, stage), total in self.totals.items():
            groups[_group(service, stage)] += total.total_ns
        return groups


@dataclass(slots=True)
class Overlap:
    """Storage reads: they run beside everything, so they are no row of the table."""

    n_reads: int = 0
    n_bytes: int = 0
    busy_ns: int = 0
    """Time in which at least one read was in flight."""
    durations: list[int] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        return self.n_bytes / self.busy_ns if self.busy_ns else 0.0


@dataclass(slots=True)
class Facts:
    """What is known beside the rows: counters of the run (differences), the kernel's count, the request's own numbers."""

    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    kernel_read_bytes: int | None = None
    """``read_bytes`` of /proc/<expert_io>/io."""
    store: StoreFacts = field(default_factory=StoreFacts)
    n_lost: int = 0
    n_prompt: int = 0
    n_generated: int = 0
    request_s: float = 0.0
    first_token_s: float = 0.0

    def counter(self, service: str, name: str) -> int:
        assert name in CELLS[service], f"{service} counts no {name}"
        return self.counters.get(service, {}).get(name, 0)


@dataclass(slots=True)
class Profile:
    all: KindProfile
    kinds: dict[str, KindProfile]
    reads: Overlap
    layers: dict[tuple[int, str, str], int]
    """(layer, service, stage) -> attributed ns."""
    facts: Facts
    found: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """layer -> (hits, late hits, misses) of the visits seen."""
    between_ns: int = 0
    """Time between the end of one step and the begin of the next: nothing was planned, or the router was late."""


def _group(service: str, stage: str) -> str:
    if stage == HOP:
        return "hops"
    if stage == OTHER or not service:
        return "other"
    if stage == Stage.IO_WAIT.name.lower():
        return "storage"
    return {EXPERT_IO: "experts", ATTENTION: "attention", ROUTER: "router", DRAFTER: "drafter"}.get(service, "other")


def stage_name(stage: int) -> str:
    try:
        return Stage(stage).name.lower()
    except ValueError:
        return f"stage_{stage}"  # rows of a newer tree


def kind_name(kind: int) -> str:
    try:
        return StepKind(kind).name.lower()
    except ValueError:
        return f"kind_{kind}"


def _rank(service: str, stage: int) -> int | None:
    """Place in the chain of who is waited for; None = never on it."""
    if stage in (Stage.STEP, Stage.IO_READ):
        return None
    if stage == Stage.IO_WAIT:
        return 3
    return _ORDER.get(service)


def analyse(rows: np.ndarray, facts: Facts | None = None) -> Profile:
    """``rows``: fields start_ns, end_ns, bytes, step, stage, layer, service, in any order (``TraceRing``)."""
    profile = Profile(KindProfile("all"), {}, Overlap(), defaultdict(int), facts or Facts())
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
    is_step = rows["stage"] == Stage.STEP
    is_read = rows["stage"] == Stage.IO_READ
    _analyse_reads(rows[is_read], profile.reads)
    windows = _windows(rows[is_step])
    work = rows[~is_step & ~is_read]
    for row in work[work["stage"] == Stage.UNION].tolist():
        before = profile.found.get(row[5], (0, 0, 0))
        hits, late_hits, misses = unpack_found(row[2])
        profile.found[row[5]] = (before[0] + hits, before[1] + late_hits, before[2] + misses)
    profile.between_ns = sum(max(0, after[0] - before[1]) for before, after in itertools.pairwise(windows))
    starts = work["start_ns"]
    longest = int((work["end_ns"] - starts).max()) if len(work) else 0
    for begin, end, kind, n_rows in windows:
        kind_report = profile.kinds.setdefault(kind, KindProfile(kind))
        low = int(np.searchsorted(starts, begin - longest, side="left"))
        high = int(np.searchsorted(starts, end, side="left"))
        block = work[low:high]
        block = block[block["end_ns"] > begin]
        for target in (profile.all, kind_report):
            target.n_steps += 1
            target.n_rows += n_rows
            target.wall_ns += end - begin
            target.step_ns.append(end - begin)
        _sweep(block, begin, end, (profile.all, kind_report), profile.layers)
    return profile


def _windows(steps: np.ndarray) -> list[tuple[int, int, str, int]]:
    """[(begin, end, kind, rows)] of the steps, disjoint: where two overlap, the later one begins at the earlier's end."""
    out: list[tuple[int, int, str, int]] = []
    last = 0
    for row in steps:
        begin, end = max(int(row["start_ns"]), last), int(row["end_ns"])
        if end > begin:
            out.append((begin, end, kind_name(int(row["layer"])), int(row["bytes"])))
            last = end
    return out


def _sweep(
    block: np.ndarray, begin: int, end: int, targets: Sequence[KindProfile], layers: dict[tuple[int, str, str], int]
) -> None:
    """Attributes every instant between the first and the last row inside one window."""
    events: list[tuple[int, int, int, tuple[str, str, int]]] = []  # time, +1 or -1, rank, (service, stage, layer)
    for row in block.tolist():
        start_ns, end_ns, n_bytes, _, stage, layer, service_idx = row[:7]
        service = SERVICES[service_idx] if 0 <= service_idx < len(SERVICES) else f"service_{service_idx}"
        name = stage_name(stage)
        start, stop = max(start_ns, begin), min(end_ns, end)
        if stage == Stage.UNION:
            n_bytes = 0  # no bytes, but counts
        if stop <= start and not n_bytes:
            continue
        if start_ns >= begin:  # counted in the window where it began
            for target in targets:
                total = target.totals.setdefault((service, name), StageTotal(service, name))
                total.busy_ns += end_ns - start_ns
                total.n_bytes += n_bytes
                total.durations.append(end_ns - start_ns)
        rank = _rank(service, stage)
        if rank is not None and stop > start:
            key = (service, name, layer)
            events.append((start, 1, rank, key))
            events.append((stop, -1, rank, key))
    if not events:
        return
    events.sort(key=lambda event: event[0])
    active: dict[tuple[int, tuple[str, str, int]], int] = {}
    attributed: dict[tuple[str, str, int], int] = defaultdict(int)
    gaps: list[tuple[str, int]] = []
    last_service = ROUTER
    # The router begins and ends each step. When it has no row there, the step began or ended with a hop.
    gap_ns = events[0][0] - begin if events[0][3][0] != ROUTER else 0
    now = events[0][0]
    for time_ns, change, rank, key in events:
        if time_ns > now:
            if active:
                service, label, layer = min(active)[1]
                if gap_ns:
                    gaps.append((HOP if service != last_service else OTHER, gap_ns))
                    gap_ns = 0
                attributed[service, label, layer] += time_ns - now
                last_service = service
            else:
                gap_ns += time_ns - now
            now = time_ns
        entry = (rank, key)
        n = active.get(entry, 0) + change
        if n > 0:
            active[entry] = n
        else:
            active.pop(entry, None)
    if last_service != ROUTER and end > now:
        gaps.append((HOP, end - now))
    for (service, label, layer), ns in attributed.items():
        for target in targets:
            target.totals.setdefault((service, label), StageTotal(service, label)).total_ns += ns
        layers[layer, service, label] += ns
    for name, ns in gaps:
        for target in targets:
            total = target.totals.setdefault(("", name), StageTotal("", name))
            total.total_ns += ns
            total.busy_ns += ns
            total.durations.append(ns)
        layers[NO_LAYER, "", name] += ns


def _analyse_reads(reads: np.ndarray, overlap: Overlap) -> None:
    overlap.n_reads = len(reads)
    overlap.n_bytes = int(reads["bytes"].sum()) if len(reads) else 0
    last = 0
    for start, end in zip(reads["start_ns"].tolist(), reads["end_ns"].tolist()):
        overlap.busy_ns += max(0, end - max(start, last))
        last = max(last, end)
        overlap.durations.append(end - start)


def read_facts(profile: Profile) -> ReadFacts:
    return ReadFacts(
        profile.reads.n_reads,
        profile.reads.n_bytes,
        profile.reads.busy_ns,
        profile.all.wall_ns + profile.between_ns,
        profile.facts.counter(EXPERT_IO, "misses"),
        profile.facts.counter(EXPERT_IO, "evictions"),
    )


def rates(profile: Profile) -> dict[str, float]:
    """Tokens per second of prefill and decode by the steps' own time (0 where nothing ran)."""
    prefill, decode, draft = (profile.kinds.get(name) for name in ("prefill", "decode", "draft"))
    decode_ns = (decode.wall_ns if decode else 0) + (draft.wall_ns if draft else 0)
    n_tokens = profile.facts.n_generated - 1 if profile.facts.n_generated else profile.facts.counter(ROUTER, "tokens")
    if not n_tokens and decode:
        n_tokens = decode.n_rows
    return {
        "prefill_tokens_per_s": prefill.n_rows * 1e9 / prefill.wall_ns if prefill else 0.0,
        "decode_tokens_per_s": max(0, n_tokens) * 1e9 / decode_ns if decode_ns else 0.0,
    }


def sorted_totals(kind: KindProfile) -> list[StageTotal]:
    return sorted(kind.totals.values(), key=lambda total: (-total.total_ns, -total.busy_ns, total.name))


def bytes_counted(facts: Facts) -> int:
    return facts.counter(EXPERT_IO, "bytes_demand") + facts.counter(EXPERT_IO, "bytes_speculative")


def io_difference(facts: Facts) -> float | None:
    counted = bytes_counted(facts)
    if facts.kernel_read_bytes is None or not counted:
        return None
    return abs(counted - facts.kernel_read_bytes) / counted
