"""Where the time of steps went: pure analysis of stage rows, and its table, JSON and Chrome trace. Opens nothing.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cli.profile_storage import ReadFacts, StoreFacts, of_ceiling, rate_text
from cli.profile_storage import advice as storage_advice
from shared.step.counters import CELLS
from shared.step.stages import NO_LAYER, Stage, StepKind, unpack_found
from shared.wire.endpoints import ATTENTION, DRAFTER, EXPERT_IO, ROUTER, SERVICES

HOP: Final = "hop"
OTHER: Final = "other"
SLOW_HOP_NS: Final = 150_000
"""A hop to a sleeping process takes 40 to 50 us on a virtual machine, a third of that on a physical one."""
WAITS: Final = frozenset({Stage.MIXED_WAIT, Stage.GATE_WAIT, Stage.DRAFT_WAIT})
"""Waiting for another process: says who is next in the chain, never where the time goes."""

_ORDER: Final = {ATTENTION: 0, DRAFTER: 1, EXPERT_IO: 2, ROUTER: 4}
"""Who is waited for first. Waiting for storage (3) comes behind expert_io's own work and before the router's."""

_GROUPS: Final[dict[str, tuple[str, str]]] = {
    "storage": (
        "waiting for experts from storage",
        "",  # profile_storage knows
    ),
    "experts": ("computing experts", "Faster cores or more threads for expert_io would help most."),
    "attention": ("attention, dense layers and the head", "Faster cores or a shorter context would help most."),
    "router": (
        "gates, sampling and planning in the router",
        "The router is the limit; that is unusual, look at its rows.",
    ),
    "drafter": ("the drafter's own layer", "Compare with --draft off."),
    "hops": ("hops between processes", "The layers are too small for the ring: messages cost more than work."),
    "other": ("time nobody named", "Some stage lacks a timer; --trace shows where."),
}


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
class KindReport:
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
        groups: dict[str, int] = dict.fromkeys(_GROUPS, 0)
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
class Report:
    all: KindReport
    kinds: dict[str, KindReport]
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


def _stage_name(stage: int) -> str:
    try:
        return Stage(stage).name.lower()
    except ValueError:
        return f"stage_{stage}"  # rows of a newer tree


def _kind_name(kind: int) -> str:
    try:
        return StepKind(kind).name.lower()
    except ValueError:
        return f"kind_{kind}"


def _rank(service: str, stage: int) -> int | None:
    """Place in the chain of who is waited for; None = never on it."""
    if stage in WAITS or stage in (Stage.STEP, Stage.IO_READ):
        return None
    if stage == Stage.IO_WAIT:
        return 3
    return _ORDER.get(service)


def analyse(rows: np.ndarray, facts: Facts | None = None) -> Report:
    """``rows``: fields start_ns, end_ns, bytes, step, stage, layer, service, in any order (``TraceRing``)."""
    report = Report(KindReport("all"), {}, Overlap(), defaultdict(int), facts or Facts())
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
    is_step = rows["stage"] == Stage.STEP
    is_read = rows["stage"] == Stage.IO_READ
    _analyse_reads(rows[is_read], report.reads)
    windows = _windows(rows[is_step])
    work = rows[~is_step & ~is_read]
    for row in work[work["stage"] == Stage.UNION].tolist():
        before = report.found.get(row[5], (0, 0, 0))
        hits, late_hits, misses = unpack_found(row[2])
        report.found[row[5]] = (before[0] + hits, before[1] + late_hits, before[2] + misses)
    report.between_ns = sum(max(0, after[0] - before[1]) for before, after in itertools.pairwise(windows))
    starts = work["start_ns"]
    longest = int((work["end_ns"] - starts).max()) if len(work) else 0
    for begin, end, kind, n_rows in windows:
        kind_report = report.kinds.setdefault(kind, KindReport(kind))
        low = int(np.searchsorted(starts, begin - longest, side="left"))
        high = int(np.searchsorted(starts, end, side="left"))
        block = work[low:high]
        block = block[block["end_ns"] > begin]
        for target in (report.all, kind_report):
            target.n_steps += 1
            target.n_rows += n_rows
            target.wall_ns += end - begin
            target.step_ns.append(end - begin)
        _sweep(block, begin, end, (report.all, kind_report), report.layers)
    return report


def _windows(steps: np.ndarray) -> list[tuple[int, int, str, int]]:
    """[(begin, end, kind, rows)] of the steps, disjoint: where two overlap, the later one begins at the earlier's end."""
    out: list[tuple[int, int, str, int]] = []
    last = 0
    for row in steps:
        begin, end = max(int(row["start_ns"]), last), int(row["end_ns"])
        if end > begin:
            out.append((begin, end, _kind_name(int(row["layer"])), int(row["bytes"])))
            last = end
    return out


