"""The slots' part of the group's memory, and how it changes while the group runs (``colibri ram``).

The frozen configuration says what the group was started with; a changed budget lies in the run directory, so that a
restarted expert_io keeps it. Lowering takes effect before the answer is given, except for slots that a layer or a read
uses at that moment: they follow within the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from native.memory import HUGE_PAGE
from services.expert_io.slots import Slot, SlotTable
from shared.errors import CapacityError
from shared.experts.residency import POLICIES, KeepAll, Key
from shared.machine.memory_probe import probe_memory
from shared.memory.huge_pages import free_room
from shared.messages.control import Ram, RamWanted
from shared.planning.ledger import change_budget
from shared.run.config import GroupConfig, read_budget, write_budget


class Budget:
    """See the module docstring. ``n_slots`` is the capacity now."""

    def __init__(self, config: GroupConfig, gate_k: int) -> None:
        self._config = config
        self._gate_k = gate_k
        self._bytes = read_budget(config)
        self.n_slots = config.n_slots
        if self._bytes != config.ram_bytes:
            self.n_slots = self._slots_of(self._bytes, 0, 0)

    @property
    def is_by_policy(self) -> bool:
        """Slots of whole huge pages may leave in any order; others so that the memory that stays is in one piece."""
        return self._config.slot_bytes % HUGE_PAGE == 0

    def _slots_of(self, n_bytes: int, n_used: int, free_bytes: int) -> int:
        return change_budget(self._config, self._gate_k, self._bytes, n_bytes, n_used, free_bytes)

    def answer(
        self,
        msg: RamWanted,
        table: SlotTable,
        expected: Callable[[], Mapping[Key, float]],
        cancel: Callable[[Slot], None],
    ) -> Ram:
        """Carries out what ``colibri ram`` asks for.

        ``expected``: uses per step by experience, for a policy that starts now because not all experts fit any more.
        ``cancel`` stops the read of a guess that has to leave.
        """
        refusal = ""
        if msg.budget_bytes:
            try:
                self._change(msg.budget_bytes, table, expected, cancel)
            except (CapacityError, OSError) as error:
                refusal = str(error)
        return Ram(msg.asker, self._bytes, self.n_slots, table.n_used, table.n_leaving, refusal)

    def _change(
        self,
        n_bytes: int,
        table: SlotTable,
        expected: Callable[[], Mapping[Key, float]],
        cancel: Callable[[Slot], None],
    ) -> None:
        config = self._config
        free_bytes = probe_memory().available_bytes
        if config.huge_dir is not None:
            free_bytes = min(free_bytes, free_room(Path(config.huge_dir)))
        n_slots = self._slots_of(n_bytes, table.n_used, free_bytes)
        n_slots = min(n_slots, len(table.slots))
        write_budget(config, n_bytes)
        self._bytes, self.n_slots = n_bytes, n_slots
        if isinstance(table.policy, KeepAll) and n_slots < table.capacity:
            policy = POLICIES[config.cache_policy](n_slots, table.policy.layers)
            policy.restore(expected())
            table.replace_policy(policy)
        for slot in table.resize(n_slots, is_by_policy=self.is_by_policy):
            cancel(slot)
