"""The memory budget of real groups: never more than was said, at any time, whatever the page cache does."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conversion.presets import preset_config
from conversion.synth import Synthesis
from deploy.launch import make_plan
from shared.model.kv_layout import blocks_for
from shared.planning.ledger import Ledger
from shared.run.config import Settings
from tests.group.harness import Group, run_up
from tests.group.memory import ControlGroup, MemorySampler, colibri, held_bytes, why_no_control_groups
from tests.group.test_store import counters_of

pytestmark = [pytest.mark.group, pytest.mark.alone]

MIB = 1 << 20
CONTEXT = 1024
SMALL: dict[str, Any] = {"max_context": CONTEXT, "max_sequences": 2, "prefill_chunk": 256}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of which little but its experts is large: 3 layers of 32 with 2 MiB each."""
    path = tmp_path_factory.mktemp("wide") / "model"
    synthesise(path, n_experts=32)
    yield path
    remove(path)


def synthesise(path: Path, n_experts: int, n_layers: int = 4, *, has_mtp: bool = False) -> None:
    sizes = {
        "hidden_size": 1024,
        "moe_intermediate_size": 1280,
        "n_routed_experts": n_experts,
        "max_position_embeddings": 4096,
    }
    Synthesis(preset_config("tiny", n_layers, has_mtp) | sizes, "int4").run(path)


def remove(path: Path) -> None:
    """Now, not when the test run ends: it is large."""
    for file in path.iterdir():
        file.unlink()


def plan_of(model: Path, **settings: Any) -> Ledger:
    return make_plan(Settings(model=str(model), **settings), model, 0).ledger


def unused(ledger: Ledger, share: float = 0.05) -> float:
    """Bytes that a group may leave of what is planned: two fifths of the processes, which share; of the rest a share."""
    processes = sum(line.bytes for line in ledger.lines if line.what == "process")
    return share * (ledger.total_bytes - processes) + 0.4 * processes


def topic(number: int, n_tokens: int = 16) -> list[int]:
    return random.Random(number).choices(range(1000), k=n_tokens)


def talk(group: Group, n_topics: int = 4, n_long: int = 250) -> list[list[int]]:
    """Topics that alternate, then a prompt that wants every expert."""
    answers = [group.tokens(topic(i), 6) for i in range(n_topics)]
    return [*answers, group.tokens(topic(99, n_long), 6)]


