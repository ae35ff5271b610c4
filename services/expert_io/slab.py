"""The memory of the expert slots: where slot ``i`` lies. Owns the memory, knows nothing of what is in it."""

from __future__ import annotations

from native.memory import HugeBuffer


class Slab:
    """``n_slots`` slots of ``slot_bytes`` (a multiple of 4096) in private huge pages; only expert_io reads them."""

    def __init__(self, n_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._memory = HugeBuffer(n_slots * slot_bytes)

    def address(self, index: int) -> int:
        """Where slot ``index`` begins; 4096-byte aligned."""
        return self._memory.address + index * self.slot_bytes

    def release(self, index: int) -> None:
        """Give the memory of slot ``index`` back to the system until it is written again."""
        self._memory.release(index * self.slot_bytes, self.slot_bytes)

    def close(self) -> None:
        self._memory.close()
