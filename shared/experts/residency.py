"""Which experts stay in memory: the policies that choose who must leave. Pure; used by expert_io and ``colibri cache-sim``.

An expert is a key ``(layer, expert)``. A policy hears of every layer visit (``visit``) and of every expert that the gates ask
for (``asked``), and orders the *candidates*: residents that nobody uses at the moment (``add``, ``discard``). ``victim`` names
the one to give up, in O(log n) and, in the default policy, one comparison per layer. What a policy decides changes how often
the disk is read, never a result.

Prompts visit nearly every expert once; would each count like a decode use, one long prompt would flush what other sequences
decode with. So what only rows of a prompt want enters at the cold end where recency decides, and where uses are counted it
weighs ``PREFILL_WEIGHT`` times the share of the prompt's rows that chose it.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

Key = tuple[int, int]

HALF_LIFE_STEPS = 8.0
"""Steps until a use counts half. Chosen on recorded traces (docs/store-measurements.md)."""
PREFILL_WEIGHT = 3.0
PASSING_SHARE = 0.125
"""Part of the slots that experts wanted by a prompt alone may hold at once beside decode rows, when no slot is free ..."""
ALONE_SHARE = 0.5
"""... and when no row of the step decodes: enough to read and compute at the same time ..."""
MIN_PASSING = 8
"""... but never fewer than these, or the disk would wait for the kernels."""


def passing_limit(n_slots: int, is_alone: bool) -> int:
    """How many slots a prompt's experts may hold at once; the rest of them wait their turn. ``is_alone``: no row decodes."""
    return min(n_slots, max(MIN_PASSING, int(n_slots * (ALONE_SHARE if is_alone else PASSING_SHARE))))


class Policy(ABC):
    """Orders the candidates. ``n_slots``: slots in all; ``layers``: the layers with experts, in the order of a step."""

    name: ClassVar[str]

    def __init__(self, n_slots: int, layers: Sequence[int]) -> None:
        self.n_slots = n_slots
        self.layers = tuple(layers)

    def resize(self, n_slots: int) -> None:
        """There are ``n_slots`` from now on."""
        self.n_slots = n_slots

    def visit(self, layer: int, is_decode: bool) -> None:  # noqa: B027
        """A layer begins; ``is_decode``: at least one of its rows decodes."""

    @abstractmethod
    def asked(self, key: Key, prompt_share: float | None, is_hit: bool) -> None:
        """A gate asked for ``key``, once per visit. ``is_hit``: it is resident.

        ``prompt_share``: None when a decode row wants it, else the share of the visit's prompt rows that chose it.
        """

    @abstractmethod
    def add(self, key: Key) -> None:
        """``key`` is resident and unused from now on."""

    @abstractmethod
    def discard(self, key: Key) -> None:
        """``key`` is in use again (or evicted); a key that is no candidate is ignored."""

    @abstractmethod
    def victim(self) -> Key | None:
        """The candidate to give up, None when there is none. It stays a candidate until ``evicted``."""

    def evicted(self, key: Key) -> None:
        """``key`` has lost its slot."""
        self.discard(key)

    def frequency(self, key: Key) -> float:
        """Usage frequency, decayed; resident or not; 0 when unknown. Compared with others of the same policy only."""
        return 0.0

    def chance(self, key: Key) -> float:
        """How likely a step is to want ``key``, 0..1; 0 where a policy does not know."""
        return 0.0

    def restore(self, uses: Mapping[Key, float]) -> None:  # noqa: B027
        """Uses per step as an earlier process knew them: what a fresh policy may start from."""


