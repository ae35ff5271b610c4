"""cache-sim: the optimum is that of trying everything, the simulation does what expert_io does, the command says so."""

from __future__ import annotations

import itertools
import json
import random
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cli.cache_sim.command import command
from cli.cache_sim.simulate import ONE_STEP_AHEAD, OPTIMUM, Visit, run, visits_of
from services.expert_io.slots import SlotTable, Tier
from services.expert_io.visit import Visit as StoreVisit
from shared.errors import ColibriError
from shared.experts.residency import POLICIES, Key
from shared.experts.traces import SpanNote, TraceHeader, TraceReader, TraceWriter, layer_record, step_record
from shared.step.stages import StepKind

SIZES = dict.fromkeys(range(8), 4096)


def random_visits(rng: random.Random, n: int, n_layers: int, n_experts: int, largest: int) -> list[Visit]:
    out = []
    for i in range(n):
        union = rng.sample(range(n_experts), rng.randint(1, largest))
        cut = rng.choice([len(union), len(union), 0, rng.randint(0, len(union))])
        out.append(Visit(i % n_layers, tuple(sorted(union[:cut])), dict.fromkeys(sorted(union[cut:]), 0.3)))
    return out


def most_hits(visits: list[Visit], n_slots: int) -> int:
    """By trying every set of victims."""

    @cache
    def from_here(i: int, resident: frozenset[Key]) -> int:
        if i == len(visits):
            return 0
        union = visits[i].union
        hits = union & resident
        everything = resident | union
        may_go = everything - union if len(union) <= n_slots else everything
        n_go = max(0, len(everything) - n_slots)
        ends = {everything - set(gone) for gone in itertools.combinations(sorted(may_go), n_go)}
        return len(hits) + max(from_here(i + 1, end) for end in ends)

    return from_here(0, frozenset())


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_equals_trying_everything(seed: int) -> None:
    rng = random.Random(seed)
    n_slots = rng.randint(1, 4)
    visits = random_visits(rng, 9, rng.randint(1, 2), 4, rng.randint(1, 4))
    score = run(OPTIMUM, visits, n_slots, range(2), SIZES)
    assert score.hits == most_hits(visits, n_slots)
    assert score.bytes_read == 4096 * (score.asked - score.hits)


@pytest.mark.parametrize("seed", range(8))
def test_no_policy_beats_the_optimum_and_knowing_one_step_beats_knowing_none(seed: int) -> None:
    rng = random.Random(seed)
    visits = random_visits(rng, 400, 4, 40, 4)
    for n_slots in (20, 50, 90):
        best = run(OPTIMUM, visits, n_slots, range(4), SIZES).hits
        hits = {name: run(name, visits, n_slots, range(4), SIZES).hits for name in (*POLICIES, ONE_STEP_AHEAD)}
        assert max(hits.values()) <= best
        assert hits[ONE_STEP_AHEAD] > hits["next-use"]


def test_the_optimum_lets_a_prompt_pass_too() -> None:
    """Its ten experts would fit the ten slots, but the store does not give it all of them."""
    visits = [Visit(0, (0, 1), {}), Visit(0, (), dict.fromkeys(range(2, 12), 0.3))] * 20
    hits = {name: run(name, visits, 10, range(1), SIZES).hits for name in (OPTIMUM, *POLICIES)}
    assert hits[OPTIMUM] == 19 * (2 + 8)
    # Were all ten forced to stay, the most would be 19 * 8, which the store itself beats.
    assert 19 * 8 < hits["next-use"] <= hits[OPTIMUM]


def play(table: SlotTable, visits: list[Visit]) -> list[tuple[int, int]]:
    """expert_io's own classes with a disk that is at once done, but only when nothing is left to compute."""
    out = []
    for i, visit in enumerate(visits):
        at_work = StoreVisit(table, i, visit.layer)
        found = at_work.look_up(dict.fromkeys(sorted(e for _, e in visit.union), 1), visit.passing)
        slots = list(at_work.more_reads())
        while not at_work.is_done:
            for slot in slots:
                table.landed(slot)
                at_work.landed(slot)
            at_work.computed(at_work.take_ready(1000)[0])
            slots = list(at_work.more_reads())
        out.append((found.n_hits, len(found.missing)))
    return out