def _sweep(
    block: np.ndarray, begin: int, end: int, targets: Sequence[KindReport], layers: dict[tuple[int, str, str], int]
) -> None:
    """Attributes every instant between the first and the last row inside one window."""
    events: list[tuple[int, int, int, tuple[str, str, int]]] = []  # time, +1 or -1, rank, (service, stage, layer)
    for row in block.tolist():
        start_ns, end_ns, n_bytes, _, stage, layer, service_idx = row[:7]
        service = SERVICES[service_idx] if 0 <= service_idx < len(SERVICES) else f"service_{service_idx}"
        name = _stage_name(stage)
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
                service, stage_name, layer = min(active)[1]
                if gap_ns:
                    gaps.append((HOP if service != last_service else OTHER, gap_ns))
                    gap_ns = 0
                attributed[service, stage_name, layer] += time_ns - now
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
    for (service, stage_name, layer), ns in attributed.items():
        for target in targets:
            target.totals.setdefault((service, stage_name), StageTotal(service, stage_name)).total_ns += ns
        layers[layer, service, stage_name] += ns
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


# ---- words and tables -------------------------------------------------------------------------------------------------


def verdict(report: Report) -> str:
    """One sentence that names the bottleneck."""
    kind = report.kinds.get("decode") or report.all
    if not kind.sum_ns:
        return "Nothing was computed while looking."
    groups, total = kind.group_ns(), kind.sum_ns
    if kind.kind == "decode" and "draft" in report.kinds:
        draft = report.kinds["draft"]
        groups = {name: ns + draft.group_ns()[name] for name, ns in groups.items()}
        total += draft.sum_ns
    name, ns = max(groups.items(), key=lambda item: item[1])
    what, advice = _GROUPS[name]
    when = "decoding" if kind.kind == "decode" else "the time"
    text = f"Bottleneck: {what}, {ns / total:.0%} of {when}."
    if name == "storage":
        reads, store = _read_facts(report), report.facts.store
        if reads.busy_ns:
            text = text[:-1] + f" (reads ran at {rate_text(reads, store)}; {_hit_text(report.facts)})."
        advice = storage_advice(reads, store)
    if name == "hops":
        median = kind.totals["", HOP].percentile(50) if ("", HOP) in kind.totals else 0.0
        text = text[:-1] + f" ({_time(median)} each in the middle)."
        if median > SLOW_HOP_NS:
            advice = "That is slow for a hop: other work on this machine keeps the processes waiting for a CPU."
    return f"{text} {advice}"


def _read_facts(report: Report) -> ReadFacts:
    return ReadFacts(
        report.reads.n_reads,
        report.reads.n_bytes,
        report.reads.busy_ns,
        report.all.wall_ns + report.between_ns,
        report.facts.counter(EXPERT_IO, "misses"),
        report.facts.counter(EXPERT_IO, "evictions"),
    )


def _hit_text(facts: Facts) -> str:
    hits, late, misses = (facts.counter(EXPERT_IO, name) for name in ("hits", "late_hits", "misses"))
    total = hits + late + misses
    return f"{hits / total:.0%} of the experts were there" if total else "no expert was asked for"


def rates(report: Report) -> dict[str, float]:
    """Tokens per second of prefill and decode by the steps' own time (0 where nothing ran)."""
    prefill, decode, draft = (report.kinds.get(name) for name in ("prefill", "decode", "draft"))
    decode_ns = (decode.wall_ns if decode else 0) + (draft.wall_ns if draft else 0)
    n_tokens = report.facts.n_generated - 1 if report.facts.n_generated else report.facts.counter(ROUTER, "tokens")
    if not n_tokens and decode:
        n_tokens = decode.n_rows
    return {
        "prefill_tokens_per_s": prefill.n_rows * 1e9 / prefill.wall_ns if prefill else 0.0,
        "decode_tokens_per_s": max(0, n_tokens) * 1e9 / decode_ns if decode_ns else 0.0,
    }


