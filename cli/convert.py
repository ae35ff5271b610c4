"""``colibri convert``: a Hugging Face checkpoint becomes a container."""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import PATH
from cli.show import progress
from conversion.convert import VERSION, Conversion
from shared.container.format import DEFAULT_PRECISION, INDEX_NAME, PRECISIONS
from shared.container.reader import Container
from shared.run.terminal import say


@click.command("convert")
@click.argument("source", metavar="HF_DIR", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default=DEFAULT_PRECISION,
    show_default=True,
    help="int4: experts and projections with one scale per 64 inputs, embedding, head and MTP layer int8.",
)
@click.option(
    "--mtp/--no-mtp", "has_mtp", default=True, help="--no-mtp leaves the MTP layer out: the same text, but no drafts."
)
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Threads that pack experts.")
def command(source: Path, out: Path, precision: str, has_mtp: bool, threads: int) -> None:
    """Convert the checkpoint in HF_DIR (f32, bf16, f16 or fp8 block-128) to a container in OUT.

    Interrupted at any moment, the same command goes on where it stopped. A finished container is never overwritten.
    """
    conversion = Conversion(source, precision, has_mtp=has_mtp)
    say(conversion.describe())
    for note in conversion.notes():
        say(f"note: {note}")
    if (out / INDEX_NAME).exists() and conversion.is_finished(out):
        say(f"{out} already is a container of this config.json in {precision}; nothing to do.")
        say(
            f"Whether it was made from these very weights: colibri verify {out} --against {source}. Changed ones need another "
            "directory."
        )
        made_by = Container.open(out).converter.version
        if made_by != VERSION:
            say(f"Converter {made_by} made it, this is {VERSION}: another directory would get other, better roundings.")
        return
    total = conversion.plan.dense_bytes + conversion.plan.expert_bytes
    with progress("converting", total) as advance:
        index = conversion.run(out, advance, threads)
    say(f"wrote {out} (fingerprint {index.fingerprint})")
