"""``colibri plan``: the ledger of this model on this machine, and what speed to expect."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

from cli.options import ABOVE_ZERO, PATH, PATH_TEXT, SIZE, setting
from cli.show import Column, Table, show
from cli.show import ledger as ledger_table
from native.library import default_threads
from shared.container.c_engine import is_c_engine
from shared.container.format import DEFAULT_PRECISION, INDEX_NAME, PRECISIONS, Facts, plan_container, plan_facts
from shared.container.mirror import drives_words, number_drives
from shared.container.reader import Container
from shared.errors import ConfigError
from shared.machine.drive import kept_folder
from shared.machine.memory_probe import probe_memory
from shared.memory.warm_sets import find_sets, known_dirs
from shared.model.config_reader import quantization_of, read_json
from shared.model.family import load_spec
from shared.model.spec import ModelSpec
from shared.planning.drive_probe import drives_of
from shared.planning.ledger import DEFAULT_CHUNK, make_ledger
from shared.planning.rates import chunk_for, memory_rate
from shared.planning.slot_share import LEDGER_SUMS, ledger_rows
from shared.planning.speed import Speed, predict_speed
from shared.run.config import load_settings
from shared.run.sizes import parse_bytes
from shared.run.terminal import complain, say


@click.command("plan")
@click.argument("model", type=PATH)
@click.option("--ram", help='Memory for the whole group, for example "12G". Default: a share of what is available now.')
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    help=f"For a checkpoint: as if converted to this. Default: {DEFAULT_PRECISION}.",
)
@setting("slots")
@setting("max_context", "--context")
@setting("max_sequences", "--sequences")
@setting("prefill_chunk")
@setting("kv_dtype")
@setting("draft")
@setting("attention")
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="DIR",
    type=PATH_TEXT,
    help="Experts are also read from the copies in DIR.",
)
@click.option(
    "--disk",
    type=ABOVE_ZERO,
    help="Rate of the drive, of several together, GB/s. Default: measured.",
)
@click.option("--memory", type=ABOVE_ZERO, help="Memory bandwidth, GB/s. Default: measured.")
@click.option("--assume", type=SIZE, help="Memory and shared memory to assume instead of what this machine has now.")
def command(
    model: Path, mirrors: tuple[str, ...], ram: str | None, precision: str | None, disk: float | None,
    memory: float | None, assume: str | None, **settings: Any,
) -> None:  # fmt: skip
    """Show how the memory would be shared out for MODEL: a container, or a checkpoint that could be converted.

    colibri-up uses the same computation. Also shows what speed to expect; drive and memory are measured unless given.
    """
    chosen = load_settings(None, {"ram": ram, **settings})
    spec, facts, container = _facts(model, precision, mirrors)
    if container:
        spec = container.spec_for(chosen.attention)
        for note in container.notes:
            say(f"note: {note}")
    probe = probe_memory()
    available, shm, source = probe.available_bytes, probe.shm_bytes, probe.source
    if assume is not None:
        available = shm = parse_bytes(assume, "assume")
        source = "assumed"
        if chosen.ram_bytes > available:
            raise ConfigError(
                f"ram = {ram} is more than the {assume} to assume; give --ram alone to plan for that much."
            )
    elif container and (warm := _kept_warm(container.fingerprint)):
        available += warm
        source += f", {warm:,} of it kept warm for this model"
    if chosen.ram_bytes > available:
        say(
            f"note: {chosen.ram_bytes:,} bytes are assumed, in /dev/shm too; now {available:,} are available ({source}), and "
            "colibri-up would refuse that much."
        )
        available, shm, source = chosen.ram_bytes, max(shm, chosen.ram_bytes), "assumed"
    n_threads = chosen.threads or default_threads()
    disk_bytes_s = disk * 1e9 if disk else _drive_rate(container)
    chunk = chunk_for(container, facts, disk_bytes_s, n_threads) if container else DEFAULT_CHUNK
    ledger = make_ledger(spec, facts, chosen, available, shm, chunk=chunk, source=source)
    show([ledger_table(ledger_rows(ledger.lines, ledger.budget_bytes, ledger.available_bytes), LEDGER_SUMS)])
    say(f"\n{available:,} bytes available ({source}), {shm:,} in /dev/shm, {ledger.segment_bytes:,} of it used")
    resident = min(ledger.n_slots / ledger.n_experts, 1.0)
    say(
        f"{ledger.n_slots:,} slots hold {resident:.1%} of {ledger.n_experts:,} experts; context {ledger.max_context:,}, "
        f"{ledger.max_sequences} sequences, chunk {ledger.prefill_chunk}, drafts {ledger.n_drafts}, {ledger.n_threads} threads"
    )
    if container and container.places[1:]:
        where = ", ".join(map(str, container.places[1:]))
        n_drives = len(set(number_drives(container.places)))
        say(f"experts also from {where}: {drives_words(n_drives, disk_bytes_s)}")
    if not disk_bytes_s and resident < 1.0:
        say("The drive's rate is not known (too few experts to measure it with, or no container): give --disk, GB/s.")
        return
    memory_bytes_s = memory * 1e9 if memory else memory_rate(n_threads)
    speed = predict_speed(spec, facts, ledger, disk_bytes_s or math.inf, memory_bytes_s)
    show(["", *_speed_report(speed, disk_bytes_s, memory_bytes_s)])


def _drive_rate(container: Container | None) -> float:
    """Bytes per second as kept from an earlier start, or measured now; 0: can't be measured with this model."""
    if container is None:
        return 0.0
    return drives_of(container, kept_folder(), may_write=True, report=complain).bytes_s


