"""What tests look at or spoil inside of an object, where it has no effect to be seen from outside: who knows where it lies.

``support/ring.py`` has the same for the engine's services, and nobody else reaches into private fields.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bench.store import Records
from deploy.keeper import Keeper
from services.expert_io.slots import Slot, SlotTable
from services.expert_io.states import SlotState
from services.gateway.stream import Ticket
from services.router.prompt_desk import PromptDesk
from services.router.recording import RoutingRecorder
from shared.awake import AwakeClock
from shared.experts.residency import NextUse

# ---- the slot table


def move(table: SlotTable, slot: Slot, to: SlotState) -> None:
    table._move(slot, to)


def lose_a_key(table: SlotTable) -> None:
    table._of_key.popitem()


def free_twice(table: SlotTable) -> None:
    table._free.append(table._free[0])


def forget_guesses(table: SlotTable) -> None:
    table._guessing.clear()


def room_for_moves(table: SlotTable) -> tuple[int, int]:
    """(moves that its stories remember, at most so many)."""
    moves = table._stories.moves
    assert moves.maxlen is not None
    return len(moves), moves.maxlen


def ranking_entries(policy: NextUse) -> int:
    """Of the first layer, those that no longer count among them."""
    return len(policy._order[0]._heap)


# ---- queues between threads


def has_pending(recorder: RoutingRecorder) -> bool:
    return bool(recorder._pending)


def queued(ticket: Ticket) -> list[Any]:
    return list(ticket._events)


def end_input(desk: PromptDesk) -> None:
    """The prompt process's stdin ends, as when the router is killed."""
    desk._outgoing.put(None)


# ---- others


def replace_descriptor(records: Records, layer: int, fd: int) -> int:
    """Returns the one it had."""
    records._fds[layer], before = fd, records._fds[layer]
    return before


def keeper_of(processes: dict[str, Any], clock: Any, stopped_since: dict[int, float]) -> Keeper:
    """A keeper that watches what it is given, and runs nothing."""
    keeper = Keeper.__new__(Keeper)
    keeper._awake, keeper._slept_s = AwakeClock(3.0, clock), 0.0
    keeper._stopped_since = stopped_since
    keeper._services = {name: {"pid": pid} for name, pid in zip("ab", stopped_since)}
    keeper.options = SimpleNamespace(logger=SimpleNamespace(warn=lambda words: None))
    keeper.process_groups = {"colibri": SimpleNamespace(processes=processes)}
    return keeper


def polled(keeper: Keeper) -> None:
    keeper._on_polled()


def ticked(keeper: Keeper) -> None:
    keeper._on_tick(None)


def stopped_pids(keeper: Keeper) -> set[int]:
    """Whom it has seen stopped."""
    return set(keeper._stopped_since)
