"""``colibri mirror plan|stage|verify``: copies of a model's experts on a second drive, made and checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options import ABOVE_ZERO, PATH, SIZE
from cli.show import progress
from shared.container.mirror import drive_of, total_rate
from shared.container.reader import Container
from shared.run.sizes import parse_bytes
from shared.run.terminal import complain, say

if TYPE_CHECKING:
    from conversion.staging import StagePlan

_SHOWN = 20
Expected = Mapping[tuple[int, int], float]


@click.group("mirror")
def command() -> None:
    """Copies of a model's experts on a second drive: colibri-up MODEL --mirror DIR reads from both at once."""


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, DIR and what chooses the records."""
    for decorate in (
        click.option(
            "--size", metavar="SIZE", type=SIZE, help="Copy at most this much, e.g. 100G. Default: every expert."
        ),
        click.option(
            "--mirror",
            "others",
            multiple=True,
            type=PATH,
            metavar="OTHER",
            help="Also read from OTHER: for a model whose expert files lie in several directories.",
        ),
        click.argument("directory", metavar="DIR", type=PATH),
        click.argument("model", metavar="MODEL", type=PATH),
    ):
        function = decorate(function)
    return function


@command.command("plan")
@_common
@click.option("--disk", type=ABOVE_ZERO, help="Rate of the model's drive, GB/s.")
@click.option("--mirror-disk", type=ABOVE_ZERO, help="Rate of DIR's drive, GB/s.")
def plan_command(
    model: Path, directory: Path, size: str | None, others: tuple[Path, ...], disk: float | None,
    mirror_disk: float | None,
) -> None:  # fmt: skip
    """Show what `colibri mirror stage` would copy to DIR, and what the drives would give together. Writes nothing."""
    container = Container.open(model, others)
    expected = _expected_use(container)
    plan = _plan(container, directory, size, expected)
    _describe(container, plan, size, expected)
    share = _share_of_reads(container, plan, expected)
    rates = disk or _kept_rate(model, container), mirror_disk or _kept_rate(directory, container)
    if drive_of(model) == drive_of(_existing(directory)):
        say(f"note: {directory} lies on the same drive as {model}; a second copy there brings no speed.")
        return
    if not all(rates):
        unknown = [str(path) for path, rate in zip((model, directory), rates, strict=True) if not rate]
        say(
            f"The rate of {' and '.join(unknown)} is not known: give --disk and --mirror-disk (GB/s) to see what both give."
        )
        return
    both = total_rate(rates, {frozenset((0, 1)): share, frozenset((0,)): 1 - share})
    say(
        f"expected rate: {both:.2f} GB/s, of {rates[0]:.2f} and {rates[1]:.2f}; {share:.1%} of the reads find a copy in "
        f"{directory}, the others must come from {model}"
    )


@command.command("stage")
@_common
def stage_command(model: Path, directory: Path, size: str | None, others: tuple[Path, ...]) -> None:
    """Copy experts of MODEL to DIR, checksums verified on the way. Interrupted, the same command goes on where it stopped."""
    from conversion.staging import stage

    container = Container.open(model, others)
    expected = _expected_use(container)
    plan = _plan(container, directory, size, expected)
    _describe(container, plan, size, expected)
    if not plan.n_bytes:
        say(f"{directory} holds them already; nothing to do.")
        return
    start = time.monotonic()
    with progress("copying", plan.n_bytes) as advance:
        n_copied = stage(container, plan, advance)
    seconds = max(time.monotonic() - start, 1e-9)
    say(f"{n_copied:,} experts copied in {seconds:.1f} s. Use them: colibri-up {model} --mirror {directory}")


@command.command("verify")
@click.argument("model", metavar="MODEL", type=PATH)
@click.argument("directory", metavar="DIR", type=PATH)
def verify_command(model: Path, directory: Path) -> None:
    """Read every copy in DIR and compare its checksum with MODEL's colibri.json. Exit code 1 when something is damaged."""
    container = Container.open(model, (directory,))
    copies = [(file, copy) for file in container.experts.values() for copy in file.copies if copy.place == 1]
    total = sum(sum(map(copy.holds, range(file.n_experts))) * file.record_bytes for file, copy in copies)
    complaints = []
    n_records = 0
    start = time.monotonic()
    with progress("verifying", total) as advance:
        for _, n_bytes, complaint in container.verify(place=1):
            advance(n_bytes)
            n_records += 1
            if complaint is not None:
                complaints.append(complaint)
    seconds = max(time.monotonic() - start, 1e-9)
    say(f"{n_records:,} experts, {total:,} bytes in {seconds:.1f} s: {total / seconds / 1e9:.2f} GB/s")
    if complaints:
        for complaint in complaints[:_SHOWN]:
            complain(f"damaged: {complaint}")
        complain(
            f"colibri: {len(complaints):,} of {n_records:,} experts in {directory} are damaged. Delete the files named and run "
            f"`colibri mirror stage {model} {directory}` again."
        )
        sys.exit(1)
    say("all checksums agree")