def _kept_warm(fingerprint: str) -> int:
    """Bytes that are not free but would be this model's at once."""
    return sum(found.n_bytes for found in find_sets(known_dirs("auto")) if found.fingerprint == fingerprint)


def _speed_report(speed: Speed, disk: float, memory: float) -> list[str | Table]:
    routed, others = speed.routed_bytes, speed.resident_bytes
    rows = []
    if disk:
        warm = f"{speed.hit_rate:.0%} of them in memory"
        for what, (expected, best) in (("every expert from the drive", speed.cold), (warm, speed.warm)):
            rows.append((f"  {what}", f"{expected:.2f}", f"{best:.2f}"))
    rows.append(("  every expert in memory", "", f"{speed.resident_tokens_s:.2f}"))
    columns = (Column("decoding one sequence, tok/s", 32, False), Column("expected", 10), Column("at best", 10))
    report: list[str | Table] = [
        f"a token reads {routed:,} bytes of routed experts and {others:,} of everything else",
        f"drive {disk / 1e9:.2f} GB/s, memory {memory / 1e9:.1f} GB/s" if disk else f"memory {memory / 1e9:.1f} GB/s",
        Table(columns, rows),
    ]
    if disk:
        report.append(
            "expected: reads wait for attention and head (prefetch hides a part); at best: everything overlaps"
        )
    return report


def _facts(model: Path, precision: str | None, mirrors: tuple[str, ...]) -> tuple[ModelSpec, Facts, Container | None]:
    if os.path.lexists(model / INDEX_NAME) or not os.path.lexists(model / "config.json") or is_c_engine(model):
        container = Container.open(model, mirrors)
        return container.spec, container.facts(), container
    spec = load_spec(model)  # a family that is not understood ends here: no precision makes it one
    if precision is None:
        precision = DEFAULT_PRECISION
        say(f"note: {model} is a checkpoint; this is its plan as if converted with --precision {precision}.")
    formats = dict(PRECISIONS[precision])
    if quantization_of(read_json(model / "config.json")).get("quant_method") == "mxfp4" and formats["expert"] == "q8":
        formats["expert"] = "mxfp4"  # as they are: ``Conversion.formats_for`` reads the shards to know of all kinds
    return spec, plan_facts(spec, plan_container(spec, formats)), None
