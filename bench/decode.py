"""``colibri bench decode``: cold decoding of a real group beside the drive's ceiling of the same seconds.

The JSON document, schema 1; fields are only ever added:

    schema      1
    model       path; record_bytes: of one expert
    tokens      timed in each round, after a prompt of 16
    settings[]  pilot ("on", "off"), place {n_slots, n_experts, slot_share, ram_bytes, limit_bytes, peak_bytes, n_threads,
                prefill_chunk}
      rounds[]  tokens_s
                reads    seconds, ceiling_gb_s (mean of the samples before and after), demand_bytes, speculative_bytes,
                         needed_bytes (without guesses nobody asked for), gb_s and share of the ceiling over the whole time,
                         hits, late_hits, misses, busy_share (of the time with a read in flight), busy_gb_s meanwhile,
                         wait_share (expert_io could only wait), floor_s = needed_bytes / ceiling
                moe_ms, compute_ms    of a token: its MoE layers; time in which somebody computed
                moe_gb_s, moe_share   all bytes of a token over moe_ms
                bound_ms, bound_share max(floor, compute) of a token, and that over the time it took
      medians   the figures of the table: {name: {median, least, most}}
    ratio       with both settings: tokens_s on / off by rounds {median, least, most}; null otherwise
"""

from __future__ import annotations

import statistics
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
from bench.columns import Figure, spread, summary, table
from bench.drive import DriveCeiling
from bench.group import SHORT_PROMPT, Group, Moment, Watch
from bench.roofline import BenchError
from bench.steps import steps_of
from shared.container.reader import Container
from shared.run.client import Answer
from shared.step.stages import StepKind

SCHEMA = 1
WARM_TOKENS = 4
"""Before the first round of a group: its code and slots are used once."""


@dataclass(frozen=True)
class Round:
    """One answer, from its first token to its last."""

    n_tokens: int
    reads: Reads
    moe_ns: float
    """Of a token."""
    compute_ns: float

    @property
    def token_ns(self) -> float:
        return self.reads.seconds * 1e9 / self.n_tokens

    @property
    def tokens_s(self) -> float:
        return 1e9 / self.token_ns

    @property
    def moe_rate(self) -> float:
        """Bytes per second while MoE layers ran."""
        return self.reads.bytes / self.n_tokens / self.moe_ns * 1e9

    @property
    def moe_share(self) -> float:
        return self.moe_rate / self.reads.ceiling

    @property
    def floor_ns(self) -> float:
        return self.reads.floor_s * 1e9 / self.n_tokens

    @property
    def bound_ns(self) -> float:
        """With perfect overlap of reading and computing."""
        return max(self.floor_ns, self.compute_ns)

    @property
    def bound_share(self) -> float:
        return self.bound_ns / self.token_ns

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens_s": self.tokens_s, "reads": self.reads.as_json(), "moe_ms": self.moe_ns / 1e6,
            "compute_ms": self.compute_ns / 1e6, "moe_gb_s": self.moe_rate / 1e9, "moe_share": self.moe_share,
            "bound_ms": self.bound_ns / 1e6, "bound_share": self.bound_share,
        }  # fmt: skip


FIGURES: tuple[Figure[Round], ...] = (
    Figure("tokens/s", lambda r: r.tokens_s),
    Figure("ms a token", lambda r: r.token_ns / 1e6, ".0f"),
    Figure("drive's ceiling, GB/s", lambda r: r.reads.ceiling / 1e9),
    Figure("MB read a token", lambda r: r.reads.bytes / r.n_tokens / 1e6, ".0f"),
    Figure("  on demand", lambda r: r.reads.demand_bytes / r.n_tokens / 1e6, ".0f"),
    Figure("  on a guess", lambda r: r.reads.speculative_bytes / r.n_tokens / 1e6, ".0f"),
    Figure("GB/s over the whole token", lambda r: r.reads.rate / 1e9),
    Figure("  of the ceiling", lambda r: r.reads.share, ".0%"),
    Figure("GB/s over its MoE layers", lambda r: r.moe_rate / 1e9),
    Figure("  of the ceiling", lambda r: r.moe_share, ".0%"),
    Figure("GB/s with a read in flight", lambda r: r.reads.busy_rate / 1e9),
    Figure("  of the time", lambda r: r.reads.busy_share, ".0%"),
    Figure("only waiting for the drive", lambda r: r.reads.wait_share, ".0%"),
    Figure("experts found in memory", lambda r: r.reads.hit_share, ".0%"),
    Figure("floor: bytes needed / ceiling, ms", lambda r: r.floor_ns / 1e6, ".0f"),
    Figure("computing, ms", lambda r: r.compute_ns / 1e6, ".0f"),
    Figure("MoE layers, ms", lambda r: r.moe_ns / 1e6, ".0f"),
    Figure("the longer of floor and computing / time taken", lambda r: r.bound_share, ".0%"),
)
MEDIANS: Mapping[str, Callable[[Round], float]] = {
    "tokens_s": lambda r: r.tokens_s,
    "ceiling_gb_s": lambda r: r.reads.ceiling / 1e9,
    "share": lambda r: r.reads.share,
    "moe_share": lambda r: r.moe_share,
    "busy_share": lambda r: r.reads.busy_share,
    "floor_ms": lambda r: r.floor_ns / 1e6,
    "compute_ms": lambda r: r.compute_ns / 1e6,
    "bound_share": lambda r: r.bound_share,
}