# ---- what they share ------------------------------------------------------------------------------------------------


def _plan(container: Container, directory: Path, size: str | None, expected: Expected) -> StagePlan:
    from conversion.staging import plan_staging

    if not container.experts:
        raise click.UsageError(f"{container.path} has no experts to copy")
    n_bytes = None if size is None else parse_bytes(size, "size")
    return plan_staging(container, directory, n_bytes, expected)


def _describe(container: Container, plan: StagePlan, size: str | None, expected: Expected) -> None:
    n_all = sum(file.n_experts for file in container.experts.values())
    n_wanted, n_held = (sum(map(len, records.values())) for records in (plan.wanted, plan.held))
    how = "every expert"
    if size is not None:
        how = f"at most {size}, " + ("the most used first" if expected else "evenly (no usage history yet)")
    say(f"{container.path} -> {plan.directory}: {n_wanted:,} of {n_all:,} experts ({how}), {n_held:,} are there")
    say(f"to copy: {plan.n_bytes:,} bytes; room needed {plan.needed:,}, free {plan.free:,}")
    if plan.needed > plan.free:
        say(f"that is {plan.needed - plan.free:,} bytes more than are free")


def _expected_use(container: Container) -> Expected:
    """The usage history of this model, if there is one."""
    from shared.experts.usage import load_usage, usage_path

    path = usage_path(container.fingerprint)
    layers = tuple(container.experts)
    if path is None or not layers:
        return {}
    history, why_empty = load_usage(path, container.fingerprint, layers, container.experts[layers[0]].n_experts)
    if why_empty:
        complain(f"note: the usage history {path} is not used: {why_empty}")
    return history.expected()


def _share_of_reads(container: Container, plan: StagePlan, expected: Expected) -> float:
    """The share of bytes read that have a copy in the mirror: by expected use if there is a history, else all alike."""
    total = mirrored = 0.0
    for layer, file in container.experts.items():
        for expert in range(file.n_experts):
            weight = file.record_bytes * (expected.get((layer, expert), 0.0) if expected else 1.0)
            total += weight
            mirrored += weight * (expert in plan.wanted[layer])
    return mirrored / total if total else 0.0


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _kept_rate(path: Path, container: Container) -> float:
    """GB/s that an earlier start or `colibri doctor` measured on this drive; 0: none did."""
    from shared.machine.drive import kept_folder, kept_path, load_kept
    from shared.planning.drive_probe import mount_of

    record_bytes = max(file.record_bytes for file in container.experts.values())
    folder = kept_folder()
    if folder is None:
        return 0.0
    try:
        mount = mount_of(_existing(path))
        kept, _ = load_kept(kept_path(folder, mount, record_bytes), mount, record_bytes, time.time())
    except OSError:
        return 0.0
    return kept.ceiling / 1e9 if kept else 0.0
