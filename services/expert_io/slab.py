"""The memory of the expert slots: where slot ``i`` lies and, in named memory, what a successor may believe of it.

Knows which bytes are whole, nothing of who wants them. The directory's entries are one 8-byte store each: emptied (or marked
as being read) before a read is submitted, filled after its completion. So a slot that is half-written when this process dies
is never taken for a full one.
"""

from __future__ import annotations

from collections.abc import Collection

from native.memory import HUGE_PAGE
from shared.experts.residency import Key
from shared.memory.big_memory import Home, NamedMemory, PrivateMemory
from shared.memory.huge_pages import huge_bytes
from shared.memory.named_file import SLAB

_FULL = 1 << 63
_READING = 1 << 62
_LAYER_SHIFT, _LAYER_MASK, _EXPERT_MASK = 32, (1 << 24) - 1, (1 << 32) - 1


class Slab:
    """``n_slots`` slots of ``slot_bytes`` (a multiple of 4096) in huge pages; only expert_io reads them.

    With ``home`` they lie in named memory if there is room for it, and may hold experts already: ``residents``.
    ``capacity``: experts in all, the most slots there can be; ``content``: what the records' bytes are.
    """

    def __init__(
        self, n_slots: int, slot_bytes: int, home: Home | None = None, capacity: int = 0, content: int = 0
    ) -> None:
        self.slot_bytes = slot_bytes
        self._n_slots = n_slots
        n_bytes = n_slots * slot_bytes
        named = home.open(SLAB, content, n_bytes, max(capacity, n_slots), slot_bytes) if home else None
        self._memory: NamedMemory | PrivateMemory = named or PrivateMemory(n_bytes)
        self._entries = named.directory if named else None

    @property
    def is_named(self) -> bool:
        return self._memory.is_named

    def address(self, index: int) -> int:
        """Where slot ``index`` begins; 4096-byte aligned."""
        return self._memory.address + index * self.slot_bytes

    def reading(self, index: int, key: Key) -> None:
        """A read of ``key`` into the slot is about to be submitted: what it held is gone."""
        if self._entries is not None:
            self._entries[index] = _READING | _packed(key)

    def holds(self, index: int, key: Key) -> None:
        """The slot holds all of ``key``, verified."""
        if self._entries is not None:
            self._entries[index] = _FULL | _packed(key)

    def empty(self, index: int) -> None:
        """The slot holds nothing of use."""
        if self._entries is not None:
            self._entries[index] = 0

    def release(self, index: int) -> None:
        """The slot's memory goes back to the system until something is read into it."""
        self.empty(index)
        self._memory.release(index * self.slot_bytes, self.slot_bytes)

    def residents(self, layers: Collection[int], n_experts: int) -> dict[int, Key]:
        """slot -> expert that a predecessor left whole; all else is emptied, nonsense included.

        Where it was reading when it ended, the drive may still be writing. Those pages are taken out of the file, so that
        late bytes go nowhere: whole huge pages, as far as a slot reaches into them, with what else lies there.
        """
        found: dict[int, Key] = {}
        if self._entries is None or not isinstance(self._memory, NamedMemory):
            return found
        seen: set[Key] = set()
        unsafe: list[int] = []
        for index, entry in enumerate(self._entries[: self._n_slots]):
            if not entry:
                continue
            key = (entry >> _LAYER_SHIFT & _LAYER_MASK, entry & _EXPERT_MASK)
            if entry == _FULL | _packed(key) and key[0] in layers and key[1] < n_experts and key not in seen:
                seen.add(key)
                found[index] = key
            else:
                unsafe.append(index)
        for index in unsafe:
            begin = index * self.slot_bytes // HUGE_PAGE * HUGE_PAGE
            end = -(-(index + 1) * self.slot_bytes // HUGE_PAGE) * HUGE_PAGE
            for other in range(begin // self.slot_bytes, min(-(-end // self.slot_bytes), self._n_slots)):
                self._entries[other] = 0
                found.pop(other, None)
            self._memory.release(begin, end - begin)
        for index in list(found):
            if not self._memory.present(index * self.slot_bytes, self.slot_bytes):
                self._entries[index] = 0
                del found[index]
        return found

    def describe(self) -> str:
        """For people: where the slots are, and in which pages as far as they are used."""
        if not isinstance(self._memory, NamedMemory):
            return "private"
        huge, present = huge_bytes(self._memory.address, self._n_slots * self.slot_bytes)
        pages = f", {huge / present:.0%} huge pages" if present else ""
        return f"named, {self._memory.path.parent}{pages}"

    def close(self) -> None:
        if self._entries is not None:
            self._entries.release()
            self._entries = None
        self._memory.close()


def _packed(key: Key) -> int:
    return key[0] << _LAYER_SHIFT | key[1]