@pytest.mark.parametrize("name", POLICIES)
def test_the_simulation_is_what_the_store_does(name: str) -> None:
    rng = random.Random(name)
    for n_slots, largest in ((60, 12), (9, 20), (3, 6)):
        visits = random_visits(rng, 600, 4, 24, largest)
        counted = play(SlotTable([Tier("ram", n_slots, n_slots)], POLICIES[name](n_slots, range(4))), visits)
        score = run(name, visits, n_slots, range(4), SIZES)
        assert score.asked == sum(h + m for h, m in counted)
        assert score.hits == sum(h for h, _ in counted), n_slots


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "routing.trace"
    header = TraceHeader(model="m", fingerprint="f", n_experts=16, gate_k=2, record_bytes={3: 4096, 4: 8192})
    writer = TraceWriter(path, header)
    rng = np.random.default_rng(0)
    for step in range(60):
        spans = [SpanNote("a", 1, step, False)] + ([SpanNote("b", 3, 0, True)] if step % 20 == 0 else [])
        n_rows = sum(s.n_rows for s in spans)
        writer.write([step_record(step, StepKind.DECODE, spans)])
        for layer in (3, 4):
            ids = np.sort(np.stack([rng.choice(16, 2, replace=False) for _ in range(n_rows)]), 1)
            writer.write([layer_record(step, layer, ids, np.ones((n_rows, 2), np.float32))])
    writer.close()
    return path


def test_visits_tell_decode_rows_from_prompts(trace: Path) -> None:
    steps = list(TraceReader(trace))
    visits = visits_of(steps)
    assert len(visits) == 120 and [v.layer for v in visits[:4]] == [3, 4, 3, 4]
    for step, visit in zip((s for s in steps for _ in s.layers), visits, strict=True):
        ids = step.layers[visit.layer - 3].ids
        assert visit.wanted == tuple(sorted(ids[0].tolist()))
        assert set(visit.passing) == set(ids[1:].ravel().tolist()) - set(visit.wanted)
        assert all(share == (ids[1:] == e).sum() / 3 for e, share in visit.passing.items())


def test_the_command_prints_the_table_json_and_a_plot(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = CliRunner().invoke(command, [str(trace), str(trace), "--slots", "25%,4,50%", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    for name in (*POLICIES, OPTIMUM, ONE_STEP_AHEAD):
        assert result.output.count(f"  {name} ") == 3
    tree = ET.parse(plot)
    assert len(tree.findall(".//{*}circle")) == 3 * 6
    result = CliRunner().invoke(command, [str(trace), "--policy", "lru", "--slots", "100%", "--json"])
    answer = json.loads(result.output)
    [lru] = answer["results"]
    assert (answer["n_experts"], lru["slots"], lru["of_optimum"]) == (32, 32, 1.0)
    assert lru["bytes_read"] == 16 * (4096 + 8192) and lru["asked"] - lru["hits"] == 32


@pytest.mark.parametrize("slots", ["0", "33", "-5%", "1.5", "x", "", "10%,,5"])
def test_impossible_slots_are_refused(slots: str, trace: Path) -> None:
    result = CliRunner().invoke(command, [str(trace), "--slots", slots])
    assert result.exit_code == 2 and "--slots takes numbers from 1 to 32" in result.output


def test_traces_of_two_models_and_empty_ones_are_refused(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    TraceWriter(
        other, TraceHeader(model="n", fingerprint="g", n_experts=16, gate_k=2, record_bytes={3: 4096, 4: 8192})
    ).close()
    result = CliRunner().invoke(command, [str(other)])
    assert isinstance(result.exception, ColibriError) and "holds no layer" in str(result.exception)
    writer = TraceWriter(
        other, TraceHeader(model="n", fingerprint="g", n_experts=16, gate_k=2, record_bytes={3: 4096, 4: 8192})
    )
    writer.write([step_record(1, StepKind.DECODE, []), layer_record(1, 3, np.zeros((1, 2)), np.zeros((1, 2)))])
    writer.close()
    result = CliRunner().invoke(command, [str(trace), str(other)])
    assert isinstance(result.exception, ColibriError) and "another model" in str(result.exception)


@pytest.mark.parametrize("name", ["x.png", "x.PDF", "x", "svg", "x.svg.gz"])
def test_a_plot_is_an_svg_file_or_refused_before_anything_is_computed(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / "absent"), "--plot", str(tmp_path / name)])
    assert result.exit_code == 2
    assert "SVG only" in result.stderr and ".svg instead of" in result.stderr
