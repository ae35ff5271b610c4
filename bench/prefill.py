"""``colibri bench prefill``: a prompt into a group with cold slots, beside the limit that binds it.

The JSON document, schema 1; fields are only ever added:

    schema      1
    model       path; record_bytes: of one expert
    prompt      tokens
    place       as in ``bench decode``
    rounds[]    first_token_s, tokens_s
                reads       as in ``bench decode``
                compute_s   time in which somebody computed
                n_chunks    steps that the prompt took
                asked, read           experts asked for (distinct in each layer and chunk) and reads, in all
                read_again            reads of a layer beyond the experts asked for in it and the guesses thrown away
                bound       "drive" (bytes read / ceiling) or "computing", whichever takes longer
                bound_s, bound_share  its time, and that over first_token_s
    medians     the figures of the table: {name: {median, least, most}}
    is_read_once    no round read an expert again within a layer and chunk
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.cold import (
    Place,
    Reads,
    Say,
    Setup,
    cold_group,
    dense_layers,
    measuring,
    middle_file,
    place_of,
    reads_between,
)
from bench.columns import Figure, summary, table
from bench.drive import DriveCeiling
from bench.group import Group, Moment, Watch
from bench.roofline import BenchError
from bench.steps import steps_of
from shared.container.reader import Container
from shared.run.client import Answer
from shared.step.stages import StepKind

SCHEMA = 1


@dataclass(frozen=True)
class Round:
    """One prompt, up to its first token."""

    n_tokens: int
    first_token_s: float
    reads: Reads
    compute_s: float
    n_chunks: int
    n_asked: dict[int, int]
    """Layer -> distinct experts asked for, summed over the chunks."""
    n_reads: dict[int, int]
    n_wasted: int
    """Reads nobody asked for."""

    @property
    def tokens_s(self) -> float:
        return self.n_tokens / self.first_token_s

    @property
    def read_s(self) -> float:
        """Of all bytes that were read, at the ceiling."""
        return self.reads.bytes / self.reads.ceiling

    @property
    def bound(self) -> str:
        return "drive" if self.read_s >= self.compute_s else "computing"

    @property
    def bound_s(self) -> float:
        return max(self.read_s, self.compute_s)

    @property
    def bound_share(self) -> float:
        return self.bound_s / self.first_token_s

    @property
    def n_again(self) -> int:
        """A layer's experts are read at most once a chunk: what is more, but for guesses, was read again."""
        more = sum(max(0, n - self.n_asked.get(layer, 0)) for layer, n in self.n_reads.items())
        return max(0, more - self.n_wasted)

    def as_json(self) -> dict[str, Any]:
        return {
            "first_token_s": self.first_token_s, "tokens_s": self.tokens_s, "reads": self.reads.as_json(),
            "compute_s": self.compute_s, "n_chunks": self.n_chunks, "asked": sum(self.n_asked.values()),
            "read": sum(self.n_reads.values()), "read_again": self.n_again, "bound": self.bound,
            "bound_s": self.bound_s, "bound_share": self.bound_share,
        }  # fmt: skip


FIGURES: tuple[Figure[Round], ...] = (
    Figure("first token after, s", lambda r: r.first_token_s),
    Figure("tokens/s", lambda r: r.tokens_s, ".1f"),
    Figure("chunks", lambda r: r.n_chunks, ".0f"),
    Figure("drive's ceiling, GB/s", lambda r: r.reads.ceiling / 1e9),
    Figure("GB read", lambda r: r.reads.bytes / 1e9),
    Figure("GB/s over the whole time", lambda r: r.reads.rate / 1e9),
    Figure("  of the ceiling", lambda r: r.reads.share, ".0%"),
    Figure("GB/s with a read in flight", lambda r: r.reads.busy_rate / 1e9),
    Figure("  of the time", lambda r: r.reads.busy_share, ".0%"),
    Figure("only waiting for the drive", lambda r: r.reads.wait_share, ".0%"),
    Figure("experts asked for, by layer and chunk", lambda r: sum(r.n_asked.values()), ".0f"),
    Figure("experts read", lambda r: sum(r.n_reads.values()), ".0f"),
    Figure("  again in the same layer and chunk", lambda r: r.n_again, ".0f"),
    Figure("reading at the ceiling, s", lambda r: r.read_s),
    Figure("computing, s", lambda r: r.compute_s),
    Figure("the longer of both / time taken", lambda r: r.bound_share, ".0%"),
)
MEDIANS: Mapping[str, Callable[[Round], float]] = {
    "first_token_s": lambda r: r.first_token_s,
    "tokens_s": lambda r: r.tokens_s,
    "ceiling_gb_s": lambda r: r.reads.ceiling / 1e9,
    "share": lambda r: r.reads.share,
    "compute_s": lambda r: r.compute_s,
    "bound_share": lambda r: r.bound_share,
}