@pytest.fixture(scope="module")
def resident_answers(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the model says when every expert has a slot."""
    with Group(wide, tmp_path_factory.mktemp("r") / "run", draft="off", **SMALL) as group:
        answers = talk(group)
        counters = counters_of(group)
        assert counters["evictions"] == 0 and counters["slots"] == 96
        return answers


def test_the_budget_holds_while_topics_alternate_and_when_it_changes(
    wide: Path, start_group: Callable[..., Group], resident_answers: list[list[int]]
) -> None:
    """G6, and the budget test of the store: 10 % of the experts fit; sampled at 20 Hz."""
    ledger = plan_of(wide, draft="off", slots=10, **SMALL)
    ram = ledger.total_bytes
    group = start_group(wide, ram=ram, draft="off", **SMALL)
    with MemorySampler(group) as sampler:
        assert talk(group) == resident_answers
        assert counters_of(group)["slots"] == 10
        assert sampler.n_samples > 5
        assert ram - unused(ledger) < sampler.peak <= ram, sampler.peak_of

        lower = ram - 4 * 2 * MIB
        done = colibri("ram", str(lower), "--run-dir", str(group.run_dir), "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["budget"] == lower and report["started_with"] == ram
        assert report["slots"]["capacity"] == 6 and report["slots"]["used"] <= 6 and report["slots"]["leaving"] == 0
        assert report["held_sum"] <= sum(report["planned"].values()) <= lower
        sampler.reset()
        assert talk(group) == resident_answers
        assert lower - unused(ledger) < sampler.peak <= lower, sampler.peak_of

        told = colibri("ram", "--slot", "0", "--slot", "99:1", "--run-dir", str(group.run_dir))
        assert "Slot 0 (ram): " in told.stdout and " RESIDENT" in told.stdout.splitlines()[0], told.stderr
        assert "Expert 1 of layer 99 lies in no slot." in told.stdout

        too_low = colibri("ram", "64M", "--run-dir", str(group.run_dir))
        assert too_low.returncode == 78 and "at least 5 expert slots" in too_low.stderr and "missing" in too_low.stderr
        too_high = colibri("ram", "900T", "--run-dir", str(group.run_dir))
        assert too_high.returncode == 78 and "can be had" in too_high.stderr

        group.wait_replaced("expert_io", group.kill("expert_io"))
        group.wait_ready()
        assert counters_of(group)["slots"] == 6
        higher = ram + 40 * 2 * MIB
        assert colibri("ram", str(higher), "--run-dir", str(group.run_dir)).returncode == 0
        sampler.reset()
        assert talk(group) == resident_answers
        assert 47 <= counters_of(group)["resident"] <= counters_of(group)["slots"] == 50  # guesses may be given up
        assert lower < sampler.peak <= higher, sampler.peak_of


def test_a_smaller_budget_in_the_middle_of_an_answer(
    wide: Path, start_group: Callable[..., Group], resident_answers: list[list[int]]
) -> None:
    group = start_group(wide, draft="off", **SMALL)
    statement = plan_of(wide, draft="off", **SMALL).total_bytes
    assert group.tokens(topic(99, 250), 6) == resident_answers[-1]
    before = slots_bytes(group)
    events = group.stream(topic(0), 60)
    next(events)
    done = colibri("ram", str(statement - 90 * 2 * MIB), "--run-dir", str(group.run_dir))
    assert done.returncode == 0, done.stderr
    assert slots_bytes(group) <= before - 80 * 2 * MIB
    assert sum(1 for _ in events) > 0
    assert group.tokens(topic(0), 6) == resident_answers[0]


def test_the_peak_is_what_was_said_at_the_start(start_group: Callable[..., Group], tmp_path: Path) -> None:
    """G2: every slot used, the whole context used by every sequence."""
    settings = SMALL | {"kv_dtype": "f32", "draft": "off"}
    synthesise(tmp_path / "model", n_experts=80)
    ledger = plan_of(tmp_path / "model", **settings)
    statement = ledger.total_bytes
    group = start_group(tmp_path / "model", **settings)
    with MemorySampler(group) as sampler:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda number: group.tokens(topic(number, CONTEXT - 20), 16), (1, 2)))
        assert counters_of(group)["resident"] >= 237
    assert statement - unused(ledger) <= sampler.peak <= statement, (statement, sampler.peak, sampler.peak_of)
    remove(tmp_path / "model")


def test_all_experts_are_asked_for_and_some_fit(
    wide: Path, start_group: Callable[..., Group], resident_answers: list[list[int]]
) -> None:
    """G1: a budget for a tenth of them."""
    ram = plan_of(wide, draft="off", slots=10, **SMALL).total_bytes
    group = start_group(wide, ram=ram, slots="all", draft="off", **SMALL)
    assert "slots for all 96 experts would take 172 MiB more than the budget; 10 fit" in group.said
    assert counters_of(group)["slots"] == 10
    with MemorySampler(group) as sampler:
        assert talk(group, 2) == [*resident_answers[:2], resident_answers[-1]]
    assert sampler.peak <= ram, sampler.peak_of


def test_drafting_takes_its_memory_from_the_slots(start_group: Callable[..., Group], tmp_path: Path) -> None:
    """G5: the drafter, its cache and its larger records stay within the same budget."""
    model = tmp_path / "model"
    synthesise(model, n_experts=16, n_layers=3, has_mtp=True)
    ram = plan_of(model, draft=2, slots=12, **SMALL).total_bytes
    answers, slots_of = [], {}
    for draft in ("off", 2):
        planned = plan_of(model, draft=draft, ram_bytes=ram, **SMALL)
        group = start_group(model, ram=ram, draft=draft, **SMALL)
        slots_of[draft] = counters_of(group)["slots"]
        assert slots_of[draft] == planned.n_slots
        with MemorySampler(group) as sampler:
            answers.append(talk(group, 2))
        assert ram - unused(planned, 0.25) < sampler.peak <= ram, sampler.peak_of
        assert group.stop() == 0
    assert answers[0] == answers[1]
    assert slots_of["off"] > slots_of[2] == 12
    remove(model)


def test_bytes_per_token_of_context(start_group: Callable[..., Group], tmp_path: Path) -> None:
    """G9: what a longer context touches is latent and index keys, and nothing per head."""
    lengths = (1024, 2048, 4096, 8192)
    config = preset_config("tiny", 3) | {"max_position_embeddings": 8192 + 64}
    Synthesis(config, "int4").run(tmp_path / "model")
    group = start_group(tmp_path / "model", draft="off", max_sequences=1, max_context=8192 + 64)
    spec = make_plan(Settings(model=str(tmp_path / "model")), tmp_path, 0).spec
    mla = spec.main_attention
    per_token = 2 * sum(a.kv_rank + a.rope.dim + (a.indexer.dim if a.owns_indexer else 0) for a in mla)
    touched, own = [], []
    for n_tokens in lengths:
        group.tokens(topic(n_tokens, n_tokens - 2), 2)
        touched.append(mapped(group.pid("attention"), f"{group.run_id}-kv"))
        own.append(held_bytes(group)["attention"])
    for i in range(1, len(lengths)):
        slope = (touched[i] - touched[i - 1]) / (lengths[i] - lengths[i - 1])
        assert slope == pytest.approx(per_token, rel=0.05)
    size = (Path("/dev/shm") / next(p.name for p in Path("/dev/shm").glob(f"*{group.run_id}-kv"))).stat().st_size
    assert size == pytest.approx(blocks_for(8192 + 64) * 64 * per_token, rel=0.05)
    # Beside the cache: scores of at most 128 rows over the context.
    assert own[-1] - own[0] <= 128 * 4 * (lengths[-1] - lengths[0]) + 2 * MIB


def slots_bytes(group: Group) -> int:
    held = held_bytes(group)
    return held["expert_io"] + held.get("slab", 0)


def mapped(pid: int, name: str) -> int:
    """Bytes of a segment that the process has touched."""
    paragraphs = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    (found,) = [p for p in paragraphs if p.split("\n", 1)[0].endswith(name)]
    rss = re.search(r"^Rss:\s+(\d+) kB", found, re.MULTILINE)
    assert rss
    return int(rss[1]) * 1024


# ---- inside control groups ----------------------------------------------------------------------------------------


@pytest.fixture
def control_group() -> Iterator[Callable[[int | None], ControlGroup]]:
    """control_group(limit) -> a memory control group of ours; removed at the end."""
    reason = why_no_control_groups()
    if reason:
        pytest.skip(reason)
    made: list[ControlGroup] = []

    def make(limit: int | None) -> ControlGroup:
        made.append(ControlGroup(str(len(made)), limit))
        return made[-1]

    yield make
    for group in made:
        group.remove()


def group_inside(limits: ControlGroup, model: Path, run_dir: Path, **options: Any) -> Group:
    group = Group(model, run_dir, **options)
    group.argv = limits.wrap(group.argv)
    return group


@pytest.mark.parametrize(("limit", "is_cache_full"), [(512 * MIB, True), (None, False)])
def test_the_limit_of_a_control_group_makes_the_budget(
    limit: int | None,
    is_cache_full: bool,
    wide: Path,
    run_dir: Path,
    tmp_path: Path,
    control_group: Callable[[int | None], ControlGroup],
    resident_answers: list[list[int]],
) -> None:
    """G3: no explicit budget; the page cache of the group counts as free; nothing is killed."""
    limits = control_group(limit)
    if is_cache_full:
        assert limit
        filler = tmp_path / "filler"
        with filler.open("wb") as file:
            file.truncate(limit + limit // 4)
        limits.fill_cache(filler)
        filler_cache = limits.value("memory.stat", "total_cache")
        assert filler_cache > 0.9 * limit
    with group_inside(limits, wide, run_dir, draft="off", **SMALL) as group:
        budget = json.loads((run_dir / "group.json").read_text())["ram_bytes"]
        if limit:
            assert 0.78 * limit < budget < 0.86 * limit
        else:
            assert budget > 1 << 30
        with MemorySampler(group) as sampler:
            assert talk(group) == resident_answers
        assert sampler.peak <= budget
        report = json.loads(colibri("ram", "--run-dir", str(run_dir), "--json").stdout)
        assert [entry["limit"] for entry in report["limits"][:1]] == ([limit] if limit else [])
        assert limits.value("memory.oom_control", "oom_kill") == 0
        assert all(entry["n_starts"] == 1 for entry in group.processes()["services"].values())


def test_more_than_the_control_group_allows_is_refused(
    wide: Path, run_dir: Path, control_group: Callable[[int | None], ControlGroup]
) -> None:
    limits = control_group(512 * MIB)
    group = group_inside(limits, wide, run_dir, ram="2G")
    with pytest.raises(AssertionError, match=r"ended with 78") as caught:
        group.start()
    assert re.search(r"ram = 2\.00 GiB is asked for, [45]\d\d\.\d\d MiB are available now", str(caught.value))
    assert str(limits.limit_file) in str(caught.value)
    assert run_up("--run-dir", str(run_dir), "--status").returncode == 78


def test_the_page_cache_evicts_nobody(
    wide: Path,
    run_dir: Path,
    tmp_path: Path,
    control_group: Callable[[int | None], ControlGroup],
    resident_answers: list[list[int]],
) -> None:
    """G4: buffered reads of several times the limit."""
    limits = control_group(320 * MIB)
    config = tmp_path / "buffered.toml"
    config.write_text('direct_io = "off"\n')
    ram = plan_of(wide, draft="off", slots=10, **SMALL).total_bytes
    for file in wide.iterdir():  # pages are charged to the group that reads them first
        forget(file)
    with group_inside(limits, wide, run_dir, ram=ram, draft="off", config=config, **SMALL) as group:
        with MemorySampler(group) as sampler:
            before = counters_of(group)["bytes_demand"]
            while counters_of(group)["bytes_demand"] - before < 2 * 320 * MIB:
                assert talk(group, 2) == [*resident_answers[:2], resident_answers[-1]]
        counters = counters_of(group)
        assert counters["slots"] == 10 and counters["resident"] >= 8  # guesses may just have been given up
        assert sampler.peak <= ram, sampler.peak_of
        report = json.loads(colibri("ram", "--run-dir", str(run_dir), "--json").stdout)
        (limit,) = [entry for entry in report["limits"] if entry["file"] == str(limits.limit_file)]
        assert limit["cache"] > 32 * MIB
        assert report["held_sum"] <= ram
        assert limit["used"] - limit["cache"] <= ram


def forget(path: Path) -> None:
    """Takes a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
