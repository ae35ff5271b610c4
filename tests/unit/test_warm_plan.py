"""A start's decisions about named memory: what counts as available, which warm set is adopted, which must go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.warm import plan_memory
from native.memory import HUGE_PAGE
from shared.errors import CapacityError, ConfigError
from shared.machine.memory_probe import MemoryProbe
from shared.memory import warm_sets
from shared.run.config import Settings
from tests.unit.test_warm_sets import MODEL, OTHER, directory, make_run, names

__all__ = ["directory"]  # the fixture
FACTS: Any = SimpleNamespace(dense_bytes=10_000, gate_bytes=0, shared_bytes=0, mtp_bytes=0)
FREE = 100 * HUGE_PAGE


def plan(directory: Path, needs: int = 0, huge_dir: str = "", n_slots: int = 4) -> Any:
    """For MODEL with ``FREE`` bytes available beside the warm sets; ``needs`` more than is available is refused."""
    asked: list[int] = []

    def probe() -> MemoryProbe:
        held = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return MemoryProbe(FREE - held, "test", FREE)

    def make(memory: MemoryProbe) -> Any:
        asked.append(memory.available_bytes)
        if needs > memory.available_bytes:
            raise CapacityError("it does not fit")
        return SimpleNamespace(n_drafts=0, n_slots=n_slots, slot_bytes=HUGE_PAGE, n_experts=8, segment_bytes=0)

    found = plan_memory(Settings(huge_dir=huge_dir or str(directory)), MODEL, FACTS, probe, make)
    return SimpleNamespace(plan=found, asked=asked)


def keep(directory: Path, fingerprint: str) -> None:
    warm_sets.keep(directory, make_run(directory, fingerprint), fingerprint, f"model {fingerprint[:2]}")


def test_the_models_own_set_is_adopted_and_counts_as_available(directory: Path) -> None:
    keep(directory, MODEL)
    found = plan(directory, needs=FREE)
    assert found.asked == [FREE] and found.plan.adopts.fingerprint == MODEL
    assert found.plan.huge_dir == str(directory) and len(names(directory)) == 2


def test_anothers_set_stays_where_there_is_room_and_goes_where_there_is_not(directory: Path) -> None:
    keep(directory, OTHER)
    beside = plan(directory, needs=FREE // 2)
    assert beside.asked[0] < FREE and beside.plan.adopts is None and len(names(directory)) == 2
    assert any("kept warm for model model fe" in note and "--drop-warm" in note for note in beside.plan.notes)
    instead = plan(directory, needs=FREE)
    assert len(instead.asked) == 2 and not names(directory)
    assert any(note.startswith("dropped for room") for note in instead.plan.notes)


def test_what_does_not_fit_without_any_set_is_refused(directory: Path) -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        plan(directory, needs=FREE + 1)


def test_a_killed_groups_memory_is_adopted_by_its_model_alone(directory: Path) -> None:
    make_run(directory, OTHER)
    own = make_run(directory, MODEL)
    found = plan(directory)
    assert (found.plan.adopts.run_id == own and found.plan.notes == []) or "small pages" in found.plan.notes[0]
    assert len(names(directory)) == 2, "the other model's remains are gone"


def test_private_memory_leaves_no_set_of_the_model_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(directory, MODEL)
    monkeypatch.setattr(warm_sets, "candidate_dirs", lambda: [directory])
    found = plan(directory, needs=FREE, huge_dir="off")
    assert found.plan.huge_dir is None and found.plan.adopts is None and not names(directory)


def test_a_directory_that_was_asked_for_must_be_able_to_hold_it(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="are needed for the weights"):
        plan(directory, n_slots=1 << 30)
    with pytest.raises(ConfigError, match="huge_dir:"):
        plan(directory, huge_dir="/proc")