def as_json(report: Report) -> dict[str, Any]:
    """The whole report as plain data; times in seconds."""

    def kind_json(kind: KindReport) -> dict[str, Any]:
        return {
            "n_steps": kind.n_steps,
            "n_rows": kind.n_rows,
            "wall_s": kind.wall_ns / 1e9,
            "sum_s": kind.sum_ns / 1e9,
            "difference": kind.difference,
            "step_p50_ms": float(np.percentile(kind.step_ns, 50)) / 1e6 if kind.step_ns else 0.0,
            "step_p99_ms": float(np.percentile(kind.step_ns, 99)) / 1e6 if kind.step_ns else 0.0,
            "rows": [_total_json(total, kind.sum_ns) for total in _sorted_totals(kind)],
        }

    facts = report.facts
    reads = _read_facts(report)
    return {
        **kind_json(report.all),
        "kinds": {name: kind_json(kind) for name, kind in report.kinds.items()},
        "reads": {
            "n": report.reads.n_reads,
            "bytes": report.reads.n_bytes,
            "busy_s": report.reads.busy_ns / 1e9,
            "gb_per_s": report.reads.gb_per_s,
            "busy_share": reads.busy_share,
            "drive_gb_per_s": facts.store.drive_bytes_s / 1e9 or None,
            "of_ceiling": of_ceiling(reads, facts.store),
        },
        "between_steps_s": report.between_ns / 1e9,
        "io": {
            "bytes_counted": _bytes_counted(facts),
            "bytes_kernel": facts.kernel_read_bytes,
            "difference": _io_difference(facts),
        },
        "layers": [
            {"layer": layer, "service": service, "stage": stage, "total_s": ns / 1e9}
            for (layer, service, stage), ns in sorted(report.layers.items())
        ],
        "found": [
            {"layer": layer, "hits": hits, "late_hits": late_hits, "misses": misses}
            for layer, (hits, late_hits, misses) in sorted(report.found.items())
        ],
        "counters": {service: dict(cells) for service, cells in facts.counters.items()},
        "request": {
            "n_prompt": facts.n_prompt,
            "n_generated": facts.n_generated,
            "wall_s": facts.request_s,
            "first_token_s": facts.first_token_s,
        },
        **rates(report),
        "n_lost": facts.n_lost,
        "verdict": verdict(report),
    }


def _total_json(total: StageTotal, sum_ns: int) -> dict[str, Any]:
    return {
        "service": total.service,
        "stage": total.stage,
        "total_s": total.total_ns / 1e9,
        "share": total.total_ns / sum_ns if sum_ns else 0.0,
        "busy_s": total.busy_ns / 1e9,
        "p50_us": total.percentile(50) / 1e3,
        "p99_us": total.percentile(99) / 1e3,
        "count": len(total.durations),
        "bytes": total.n_bytes,
        "gb_per_s": total.gb_per_s,
    }


def _sorted_totals(kind: KindReport) -> list[StageTotal]:
    return sorted(kind.totals.values(), key=lambda total: (-total.total_ns, -total.busy_ns, total.name))


def _bytes_counted(facts: Facts) -> int:
    return facts.counter(EXPERT_IO, "bytes_demand") + facts.counter(EXPERT_IO, "bytes_speculative")


def _io_difference(facts: Facts) -> float | None:
    counted = _bytes_counted(facts)
    if facts.kernel_read_bytes is None or not counted:
        return None
    return abs(counted - facts.kernel_read_bytes) / counted


def format_report(report: Report, *, has_layers: bool = False) -> list[str]:
    """The table as lines of plain ASCII."""
    lines: list[str] = []
    known = ("prefill", "decode", "draft")
    names = [name for name in (*known, *sorted(set(report.kinds) - {*known})) if name in report.kinds]
    for name in names:
        lines += _format_kind(report.kinds[name]) + [""]
    if not names:
        lines += ["no step ran while looking", ""]
    if has_layers and report.layers:
        lines += _format_layers(report) + [""]
    lines += _format_facts(report)
    lines += ["", verdict(report)]
    return lines


