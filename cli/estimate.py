"""``colibri estimate``: what a checkpoint would become on this machine, before anything of it is converted or even fetched."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import click

from cli.options import ABOVE_ZERO, PATH, PATH_TEXT, SIZE
from cli.show import Column, Table, show
from conversion.convert import Conversion
from native.library import default_threads
from shared.container.format import DEFAULT_PRECISION, PRECISIONS, plan_container, plan_facts
from shared.container.recognise import is_hub_name
from shared.errors import CapacityError, ConfigError, ContainerError
from shared.machine.drive import kept_folder
from shared.machine.memory_probe import probe_memory
from shared.planning.drive_probe import rate_at
from shared.planning.ledger import make_ledger
from shared.planning.rates import memory_rate
from shared.planning.speed import predict_speed
from shared.run.config import load_settings
from shared.run.sizes import parse_bytes
from shared.run.terminal import complain, say


class Source(NamedTuple):
    """``window_bytes``: the most of the checkpoint that lies on the disk beside the container."""

    conversion: Conversion
    title: str
    n_bytes: int
    window_bytes: int


@click.command("estimate")
@click.argument("source", metavar="HF_DIR|hf:ORG/NAME[@REV]", type=PATH_TEXT)
@click.option("--at", "directory", metavar="DIR", type=PATH, default=Path("."),
              help="Where the container would lie: its drive is asked for room and speed. Default: here.")  # fmt: skip
@click.option("--ram", help='Memory for the whole group, for example "12G". Default: a share of what is available now.')
@click.option("--assume", type=SIZE, help="Memory to assume instead of what this machine has now.")
@click.option("--disk", type=ABOVE_ZERO, help="Rate of the drive, GB/s. Default: measured in DIR.")
@click.option("--memory", type=ABOVE_ZERO, help="Memory bandwidth, GB/s. Default: measured.")
@click.option("--mtp/--no-mtp", "has_mtp", default=True, help="--no-mtp: as if converted without the MTP layer.")
def command(
    source: str, directory: Path, ram: str | None, assume: str | None, disk: float | None, memory: float | None,
    has_mtp: bool,
) -> None:  # fmt: skip
    """Say how large a checkpoint becomes in each precision, whether it fits, and the speed to expect of it here.

    Of hf:ORG/NAME only config.json, tokenizer and the headers of the shards are fetched. That it would be converted is checked
    as `colibri convert` does.
    """
    found = _from_the_hub(source, has_mtp) if is_hub_name(source) else _from_a_directory(Path(source), has_mtp)
    conversion, spec = found.conversion, found.conversion.spec
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"--at {directory}: {error.strerror}. Name a directory that is there.") from None
    free = stat.f_bavail * stat.f_frsize
    n_files = len(conversion.checkpoint.files)
    say(
        f"{found.title}: {spec.family}, {spec.n_layers} layers{' + MTP' if spec.n_mtp else ''}, "
        f"{conversion.n_parameters / 1e9:.3f} billion parameters in {n_files} files, {found.n_bytes:,} bytes"
    )
    for note in conversion.notes():
        say(f"note: {note}")
    rows: list[tuple[str, ...]] = []
    reasons = []
    plans = {}
    for name in PRECISIONS:
        try:
            plans[name] = plan_container(spec, conversion.formats_for(name))
        except ContainerError as error:
            rows.append((name, "", "is refused", "", "", "", ""))
            reasons.append(f"{name}: {error}")
    facts = {name: plan_facts(spec, plan) for name, plan in plans.items()}
    record_bytes = max(facts[DEFAULT_PRECISION].record_bytes, default=0)
    disk_bytes_s = disk * 1e9 if disk else rate_at(directory, record_bytes, kept_folder(), report=complain)
    n_threads = default_threads()
    memory_bytes_s = memory * 1e9 if memory else memory_rate(n_threads)
    probe = probe_memory()
    settings = load_settings(None, {"ram": ram})
    available = parse_bytes(assume, "assume") if assume else max(probe.available_bytes, settings.ram_bytes)
    for name, known in facts.items():
        plan = plans[name]
        size = plan.dense_bytes + plan.expert_bytes
        room = "fits" if size + found.window_bytes <= free else "does not fit"
        try:
            ledger = make_ledger(spec, known, settings, available, available)
        except CapacityError as error:
            rows.append((name, f"{size:,}", room, "", "", "", "too little"))
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        resident = min(ledger.n_slots / max(ledger.n_experts, 1), 1.0)
        speed = predict_speed(spec, known, ledger, disk_bytes_s or math.inf, memory_bytes_s)
        rates = [f"{speed.cold[0]:.2f}", f"{speed.warm[0]:.2f}"] if disk_bytes_s else ["", ""]
        rows.append((name, f"{size:,}", room, f"{resident:.0%}", *rates, f"{speed.resident_tokens_s:.2f}"))
    columns = (
        Column("precision", 10, False), Column("bytes on disk", 18), Column("disk", 14), Column("experts in memory", 19),
        Column("tok/s cold", 12), Column("as expected", 13), Column("all in memory", 15),
    )  # fmt: skip
    show([Table(columns, rows)])
    beside = f" (and {found.window_bytes:,} for shards while it is converted)" if found.window_bytes else ""
    rate = f"{disk_bytes_s / 1e9:.2f} GB/s" if disk_bytes_s else "of unknown rate: give --disk, GB/s"
    say(
        f"{directory}: {free:,} bytes free{beside}, drive {rate}; memory {memory_bytes_s / 1e9:.1f} GB/s, {available:,} bytes "
        "available"
    )
    say(
        "tok/s of decoding one sequence: cold, every expert comes from the drive; as expected, that share of them is in "
        "memory (real routing hits more)"
    )
    for reason in reasons:
        say(f"note: {reason}")


def _from_a_directory(source: Path, has_mtp: bool) -> Source:
    conversion = Conversion(source, DEFAULT_PRECISION, has_mtp=has_mtp)
    n_bytes = sum(int(described.partition(":")[0]) for described in conversion.checkpoint.files.values())
    return Source(conversion, str(source), n_bytes, 0)


def _from_the_hub(source: str, has_mtp: bool) -> Source:
    from conversion.fetching import HubConversion
    from conversion.hub import Hub, HubName

    name = HubName.of(source)
    with HubConversion(Hub.open(name), DEFAULT_PRECISION, has_mtp=has_mtp) as fetched:
        title = f"{name} at commit {fetched.hub.commit}"
        return Source(fetched.conversion, title, fetched.source_bytes(), fetched.window_bytes())
