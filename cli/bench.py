"""``colibri bench``: what this machine can do and how much of it we use. Thin: ``bench`` measures and formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options import PATH, SIZE
from native.library import ISAS, NativeError
from shared.errors import EXIT_FAULT, EXIT_OK, ConfigError
from shared.run.sizes import parse_bytes
from shared.run.terminal import complain, say, say_json

if TYPE_CHECKING:
    from bench.cold import Setup


@click.group("bench")
def command() -> None:
    """Measure this machine and our speed on it. Nothing else should be running meanwhile."""


@command.command("kernels")
@click.option(
    "--json", "as_document", is_flag=True, help="For programs: one JSON document (schema in bench/kernels_report.py)."
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
    from bench.kernels_report import as_json, as_text

    try:
        report = run_kernels(isa, n_threads, quick, size, _progress)
    except NativeError as error:
        raise ConfigError(str(error)) from None
    _show(report, as_document, as_json, as_text)


MODEL = click.argument("model", type=PATH)
JSON = click.option("--json", "as_document", is_flag=True, help="For programs: one JSON document (schema in bench/).")
LIMIT = click.option(
    "--limit", metavar="SIZE", type=SIZE, help='Put the group into a memory limit that counts page cache, e.g. "8G".'
)
RAM = click.option("--ram", metavar="SIZE", type=SIZE, help="Memory for the whole group (default: its own choice).")
SLOTS = click.option("--slots", type=click.IntRange(1), help="Expert slots instead of what the memory allows.")
ROUNDS = click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, metavar="N")


@command.command("store")
@MODEL
@JSON
@click.option("--quick", is_flag=True, help="Fewer repetitions: some seconds instead of half a minute.")
def store(model: Path, as_document: bool, quick: bool) -> None:
    """Read random experts as the store does, without a group, beside what the drive gives at best."""
    from bench.store import as_json, as_text, run_store

    report = run_store(model, quick, _progress)
    _show(report, as_document, as_json, as_text)


@command.command("decode")
@MODEL
@JSON
@RAM
@SLOTS
@LIMIT
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True, metavar="N", help="In each round.")
@ROUNDS
@click.option("--pilot", type=click.Choice(["on", "off", "both"]), default="on", show_default=True,
              help="Prefetch of predicted experts; both: a group of each in turn, and the ratio.")  # fmt: skip
def decode(
    model: Path, as_document: bool, ram: str | None, slots: int | None, limit: str | None, tokens: int, rounds: int,
    pilot: str,
) -> None:  # fmt: skip
    """Decode with cold slots in a group of its own, beside the drive's ceiling of the same seconds."""
    from bench.decode import as_json, as_text, run_decode

    pilots = ("on", "off") if pilot == "both" else (pilot,)
    report = run_decode(_setup(model, ram, slots, limit), pilots, tokens, rounds, _progress)
    _show(report, as_document, as_json, as_text)


@command.command("prefill")
@MODEL
@JSON
@RAM
@SLOTS
@LIMIT
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, metavar="N", help="Tokens.")
@ROUNDS
def prefill(
    model: Path, as_document: bool, ram: str | None, slots: int | None, limit: str | None, prompt: int, rounds: int
) -> int:
    """Time to the first token with cold slots, beside the drive's ceiling and the time that computing takes."""
    from bench.prefill import as_json, as_text, run_prefill

    report = run_prefill(_setup(model, ram, slots, limit), prompt, rounds, _progress)
    _show(report, as_document, as_json, as_text)
    return EXIT_OK if report.is_read_once else EXIT_FAULT


@command.command("resident")
@MODEL
@JSON
@RAM
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, metavar="N", help="Tokens.")
@click.option(
    "--tokens", type=click.IntRange(1), default=32, show_default=True, metavar="N", help="Decoded in each round."
)
@ROUNDS
def resident(model: Path, as_document: bool, ram: str | None, prompt: int, tokens: int, rounds: int) -> None:
    """Prefill and decode with every expert in memory, beside what the memory's bandwidth of the same seconds allows."""
    from bench.resident import as_json, as_text, run_resident

    report = run_resident(_setup(model, ram, None, None), prompt, tokens, rounds, _progress)
    if as_document:
        say_json(as_json(report), indent=1)
    else:
        say(as_text(report))


@command.command("start")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@JSON
@ROUNDS
@click.option("--timeline", "with_timeline", is_flag=True, help="Show who did what when in the median start, too.")
def start(model: Path | None, as_document: bool, rounds: int, with_timeline: bool) -> None:
    """Time a start, a stop and a whole `colibri run`, beside bare interpreters with the same imports."""
    from bench.start import as_json, as_text, run_start, timeline_text

    found = run_start(model, rounds, _progress)
    _show(found, as_document, as_json, as_text)
    if with_timeline and not as_document:
        say("\n" + timeline_text(found))


def _setup(model: Path, ram: str | None, slots: int | None, limit: str | None) -> Setup:
    from bench.cold import Setup

    given = {"--ram": ram, "--slots": slots}
    arguments = tuple(str(word) for flag, value in given.items() if value is not None for word in (flag, value))
    return Setup(model, arguments, parse_bytes(limit, "limit") if limit else 0)


def _show(
    results: Any, as_document: bool, as_json: Callable[[Any], dict[str, Any]], as_text: Callable[[Any], str]
) -> None:
    """As a document for programs, or as text for people."""
    if as_document:
        say_json(as_json(results), indent=1)
    else:
        say(as_text(results))


def _progress(text: str) -> None:
    complain(text)