class Ranking:
    """A heap of (rank, key) whose outdated entries are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, Key]] = []
        self._rank: dict[Key, Any] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._rank

    def put(self, key: Key, rank: Any) -> None:
        self._rank[key] = rank
        if len(self._heap) > 64 + 2 * len(self._rank):
            self._heap = [(r, k) for k, r in self._rank.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def discard(self, key: Key) -> None:
        self._rank.pop(key, None)

    def lowest(self) -> tuple[Any, Key] | None:
        heap = self._heap
        while heap and self._rank.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


class Lru(Policy):
    """The longest unused leaves first. What only prompts asked for is older than anything that decoded."""

    name = "lru"

    def __init__(self, n_slots: int, layers: Sequence[int]) -> None:
        super().__init__(n_slots, layers)
        self._order = Ranking()
        self._used: dict[Key, tuple[int, int]] = {}
        self._clock = 0

    def visit(self, layer: int, is_decode: bool) -> None:
        self._clock += 1

    def asked(self, key: Key, prompt_share: float | None, is_hit: bool) -> None:
        if prompt_share is None:
            self._used[key] = (1, self._clock)
        elif not is_hit:
            self._used[key] = (0, self._clock)

    def add(self, key: Key) -> None:
        self._order.put(key, self._used.get(key, (0, 0)))

    def discard(self, key: Key) -> None:
        self._order.discard(key)

    def victim(self) -> Key | None:
        lowest = self._order.lowest()
        return lowest[1] if lowest else None

    def frequency(self, key: Key) -> float:
        kind, clock = self._used.get(key, (0, 0))
        return float(clock) if kind else 0.0


class SegmentedLru(Lru):
    """Two recency lists: a second use moves a key into the protected one, which gives back its oldest when it is full.

    Method: Karedla, Love and Wherry, Caching strategies to improve disk system performance, Computer 27(3), 1994.
    """

    name = "slru"
    PROTECTED_SHARE = 0.8

    def __init__(self, n_slots: int, layers: Sequence[int]) -> None:
        super().__init__(n_slots, layers)
        self._protected: OrderedDict[Key, None] = OrderedDict()
        self.resize(n_slots)

    def resize(self, n_slots: int) -> None:
        super().resize(n_slots)
        self._n_protected = max(1, int(n_slots * self.PROTECTED_SHARE))

    def asked(self, key: Key, prompt_share: float | None, is_hit: bool) -> None:
        if prompt_share is not None:
            if not is_hit:
                self._used[key] = (0, self._clock)
            return
        if not is_hit:
            self._used[key] = (1, self._clock)
            return
        self._used[key] = (2, self._clock)
        self._protected[key] = None
        self._protected.move_to_end(key)
        while len(self._protected) > self._n_protected:
            oldest, _ = self._protected.popitem(last=False)
            self._used[oldest] = (1, self._clock)  # the youngest of the others: it has earned that
            if oldest in self._order:
                self.add(oldest)

    def evicted(self, key: Key) -> None:
        self.discard(key)
        self._protected.pop(key, None)
        self._used.pop(key, None)


class DecayedLfu(Policy):
    """The least used leaves first; a use counts half after ``half_life`` steps.

    Heats are kept as log2 of their value at time 0 of the decay, which all share: so their order holds without being touched.
    """

    name = "lfu"

    def __init__(self, n_slots: int, layers: Sequence[int], half_life: float = HALF_LIFE_STEPS) -> None:
        super().__init__(n_slots, layers)
        self._per_visit = 1.0 / (half_life * max(1, len(self.layers)))
        self._full = _full_frequency(half_life)
        self._log_frequency: dict[Key, float] = {}
        self._order = Ranking()
        self._now = 0.0  # in half-lives

    def visit(self, layer: int, is_decode: bool) -> None:
        if is_decode:
            self._now += self._per_visit

    def asked(self, key: Key, prompt_share: float | None, is_hit: bool) -> None:
        weight = 1.0 if prompt_share is None else PREFILL_WEIGHT * prompt_share
        self._log_frequency[key] = _log_add(self._log_frequency.get(key), weight, self._now)

    def add(self, key: Key) -> None:
        self._order.put(key, self._log_frequency.get(key, -math.inf))

    def discard(self, key: Key) -> None:
        self._order.discard(key)

    def victim(self) -> Key | None:
        lowest = self._order.lowest()
        return lowest[1] if lowest else None

    def frequency(self, key: Key) -> float:
        log_frequency = self._log_frequency.get(key)
        return 0.0 if log_frequency is None else 2.0 ** (log_frequency - self._now)

    def chance(self, key: Key) -> float:
        return min(1.0, self.frequency(key) / self._full)

    def restore(self, uses: Mapping[Key, float]) -> None:
        for key, per_step in uses.items():
            if per_step > 0:
                self._log_frequency[key] = math.log2(per_step * self._full) + self._now


class NextUse(Policy):
    """Who is needed last leaves first, by an estimate of the next use. The default.

    A layer's experts are asked for once per step and then not before the whole model has been passed, so time is counted per
    layer: an expert's usage frequency decays with the visits of its own layer and gives the chance ``p`` that a step wants it.
    Its next use is then expected after ``d / L + 1 / p - 1`` steps, ``d`` being how many layers ahead its own is: of two
    equally frequent experts, the one whose layer has just been passed leaves. Within a layer the order of frequencies holds by
    itself (all decay alike), so a heap per layer is enough and the victim is the worst of their tops.
    """

    name = "next-use"

    def __init__(self, n_slots: int, layers: Sequence[int], half_life: float = HALF_LIFE_STEPS) -> None:
        super().__init__(n_slots, layers)
        self._per_step = 1.0 / half_life
        self._full = _full_frequency(half_life)
        self._log_frequency: dict[Key, float] = {}
        self._place = {layer: i for i, layer in enumerate(self.layers)}
        self._order = [Ranking() for _ in self.layers]
        self._now = [0.0] * len(self.layers)  # in half-lives
        self._at = 0

    def visit(self, layer: int, is_decode: bool) -> None:
        self._at = self._place[layer]
        if is_decode:
            self._now[self._at] += self._per_step

    def asked(self, key: Key, prompt_share: float | None, is_hit: bool) -> None:
        weight = 1.0 if prompt_share is None else PREFILL_WEIGHT * prompt_share
        self._log_frequency[key] = _log_add(self._log_frequency.get(key), weight, self._now[self._place[key[0]]])

    def add(self, key: Key) -> None:
        self._order[self._place[key[0]]].put(key, self._log_frequency.get(key, -math.inf))

    def discard(self, key: Key) -> None:
        self._order[self._place[key[0]]].discard(key)

    def victim(self) -> Key | None:
        n_layers = len(self.layers)
        latest = -1.0
        found = None
        for i, order in enumerate(self._order):
            lowest = order.lowest()
            if lowest is None:
                continue
            frequency = 2.0 ** (lowest[0] - self._now[i])
            if frequency < 1e-30:
                frequency = 1e-30
            next_use = ((i - self._at - 1) % n_layers + 1) / n_layers + self._full / frequency
            if next_use > latest:
                latest, found = next_use, lowest[1]
        return found

    def frequency(self, key: Key) -> float:
        log_frequency = self._log_frequency.get(key)
        return 0.0 if log_frequency is None else 2.0 ** (log_frequency - self._now[self._place[key[0]]])

    def chance(self, key: Key) -> float:
        return min(1.0, self.frequency(key) / self._full)

    def restore(self, uses: Mapping[Key, float]) -> None:
        for key, per_step in uses.items():
            if per_step > 0 and key[0] in self._place:
                self._log_frequency[key] = math.log2(per_step * self._full) + self._now[self._place[key[0]]]


class KeepAll(Policy):
    """For slots that hold every expert: nobody ever leaves, so nothing needs to be known."""

    name = "keep-all"

    def asked(self, key: Key, prompt_share: float | None, is_hit: bool) -> None:
        pass

    def add(self, key: Key) -> None:
        pass

    def discard(self, key: Key) -> None:
        pass

    def victim(self) -> Key | None:
        return None


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (NextUse, DecayedLfu, SegmentedLru, Lru)}
"""By the name that settings and ``colibri cache-sim`` know."""


def make_policy(name: str, n_slots: int, layers: Sequence[int], n_experts: int) -> Policy:
    """The policy of this name, or ``KeepAll`` where every expert has a slot."""
    kind = KeepAll if n_slots >= len(layers) * n_experts else POLICIES[name]
    return kind(n_slots, layers)


def _full_frequency(half_life: float) -> float:
    """The frequency of a key that is used in every step: 1 + r + r^2 + ... with r = 2 ** (-1 / half_life)."""
    return 1.0 / (1.0 - math.exp2(-1.0 / half_life))


def _log_add(log_frequency: float | None, weight: float, now: float) -> float:
    """log2(2 ** log_frequency + weight * 2 ** now), without overflow."""
    if weight <= 0:
        return -math.inf if log_frequency is None else log_frequency
    new = math.log2(weight) + now
    if log_frequency is None or log_frequency == -math.inf:
        return new
    high, low = (new, log_frequency) if new > log_frequency else (log_frequency, new)
    return high + math.log2(1.0 + 2.0 ** (low - high))
