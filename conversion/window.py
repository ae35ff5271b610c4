"""In which order the shards of a checkpoint are fetched, when they can't all lie on the disk at once. Pure.

A *need* is the set of shards that hold what one tensor or one expert of the container is made from. A shard is held until
everything that needs it is made; needs that span two shards keep the first one while the second comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

Need = frozenset[str]


def order_of(needs: Collection[Need], first: Sequence[Need] = ()) -> list[str]:
    """Every shard that is needed, once: by name, but what completes a need that has begun goes first.

    ``first``: needs to be met before all others.
    """
    order: list[str] = []
    held: set[str] = set()
    pending = set(needs) | set(first)

    def take(shard: str) -> None:
        order.append(shard)
        held.add(shard)
        pending.difference_update({need for need in pending if need <= held})

    for need in first:
        for shard in sorted(need - held):
            take(shard)
    while pending:
        begun = [need - held for need in pending if need & held]
        candidates = min(begun, key=lambda missing: (len(missing), sorted(missing))) if begun else _all(pending)
        take(min(candidates))
    return order


def releases(order: Sequence[str], needs: Collection[Need]) -> list[list[str]]:
    """After each shard of ``order``: which are needed no more."""
    place = {shard: i for i, shard in enumerate(order)}
    last = dict(place)
    for need in needs:
        done = max(place[shard] for shard in need)
        for shard in need:
            last[shard] = max(last[shard], done)
    return [[shard for shard in order if last[shard] == i] for i in range(len(order))]


def peak_bytes(order: Sequence[str], needs: Collection[Need], sizes: Mapping[str, int], n_ahead: int) -> int:
    """The most bytes of shards that lie on the disk at once, when ``n_ahead`` are fetched before they are needed."""
    peak = held = n_fetched = 0
    for i, gone in enumerate(releases(order, needs)):
        while n_fetched < min(i + 1 + n_ahead, len(order)):
            held += sizes[order[n_fetched]]
            n_fetched += 1
        peak = max(peak, held)
        held -= sum(sizes[shard] for shard in gone)
    return peak


def _all(needs: Iterable[Need]) -> set[str]:
    return set().union(*needs)
