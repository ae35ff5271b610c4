"""Who holds experts and computes makes no difference to the deciders, nor to the text: a second engine, alone and beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.expert_io.cpu_engine import CpuEngine
from services.expert_io.engine import ExpertEngine
from services.expert_io.events import Compute, Event
from services.expert_io.state import StoreState
from shared.messages.control import RamWanted
from tests.oracle import oracle_array
from tests.support.engines import FakeDevice, use_engines
from tests.support.ring import Ring

Converted = Callable[[str, str], Path]
NAME = "deepseek_v3"


class Device(FakeDevice):
    n_slots = 9


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Every store checks its invariants after each event; the events in order."""
    seen: list[Event] = []
    handle = StoreState.handle

    def checking(state: StoreState, event: Event):  # type: ignore[no-untyped-def]
        seen.append(event)
        yield from handle(state, event)
        state.check()

    monkeypatch.setattr(StoreState, "handle", checking)
    return seen


@pytest.mark.parametrize(
    "kinds", [(Device,), (Device, CpuEngine), (CpuEngine, Device)], ids=lambda kinds: str(len(kinds))
)
@pytest.mark.parametrize(
    "options", [{}, {"pilot": "random", "n_drafts": 2, "shuffle": 3, "prefill_chunk": 7}], ids=["plain", "all"]
)
def test_the_text_is_the_same_whoever_computes(
    kinds: tuple[type[ExpertEngine], ...],
    options: dict[str, object],
    converted: Converted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checked: list[Event],
) -> None:
    model, prompt = converted(NAME, "int8"), oracle_array(NAME, "prompt_ids").tolist()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 10).tokens
    use_engines(monkeypatch, *kinds)
    checked.clear()
    with Ring(model, tmp_path, n_slots=7, **options) as ring:
        store = ring.store
        started: set[int] = set()
        for engine in store.engines:
            start = engine.start

            def counted(order: Compute, work: object, start=start) -> None:  # type: ignore[no-untyped-def]
                started.add(order.tier)
                start(order, work)

            engine.start = counted
        assert ring.generate(prompt, 10).tokens == expected
        assert started == set(range(len(kinds))), "each had its part"
        table = store.state.table
        assert [tier.name for tier in table.tiers] == [kind.tier(ring.config, 7).name for kind in kinds]
        assert table.capacity == sum(tier.capacity for tier in table.tiers) and table.n_evicted > 0
        if len(kinds) > 1:  # the budget is the host memory's
            ram = store.change_ram(RamWanted(0, 1))
            assert not ram.refusal and ram.n_slots == 7
            at_once = next(engine for engine in store.engines if isinstance(engine, FakeDevice)).seen
            assert "several at once" in at_once
        assert ring.generate(prompt, 10).tokens == expected


def test_a_peer_may_be_lost_while_an_engine_computes(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: list[Event]
) -> None:
    """The abandoned visit's experts stay where they are until the engine lets go, and the replay is exact."""
    model, prompt = converted(NAME, "int8"), oracle_array(NAME, "prompt_ids").tolist()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 8).tokens
    use_engines(monkeypatch, Device)
    for n_steps in (30, 95, 160):
        with Ring(model, tmp_path, n_slots=7) as ring:
            state, engine = ring.store.state, ring.engine
            ring.submit("r", prompt, max_tokens=8, ignore_eos=True)
            for _ in range(n_steps):
                ring.step()
            engine.is_stuck = True
            while not state.is_computing:
                ring.step()
            ring.kill("attention")
            ring.start("attention")
            for _ in range(40):  # the replay reaches the store and waits there
                ring.step()
            assert state.has_orphans
            engine.is_stuck = False
            ring.run()
            assert ring.answers["r"].tokens == expected


def test_an_engine_that_is_lost_ends_requests_with_its_own_words_and_the_next_ones_are_served(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: list[Event]
) -> None:
    model, prompt = converted(NAME, "int8"), oracle_array(NAME, "prompt_ids").tolist()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 3).tokens
    use_engines(monkeypatch, Device)
    with Ring(model, tmp_path) as ring:
        engine = ring.engine
        engine.loses_every = 1
        done = ring.generate(prompt, 3).done
        assert done is not None and (done.reason, done.error_code) == ("error", "kernel_failed")
        assert done.error == "The device does not answer."
        engine.loses_every = 0
        assert ring.generate(prompt, 3).tokens == expected
