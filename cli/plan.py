"""``colibri plan``: the ledger of this model on this machine, and what speed to expect at best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shared.config import load_settings, parse_bytes
from shared.container.format import INDEX_NAME, PRECISIONS, Facts, plan_container, plan_facts
from shared.container.reader import Container
from shared.ledger import make_ledger, predict_speed
from shared.memory_probe import probe_memory
from shared.model_spec import ModelSpec


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--ram", help='Memory for the whole group, for example "12G". Default: a share of what is available now.')
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="For a checkpoint: as if converted to this.")
@click.option("--slots", type=click.IntRange(0), help="Expert slots in all.")
@click.option("--context", "max_context", type=click.IntRange(1), help="Tokens per sequence.")
@click.option("--sequences", "max_sequences", type=click.IntRange(1), help="Sequences at the same time.")
@click.option("--prefill-chunk", type=click.IntRange(1), help="Prompt tokens per step.")
@click.option("--kv-dtype", type=click.Choice(["f32", "bf16"]), help="Precision of the KV cache.")
@click.option("--draft", help="auto, off or a number of tokens.")
@click.option("--disk", type=click.FloatRange(min=0, min_open=True), help="Measured rate of the drive, GB/s.")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), help="Measured memory bandwidth, GB/s.")
@click.option("--assume", help="Memory and shared memory to assume instead of what this machine has now.")
def command(
    model: Path, ram: str | None, precision: str | None, disk: float | None, memory: float | None, assume: str | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Show how the memory would be shared out for MODEL: a container, or a checkpoint that could be converted.

    colibri-up uses the same computation. With --disk and --memory it also shows what decoding can reach at best.
    """
    spec, facts = _facts(model, precision)
    chosen = load_settings(None, {"ram": ram, **settings})
    probe = probe_memory()
    available, shm, source = probe.available_bytes, probe.shm_bytes, probe.source
    if assume is not None:
        available = shm = parse_bytes(assume, "assume")
        source = "assumed"
    ledger = make_ledger(spec, facts, chosen, available, shm)
    click.echo(ledger.table())
    click.echo(f"\n{available:,} bytes available ({source}), {shm:,} in /dev/shm, {ledger.segment_bytes:,} of it used")
    resident = min(ledger.n_slots / ledger.n_experts, 1.0)
    click.echo(
        f"{ledger.n_slots:,} slots hold {resident:.1%} of {ledger.n_experts:,} experts; context {ledger.max_context:,}, "
        f"{ledger.max_sequences} sequences, chunk {ledger.prefill_chunk}, drafts {ledger.n_drafts}, {ledger.n_threads} threads"
    )
    if disk is None or memory is None:
        click.echo("Give --disk and --memory (GB/s) to see the speed that these bytes allow at best.")
        return
    speed = predict_speed(spec, facts, ledger, disk, memory)
    routed, all_bytes = speed.routed_bytes, speed.routed_bytes + speed.resident_bytes
    miss = 1 - speed.hit_rate
    click.echo(
        f"\nbytes per token: {routed:,} of routed experts, {speed.resident_bytes:,} of everything else\n"
        f"cold      {speed.cold_tokens_s:9.2f} tok/s = 1 / max({routed:,} / {disk:g} GB/s, {all_bytes:,} / {memory:g} GB/s)\n"
        f"warm      {speed.warm_tokens_s:9.2f} tok/s = 1 / max({miss:.1%} x {routed:,} / {disk:g} GB/s, memory as above)\n"
        f"resident  {speed.resident_tokens_s:9.2f} tok/s = {memory:g} GB/s / {all_bytes:,}"
    )


def _facts(model: Path, precision: str | None) -> tuple[ModelSpec, Facts]:
    if (model / INDEX_NAME).exists() or precision is None:
        container = Container.open(model)
        return container.spec, container.facts()
    spec = ModelSpec.load(model)
    return spec, plan_facts(spec, plan_container(spec, PRECISIONS[precision]))
