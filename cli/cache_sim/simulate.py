"""Plays recorded layer visits against a policy, against Belady's optimum, and against a policy that knows one step ahead.

Pure. The rules are those of expert_io (``services/expert_io/visit.py``): what a visit finds is held until it has been
used, decode rows' experts are loaded before those of prompts alone and are in slots at once when they fit; what does not fit,
and a prompt's experts beyond their part of the slots, come in waves. Prefetching is left out: it brings hits sooner, not more
of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.experts.residency import POLICIES, Key, NextUse, Policy, Ranking, passing_limit
from shared.experts.traces import TraceStep

OPTIMUM = "optimum"
ONE_STEP_AHEAD = "one-step-ahead"
IMPOSSIBLE = (OPTIMUM, ONE_STEP_AHEAD)
"""Bounds, not policies: they know what comes."""
NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Visit:
    """One layer of one step. ``wanted``: experts of decode rows; ``passing``: of prompt rows alone, with the share of them."""

    layer: int
    wanted: tuple[int, ...]
    passing: dict[int, float]

    @property
    def is_alone(self) -> bool:
        """No row decodes."""
        return not self.wanted

    @property
    def union(self) -> set[Key]:
        return {(self.layer, e) for e in (*self.wanted, *self.passing)}


@dataclass
class Score:
    """What a run counted, over all visits and over the experts that decode rows wanted."""

    asked: int = 0
    hits: int = 0
    decode_asked: int = 0
    decode_hits: int = 0
    bytes_read: int = 0

    def count(self, visit: Visit, hits: set[Key], record_bytes: int) -> None:
        """One visit, which found ``hits`` of its union resident."""
        n = len(visit.wanted) + len(visit.passing)
        self.asked += n
        self.hits += len(hits)
        self.decode_asked += len(visit.wanted)
        self.decode_hits += sum((visit.layer, e) in hits for e in visit.wanted)
        self.bytes_read += (n - len(hits)) * record_bytes

    def __add__(self, other: Score) -> Score:
        return Score(*(a + b for a, b in zip(self._cells(), other._cells(), strict=True)))

    def _cells(self) -> tuple[int, ...]:
        return self.asked, self.hits, self.decode_asked, self.decode_hits, self.bytes_read

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)

    @property
    def decode_hit_rate(self) -> float:
        return self.decode_hits / max(1, self.decode_asked)


def visits_of(steps: Iterable[TraceStep]) -> list[Visit]:
    """The layer visits of a trace, in order."""
    visits = []
    for step in steps:
        n_prefill = step.n_prefill
        for choice in step.layers:
            n_decode = len(choice.ids) - n_prefill
            wanted = sorted(set(choice.ids[:n_decode].ravel().tolist()))
            rows: dict[int, int] = {}
            for expert in choice.ids[n_decode:].ravel().tolist():
                rows[expert] = rows.get(expert, 0) + 1
            passing = {e: n / n_prefill for e, n in sorted(rows.items()) if e not in set(wanted)}
            visits.append(Visit(choice.layer, tuple(wanted), passing))
    return visits


def run(name: str, visits: Sequence[Visit], n_slots: int, layers: Sequence[int], record_bytes: dict[int, int]) -> Score:
    """One policy, or one of ``IMPOSSIBLE``, from empty slots."""
    if name == OPTIMUM:
        return optimum(visits, n_slots, record_bytes)
    if name == ONE_STEP_AHEAD:
        return simulate(OneStepAhead(n_slots, layers, visits), visits, n_slots, record_bytes)
    return simulate(POLICIES[name](n_slots, layers), visits, n_slots, record_bytes)


def simulate(policy: Policy, visits: Sequence[Visit], n_slots: int, record_bytes: dict[int, int]) -> Score:
    """The policy at work, starting with empty slots."""
    score = Score()
    resident: set[Key] = set()
    for visit in visits:
        layer = visit.layer
        limit = passing_limit(n_slots, visit.is_alone)
        policy.visit(layer, not visit.is_alone)
        held: list[Key] = []
        n_passing = 0
        hits = visit.union & resident
        for key in sorted(hits):
            policy.asked(key, visit.passing.get(key[1]), True)
            policy.discard(key)
            held.append(key)
        for expert in (*visit.wanted, *visit.passing):
            key = (layer, expert)
            if key in hits:
                continue
            is_passing = expert in visit.passing
            while len(resident) >= n_slots:
                victim = None if is_passing and n_passing >= limit else policy.victim()
                if victim is not None:
                    policy.evicted(victim)
                    resident.remove(victim)
                    break
                # What has arrived is computed and becomes a candidate: the next wave.
                for done in held:
                    policy.add(done)
                held.clear()
                n_passing = 0
            policy.asked(key, visit.passing.get(expert), False)
            resident.add(key)
            held.append(key)
            n_passing += is_passing
        for key in held:
            policy.add(key)
        score.count(visit, hits, record_bytes[layer])
    return score


def optimum(visits: Sequence[Visit], n_slots: int, record_bytes: dict[int, int]) -> Score:
    """The most hits that any choice of victims gives: always the resident whose next use is farthest.

    Method: Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966; on visits
    instead of single uses: a visit's experts can't be its victims when they are in slots at once. When they come in waves,
    whatever is there or came by may be left over, also where the order of the waves would forbid it: an upper bound.
    """
    next_use: list[dict[Key, int]] = [{}] * len(visits)
    coming: dict[Key, int] = {}
    for i in range(len(visits) - 1, -1, -1):
        union = visits[i].union
        next_use[i] = {key: coming.get(key, NEVER) for key in union}
        coming |= dict.fromkeys(union, i)
    score = Score()
    resident: set[Key] = set()
    order = Ranking()
    for visit, following in zip(visits, next_use, strict=True):
        hits = following.keys() & resident
        in_waves = len(following) > n_slots or len(visit.passing) > passing_limit(n_slots, visit.is_alone)
        must_stay = set() if in_waves else set(following)
        for key, then in following.items():
            order.put(key, -then)
        for key in must_stay:
            order.discard(key)
        resident |= following.keys()
        while len(resident) > n_slots:
            farthest = order.lowest()
            assert farthest is not None
            order.discard(farthest[1])
            resident.remove(farthest[1])
        for key in must_stay:
            order.put(key, -following[key])
        score.count(visit, hits, record_bytes[visit.layer])
    return score


class OneStepAhead(NextUse):
    """A bound for predictors: knows exactly what each layer's next visit wants, and beyond that as much as ``NextUse``."""

    name = ONE_STEP_AHEAD

    def __init__(self, n_slots: int, layers: Sequence[int], visits: Sequence[Visit]) -> None:
        super().__init__(n_slots, layers)
        self._coming: dict[int, deque[set[Key]]] = {layer: deque() for layer in self.layers}
        for visit in visits:
            self._coming[visit.layer].append(visit.union)
        self._next: dict[int, set[Key]] = {layer: set() for layer in self.layers}
        self._candidates: dict[int, set[Key]] = {layer: set() for layer in self.layers}

    def visit(self, layer: int, is_decode: bool) -> None:
        super().visit(layer, is_decode)
        coming = self._coming[layer]
        coming.popleft()
        self._next[layer] = coming[0] if coming else set()
        for key in list(self._candidates[layer]):
            self.add(key)

    def add(self, key: Key) -> None:
        self._candidates[key[0]].add(key)
        if key in self._next[key[0]]:
            super().discard(key)
        else:
            super().add(key)

    def discard(self, key: Key) -> None:
        self._candidates[key[0]].discard(key)
        super().discard(key)

    def victim(self) -> Key | None:
        unneeded = super().victim()
        if unneeded:
            return unneeded
        n_layers = len(self.layers)
        for back in range(n_layers):  # the layer that was just passed comes last
            candidates = self._candidates[self.layers[(self._at - back) % n_layers]]
            if candidates:
                return min(candidates)
        return None
