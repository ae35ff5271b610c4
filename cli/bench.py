"""``colibri bench``: what this machine can do and how much of it we use. Thin: ``bench`` measures and formats."""

from __future__ import annotations

import json

import click

from native.library import ISAS, NativeError
from shared.errors import ConfigError


@click.group("bench")
def command() -> None:
    """Measure this machine and our speed on it. Nothing else should be running meanwhile."""


@command.command("kernels")
@click.option(
    "--json", "as_document", is_flag=True, help="For programs: one JSON document (schema in bench/report.py)."
)
@click.option("--isa", type=click.Choice(ISAS), help="Use no instruction set above this one.")
@click.option("--threads", "n_threads", type=click.IntRange(0, 256), default=0, show_default=True, metavar="N",
              help="Threads of the kernels and of the limits; 0: one per usable core.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Fewer repetitions: half a minute instead of two.")
@click.option("--size", type=click.Choice(["glm-5.2", "tiny"]), default="glm-5.2", show_default=True,
              help="Whose widths to use; tiny only shows that everything works.")  # fmt: skip
def kernels(as_document: bool, isa: str | None, n_threads: int, quick: bool, size: str) -> None:
    """Time every kernel beside what memory and arithmetic of this machine allow, measured in the same run."""
    from bench.kernels import run_kernels
    from bench.report import as_json, as_text

    try:
        report = run_kernels(isa, n_threads, quick, size, lambda text: click.echo(text, err=True))
    except NativeError as error:
        raise ConfigError(str(error)) from None
    click.echo(json.dumps(as_json(report), indent=1) if as_document else as_text(report))
