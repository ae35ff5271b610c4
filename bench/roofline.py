"""The least time that a piece of work can take on a machine with given limits. Pure arithmetic; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.errors import ColibriError


class BenchError(ColibriError):
    """A measurement is impossible or makes no sense. Says what was expected and what was found."""


@dataclass(frozen=True)
class Work:
    """What one call must at least do: bytes that come from memory, and operations (multiplications plus additions)."""

    n_bytes: int
    ops: Mapping[str, int] = field(default_factory=dict)
    """Kind of arithmetic (``native.probe.KINDS``) -> operations."""

    @property
    def n_ops(self) -> int:
        return sum(self.ops.values())


@dataclass(frozen=True)
class Limits:
    """Rates of this machine with the same threads. BenchError unless each is finite and positive."""

    bytes_s: float
    ops_s: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, rate in (("memory", self.bytes_s), *self.ops_s.items()):
            if not math.isfinite(rate) or rate <= 0:
                raise BenchError(f"the measured limit of {name} is {rate}: expected a finite, positive rate")


@dataclass(frozen=True)
class Bound:
    """The least time in ns, and which limit sets it: "memory" or a kind of arithmetic."""

    ns: float
    by: str


def bound_of(work: Work, limits: Limits) -> Bound:
    """max(bytes / bandwidth, operations / peak). Kinds of arithmetic share the same units, so their times add up."""
    missing = [kind for kind, n in work.ops.items() if n and kind not in limits.ops_s]
    if missing:
        raise BenchError(f"no limit was measured for {', '.join(missing)}")
    if work.n_bytes <= 0 and work.n_ops <= 0:
        raise BenchError("a piece of work without bytes and operations has no bound")
    memory_ns = work.n_bytes / limits.bytes_s * 1e9
    kinds_ns = {kind: n / limits.ops_s[kind] * 1e9 for kind, n in work.ops.items() if n}
    if sum(kinds_ns.values()) <= memory_ns:
        return Bound(memory_ns, "memory")
    return Bound(sum(kinds_ns.values()), max(kinds_ns, key=lambda kind: kinds_ns[kind]))
