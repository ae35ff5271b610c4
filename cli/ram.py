"""``colibri ram``: who holds the memory of a running group, and another budget for it while it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from cli.options import PATH_TEXT, SIZE, SLOT
from cli.show import Column, Table, ledger, show
from shared.errors import CapacityError, ConfigError
from shared.machine.memory_probe import limits_of, page_cache_bytes, probe_memory
from shared.machine.processes import own_bytes, service_bytes
from shared.memory.named_file import named_bytes
from shared.memory.segments import run_bytes
from shared.messages import control
from shared.planning.ledger import GROUP, SHARED
from shared.planning.slot_share import LEDGER_SUMS, ledger_rows, slots_line
from shared.run import running
from shared.run.config import LOCK_NAME, GroupConfig, Line
from shared.run.sizes import parse_bytes
from shared.run.terminal import say_json
from shared.wire.control_plane import ControlClient
from shared.wire.endpoints import EXPERT_IO, Endpoints, default_run_dir

ANSWER_S = 30.0


@click.command("ram")
@click.argument("size", required=False, type=SIZE)
@click.option(
    "--run-dir", metavar="DIR", type=PATH_TEXT, help="The group of this run directory (default: the user's own)."
)
@click.option(
    "--slot",
    "asked",
    multiple=True,
    type=SLOT,
    help="Tell which events led to the state of this slot, or of an expert's slot. May be repeated.",
)
@click.option("--json", "is_json", is_flag=True, help="As JSON.")
def command(size: str | None, run_dir: str | None, asked: tuple[tuple[int, int], ...], is_json: bool) -> None:
    """Show the memory of the running group, or give it another budget: SIZE for the whole group, for example 12G.

    A smaller budget takes effect at once: experts leave their slots and the memory goes back to the system. Everything but
    the slots keeps its size until the next start.
    """
    n_bytes = parse_bytes(size, "size") if size is not None else 0
    directory = Path(os.path.expanduser(run_dir)).absolute() if run_dir else default_run_dir()
    config = running.running_config(directory)
    ram = _ask(config, n_bytes, asked)
    if ram.refusal:
        raise CapacityError(ram.refusal)
    report = make_report(config, ram)
    if is_json:
        say_json(report, indent=1)
    else:
        show([format_stories(ram)] if asked else format_report(config, ram, report))


def format_stories(ram: control.Ram) -> str:
    """How many slots are in which state, and the stories that were asked for."""
    states = ", ".join(f"{n:,} {state}" for state, n in ram.states)
    return "\n".join([f"slots: {states}", *ram.stories])


def _ask(config: GroupConfig, n_bytes: int, asked: tuple[tuple[int, int], ...]) -> control.Ram:
    client = ControlClient(Endpoints(config.run_dir, config.run_id))
    try:
        answer = client.ask(control.RamWanted(n_bytes, 0, asked), control.Ram, ANSWER_S)
    finally:
        client.close(0)
    if not isinstance(answer, control.Ram):
        raise ConfigError(
            f"the group in {config.run_dir} did not answer within {ANSWER_S:.0f} s; see colibri-up --status"
        )
    return answer


def make_report(config: GroupConfig, ram: control.Ram) -> dict[str, Any]:
    """All figures in bytes. ``held``: what each process holds by itself, by its ledger's owner; segments are apart."""
    run_dir = Path(config.run_dir)
    found = running.processes(run_dir)
    pids = {name: int(entry["pid"]) for name, entry in found.get("services", {}).items() if entry.get("pid")}
    owner = int(running.read_json(run_dir / LOCK_NAME).get("pid", 0))
    held = {name: service_bytes(pid) for name, pid in pids.items()}
    for name, n_bytes in named_bytes(config).items():
        held[name] = held.get(name, 0) + n_bytes
    held[GROUP] = sum(own_bytes(pid) for pid in (running.keeper_pid(run_dir) or 0, owner) if pid)
    held[SHARED] = run_bytes(config.run_id)
    planned: dict[str, int] = {}
    for line in lines_of(config, ram):
        planned[line.owner] = planned.get(line.owner, 0) + line.bytes
    probe = probe_memory()
    return {
        "budget": ram.budget_bytes,
        "started_with": config.ram_bytes,
        "slots": {
            "capacity": ram.n_slots,
            "used": ram.n_used,
            "leaving": ram.n_leaving,
            "bytes": config.slot_bytes,
            "states": dict(ram.states),
            "stories": list(ram.stories),
        },
        "planned": planned,
        "held": held,
        "held_sum": sum(held.values()),
        "available": probe.available_bytes,
        "page_cache": page_cache_bytes(),
        "limits": [
            {
                "file": limit.limit_file,
                "limit": limit.limit_bytes,
                "used": limit.used_bytes,
                "cache": limit.cache_bytes,
                "left": limit.left_bytes,
            }
            for limit in limits_of(pids.get(EXPERT_IO, 0))
        ],
    }


def lines_of(config: GroupConfig, ram: control.Ram) -> list[Line]:
    """The ledger as it holds now."""
    n_experts = max(config.n_experts, ram.n_slots)
    return [*config.memory, slots_line(ram.n_slots, n_experts, config.slot_bytes)]


def format_report(config: GroupConfig, ram: control.Ram, report: dict[str, Any]) -> list[str | Table]:
    """For people."""
    available = report["available"] + report["held_sum"]
    planned, held = report["planned"], report["held"]
    rows = [(owner, f"{planned.get(owner, 0):,}", f"{held.get(owner, 0):,}") for owner in sorted({*planned, *held})]
    rows.append(("sum", f"{sum(planned.values()):,}", f"{report['held_sum']:,}"))
    columns = (Column("process", 12, False), Column("in the ledger", 18), Column("held now", 18))
    leaving = f", {ram.n_leaving} more leave as soon as they are let go" if ram.n_leaving else ""
    parts: list[str | Table] = [
        ledger(ledger_rows(lines_of(config, ram), ram.budget_bytes, available), LEDGER_SUMS),
        "",
        Table(columns, rows, n_sums=1),
        "",
        f"{ram.n_slots:,} slots, {ram.n_used:,} hold an expert{leaving}",
    ]
    if ram.budget_bytes != config.ram_bytes:
        parts.append(f"started with a budget of {config.ram_bytes:,}")
    parts.append(
        f"available beside that: {report['available']:,}; page cache, which is not ours: {report['page_cache']:,}"
    )
    for limit in report["limits"]:
        parts.append(
            f"control group {limit['file']}: limit {limit['limit']:,}, used {limit['used']:,}, of it page cache "
            f"{limit['cache']:,}, left {limit['left']:,}"
        )
    return parts
