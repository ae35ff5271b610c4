"""The expert store at work: text does not depend on slots, policy or guesses, and each expert is read at most once a visit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from services.expert_io.events import Read
from shared.experts.residency import POLICIES
from shared.messages.control import RamWanted
from tests.oracle import oracle_array
from tests.support.ring import Ring

Converted = Callable[[str, str], Path]


def reads_of(ring: Ring) -> list[tuple[int, int, int]]:
    """Watches the store: fills the list with (step, layer, expert) of every demand read."""
    seen: list[tuple[int, int, int]] = []
    service = ring.store
    [engine] = service.engines
    start = engine.read

    def counted(order: Read) -> None:
        if not order.is_speculative:
            seen.append((service.state.visit.step, *order.key))
        start(order)

    engine.read = counted
    return seen


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_few_slots_long_prompts_one_read_per_visit(
    policy: str, chunk: int, converted: Converted, tmp_path: Path
) -> None:
    model = converted("deepseek_v3", "int8")
    prompt = (oracle_array("deepseek_v3", "prompt_ids").tolist() * 9)[:200]
    with Ring(model, tmp_path, prefill_chunk=64) as ring:
        resident = ring.generate(prompt, 4).tokens
    with Ring(model, tmp_path, prefill_chunk=chunk, cache_policy=policy, n_slots=ring.spec.gate_k + 1) as ring:
        reads = reads_of(ring)
        assert ring.generate(prompt, 4).tokens == resident
        assert reads and max(Counter(reads).values()) == 1


def test_the_store_is_told_which_rows_are_a_prompts(converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v3", "int8")
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()
    wanted: list[tuple[int, int]] = []

    def watch(sender: str, receiver: str, msg: object) -> bool:
        if type(msg).__name__ == "ExpertsWanted":
            wanted.append((msg.n_rows, msg.n_prefill))  # type: ignore[attr-defined]
        return True

    with Ring(model, tmp_path, prefill_chunk=16) as ring:
        ring.on_deliver = watch
        ring.submit("a", prompt[:1], max_tokens=30, ignore_eos=True)
        while len(wanted) < 8 * len(ring.spec.moe_layers):
            ring.step()
        ring.submit("b", prompt[:20], max_tokens=2, ignore_eos=True)
        ring.run()
    assert set(wanted) == {(1, 0), (17, 16), (5, 4), (2, 0)}
    n_layers = sum(layer < ring.spec.n_layers for layer in ring.spec.moe_layers)
    assert wanted.count((17, 16)) == wanted.count((5, 4)) == n_layers


def warm(ring: Ring) -> int:
    """Lets the store's idle time pass; returns how many experts lie in slots."""
    store = ring.store
    store.tick()
    while store.state.filling.in_flight:
        ring.step()
    return store.state.table.n_used  # type: ignore[no-any-return]


