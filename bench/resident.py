"""``colibri bench resident``: a group that holds every expert in memory, beside the memory's bandwidth of the same seconds.

All weights are touched right before each round, by prompts that name every expert, because a host takes back memory that
idles; what was found cold is said, and a decode that began so is taken once more.

The JSON document, schema 1; fields are only ever added:

    schema      1
    model       path; bytes_per_token: weights that a decoded token reads; n_threads
    prompt, tokens     of a round
    rounds[]    touches_s    seconds of the passes over all weights before it
                was_cold     the first of them was
                again        the decode began cold and was taken once more
                bandwidth_gb_s    mean of the samples before and after the decode
                prefill_tokens_s
                tokens_s, bound_tokens_s, bound_share    of decoding; bytes_per_token / bandwidth
                rest_share   of a token: no kernel ran (hops, union, plan, reduce, sampling, the interpreter)
    medians     the figures of the table: {name: {median, least, most}}
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.cold import Say, Setup, cold_group, place_of
from bench.columns import Figure, summary, table
from bench.group import SHORT_PROMPT, Group, Watch
from bench.measure import MIB
from bench.roofline import BenchError
from bench.steps import steps_of
from bench.warmth import is_cold, starts_cold, warm_text, warm_up
from native.library import Pool
from native.memory import HugeBuffer
from native.probe import read_rate
from shared.container.reader import Container
from shared.model.spec import ModelSpec
from shared.planning.speed import bytes_per_token
from shared.step.stages import KERNELS, StepKind

SCHEMA = 1
PLAIN_BYTES = 256 * MIB
SURELY = 7.0
"""Random prompts of this many times the tokens that would name every expert once leave less than one in a thousand out."""


@dataclass(frozen=True)
class Round:
    touches_s: tuple[float, ...]
    again: bool
    bandwidth: float
    """Bytes per second."""
    prefill_tokens_s: float
    tokens_s: float
    bytes_per_token: int
    rest_share: float

    @property
    def was_cold(self) -> bool:
        return is_cold(self.touches_s[0], self.touches_s[1:])

    @property
    def bound_tokens_s(self) -> float:
        return self.bandwidth / self.bytes_per_token

    @property
    def bound_share(self) -> float:
        return self.tokens_s / self.bound_tokens_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "bandwidth_gb_s": self.bandwidth / 1e9, "was_cold": self.was_cold, "bound_tokens_s": self.bound_tokens_s,
            "bound_share": self.bound_share,
        }  # fmt: skip


FIGURES: tuple[Figure[Round], ...] = (
    Figure("memory, GB/s", lambda r: r.bandwidth / 1e9, ".1f"),
    Figure("decode, tokens/s", lambda r: r.tokens_s),
    Figure("  bound: bandwidth / bytes of a token", lambda r: r.bound_tokens_s),
    Figure("  of the bound", lambda r: r.bound_share, ".0%"),
    Figure("  of a token: no kernel ran", lambda r: r.rest_share, ".1%"),
    Figure("prefill, tokens/s", lambda r: r.prefill_tokens_s, ".1f"),
)
MEDIANS: Mapping[str, Callable[[Round], float]] = {
    "bandwidth_gb_s": lambda r: r.bandwidth / 1e9,
    "tokens_s": lambda r: r.tokens_s,
    "bound_share": lambda r: r.bound_share,
    "rest_share": lambda r: r.rest_share,
    "prefill_tokens_s": lambda r: r.prefill_tokens_s,
}


@dataclass
class ResidentResults:
    model: str
    n_prompt: int
    n_tokens: int
    n_threads: int
    bytes_per_token: int
    rounds: list[Round] = field(default_factory=list)


def touching_tokens(spec: ModelSpec) -> int:
    """Random tokens that name every expert of every layer, all but surely; at least 16."""
    each = spec.n_experts / max(1, spec.gate_k)
    return max(16, math.ceil(each * (math.log(max(2, spec.n_experts)) + SURELY)))


def run_resident(
    setup: Setup, n_prompt: int, n_tokens: int, n_rounds: int, say: Say = lambda _: None
) -> ResidentResults:
    """BenchError where the group does not start or not every expert has a slot."""
    if n_prompt < 1 or n_tokens < 1 or n_rounds < 1:
        raise BenchError("at least one token and one round are needed")
    container = Container.open(setup.model)
    n_touch = min(touching_tokens(container.spec), container.spec.max_context - 1)
    n_context = max(n_prompt, n_touch, SHORT_PROMPT + n_tokens) + 64
    setup = replace(setup, max_context=setup.max_context or n_context)
    with cold_group(container, setup) as (group, limit), Watch(group.config) as watch:
        place = place_of(container, group, limit)
        if place.n_slots < place.n_experts:
            raise BenchError(f"{place.n_slots:,} of {place.n_experts:,} experts have a slot: expected all; raise --ram")
        n_bytes = sum(bytes_per_token(container.spec, container.facts()))
        report = ResidentResults(str(setup.model), n_prompt, n_tokens, place.n_threads, n_bytes)
        group.prefill(n_touch, 1)  # brings the experts from the disk, so it says nothing about memory
        with Pool(place.n_threads) as pool, HugeBuffer(PLAIN_BYTES) as plain:
            plain.array[:] = 1

            def bandwidth() -> float:
                return max(read_rate(pool, plain.array, ahead) for ahead in (False, True) for _ in range(2))

            for i in range(n_rounds):
                found = _round(group, watch, report, bandwidth, n_touch, 100 * (i + 1), say)
                report.rounds.append(found)
                say(
                    f"round {i + 1}: {found.tokens_s:.2f} tokens/s, {found.bound_share:.0%} of what memory allows; prefill "
                    f"{found.prefill_tokens_s:.1f} tokens/s"
                )
    return report


def _round(
    group: Group,
    watch: Watch,
    report: ResidentResults,
    bandwidth: Callable[[], float],
    n_touch: int,
    seed: int,
    say: Say,
) -> Round:
    def one_pass() -> float:
        return group.answer(n_touch, 1, seed).first_token_s

    touches = warm_up(one_pass)
    say(f"  {warm_text(touches)}")
    prefill = group.prefill(report.n_prompt, seed + 1)
    again = False
    while True:
        watch.rows()
        before = bandwidth()
        times = _token_times(group, report.n_tokens, seed + 2 + again)
        after = bandwidth()
        if again or not starts_cold(times):
            break
        again = True
        say("  the first tokens took far longer than the others: memory was cold; taken once more")
    steps = steps_of(watch.rows(), StepKind.DECODE, (), counting=KERNELS)
    if not steps.n_steps:
        raise BenchError("the group's trace holds no decode step")
    return Round(
        tuple(touches), again, (before + after) / 2, prefill, 1 / statistics.mean(times), report.bytes_per_token,
        1 - steps.compute_ns / steps.wall_ns,
    )  # fmt: skip


def _token_times(group: Group, n_tokens: int, seed: int) -> list[float]:
    """Seconds of each token after the first, as the client sees them come."""
    seen: list[tuple[float, int]] = []
    group.answer(SHORT_PROMPT, n_tokens + 1, seed, lambda a: seen.append((time.monotonic(), len(a.token_ids))))
    moments = [seen[0], *(b for a, b in itertools.pairwise(seen) if b[1] > a[1])]
    times: list[float] = []
    for (t0, n0), (t1, n1) in itertools.pairwise(moments):
        times += [(t1 - t0) / (n1 - n0)] * (n1 - n0)
    if not times:
        raise BenchError(f"all {n_tokens + 1} tokens came at once; more tokens are needed to time them")
    return times


def as_json(report: ResidentResults) -> dict[str, Any]:
    """The document described above."""
    return {
        "schema": SCHEMA,
        "model": report.model,
        "bytes_per_token": report.bytes_per_token,
        "n_threads": report.n_threads,
        "prompt": report.n_prompt,
        "tokens": report.n_tokens,
        "rounds": [r.as_json() for r in report.rounds],
        "medians": summary(MEDIANS, report.rounds),
    }


def as_text(report: ResidentResults) -> str:
    """The table, and below it what was cold."""
    lines = [
        f"{report.model}; every expert in memory; {report.n_threads} threads; a token reads "
        f"{report.bytes_per_token / 1e6:,.0f} MB of weights",
        f"prompts of {report.n_prompt} tokens, {report.n_tokens} decoded; all weights touched right before",
        "",
        *table(FIGURES, {"": report.rounds}),
    ]
    if n_cold := sum(r.was_cold for r in report.rounds):
        lines.append(
            f"memory was cold before {n_cold} of {len(report.rounds)} rounds, and was touched until it no longer was"
        )
    if n_again := sum(r.again for r in report.rounds):
        lines.append(f"{n_again} decodes began cold and were taken once more")
    return "\n".join(lines)
