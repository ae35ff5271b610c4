"""``colibri verify``: every byte of a container against its checksums, and its origin against the checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from cli.options import PATH, PATH_TEXT
from cli.show import progress
from shared.container.reader import Container
from shared.run.terminal import complain, say

_SHOWN = 20


@click.command("verify")
@click.argument("directory", metavar="MODEL", type=PATH)
@click.option(
    "--mirror", "mirrors", multiple=True, metavar="DIR", type=PATH_TEXT, help="Expert files may also lie in DIR."
)
@click.option("--against", "source", metavar="HF_DIR", type=PATH,
              help="Also read the checkpoint HF_DIR: is MODEL made from the very bytes that it holds?")  # fmt: skip
def command(directory: Path, mirrors: tuple[str, ...], source: Path | None) -> None:
    """Read the whole container MODEL and compare every checksum. Exit code 70 when something is damaged."""
    container = Container.open(directory, mirrors)
    total = sum(part.n_bytes for entry in container.dense.values() for part in entry.parts())
    total += sum(
        part.n_bytes
        for file in container.experts.values()
        for expert in range(file.n_experts)
        for part in file.parts(expert)
    )
    for note in container.notes:
        say(f"note: {note}")
    complaint = container.fingerprint_complaint()
    complaints = [complaint] if complaint else []
    found, n_parts = _read_all("verifying", total, ((n, words) for _, n, words in container.verify()))
    complaints += found
    n_parts += 1
    if source is not None:
        from conversion.provenance import compare_sources

        found, n_more = _read_all("comparing", total, compare_sources(container, source))
        complaints += found
        n_parts += n_more
    if complaints:
        for complaint in complaints[:_SHOWN]:
            complain(f"damaged: {complaint}")
        complain(f"colibri: {len(complaints)} of {n_parts} parts of {directory} are damaged.")
        sys.exit(70)
    if not container.has_checksums:
        say("everything can be read; whether it is what was written nobody can tell: there are no checksums")
        return
    say("all checksums agree" + ("" if source is None else f", and {source} is what it was made from"))


def _read_all(label: str, total: int, parts: Iterator[tuple[int, str | None]]) -> tuple[list[str], int]:
    """(complaints, number of parts) of (bytes, complaint) each, with a bar and the rate."""
    complaints = []
    n_parts = 0
    start = time.monotonic()
    with progress(label, total) as advance:
        for n_bytes, complaint in parts:
            advance(n_bytes)
            n_parts += 1
            if complaint is not None:
                complaints.append(complaint)
    seconds = max(time.monotonic() - start, 1e-9)
    say(f"{n_parts} parts, {total:,} bytes in {seconds:.1f} s: {total / seconds / 1e9:.2f} GB/s")
    return complaints, n_parts
