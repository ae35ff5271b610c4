"""What a profile says: one sentence that names the bottleneck, the table for people, the JSON for programs. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cli.profile.analysis import (
    HOP,
    SLOW_HOP_NS,
    Facts,
    KindProfile,
    Profile,
    StageTotal,
    bytes_counted,
    io_difference,
    rates,
    read_facts,
    sorted_totals,
)
from cli.profile.storage import advice as storage_advice
from cli.profile.storage import of_ceiling, rate_text
from cli.show import Column, Table, plain_lines
from shared.step.stages import NO_LAYER
from shared.wire.endpoints import EXPERT_IO, ROUTER

_WORDS: Final[dict[str, tuple[str, str]]] = {
    "storage": (
        "waiting for experts from storage",
        "",  # the module storage knows
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
"""Group -> (what it is, the advice that goes with it)."""


def verdict(profile: Profile) -> str:
    """One sentence that names the bottleneck."""
    kind = profile.kinds.get("decode") or profile.all
    if not kind.sum_ns:
        return "Nothing was computed while looking."
    groups, total = kind.group_ns(), kind.sum_ns
    if kind.kind == "decode" and "draft" in profile.kinds:
        draft = profile.kinds["draft"]
        groups = {name: ns + draft.group_ns()[name] for name, ns in groups.items()}
        total += draft.sum_ns
    name, ns = max(groups.items(), key=lambda item: item[1])
    what, advice = _WORDS[name]
    when = "decoding" if kind.kind == "decode" else "the time"
    text = f"Bottleneck: {what}, {ns / total:.0%} of {when}."
    if name == "storage":
        reads, store = read_facts(profile), profile.facts.store
        if reads.busy_ns:
            text = text[:-1] + f" (reads ran at {rate_text(reads, store)}; {_hit_text(profile.facts)})."
        advice = storage_advice(reads, store)
    if name == "hops":
        median = kind.totals["", HOP].percentile(50) if ("", HOP) in kind.totals else 0.0
        text = text[:-1] + f" ({_time(median)} each in the middle)."
        if median > SLOW_HOP_NS:
            advice = "That is slow for a hop: other work on this machine keeps the processes waiting for a CPU."
    return f"{text} {advice}"


def _hit_text(facts: Facts) -> str:
    hits, late, misses = (facts.counter(EXPERT_IO, name) for name in ("hits", "late_hits", "misses"))
    total = hits + late + misses
    return f"{hits / total:.0%} of the experts were there" if total else "no expert was asked for"


def as_json(profile: Profile) -> dict[str, Any]:
    """The whole report as plain data; times in seconds."""

    def kind_json(kind: KindProfile) -> dict[str, Any]:
        return {
            "n_steps": kind.n_steps,
            "n_rows": kind.n_rows,
            "wall_s": kind.wall_ns / 1e9,
            "sum_s": kind.sum_ns / 1e9,
            "difference": kind.difference,
            "step_p50_ms": float(np.percentile(kind.step_ns, 50)) / 1e6 if kind.step_ns else 0.0,
            "step_p99_ms": float(np.percentile(kind.step_ns, 99)) / 1e6 if kind.step_ns else 0.0,
            "rows": [_total_json(total, kind.sum_ns) for total in sorted_totals(kind)],
        }

    facts = profile.facts
    reads = read_facts(profile)
    return {
        **kind_json(profile.all),
        "kinds": {name: kind_json(kind) for name, kind in profile.kinds.items()},
        "reads": {
            "n": profile.reads.n_reads,
            "bytes": profile.reads.n_bytes,
            "busy_s": profile.reads.busy_ns / 1e9,
            "gb_per_s": profile.reads.gb_per_s,
            "busy_share": reads.busy_share,
            "drive_gb_per_s": facts.store.drive_bytes_s / 1e9 or None,
            "of_ceiling": of_ceiling(reads, facts.store),
        },
        "between_steps_s": profile.between_ns / 1e9,
        "io": {
            "bytes_counted": bytes_counted(facts),
            "bytes_kernel": facts.kernel_read_bytes,
            "difference": io_difference(facts),
        },
        "layers": [
            {"layer": layer, "service": service, "stage": stage, "total_s": ns / 1e9}
            for (layer, service, stage), ns in sorted(profile.layers.items())
        ],
        "found": [
            {"layer": layer, "hits": hits, "late_hits": late_hits, "misses": misses}
            for layer, (hits, late_hits, misses) in sorted(profile.found.items())
        ],
        "counters": {service: dict(cells) for service, cells in facts.counters.items()},
        "request": {
            "n_prompt": facts.n_prompt,
            "n_generated": facts.n_generated,
            "wall_s": facts.request_s,
            "first_token_s": facts.first_token_s,
        },
        **rates(profile),
        "n_lost": facts.n_lost,
        "verdict": verdict(profile),
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


def format_report(profile: Profile, *, has_layers: bool = False) -> list[str]:
    """The report as lines of plain ASCII."""
    return plain_lines(parts_of(profile, has_layers=has_layers))


def parts_of(profile: Profile, *, has_layers: bool = False) -> list[str | Table]:
    """The report for ``show``."""
    parts: list[str | Table] = []
    known = ("prefill", "decode", "draft")
    names = [name for name in (*known, *sorted(set(profile.kinds) - {*known})) if name in profile.kinds]
    for name in names:
        parts += [*_format_kind(profile.kinds[name]), ""]
    if not names:
        parts += ["no step ran while looking", ""]
    if has_layers and (layers := _format_layers(profile)):
        parts += [layers, ""]
    return [*parts, *_format_facts(profile), "", verdict(profile)]


def _format_kind(kind: KindProfile) -> list[str | Table]:
    rows = []
    for total in sorted_totals(kind):
        is_wait = not total.total_ns and total.stage.endswith("_wait")
        rows.append(
            (
                total.name,
                "(covers)" if is_wait else _time(total.total_ns),
                "" if is_wait or not kind.sum_ns else f"{total.total_ns / kind.sum_ns:.1%}",
                _time(total.percentile(50)),
                _time(total.percentile(99)),
                str(len(total.durations)),
                _size(total.n_bytes) if total.n_bytes else "",
                f"{total.gb_per_s:.2f}" if total.n_bytes else "",
            )
        )
    widths = (("total", 10), ("share", 8), ("p50", 10), ("p99", 10), ("count", 8), ("bytes", 10), ("GB/s", 8))
    return [
        f"{kind.kind}: {kind.n_steps} steps, {kind.n_rows} rows, {_time(kind.wall_ns)}"
        f" (step p50 {_time(np.percentile(kind.step_ns, 50))}, p99 {_time(np.percentile(kind.step_ns, 99))})",
        Table((Column("stage", 24, False, "  "), *(Column(title, width) for title, width in widths)), rows),
        f"  {'sum':<24}{_time(kind.sum_ns):>10}   the router measured {_time(kind.wall_ns)}: {kind.difference:.1%} apart"
        + (" (MORE THAN 5 %)" if kind.difference > 0.05 else ""),
    ]


def _format_layers(profile: Profile) -> Table | None:
    stages = sorted({(service, stage) for layer, service, stage in profile.layers if layer != NO_LAYER})
    if not stages:
        return None
    columns = [Column("layer", 7), *(Column(stage[:11], 12) for _, stage in stages)]
    if profile.found:
        columns += [Column("hits", 9), Column("late", 7), Column("misses", 8)]
    rows = []
    for layer in sorted({layer for layer, _, _ in profile.layers if layer != NO_LAYER}):
        cells = [profile.layers.get((layer, service, stage), 0) for service, stage in stages]
        found = map(str, profile.found.get(layer, ()))
        rows.append([str(layer), *(_time(ns) if ns else "" for ns in cells), *found])
    return Table(columns, rows)


def _format_facts(profile: Profile) -> list[str]:
    facts, reads = profile.facts, profile.reads
    lines = []
    speed = rates(profile)
    lines.append(
        f"speed:   prefill {speed['prefill_tokens_per_s']:.2f} tokens/s, decode {speed['decode_tokens_per_s']:.2f} tokens/s"
        + (
            f"; first token after {facts.first_token_s:.2f} s, all after {facts.request_s:.2f} s"
            if facts.request_s
            else ""
        )
    )
    if profile.all.n_steps > 1:
        lines.append(f"between: {_time(profile.between_ns)} between steps, in which no step was under way")
    hits, late, misses = (facts.counter(EXPERT_IO, name) for name in ("hits", "late_hits", "misses"))
    total = hits + late + misses
    if total:
        lines.append(
            f"experts: {hits} hits ({hits / total:.1%}), {late} late hits ({late / total:.1%}),"
            f" {misses} misses ({misses / total:.1%}); {facts.counter(EXPERT_IO, 'evictions')} evictions"
        )
    counted = bytes_counted(facts)
    if counted or reads.n_reads:
        line = f"reads:   {_size(counted)} in {facts.counter(EXPERT_IO, 'reads')} reads"
        if reads.busy_ns:
            line += f", storage busy {_time(reads.busy_ns)}"
            found = read_facts(profile)
            if found.span_ns:
                line += f" ({found.busy_share:.0%} of the time)"
            line += f", {rate_text(found, facts.store)}"
        lines.append(line)
    difference = io_difference(facts)
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
        lines.append(f"drafts:  {accepted} of {drafted} accepted ({accepted / drafted:.0%}){_draft_text(profile)}")
    if facts.n_lost:
        lines.append(f"lost:    {facts.n_lost} rows were overwritten before they could be read; totals are too small")
    return lines


def _draft_text(profile: Profile) -> str:
    """What drafting costs and brings. A step that verifies drafts takes at least as long as one without them, so its time
    is an upper bound for a token without drafts."""
    decode, draft = profile.kinds.get("decode"), profile.kinds.get("draft")
    if decode is None or draft is None or not decode.n_steps:
        return ""
    per_step = decode.wall_ns / decode.n_steps
    per_token = (decode.wall_ns + draft.wall_ns) / (decode.n_steps + profile.facts.counter(ROUTER, "accepted"))
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
