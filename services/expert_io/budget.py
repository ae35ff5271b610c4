"""The slots' part of the group's memory, and how it changes while the group runs (``colibri ram``).

The frozen configuration says what the group was started with; a changed budget lies in the run directory, so that a
restarted expert_io keeps it. Which slots leave when, ``StoreState`` decides.
"""

from __future__ import annotations

from pathlib import Path

from native.memory import HUGE_PAGE
from shared.machine.memory_probe import probe_memory
from shared.memory.huge_pages import free_room
from shared.planning.slot_share import change_budget
from shared.run.config import GroupConfig, read_budget, write_budget


class Budget:
    """``n_slots`` is what it allows now, ``n_bytes`` what the whole group may take."""

    def __init__(self, config: GroupConfig, gate_k: int) -> None:
        self._config = config
        self._gate_k = gate_k
        self.n_bytes = read_budget(config)
        self.n_slots = config.n_slots
        if self.n_bytes != config.ram_bytes:
            self.n_slots = self._slots_of(self.n_bytes, 0, 0)

    @property
    def is_by_policy(self) -> bool:
        """Slots of whole huge pages may leave in any order; others so that the memory that stays is in one piece."""
        return self._config.slot_bytes % HUGE_PAGE == 0

    def _slots_of(self, n_bytes: int, n_used: int, free_bytes: int) -> int:
        return change_budget(self._config, self._gate_k, self.n_bytes, n_bytes, n_used, free_bytes)

    def change(self, n_bytes: int, n_used: int, n_reserved: int) -> None:
        """Another budget from now on. ``n_used``: slots in use, ``n_reserved``: those that have an address.

        Raises CapacityError when that can't be, with the arithmetic; OSError when it can't be remembered.
        """
        config = self._config
        free_bytes = probe_memory().available_bytes
        if config.huge_dir is not None:
            free_bytes = min(free_bytes, free_room(Path(config.huge_dir)))
        n_slots = min(self._slots_of(n_bytes, n_used, free_bytes), n_reserved)
        write_budget(config, n_bytes)
        self.n_bytes, self.n_slots = n_bytes, n_slots