def test_a_new_store_fills_its_slots_in_order_of_use_before_anybody_asks(converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v3", "int8")
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()
    usage = tmp_path / "state" / "usage"
    n_slots = 24
    with Ring(model, tmp_path, n_slots=n_slots, usage_path=str(usage)) as ring:
        assert warm(ring) == 0, "there is nothing to know yet"
        first = ring.generate(prompt, 12).tokens
        cold = ring.counters("expert_io")
        assert not usage.exists(), "written at most once a minute and at the end"
    assert usage.stat().st_mode & 0o777 == 0o600
    with Ring(model, tmp_path, n_slots=n_slots, usage_path=str(usage)) as ring:
        store = ring.store
        expected = list(store.history.usage.expected())[:n_slots]
        assert warm(ring) == n_slots
        assert {slot.key for slot in store.state.table.slots} == set(expected)
        assert store.counters.get("warm_reads") == n_slots == store.counters.get("reads")
        assert ring.generate(prompt, 12).tokens == first
        assert store.counters.get("misses") < cold["misses"]


def test_demand_does_not_wait_for_a_store_that_warms_up(converted: Converted, tmp_path: Path) -> None:
    """A request in the middle of warming: same text; an expert that is on its way is not read twice."""
    model = converted("deepseek_v3", "int8")
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()
    usage = tmp_path / "usage"
    with Ring(model, tmp_path, usage_path=str(usage)) as ring:
        first = ring.generate(prompt, 12).tokens
    with Ring(model, tmp_path, usage_path=str(usage)) as ring:
        store = ring.store
        store.tick()
        assert store.state.filling.in_flight
        assert ring.generate(prompt, 12).tokens == first
        warm(ring)
        counters = store.counters.read()
        n_reads = counters["misses"] + counters["warm_reads"] + counters["ahead_reads"]
        assert counters["reads"] == n_reads == counters["resident"] + counters["ahead_wasted"]


def test_without_a_history_nothing_is_written_and_with_one_at_most_once_a_minute(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.expert_io import history

    model = converted("deepseek_v3", "int8")
    saved: list[Path] = []
    now = [history.time.monotonic()]
    monkeypatch.setattr(history, "save_usage", lambda path, *_: saved.append(path))
    monkeypatch.setattr(history.time, "monotonic", lambda: now[0])
    for path in (None, tmp_path / "usage"):
        saved.clear()
        with Ring(model, tmp_path, usage_path=path and str(path)) as ring:
            for _ in range(10):
                ring.generate([1, 2, 3], 2)
                now[0] += 13.0
                ring.store.tick()
            ring.generate([1, 2, 3], 2)
        assert len(saved) == (3 if path else 0), "two full minutes and the end"
    assert not list(tmp_path.glob("usage*"))


def test_a_damaged_expert_found_while_warming_harms_nobody(converted: Converted, tmp_path: Path) -> None:
    import shutil

    from shared.container.reader import Container

    model = tmp_path / "model"
    shutil.copytree(converted("deepseek_v3", "int8"), model)
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()
    usage = tmp_path / "usage"
    with Ring(model, tmp_path, usage_path=str(usage)) as ring:
        ring.generate(prompt, 4)
        layer, expert = next(iter(ring.store.history.usage.expected()))
    file = Container.open(model).experts[layer]
    with file.path.open("r+b") as out:
        out.seek(file.offset_of(expert) + 100)
        out.write(b"\x55\xaa" * 50)
    with Ring(model, tmp_path, usage_path=str(usage)) as ring:
        store = ring.store
        warm(ring)
        assert store.state.table.find((layer, expert)) is None and store.counters.get("read_errors") == 1
        done = ring.generate(prompt, 4).done
        assert done is not None and done.error_code == "expert_checksum_mismatch"


@pytest.mark.parametrize("pilot", ["on", "random"])
def test_the_account_of_guesses_adds_up(pilot: str, converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v3", "int8")
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()
    with Ring(model, tmp_path, n_slots=20) as ring:
        expected = ring.generate(prompt[:3], 40).tokens
    with Ring(model, tmp_path, n_slots=20, pilot=pilot) as ring:
        assert ring.generate(prompt[:3], 40).tokens == expected
        store = ring.store
        counters = ring.store_counters()
        table, account = store.state.table, store.state.guessing.account
        assert counters["pilot_reads"] > 0
        undecided = table.n_open_guesses + table.n_stale
        assert counters["pilot_reads"] == counters["pilot_useful"] + counters["pilot_wasted"] + undecided
        assert 0 < counters["pilot_right"] < counters["pilot_wanted"]
        recall = counters["pilot_right"] / counters["pilot_wanted"]
        assert (recall > 0.5) == (pilot == "on")
        assert counters["pilot_saved_ns"] > 0
        layers = [layer for layer in ring.spec.moe_layers if layer < ring.spec.n_layers]
        named = {signal: sorted(layer for layer, s in account.recall_of if s == signal) for signal in (0, 1)}
        assert named[0] == layers[1:], "the first layer has no layer before it that could guess for it"
        assert named[1] == (layers if pilot == "on" else []), "its own input every layer has"
        if pilot == "on":
            early, late = ([account.recall_of[layer, signal] for layer in layers[1:]] for signal in (0, 1))
            assert sum(right for right, _ in late) > sum(right for right, _ in early), "the later signal knows more"


def test_a_prompt_is_read_ahead_layer_by_layer_and_nothing_twice(converted: Converted, tmp_path: Path) -> None:
    """Chunks that want most experts: the next layer's are read while this one computes; a chunk reads each once at most."""
    model = converted("deepseek_v3", "int8")
    prompt = (oracle_array("deepseek_v3", "prompt_ids").tolist() * 9)[:192]
    with Ring(model, tmp_path, prefill_chunk=64) as ring:
        expected = ring.generate(prompt, 4).tokens
        spec = ring.spec
    layers = [layer for layer in spec.moe_layers if layer < spec.n_layers]
    n_slots = len(layers) * spec.n_experts * 3 // 4
    with Ring(model, tmp_path, prefill_chunk=64, n_slots=n_slots, n_drafts=1) as ring:
        store = ring.store
        reads: Counter[tuple[int, int]] = Counter()
        [engine] = store.engines
        start = engine.read
        step = [0]

        def counted(order: Read) -> None:
            visit = store.state.visit
            if visit and visit.step != step[0]:
                step[0] = visit.step
                reads.clear()
            reads[order.key] += 1
            assert reads[order.key] == 1, "twice in one chunk"
            assert order.key[0] in layers or not order.is_speculative, "the MTP layer is not part of a chunk"
            start(order)

        engine.read = counted
        assert ring.generate(prompt, 4).tokens == expected
        counters = ring.store_counters()
    assert counters["ahead_reads"] > 0
    assert counters["ahead_useful"] > 0.8 * counters["ahead_reads"]
    assert counters["ahead_useful"] + counters["ahead_wasted"] <= counters["ahead_reads"]
    assert counters["pilot_useful"] == counters["pilot_wasted"] == 0


def test_while_guessing_rests_the_router_makes_no_guess(converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v3", "int8")
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()[:3]
    hints: list[int] = []

    def watch(sender: str, receiver: str, msg: object) -> bool:
        if type(msg).__name__ == "PilotHint":
            hints.append(msg.layer)  # type: ignore[attr-defined]
        return True

    with Ring(model, tmp_path, n_slots=20, pilot="on") as ring:
        ring.on_deliver = watch
        trial = ring.store.state.guessing.trial
        n_visits = sum(layer < ring.spec.n_layers for layer in ring.spec.moe_layers)
        ring.generate(prompt, 200)
        assert 0 < len(hints) < 199 * (2 * n_visits - 1), "steps without guesses have passed"
        trial.is_on, trial.rest_left = False, 10_000
        ring.generate(prompt, 2)  # whose first visit tells the router
        hints.clear()
        tokens = ring.generate(prompt, 10).tokens
        assert not hints
    with Ring(model, tmp_path) as ring:
        assert ring.generate(prompt, 10).tokens == tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_stays_while_the_budget_changes(policy: str, converted: Converted, tmp_path: Path) -> None:
    """Before every step another budget, from the least that is possible to all experts; prompts come in waves."""
    model = converted("deepseek_v3", "int8")
    prompt = (oracle_array("deepseek_v3", "prompt_ids").tolist() * 9)[:100]
    with Ring(model, tmp_path, prefill_chunk=16) as ring:
        resident = ring.generate(prompt, 12).tokens
    with Ring(model, tmp_path, prefill_chunk=16, cache_policy=policy, ram_bytes=1 << 30) as ring:
        service = ring.store
        least, most = ring.spec.gate_k + 1, ring.config.n_slots
        sizes = itertools.cycle((least, most, most // 2, least + 3))
        seen = []

        def change(sender: str, receiver: str, msg: object) -> bool:
            if type(msg).__name__ == "ExpertsWanted" and receiver == "expert_io" and msg.layer % 2:  # type: ignore[attr-defined]
                ram = service.change_ram(RamWanted(next(sizes) * ring.config.slot_bytes, 3))
                assert not ram.refusal and ram.asker == 3
                assert service.state.table.n_used <= service.state.table.capacity + ram.n_leaving
                seen.append(ram.n_slots)
            return True

        ring.on_deliver = change
        assert ring.generate(prompt, 12).tokens == resident
        assert {least, most // 2, most} <= set(seen)
        refused = service.change_ram(RamWanted((least - 1) * ring.config.slot_bytes, 4))
        told = service.change_ram(RamWanted(0, 5, ((-1, 0), (99, 0))))
        assert sum(n for _, n in told.states) == len(service.state.table.slots)
        assert told.stories[0].startswith("Slot 0 (ram): ") and "ExpertsChosen of step" in told.stories[0]
        assert told.stories[1] == "Expert 0 of layer 99 lies in no slot."
        assert f"at least {least} expert slots" in refused.refusal and refused.n_slots == seen[-1]
