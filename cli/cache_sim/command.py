"""``colibri cache-sim TRACE``: what each residency policy would have made of a recorded routing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from cli.cache_sim import simulate as sim
from cli.cache_sim.plot import line_chart
from cli.options import PATH, check_writable, write_result
from cli.show import Column, Table, show
from shared.errors import ConfigError
from shared.experts.residency import POLICIES
from shared.experts.traces import TraceHeader, TraceReader
from shared.run.terminal import say, say_json

NAMES = (sim.OPTIMUM, sim.ONE_STEP_AHEAD, *POLICIES)


@dataclass(frozen=True)
class Trace:
    """One file, read."""

    header: TraceHeader
    n_steps: int
    n_lost: int
    visits: list[sim.Visit]


@click.command("cache-sim")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=PATH)
@click.option(
    "--slots", default="10%,25%,50%", show_default=True, metavar="LIST", help="Numbers, or shares of all experts."
)
@click.option("--policy", "policies", multiple=True, type=click.Choice(NAMES), help="Only these; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--plot", type=PATH, metavar="FILE.svg", help="Draw hit rates over slots.")
def command(traces: tuple[Path, ...], slots: str, policies: tuple[str, ...], as_json: bool, plot: Path | None) -> int:
    """Judge residency policies on routing traces, made by colibri-up --record-routing.

    Each trace starts with empty slots; several traces of one model are added up. "optimum" is Belady's: the most hits that any
    choice of victims allows. "one-step-ahead" knows what the next step will want, exactly; no policy can.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise click.UsageError(f"--plot draws SVG only: name the file {plot.stem or 'plot'}.svg instead of {plot.name}")
    if plot is not None:
        check_writable(plot, "--plot")
    read = [_read(path) for path in traces]
    header = read[0].header
    for path, trace in zip(traces, read, strict=True):
        if (trace.header.fingerprint, trace.header.layers) != (header.fingerprint, header.layers):
            raise ConfigError(f"{path} is of another model ({trace.header.model}) or other layers than {traces[0]}")
    n_experts = len(header.layers) * header.n_experts
    sizes = parse_slots(slots, n_experts)
    names = [name for name in NAMES if not policies or name in policies]
    scores = {(name, n): _score(name, read, n, header) for n in sizes for name in names}
    best = {
        n: scores[sim.OPTIMUM, n] if (sim.OPTIMUM, n) in scores else _score(sim.OPTIMUM, read, n, header) for n in sizes
    }
    if plot is not None:
        lines = {name: [(n / n_experts, scores[name, n].hit_rate) for n in sizes] for name in names}
        write_result(plot, line_chart(f"{header.model}: expert hit rate", lines, sim.IMPOSSIBLE))
    if as_json:
        say_json(_as_json(header, read, n_experts, scores, best))
    else:
        _print(header, read, n_experts, scores, best)
    return 0


def parse_slots(text: str, n_experts: int) -> list[int]:
    """``10%,25%`` or ``64,128`` -> slot counts, ascending. Raises UsageError."""
    found = set()
    for part in text.split(","):
        is_share = part.strip().endswith("%")
        try:
            value = float(part.strip().removesuffix("%"))
        except ValueError:
            value = -1.0
        n = int(n_experts * value / 100) if is_share else int(value)
        if not 1 <= n <= n_experts or (not is_share and n != value):
            raise click.UsageError(
                f"--slots takes numbers from 1 to {n_experts:,} or shares like 10%; got {part.strip()!r}"
            )
        found.add(n)
    return sorted(found)


def _read(path: Path) -> Trace:
    reader = TraceReader(path)
    steps = list(reader)
    visits = sim.visits_of(steps)
    if not visits:
        raise ConfigError(f"trace {path} holds no layer; was a request answered while it was recorded?")
    return Trace(reader.header, len(steps), reader.n_lost, visits)


def _score(name: str, traces: list[Trace], n_slots: int, header: TraceHeader) -> sim.Score:
    total = sim.Score()
    for trace in traces:
        total += sim.run(name, trace.visits, n_slots, header.layers, header.record_bytes)
    return total


def _as_json(
    header: TraceHeader,
    traces: list[Trace],
    n_experts: int,
    scores: dict[tuple[str, int], sim.Score],
    best: dict[int, sim.Score],
) -> dict[str, object]:
    return {
        "model": header.model,
        "fingerprint": header.fingerprint,
        "n_experts": n_experts,
        "n_steps": sum(t.n_steps for t in traces),
        "n_lost": sum(t.n_lost for t in traces),
        "results": [
            {
                "policy": name,
                "slots": n,
                "share": n / n_experts,
                **asdict(score),
                "hit_rate": score.hit_rate,
                "decode_hit_rate": score.decode_hit_rate,
                "of_optimum": score.hits / max(1, best[n].hits),
            }
            for (name, n), score in scores.items()
        ],
    }


def _print(
    header: TraceHeader,
    traces: list[Trace],
    n_experts: int,
    scores: dict[tuple[str, int], sim.Score],
    best: dict[int, sim.Score],
) -> None:
    n_visits = sum(len(t.visits) for t in traces)
    first = next(iter(scores.values()))
    say(
        f"{header.model}: {sum(t.n_steps for t in traces):,} steps, {n_visits:,} layer visits, {first.asked:,} experts asked "
        f"for ({first.decode_asked:,} by decode rows); {n_experts:,} experts in {len(header.layers)} layers"
    )
    n_lost = sum(t.n_lost for t in traces)
    if n_lost:
        say(f"note: {n_lost:,} records are missing: the disk did not keep up while recording")
    rows = []
    last = None
    for (name, n), score in scores.items():
        label = f"{n:,} ({n / n_experts:.0%})" if n != last else ""
        last = n
        rows.append(
            (
                label,
                name,
                f"{score.hit_rate:.1%}",
                f"{score.decode_hit_rate:.1%}",
                f"{score.hits / max(1, best[n].hits):.1%}",
                f"{score.bytes_read:,}",
            )
        )
    columns = (
        Column("slots", 14),
        Column("policy", 15, False, "  "),
        Column("hits", 8),
        Column("decode hits", 13),
        Column("of optimum", 12),
        Column("bytes read", 18),
    )
    show(["", Table(columns, rows)])