def _format_kind(kind: KindReport) -> list[str]:
    lines = [
        f"{kind.kind}: {kind.n_steps} steps, {kind.n_rows} rows, {_time(kind.wall_ns)}"
        f" (step p50 {_time(np.percentile(kind.step_ns, 50))}, p99 {_time(np.percentile(kind.step_ns, 99))})",
        f"  {'stage':<24}{'total':>10}{'share':>8}{'p50':>10}{'p99':>10}{'count':>8}{'bytes':>10}{'GB/s':>8}",
    ]
    for total in _sorted_totals(kind):
        is_wait = not total.total_ns and total.stage.endswith("_wait")
        share = "" if is_wait else f"{total.total_ns / kind.sum_ns:.1%}" if kind.sum_ns else ""
        lines.append(
            f"  {total.name:<24}{'(covers)' if is_wait else _time(total.total_ns):>10}{share:>8}"
            f"{_time(total.percentile(50)):>10}{_time(total.percentile(99)):>10}{len(total.durations):>8}"
            f"{_size(total.n_bytes) if total.n_bytes else '':>10}{f'{total.gb_per_s:.2f}' if total.n_bytes else '':>8}"
        )
    lines.append(
        f"  {'sum':<24}{_time(kind.sum_ns):>10}   the router measured {_time(kind.wall_ns)}: {kind.difference:.1%} apart"
        + (" (MORE THAN 5 %)" if kind.difference > 0.05 else "")
    )
    return lines


def _format_layers(report: Report) -> list[str]:
    stages = sorted({(service, stage) for layer, service, stage in report.layers if layer != NO_LAYER})
    if not stages:
        return []
    head = "".join(f"{stage[:11]:>12}" for _, stage in stages)
    if report.found:
        head += f"{'hits':>9}{'late':>7}{'misses':>8}"
    lines = ["  layer" + head]
    for layer in sorted({layer for layer, _, _ in report.layers if layer != NO_LAYER}):
        cells = (report.layers.get((layer, service, stage), 0) for service, stage in stages)
        line = f"  {layer:>5}" + "".join(f"{_time(ns) if ns else '':>12}" for ns in cells)
        if layer in report.found:
            hits, late_hits, misses = report.found[layer]
            line += f"{hits:>9}{late_hits:>7}{misses:>8}"
        lines.append(line)
    return lines


def _format_facts(report: Report) -> list[str]:
    facts, reads = report.facts, report.reads
    lines = []
    speed = rates(report)
    lines.append(
        f"speed:   prefill {speed['prefill_tokens_per_s']:.2f} tokens/s, decode {speed['decode_tokens_per_s']:.2f} tokens/s"
        + (
            f"; first token after {facts.first_token_s:.2f} s, all after {facts.request_s:.2f} s"
            if facts.request_s
            else ""
        )
    )
    if report.all.n_steps > 1:
        lines.append(f"between: {_time(report.between_ns)} between steps, in which no step was under way")
    hits, late, misses = (facts.counter(EXPERT_IO, name) for name in ("hits", "late_hits", "misses"))
    total = hits + late + misses
    if total:
        lines.append(
            f"experts: {hits} hits ({hits / total:.1%}), {late} late hits ({late / total:.1%}),"
            f" {misses} misses ({misses / total:.1%}); {facts.counter(EXPERT_IO, 'evictions')} evictions"
        )
    counted = _bytes_counted(facts)
    if counted or reads.n_reads:
        line = f"reads:   {_size(counted)} in {facts.counter(EXPERT_IO, 'reads')} reads"
        if reads.busy_ns:
            line += f", storage busy {_time(reads.busy_ns)}"
            found = _read_facts(report)
            if found.span_ns:
                line += f" ({found.busy_share:.0%} of the time)"
            line += f", {rate_text(found, facts.store)}"
        lines.append(line)
    difference = _io_difference(facts)
    if difference is not None:
        lines.append(
            f"kernel:  /proc says {_size(facts.kernel_read_bytes or 0)}, {difference:.1%} apart"
            + ("" if difference <= 0.01 else " (the page cache serves buffered reads without storage)")
        )
    useful, wasted = facts.counter(EXPERT_IO, "pilot_useful"), facts.counter(EXPERT_IO, "pilot_wasted")
    if useful or wasted:
        lines.append(
            f"pilot:   {useful} useful, {wasted} wasted; {_size(facts.counter(EXPERT_IO, 'bytes_speculative'))} read ahead"
        )
    wanted = facts.counter(EXPERT_IO, "pilot_wanted")
    if wanted:
        saved, lost = facts.counter(EXPERT_IO, "pilot_saved_ns"), facts.counter(EXPERT_IO, "pilot_lost_ns")
        lines.append(
            f"         named {facts.counter(EXPERT_IO, 'pilot_right') / wanted:.1%} of what was wanted; reading time taken off"
            f" demand {_time(saved)}, delays caused {_time(lost)}"
        )
    ahead = facts.counter(EXPERT_IO, "ahead_reads")
    if ahead:
        useful, wasted = (facts.counter(EXPERT_IO, name) for name in ("ahead_useful", "ahead_wasted"))
        lines.append(f"ahead:   {ahead} experts read ahead for prompts, {useful} useful, {wasted} wasted")
    drafted, accepted = facts.counter(ROUTER, "drafts"), facts.counter(ROUTER, "accepted")
    if drafted:
        lines.append(f"drafts:  {accepted} of {drafted} accepted ({accepted / drafted:.0%}){_draft_text(report)}")
    if facts.n_lost:
        lines.append(f"lost:    {facts.n_lost} rows were overwritten before they could be read; totals are too small")
    return lines


