"""What a start does about named memory: which directory, which warm set is adopted, which must go.

Decides before anything is created, from sizes alone. Prints nothing; ``notes`` are for people.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from native.memory import HUGE_PAGE
from shared.container.format import Facts
from shared.errors import CapacityError, ConfigError
from shared.machine.memory_probe import MemoryProbe
from shared.memory import warm_sets
from shared.memory.huge_pages import SHM_DIR, Place, candidate_dirs, probe_place
from shared.memory.named_file import FINGERPRINT, PAGE_BYTES
from shared.memory.warm_sets import WarmSet
from shared.planning.ledger import Ledger
from shared.run.config import Settings


@dataclass
class WarmPlan:
    """``huge_dir``: None for private memory. ``adopts``: the set that becomes this run's, still under its old name."""

    ledger: Ledger
    huge_dir: str | None = None
    adopts: WarmSet | None = None
    notes: list[str] = field(default_factory=list)


def plan_memory(
    settings: Settings,
    fingerprint: str,
    facts: Facts,
    probe: Callable[[], MemoryProbe],
    make: Callable[[MemoryProbe], Ledger],
) -> WarmPlan:
    """The ledger, and where its weights go.

    A warm set that will be adopted counts as available. Sets of other models stay
    as long as there is room beside them; where the plan fails because of them, the oldest goes first.
    """
    notes: list[str] = []
    sets = warm_sets.find_sets(warm_sets.known_dirs(settings.huge_dir))
    places = _places(settings.huge_dir, [s.directory for s in sets if s.fingerprint == fingerprint], notes)
    if not FINGERPRINT.fullmatch(fingerprint):
        places = []
    others: list[WarmSet] = []
    own: WarmSet | None = None
    for warm in sets:
        if warm.fingerprint == fingerprint and own is None and any(p.directory == warm.directory for p in places):
            own = warm
        elif warm.is_kept and warm.fingerprint != fingerprint:
            others.append(warm)
        else:
            warm_sets.drop(warm)
    while True:
        memory = probe()
        try:
            available = memory.available_bytes + (own.n_bytes if own else 0)
            ledger = make(msgspec.structs.replace(memory, available_bytes=available))
            break
        except CapacityError:
            if not others:
                raise
            gone = others.pop(0)
            warm_sets.drop(gone)
            notes.append(f"dropped for room: {gone.describe()}")
    plan = WarmPlan(ledger, notes=notes)
    needed = named_bytes(ledger, facts)
    for place in places:
        has = own.n_bytes if own and own.directory == place.directory else 0
        also = ledger.segment_bytes if place.directory == SHM_DIR else 0
        if needed + also <= place.free_bytes + has:
            plan.huge_dir = str(place.directory)
            break
        if settings.huge_dir not in ("auto", "off"):
            raise CapacityError(
                f"{place.directory} has {place.free_bytes + has:,} bytes free, {needed + also:,} are needed for the weights. "
                "Enlarge it (mount -o remount,size=...), give less memory with ram, or take huge_dir = off."
            )
    if own and plan.huge_dir == str(own.directory):
        plan.adopts = own
    elif own:
        warm_sets.drop(own)
        notes.append(f"dropped, it can't be used by this start: {own.describe()}")
    notes += [f"{warm.describe()}; `colibri-up --drop-warm` frees it" for warm in others]
    return plan


def named_bytes(ledger: Ledger, facts: Facts) -> int:
    """What the weights take as named memory: each kind rounded up, with its header."""
    sizes = [facts.dense_bytes, facts.gate_bytes, facts.shared_bytes, facts.mtp_bytes if ledger.n_drafts else 0]
    total = sum(_rounded(size + PAGE_BYTES) for size in sizes if size)
    return total + _rounded(ledger.n_slots * ledger.slot_bytes) + _rounded(PAGE_BYTES + 8 * ledger.n_experts)


def _rounded(size: int) -> int:
    return -(-size // HUGE_PAGE) * HUGE_PAGE


def _places(huge_dir: str, first: list[Path], notes: list[str]) -> list[Place]:
    """Directories to be used, best first. Raises ConfigError for one that was asked for and can't be used."""
    if huge_dir == "off":
        return []
    if huge_dir != "auto":
        place = probe_place(Path(os.path.expanduser(huge_dir)).absolute())
        if place.problem:
            raise ConfigError(
                f"huge_dir: {place.problem}; name a directory of a tmpfs or hugetlbfs, or take auto or off"
            )
        if not place.is_huge:
            notes.append(
                f"{place.directory} gives small pages: weights there are read more slowly than private memory. "
                "`colibri doctor` says how to get huge ones."
            )
        return [place]
    probed = [probe_place(d) for d in dict.fromkeys([*first, *candidate_dirs()])]
    return [place for place in probed if place.is_huge and not place.problem]
