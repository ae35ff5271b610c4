"""``colibri verify``: every byte of a container against its checksums."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from shared.container.reader import Container
from shared.run.terminal import complain, say

_SHOWN = 20


@click.command("verify")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--mirror", "mirrors", multiple=True, metavar="DIR", help="Expert files may also lie in DIR.")
def command(directory: Path, mirrors: tuple[str, ...]) -> None:
    """Read the whole container in DIRECTORY and compare every checksum. Exit code 70 when something is damaged."""
    container = Container.open(directory, mirrors)
    total = sum(entry.bytes + entry.scale_bytes for entry in container.dense.values())
    total += sum(file.record_bytes * file.n_experts for file in container.experts.values())
    complaints = [complaint] if (complaint := container.fingerprint_complaint()) else []
    n_parts = 1
    start = time.monotonic()
    with click.progressbar(length=total, label="verifying") as bar:
        for _, n_bytes, complaint in container.verify():
            bar.update(n_bytes)
            n_parts += 1
            if complaint is not None:
                complaints.append(complaint)
    seconds = max(time.monotonic() - start, 1e-9)
    say(f"{n_parts} parts, {total:,} bytes in {seconds:.1f} s: {total / seconds / 1e9:.2f} GB/s")
    if complaints:
        for complaint in complaints[:_SHOWN]:
            complain(f"damaged: {complaint}")
        complain(f"colibri: {len(complaints)} of {n_parts} parts of {directory} are damaged.")
        sys.exit(70)
    say("all checksums agree")