def _draft_text(report: Report) -> str:
    """What drafting costs and brings. A step that verifies drafts takes at least as long as one without them, so its time
    is an upper bound for a token without drafts."""
    decode, draft = report.kinds.get("decode"), report.kinds.get("draft")
    if decode is None or draft is None or not decode.n_steps:
        return ""
    per_step = decode.wall_ns / decode.n_steps
    per_token = (decode.wall_ns + draft.wall_ns) / (decode.n_steps + report.facts.counter(ROUTER, "accepted"))
    share = draft.wall_ns / (decode.wall_ns + draft.wall_ns)
    return f"; drafting takes {share:.0%} of decoding: {_time(per_token)} a token, without drafts at most {_time(per_step)}"


def _time(ns: float) -> str:
    if ns >= 1e9:
        return f"{ns / 1e9:.2f} s"
    if ns >= 1e6:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e3:.0f} us"


def _size(n_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes} B"


# ---- Chrome trace -----------------------------------------------------------------------------------------------------


def chrome_trace(rows: np.ndarray) -> dict[str, Any]:
    """All rows in the trace-event format (Perfetto, chrome://tracing): a process per service, reads on lanes of their own."""
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
    origin = int(rows["start_ns"][0]) if len(rows) else 0
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, int], str] = {}
    lanes: list[int] = []  # end of the last read on each lane
    for start, end, n_bytes, step, stage, layer, service in (row[:7] for row in rows.tolist()):
        track, name, args = 0, _stage_name(stage), {"step": step}
        label = "work"
        if stage == Stage.STEP:
            track, label, name = 1, "steps", _kind_name(layer)
            args["rows"] = n_bytes
        else:
            if layer != NO_LAYER:
                args["layer"] = layer
            if stage == Stage.UNION:
                args |= zip(("hits", "late_hits", "misses"), unpack_found(n_bytes), strict=True)
            elif n_bytes:
                args["bytes"] = n_bytes
        if stage == Stage.IO_READ:
            lane = next((i for i, busy_until in enumerate(lanes) if busy_until <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            track, label = 2 + lane, f"read {lane}"
        tracks.setdefault((service, track), label)
        events.append(
            {
                "ph": "X", "name": name, "cat": label.split()[0], "pid": service, "tid": track,
                "ts": (start - origin) / 1e3, "dur": (end - start) / 1e3, "args": args,
            }
        )  # fmt: skip
    return {"traceEvents": [*_track_names(tracks), *events], "displayTimeUnit": "ms"}


def _track_names(tracks: Mapping[tuple[int, int], str]) -> Iterable[dict[str, Any]]:
    for service in sorted({service for service, _ in tracks}):
        name = SERVICES[service] if 0 <= service < len(SERVICES) else f"service {service}"
        yield {"ph": "M", "name": "process_name", "pid": service, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": service, "tid": 0, "args": {"sort_index": service}}
    for (service, track), label in sorted(tracks.items()):
        yield {"ph": "M", "name": "thread_name", "pid": service, "tid": track, "args": {"name": label}}
