"""The order of shards: each once, few at a time, and what has begun is finished first."""

from __future__ import annotations

import random

import pytest

from conversion.window import Need, order_of, peak_bytes, releases


def need(*shards: int) -> Need:
    return frozenset(f"{shard:03d}" for shard in shards)


def names(*shards: int) -> list[str]:
    return [f"{shard:03d}" for shard in shards]


SIZES = {f"{i:03d}": 10 for i in range(200)}


def test_shards_in_their_order_hold_two_at_most() -> None:
    """As large checkpoints are: everything in one shard, or across the border to the next."""
    needs = {need(i) for i in range(100)} | {need(i, i + 1) for i in range(99)}
    order = order_of(needs)
    assert order == names(*range(100))
    assert releases(order, needs)[:3] == [[], names(0), names(1)]
    assert releases(order, needs)[-1] == names(98, 99)
    assert peak_bytes(order, needs, SIZES, 0) == 20
    assert peak_bytes(order, needs, SIZES, 1) == 30


def test_what_has_begun_is_finished_first() -> None:
    needs = {need(0, 7), need(1), need(2), need(3)}
    order = order_of(needs)
    assert order == names(0, 7, 1, 2, 3)
    assert peak_bytes(order, needs, SIZES, 0) == 20


def test_what_must_come_first() -> None:
    needs = {need(i) for i in range(6)}
    order = order_of(needs, [need(0, 5)])
    assert order == names(0, 5, 1, 2, 3, 4)
    assert releases(order, [*needs, need(0, 5)])[:3] == [[], names(0, 5), names(1)]


def test_shards_that_nothing_needs_are_left() -> None:
    assert order_of({need(3), need(9)}) == names(3, 9)
    assert order_of(set()) == []
    assert peak_bytes([], set(), {}, 1) == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_needs(seed: int) -> None:
    """Each shard once; a shard is there when something needs it, and goes when nothing does any more."""
    rng = random.Random(seed)
    needs = {need(*rng.sample(range(30), rng.randint(1, 4))) for _ in range(rng.randint(1, 40))}
    order = order_of(needs)
    assert sorted(order) == sorted(set().union(*needs))
    held: set[str] = set()
    pending = set(needs)
    most = 0
    for shard, gone in zip(order, releases(order, needs)):
        held.add(shard)
        most = max(most, 10 * len(held))
        pending -= {each for each in pending if each <= held}
        held -= set(gone)
        assert all(held & each == each & set(order[: order.index(shard) + 1]) for each in pending)
        assert held == {each for each in held if any(each in waiting for waiting in pending)}
    assert not held and not pending
    assert peak_bytes(order, needs, SIZES, 0) == most
