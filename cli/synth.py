"""``colibri synth``: a container of random weights, for measurements."""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import PATH
from cli.show import progress
from conversion.presets import PRESETS, preset_config
from conversion.synth import Synthesis
from shared.container.format import DEFAULT_PRECISION, PRECISIONS
from shared.run.terminal import say


@click.command("synth")
@click.argument("out", metavar="OUT", type=PATH)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="tiny", show_default=True, help="The sizes.")
@click.option("--layers", type=click.IntRange(2, 4000), default=None, help="Fewer than the model's, mostly MoE.")
@click.option("--mtp/--no-mtp", default=False, show_default=True, help="Add the MTP layer.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default=DEFAULT_PRECISION, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same bytes.")
def command(out: Path, preset: str, layers: int | None, mtp: bool, precision: str, seed: int) -> None:
    """Write a container of random weights to OUT: real sizes, no tokenizer, and it says nothing sensible."""
    synthesis = Synthesis(preset_config(preset, layers or 0, mtp), precision, seed)
    spec, plan = synthesis.spec, synthesis.plan
    say(
        f"plan: {preset}, {spec.n_layers} layers{' + MTP' if spec.n_mtp else ''}, {precision}, seed {seed}; "
        f"dense part {plan.dense_bytes:,} bytes, experts {plan.expert_bytes:,} bytes in {len(plan.experts)} files"
    )
    with progress("writing", synthesis.n_bytes) as advance:
        index = synthesis.run(out, advance)
    say(f"wrote {out} (fingerprint {index.fingerprint})")
