"""What ``colibri bench kernels`` prints: a table for people, JSON for programs. Formats only.

The JSON document, schema 1; fields are only ever added:

    schema      1
    machine     processor, n_threads, isa (highest rung used), available_isas [..], dispatch, last_cache_bytes, load
    size        the model whose widths were used
    limits      medians of the run: read_gb_s, and f32_gop_s, int8_gop_s, int4_gop_s (a multiply-add is two operations)
    kernels[]   family, case, n_runs
                ns            median wall time of one call
                bytes, ops    what a call must at least move and compute; ops by kind {"int4": n, ..}
                gb_s, gop_s   bytes / ns and sum of ops / ns
                limits        read_gb_s and the peaks of the case's kinds, measured before, between and after its calls
                bound_ns      max(bytes / read_gb_s, sum over kinds of ops / peak): the least time on this machine
                bound         "memory", or the kind of arithmetic that sets it
                share         bound_ns / ns
                best_ns, best_share   of the fastest call, against the best sample of each limit
                memory_share  bytes / read_gb_s / ns, whatever the bound is
                first_touch   reading the case's memory right before, time of the first pass over that of the second
    sharing     alone_ns {"experts": ns, "attention": ns}, pair_ns, ratio = pair_ns / sum of alone_ns, n_pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.kernels import KernelResults, Machine
from bench.measure import Measurement
from bench.roofline import Limits
from bench.sharing import Sharing

SCHEMA = 1
DOUBTFUL_LOAD = 0.2
DOUBTFUL_SHARE = 1.05
TAKEN_BACK = 2.0
"""A first pass over memory that takes this many times as long as the next one: the host had taken some of it back."""
COLUMNS = ("family", "case", "µs", "GB/s", "GOP/s", "bound by", "share", "best", "of memory")


def as_json(report: KernelResults) -> dict[str, Any]:
    """The document described above."""
    machine = report.machine
    return {
        "schema": SCHEMA,
        "machine": {name: getattr(machine, name) for name in Machine.__dataclass_fields__}
        | {"available_isas": list(machine.available_isas)},
        "size": report.size,
        "limits": _limits_json(report.limits),
        "kernels": [_kernel_json(m) for m in report.kernels],
        "sharing": {
            "alone_ns": report.sharing.alone_ns,
            "pair_ns": report.sharing.pair_ns,
            "ratio": report.sharing.ratio,
            "n_pairs": report.sharing.n_pairs,
        },
    }


def _limits_json(limits: Limits) -> dict[str, float]:
    return {"read_gb_s": limits.bytes_s / 1e9} | {f"{kind}_gop_s": rate / 1e9 for kind, rate in limits.ops_s.items()}


def _kernel_json(m: Measurement) -> dict[str, Any]:
    return {
        "family": m.family,
        "case": m.name,
        "n_runs": m.n_runs,
        "ns": m.ns,
        "bytes": m.work.n_bytes,
        "ops": dict(m.work.ops),
        "gb_s": m.work.n_bytes / m.ns,
        "gop_s": m.work.n_ops / m.ns,
        "limits": _limits_json(m.limits),
        "bound_ns": m.bound.ns,
        "bound": m.bound.by,
        "share": m.share,
        "best_ns": m.best_ns,
        "best_share": m.best_share,
        "memory_share": m.memory_share,
        "first_touch": m.first_touch,
    }


def as_text(report: KernelResults) -> str:
    """The table, its limits above, doubts below."""
    machine, limits = report.machine, report.limits
    peaks = ", ".join(f"{kind} {rate / 1e9:,.0f} GOP/s" for kind, rate in sorted(limits.ops_s.items()))
    lines = [
        f"{machine.processor}, {machine.n_threads} threads, {machine.isa} (of {', '.join(machine.available_isas)})",
        f"limits of this run (medians): memory {limits.bytes_s / 1e9:.1f} GB/s, {peaks}",
        "",
        *_table([COLUMNS, *(_row(m) for m in report.kernels)]),
        "",
        _sharing_line(report.sharing),
        "share: least time that memory and arithmetic allow / time taken (medians; limits measured between a case's own calls)",
        "best: the same of the fastest call and the best limits, less disturbed where other work runs",
        *_doubts(report),
    ]
    return "\n".join(lines)


def _row(m: Measurement) -> tuple[str, ...]:
    return (
        m.family,
        m.name,
        f"{m.ns / 1e3:,.1f}",
        f"{m.work.n_bytes / m.ns:.1f}",
        f"{m.work.n_ops / m.ns:.1f}",
        m.bound.by,
        f"{m.share:.0%}",
        f"{m.best_share:.0%}",
        f"{m.memory_share:.0%}",
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Two columns of words, the others of figures but for "bound by"."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = {0, 1, COLUMNS.index("bound by")}
    return [
        "  ".join(cell.ljust(width) if i in words else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        .rstrip()
        for row in rows
    ]  # fmt: skip


def _sharing_line(sharing: Sharing) -> str:
    alone = " + ".join(f"{role} {ns / 1e3:,.0f} µs" for role, ns in sharing.alone_ns.items())
    return (
        f"two processes in turn on the same cores: {sharing.pair_ns / 1e3:,.0f} µs a pair, alone {alone}: "
        f"ratio {sharing.ratio:.2f}"
    )


def _doubts(report: KernelResults) -> list[str]:
    found = []
    if report.machine.load > DOUBTFUL_LOAD:
        found.append(
            f"doubtful: {report.machine.load:.1f} other processes per processor were running before; repeat on a quiet machine"
        )
    if any(m.share > DOUBTFUL_SHARE for m in report.kernels):
        found.append("doubtful: a share above 1 means that a limit was disturbed while it was measured")
    slow = [m for m in report.kernels if m.first_touch > TAKEN_BACK]
    if slow:
        worst = max(slow, key=lambda m: m.first_touch)
        found.append(
            f"the host takes back memory that idles: reading what {worst.family} ({worst.name}) uses took "
            f"{worst.first_touch:.1f} times as long at first as again; each case's memory was touched right before it"
        )
    return found
