"""The expert engines in use: the one place where an engine is registered. What one is, ``engine.py`` says."""

from __future__ import annotations

from collections.abc import Sequence

from services.expert_io.cpu_engine import CpuEngine
from services.expert_io.engine import EngineSetup, ExpertEngine
from services.expert_io.slots import Tier

ENGINES: tuple[type[ExpertEngine], ...] = (CpuEngine,)
"""In the order in which free slots are taken."""


def open_engines(
    setup: EngineSetup, n_slots: int, kinds: Sequence[type[ExpertEngine]] | None = None
) -> tuple[list[ExpertEngine], list[Tier]]:
    """Every engine that has slots in this group, with its tier; ``n_slots`` for those whose slots the budget pays."""
    engines: list[ExpertEngine] = []
    tiers: list[Tier] = []
    first = 0
    try:
        for kind in ENGINES if kinds is None else kinds:
            tier = kind.tier(setup.config, n_slots)
            if tier.n_reserved:
                end = first + tier.n_reserved
                engines.append(kind(setup, range(first, end)))  # type: ignore[call-arg]
                tiers.append(tier)
                first = end
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines, tiers
