"""The expert store: reads that bring records from their sources into slots, verified, ready for the kernels.

Joins the slab (``slab.py``), the files (``sources.py``) and the read pool. Does not choose victims (``slots.py``) nor order
work (``layer_run.py``). Runs in expert_io.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from native.kernels import Ffn
from native.matrix import Matrix, matrix
from native.reader import ReadDone, Reader
from services.expert_io.slab import Slab
from services.expert_io.slots import Slot
from services.expert_io.sources import RecordSources, Source
from shared.container.format import ExpertLayout
from shared.container.reader import Container, ExpertFile
from shared.errors import StoreError
from shared.residency import Key

READ_ALIGN = 4096
PIECE_BYTES = 2 << 20
PIECES_IN_FLIGHT = 4


@dataclass(frozen=True)
class ReadFault:
    """A read that failed for good, in a sentence."""

    key: Key
    code: str
    message: str


class ExpertStore:
    """Slots and the reads that fill them. ``layers`` are the MoE layers whose experts may be asked for."""

    def __init__(
        self, container: Container, layers: tuple[int, ...], n_slots: int, slot_bytes: int, direct_io: str
    ) -> None:
        self._sources = RecordSources(container, layers, direct_io)
        largest = max((f.record_bytes for f in self._sources.files.values()), default=READ_ALIGN)
        if slot_bytes < largest:
            raise StoreError(
                f"A slot has {slot_bytes} bytes but the largest expert record has {largest}; this is a fault."
            )
        self.slab = Slab(n_slots, slot_bytes)
        self._layout_of = _number_layouts(self._sources.files)
        self._spec = container.spec
        self.reader = Reader(PIECES_IN_FLIGHT, PIECE_BYTES)
        self._verified: set[Key] = set()
        self._reads: dict[int, tuple[Slot, int, Key, Source]] = {}
        self._next_tag = 1
        self._tag_of_slot: dict[int, int] = {}
        self._ffns: dict[tuple[int, int], Ffn] = {}

    @property
    def is_direct(self) -> bool:
        return self._sources.is_direct

    # -- reads -----------------------------------------------------------------------------------------------

    def start_read(self, slot: Slot, *, speculative: bool) -> None:
        """Read the record of ``slot.key`` into the slot; ``finished`` tells when it is there."""
        assert slot.key is not None
        source = self._sources.choose(slot.key)
        tag = self._next_tag
        self._next_tag += 1
        self._reads[tag] = (slot, slot.generation, slot.key, source)
        self._tag_of_slot[slot.index] = tag
        self.reader.submit(
            tag,
            source.fd,
            source.offset,
            source.n_bytes,
            self.slab.address(slot.index),
            speculative=speculative,
            checksum=slot.key not in self._verified,
        )

    def promote(self, slot: Slot) -> None:
        """Somebody waits for this guessed read now."""
        tag = self._tag_of_slot.get(slot.index)
        if tag is not None:
            self.reader.promote(tag)

    def cancel(self, slot: Slot) -> None:
        """Stop this read at its next piece; its completion still comes."""
        tag = self._tag_of_slot.get(slot.index)
        if tag is not None:
            self.reader.cancel(tag)

    def finished(self) -> list[tuple[Slot, ReadDone, ReadFault | None]]:
        """Reads that ended since the last call, with the fault of those that failed."""
        out: list[tuple[Slot, ReadDone, ReadFault | None]] = []
        for done in self.reader.take():
            slot, generation, key, source = self._reads.pop(done.tag)
            if self._tag_of_slot.get(slot.index) == done.tag:
                del self._tag_of_slot[slot.index]
            assert slot.generation == generation, "a slot got a new tenant while its read was in flight"
            out.append((slot, done, None if done.cancelled else self._fault(key, done, source)))
        return out

    def _fault(self, key: Key, done: ReadDone, source: Source) -> ReadFault | None:
        layer, expert = key
        where = f"expert {expert} of layer {layer} in {source.path} at offset {source.offset}"
        if done.error:
            return ReadFault(
                key,
                "expert_read_failed",
                f"Reading {where}: expected {done.wanted} bytes, received {done.bytes} ({os.strerror(done.error)}). "
                "Run `colibri verify` on the model directory and check the drive.",
            )
        if key not in self._verified:
            found = f"{done.checksum:016x}"
            expected = self._sources.files[layer].checksums[expert]
            if found != expected:
                return ReadFault(
                    key,
                    "expert_checksum_mismatch",
                    f"The checksum of {where} is {found}, expected {expected}: the file has changed since it was "
                    "converted. Run `colibri verify` on the model directory and convert or copy it again.",
                )
            self._verified.add(key)
        return None

    # -- what the kernels see -------------------------------------------------------------------------------

    def ffn(self, slot: Slot) -> Ffn:
        """The three matrices of the expert in ``slot``, pointing into it."""
        assert slot.key is not None
        place = (slot.index, self._layout_of[slot.key[0]])
        cached = self._ffns.get(place)
        if cached is None:
            file = self._sources.files[slot.key[0]]
            cached = expert_ffn(
                self.slab.address(slot.index),
                file.layout,
                file.format,
                self._spec.hidden,
                self._spec.expert_inner,
            )
            self._ffns[place] = cached
        return cached

    def give_back(self, indices: list[int]) -> None:
        """The memory of these slots, which hold nothing any more, goes back to the system."""
        for index in indices:
            self.slab.release(index)
            for layout in set(self._layout_of.values()):
                self._ffns.pop((index, layout), None)

    def close(self) -> None:
        self.reader.close()
        self._sources.close()
        self.slab.close()


def _number_layouts(files: dict[int, ExpertFile]) -> dict[int, int]:
    """Layer -> a number that is the same for records of the same layout: their matrices lie alike in a slot."""
    numbers: dict[ExpertLayout, int] = {}
    return {layer: numbers.setdefault(file.layout, len(numbers)) for layer, file in files.items()}


def expert_ffn(address: int, layout: ExpertLayout, fmt: str, hidden: int, inner: int) -> Ffn:
    """gate [F, D], up [F, D], down [D, F] of a record that lies at ``address``."""

    def part(weight: int, scale: int | None, out: int, in_: int) -> Matrix:
        return matrix(address + weight, None if scale is None else address + scale, fmt, out, in_)

    return Ffn(
        part(layout.gate_w, layout.gate_s, inner, hidden),
        part(layout.up_w, layout.up_s, inner, hidden),
        part(layout.down_w, layout.down_s, hidden, inner),
    )