@dataclass
class PrefillResults:
    model: str
    record_bytes: int
    n_prompt: int
    place: Place | None = None
    rounds: list[Round] = field(default_factory=list)

    @property
    def is_read_once(self) -> bool:
        return all(not r.n_again for r in self.rounds)


def run_prefill(setup: Setup, n_prompt: int, n_rounds: int, say: Say = lambda _: None) -> PrefillResults:
    """One group, a different random prompt in each round. BenchError where it does not start or a limit is impossible."""
    if n_prompt < 1 or n_rounds < 1:
        raise BenchError("at least one token and one round are needed")
    container = Container.open(setup.model)
    if n_prompt >= container.spec.max_context:
        raise BenchError(f"a prompt of {n_prompt} tokens: the model has room for {container.spec.max_context - 1}")
    setup = replace(setup, max_context=setup.max_context or n_prompt + 64)
    report = PrefillResults(str(setup.model), middle_file(container).record_bytes, n_prompt)
    with cold_group(container, setup) as (group, limit), measuring(container, group) as (drive, watch):
        for i in range(n_rounds):
            found = measure_round(container, group, drive, watch, n_prompt, i)
            report.rounds.append(found)
            say(
                f"round {i + 1}: {found.tokens_s:.1f} tokens/s, {found.reads.share:.0%} of the ceiling, "
                f"{found.bound_share:.0%} of what {found.bound} allows"
            )
        report.place = place_of(container, group, limit)
    return report


def measure_round(
    container: Container, group: Group, drive: DriveCeiling, watch: Watch, n_prompt: int, seed: int
) -> Round:
    """Ceiling, an answer of one token, ceiling."""
    ends: list[Moment] = []

    def note(_: Answer) -> None:
        ends.append(watch.now())

    watch.rows()
    before = drive.sample()
    begin = watch.now()
    answer = group.answer(n_prompt, 1, seed + 1, note)
    after = drive.sample()
    rows = watch.rows()
    if watch.n_lost:
        raise BenchError(
            f"{watch.n_lost} rows of the trace were overwritten; a shorter prompt is needed to count reads"
        )
    steps = steps_of(rows, StepKind.PREFILL, dense_layers(container), begin.ns)
    reads = reads_between(begin, ends[0], (before, after), middle_file(container).record_bytes)
    count = ends[0].since(begin)
    return Round(
        n_prompt, answer.first_token_s, reads, steps.compute_ns / 1e9, steps.n_steps, steps.n_asked, steps.n_reads,
        count["pilot_wasted"] + count["ahead_wasted"],
    )  # fmt: skip


def as_json(report: PrefillResults) -> dict[str, Any]:
    """The document described above."""
    place = report.place
    return {
        "schema": SCHEMA,
        "model": report.model,
        "record_bytes": report.record_bytes,
        "prompt": report.n_prompt,
        "place": (asdict(place) | {"slot_share": place.slot_share}) if place else None,
        "rounds": [r.as_json() for r in report.rounds],
        "medians": summary(MEDIANS, report.rounds),
        "is_read_once": report.is_read_once,
    }


def as_text(report: PrefillResults) -> str:
    """The table, and loudly below it what must not be."""
    lines = [
        f"{report.model}; prompts of {report.n_prompt} tokens, experts of {report.record_bytes / 1e6:.1f} MB",
        report.place.text() if report.place else "",
        "",
        *table(FIGURES, {"": report.rounds}),
        "",
        f"bound by: {', '.join(r.bound for r in report.rounds)}",
    ]
    if not report.is_read_once:
        n = sum(r.n_again for r in report.rounds)
        lines.append(f"FAULT: {n} experts were read again within a layer and chunk; each should be read at most once")
    return "\n".join(lines)
