"""How many slots a budget leaves, at a start and in a running group, and the arithmetic as people see it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import CapacityError
from shared.run.config import GroupConfig, Line

LEDGER_SUMS = 3
MIB = 1 << 20


def share_out_slots(
    fixed: Sequence[Line],
    slot_bytes: int,
    min_slots: int,
    max_slots: int,
    budget: int,
    available: int,
    advice: str,
) -> int:
    """How many slots fit into what ``fixed`` leaves of the budget. CapacityError with the arithmetic and ``advice``."""
    n_slots = min((budget - sum_of(fixed)) // slot_bytes, max_slots)
    if n_slots < min_slots:
        lines = [
            *fixed,
            Line("expert_io", f"at least {min_slots} expert slots x {slot_bytes:,}", min_slots * slot_bytes),
        ]
        raise CapacityError(
            f"The model does not fit: {sized(sum_of(lines))} are needed, the budget is {sized(budget)}. {advice}\n"
            + ledger_table(lines, budget, available)
        )
    return n_slots


def slots_line(n_slots: int, n_experts: int, slot_bytes: int) -> Line:
    """The ledger's last line."""
    return Line("expert_io", f"{n_slots:,} of {n_experts:,} expert slots x {slot_bytes:,}", n_slots * slot_bytes)


def change_budget(
    config: GroupConfig, gate_k: int, present_bytes: int, wanted_bytes: int, n_used: int, free_bytes: int
) -> int:
    """The slots of a running group under another budget.

    ``present_bytes``: its budget; ``n_used``: slots that hold an expert; ``free_bytes``: what is available beside what the
    group holds. Raises CapacityError with the arithmetic: less than the minimum can't be, nor more than there is.
    """
    reachable = sum_of(config.memory) + n_used * config.slot_bytes + free_bytes
    if wanted_bytes > max(reachable, present_bytes):
        raise CapacityError(
            f"{sized(wanted_bytes)} are asked for, but only {sized(reachable)} can be had: {sized(sum_of(config.memory))} are "
            f"held beside the slots, {sized(n_used * config.slot_bytes)} in {n_used:,} used slots, {sized(free_bytes)} are "
            "free. Ask for less, or end other programs."
        )
    return share_out_slots(
        config.memory,
        config.slot_bytes,
        min(gate_k + 1, config.n_slots),
        max(config.n_slots, config.reserved_slots),
        wanted_bytes,
        reachable,
        "A running group keeps everything but its slots; start it again to change the rest.",
    )


def sum_of(lines: Sequence[Line]) -> int:
    return sum(line.bytes for line in lines)


def ledger_table(lines: Sequence[Line], budget: int, available: int) -> str:
    """The arithmetic, one line per allocation."""
    return "\n".join(f"{owner:10} {what:58} {size:>18}" for owner, what, size in ledger_rows(lines, budget, available))


def ledger_rows(lines: Sequence[Line], budget: int, available: int) -> list[tuple[str, str, str]]:
    """(owner, what, bytes) per allocation, then LEDGER_SUMS rows: the sum, the budget, and what is left or missing."""
    total = sum(line.bytes for line in lines)
    return [
        *((line.owner, line.what, f"{line.bytes:,}") for line in lines),
        ("sum", "", f"{total:,}"),
        ("budget", f"of {available:,} available", f"{budget:,}"),
        ("left" if total <= budget else "missing", "", f"{abs(budget - total):,}"),
    ]


def sized(n_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:,.2f} {unit}"
    return f"{n_bytes:,} bytes"
