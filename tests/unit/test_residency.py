"""The residency policies: each keeps its order under any use, and the victim is always a candidate."""

from __future__ import annotations

import random

import pytest

from shared.experts.residency import POLICIES, DecayedLfu, KeepAll, Key, Lru, NextUse, Policy, SegmentedLru, make_policy
from tests.support import inside

LAYERS = (1, 2, 3)


def use(policy: Policy, key: Key, share: float | None = None, *, is_hit: bool = False) -> None:
    policy.discard(key)
    policy.asked(key, share, is_hit)
    policy.add(key)


def drain(policy: Policy) -> list[Key]:
    out = []
    while (key := policy.victim()) is not None:
        policy.evicted(key)
        out.append(key)
    return out


@pytest.mark.parametrize("name", POLICIES)
def test_the_victim_is_a_candidate_at_all_times_and_every_candidate_can_leave(name: str) -> None:
    rng = random.Random(name)
    policy = POLICIES[name](12, LAYERS)
    candidates: set[Key] = set()
    for _ in range(5000):
        layer = rng.choice(LAYERS)
        policy.visit(layer, rng.random() < 0.7)
        key = (layer, rng.randrange(10))
        policy.discard(key)
        policy.asked(key, rng.choice([None, 0.1, 1.0]), key in candidates)
        candidates.discard(key)
        if rng.random() < 0.9:
            policy.add(key)
            candidates.add(key)
        victim = policy.victim()
        assert (victim in candidates) if candidates else victim is None
        if victim and len(candidates) > 12:
            policy.evicted(victim)
            candidates.remove(victim)
    assert set(drain(policy)) == candidates
    assert policy.victim() is None


def test_lru_gives_up_the_longest_unused_and_prompts_before_all() -> None:
    policy = Lru(8, LAYERS)
    for i, key in enumerate([(1, 0), (2, 0), (3, 0), (1, 1)]):
        policy.visit(key[0], True)
        use(policy, key, 0.5 if i == 3 else None)
    policy.visit(1, True)
    use(policy, (1, 0), is_hit=True)
    policy.visit(2, False)
    use(policy, (2, 0), 0.9, is_hit=True)  # a prompt's use of what is there does not make it younger
    assert drain(policy) == [(1, 1), (2, 0), (3, 0), (1, 0)]


def test_segmented_lru_protects_what_was_used_twice_within_its_share() -> None:
    policy = SegmentedLru(5, LAYERS)  # four protected
    for e in range(5):
        policy.visit(1, True)
        use(policy, (1, e))
        policy.visit(1, True)
        use(policy, (1, e), is_hit=True)
    policy.visit(1, True)
    use(policy, (1, 9))
    # (1, 0) was demoted when the fifth was promoted; then the protected ones by age.
    assert drain(policy) == [(1, 0), (1, 9), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_decayed_frequency_weighs_uses_by_age() -> None:
    policy = DecayedLfu(8, LAYERS, half_life=4)
    for step in range(40):
        for layer in LAYERS:
            policy.visit(layer, True)
            if layer == 1 and step < 10:
                use(policy, (1, 0))
            if layer == 1 and step in (38, 39):
                use(policy, (1, 1))
    assert policy.frequency((1, 0)) < 0.1 < 1 < policy.frequency((1, 1)) <= 2
    assert drain(policy) == [(1, 0), (1, 1)]
    for _ in range(3 * 4 * 3):
        policy.visit(1, False)
    assert policy.frequency((1, 1)) > 1, "prompts do not make the decode set older"


def test_next_use_knows_that_the_layers_come_in_turn() -> None:
    policy = NextUse(8, LAYERS)
    for layer in LAYERS:
        policy.visit(layer, True)
        use(policy, (layer, 0))
    # Equally warm; layer 3 has just begun, so its own come last of all, then layer 2's.
    assert drain(policy) == [(3, 0), (2, 0), (1, 0)]
    for layer in LAYERS:
        policy.add((layer, 0))
    policy.visit(1, True)
    assert policy.victim() == (1, 0)


def test_next_use_prefers_chance_to_place() -> None:
    policy = NextUse(8, LAYERS)
    for step in range(6):
        for layer in LAYERS:
            policy.visit(layer, True)
            if layer == 3 or step == 5:
                use(policy, (layer, 0))
    assert drain(policy) == [(2, 0), (1, 0), (3, 0)]


@pytest.mark.parametrize("kind", [NextUse, DecayedLfu])
def test_frequencies_do_not_overflow_and_what_was_known_before_gives_the_first_order(kind: type[Policy]) -> None:
    policy = kind(8, LAYERS)
    policy.restore({(1, 5): 0.02, (1, 6): 0.0, (1, 7): 0.05})
    for e in (5, 6, 7):
        policy.add((1, e))
    policy.visit(1, True)
    use(policy, (1, 1))
    assert drain(policy) == [(1, 6), (1, 5), (1, 7), (1, 1)]
    for _ in range(200_000):
        policy.visit(1, True)
    use(policy, (1, 2))
    assert policy.frequency((1, 1)) < 1e-30 < policy.frequency((1, 2))
    assert policy.victim() == (1, 2)


def test_the_heap_does_not_grow_with_uses() -> None:
    policy = NextUse(8, LAYERS)
    for _ in range(20_000):
        policy.visit(1, True)
        use(policy, (1, 1))
        use(policy, (1, 2))
    assert inside.ranking_entries(policy) < 200


def test_slots_for_every_expert_need_no_policy() -> None:
    assert isinstance(make_policy("lru", 30, LAYERS, 10), KeepAll)
    assert isinstance(make_policy("lru", 29, LAYERS, 10), Lru)
    policy = make_policy("next-use", 30, LAYERS, 10)
    use(policy, (1, 1))
    assert policy.victim() is None