@dataclass
class Setting:
    """All rounds with one setting."""

    place: Place | None = None
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class DecodeResults:
    model: str
    record_bytes: int
    n_tokens: int
    settings: dict[str, Setting]
    """By the setting of PILOT."""

    @property
    def ratios(self) -> list[float]:
        """tokens/s with PILOT over tokens/s without, round by round (neighbours in time); empty with one setting."""
        if len(self.settings) < 2:
            return []
        pairs = zip(self.settings["on"].rounds, self.settings["off"].rounds)
        return [on.tokens_s / off.tokens_s for on, off in pairs]


def run_decode(
    setup: Setup, pilots: tuple[str, ...], n_tokens: int, n_rounds: int, say: Say = lambda _: None
) -> DecodeResults:
    """With one setting a single group serves all rounds; with several each round starts a group of each, in turn.

    BenchError where a group does not start or a limit is impossible.
    """
    if n_tokens < 1 or n_rounds < 1:
        raise BenchError("at least one token and one round are needed")
    container = Container.open(setup.model)
    setup = replace(setup, max_context=setup.max_context or SHORT_PROMPT + n_tokens + 64)
    settings = {pilot: Setting() for pilot in pilots}
    record = middle_file(container).record_bytes
    if len(pilots) == 1:
        _visit(container, setup, pilots[0], settings[pilots[0]], n_tokens, range(n_rounds), say)
    else:
        for i in range(n_rounds):
            # Whoever goes first in one round goes last in the next, so that a drift of the drive hits both alike.
            for pilot in pilots if i % 2 == 0 else pilots[::-1]:
                _visit(container, setup, pilot, settings[pilot], n_tokens, range(i, i + 1), say)
    return DecodeResults(str(setup.model), record, n_tokens, settings)


def _visit(
    container: Container, setup: Setup, pilot: str, setting: Setting, n_tokens: int, rounds: range, say: Say
) -> None:
    """One group with this setting, for these rounds."""
    setup = replace(setup, arguments=(*setup.arguments, "--pilot", pilot))
    with cold_group(container, setup) as (group, limit), measuring(container, group) as (drive, watch):
        group.answer(SHORT_PROMPT, WARM_TOKENS, 999)
        for i in rounds:
            found = measure_round(container, group, drive, watch, n_tokens, i)
            setting.rounds.append(found)
            say(f"round {i + 1}, pilot {pilot}: {found.tokens_s:.2f} tokens/s, {found.reads.share:.0%} of the ceiling")
        setting.place = place_of(container, group, limit)


def measure_round(
    container: Container, group: Group, drive: DriveCeiling, watch: Watch, n_tokens: int, seed: int
) -> Round:
    """Ceiling, an answer, ceiling."""
    moments: list[Moment] = []
    n_seen: list[int] = []

    def note(answer: Answer) -> None:
        moment = watch.now()
        moments[1:] = [moment]
        n_seen[1:] = [len(answer.token_ids)]
        watch.take()

    watch.rows()
    before = drive.sample()
    group.answer(SHORT_PROMPT, n_tokens + 1, seed, note)
    after = drive.sample()
    first, last = moments[0], moments[-1]
    n_later = n_seen[-1] - n_seen[0]
    if n_later < 1:
        raise BenchError(f"all {n_tokens + 1} tokens came at once; more tokens are needed to time them")
    steps = steps_of(watch.rows(), StepKind.DECODE, dense_layers(container), first.ns - 10_000_000)
    if not steps.n_steps:
        raise BenchError("the group's trace holds no step of this answer; is it decoding with drafts?")
    reads = reads_between(first, last, (before, after), middle_file(container).record_bytes)
    return Round(n_later, reads, steps.moe_ns / steps.n_steps, steps.compute_ns / steps.n_steps)


def as_json(report: DecodeResults) -> dict[str, Any]:
    """The document described above."""
    ratios = report.ratios
    return {
        "schema": SCHEMA,
        "model": report.model,
        "record_bytes": report.record_bytes,
        "tokens": report.n_tokens,
        "settings": [
            {
                "pilot": pilot,
                "place": (asdict(setting.place) | {"slot_share": setting.place.slot_share}) if setting.place else None,
                "rounds": [r.as_json() for r in setting.rounds],
                "medians": summary(MEDIANS, setting.rounds),
            }
            for pilot, setting in report.settings.items()
        ],
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)} if ratios else None,
    }


def as_text(report: DecodeResults) -> str:
    """The table, its setting above, the ratio below."""
    place = next(iter(report.settings.values())).place
    lines = [
        f"{report.model}; {report.n_tokens} tokens a round, experts of {report.record_bytes / 1e6:.1f} MB",
        place.text() if place else "",
        "",
        *table(FIGURES, {f"pilot {pilot}": setting.rounds for pilot, setting in report.settings.items()}),
    ]
    if ratios := report.ratios:
        lines += ["", f"tokens/s with the pilot over without: {spread(ratios)}"]
    return "\n".join(lines)
