"""The command itself: asks every subject, prints what they found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from cli.doctor import budget, drive, memory, pages, processor, tokenizer
from cli.doctor.finding import Case, Finding
from cli.options import PATH
from shared.container.reader import Container
from shared.run.terminal import say, say_json

SUBJECTS: tuple[Callable[[Case], list[Finding]], ...] = (
    processor.look,
    budget.look,
    pages.look,
    memory.look,
    drive.look,
    tokenizer.look,
)
"""In the order in which they are shown."""


@click.command("doctor")
@click.argument("model", type=PATH, required=False)
@click.option("--measure", is_flag=True, help="Measure MODEL's drive now, whatever is kept (about a second).")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(model: Path | None, measure: bool, as_json: bool) -> None:
    """Say what this machine offers to a model, what is advisable, and the command for it.

    With MODEL, a container, also how fast its drive is and how it will be read.
    """
    if measure and model is None:
        raise click.UsageError("--measure needs a model directory, whose drive is measured")
    case = Case(Container.open(model) if model else None, must_measure=measure)
    findings = [finding for look in SUBJECTS for finding in look(case)]
    if as_json:
        say_json([{"subject": f.subject, "found": f.found, "verdict": f.verdict, "advice": f.advice, **f.facts}
                        for f in findings], indent=1)  # fmt: skip
        return
    say("\n".join(format_findings(findings)))  # no table: commands are to be copied, so they must not be folded


def format_findings(findings: list[Finding]) -> list[str]:
    """The report as lines."""
    width = max((len(f.subject) for f in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:5} {finding.subject:{width}}  {finding.found}")
        lines += [f"{'':{width + 8}}{detail}" for detail in finding.details]
        if finding.advice:
            lines.append(f"{'':{width + 8}}-> {finding.advice}")
    return lines
