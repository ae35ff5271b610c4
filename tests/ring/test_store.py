"""The expert store at work: text does not depend on slots, policy or guesses, and each expert is read at most once a visit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.residency import POLICIES
from tests.oracle import oracle_array
from tests.support.ring import Ring

Converted = Callable[[str, str], Path]


def reads_of(ring: Ring) -> list[tuple[int, int, int]]:
    """Watches the store: fills the list with (step, layer, expert) of every demand read."""
    seen: list[tuple[int, int, int]] = []
    service = ring.services["expert_io"]
    start = service._store.start_read

    def counted(slot: Any, *, speculative: bool) -> None:
        if not speculative:
            seen.append((service._visit.step, *slot.key))
        start(slot, speculative=speculative)

    service._store.start_read = counted
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
