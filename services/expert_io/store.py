"""The expert store: reads that bring records from their sources into slots, verified, ready for the kernels.

Joins the slab (``slab.py``), the files (``sources.py``) and the read pools, one per drive. A read that fails goes to another
copy of the record; only when none is left it is a fault. Does not choose victims (``slots.py``) nor order work
(``layer_run.py``). Runs in expert_io.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace

from native.kernels import Ffn
from native.matrix import Matrix, matrix
from native.reader import ReadCounters, ReadDone, Reader
from services.expert_io.slab import Slab
from services.expert_io.slots import Slot
from services.expert_io.sources import RecordSources, Source
from shared.container.format import ExpertLayout
from shared.container.reader import Container, ExpertFile
from shared.errors import StoreError
from shared.experts.residency import Key
from shared.memory.big_memory import Home, content_of

READ_ALIGN = 4096


@dataclass(frozen=True)
class ReadFault:
    """A read that failed for good, in a sentence."""

    key: Key
    code: str
    message: str


@dataclass
class _Read:
    """A read under way. ``is_guess``: nobody waits for it yet."""

    slot: Slot
    generation: int
    key: Key
    source: Source
    is_guess: bool
    faults: dict[int, ReadFault] = field(default_factory=dict)  # of the places already tried


class ExpertStore:
    """Slots and the reads that fill them. ``layers`` are the MoE layers whose experts may be asked for. ``warn`` takes an event
    and its facts when a copy turns out bad."""

    def __init__(
        self,
        container: Container,
        layers: tuple[int, ...],
        n_slots: int,
        slot_bytes: int,
        direct_io: str,
        new_reader: Callable[[], Reader],
        warn: Callable[..., None] = lambda event, **facts: None,
        home: Home | None = None,
    ) -> None:
        """``new_reader`` is called once per drive."""
        self._sources = RecordSources(container, layers, direct_io, warn)
        largest = max((f.record_bytes for f in self._sources.files.values()), default=READ_ALIGN)
        if slot_bytes < largest:
            raise StoreError(
                f"A slot has {slot_bytes} bytes but the largest expert record has {largest}; this is a fault."
            )
        n_records = sum(file.n_experts for file in container.experts.values())
        content = content_of(container.experts_content()) if home else 0
        self.slab = Slab(n_slots, slot_bytes, home, n_records, content)
        self._layout_of = _number_layouts(self._sources.files)
        self._spec = container.spec
        self.readers = [new_reader() for _ in range(self._sources.n_drives)]
        self._reads: dict[int, _Read] = {}
        self._next_tag = 1
        self._tag_of_slot: dict[int, int] = {}
        self._ffns: dict[tuple[int, int], Ffn] = {}

    @property
    def is_direct(self) -> bool:
        return self._sources.is_direct

    def residents(self, layers: tuple[int, ...]) -> dict[int, Key]:
        """What ``Slab.residents`` finds; those experts were verified when they were read."""
        return self.slab.residents(layers, self._spec.n_experts)

    # -- reads -----------------------------------------------------------------------------------------------

    def start_read(self, slot: Slot, *, speculative: bool) -> None:
        """Read the record of ``slot.key`` into the slot; ``finished`` tells when it is there."""
        assert slot.key is not None
        source = self._sources.choose(slot.key, is_guess=speculative)
        assert source is not None, "an opened container has a copy of every record"
        self._submit(_Read(slot, slot.generation, slot.key, source, speculative))

    def _submit(self, read: _Read) -> None:
        tag = self._next_tag
        self._next_tag += 1
        self._reads[tag] = read
        self._tag_of_slot[read.slot.index] = tag
        self.slab.reading(read.slot.index, read.key)
        source = read.source
        self.readers[source.drive].submit(
            tag,
            source.fd,
            source.offset,
            source.n_bytes,
            self.slab.address(read.slot.index),
            speculative=read.is_guess,
            checksum=not self._sources.is_verified(source, read.key),
        )

    def promote(self, slot: Slot) -> None:
        """Somebody waits for this guessed read now."""
        tag = self._tag_of_slot.get(slot.index)
        if tag is not None:
            read = self._reads[tag]
            self.readers[read.source.drive].promote(tag)
            if read.is_guess:
                read.is_guess = False
                self._sources.promoted(read.source)

    def cancel(self, slot: Slot) -> None:
        """Stop this read at its next piece; its completion still comes."""
        tag = self._tag_of_slot.get(slot.index)
        if tag is not None:
            self.readers[self._reads[tag].source.drive].cancel(tag)

    def finished(self) -> list[tuple[Slot, ReadDone, ReadFault | None]]:
        """Reads that ended since the last call, with the fault of those that failed in every place."""
        out: list[tuple[Slot, ReadDone, ReadFault | None]] = []
        for done in (done for reader in self.readers for done in reader.take()):
            read = self._reads.pop(done.tag)
            slot, source = read.slot, read.source
            if self._tag_of_slot.get(slot.index) == done.tag:
                del self._tag_of_slot[slot.index]
            assert slot.generation == read.generation, "a slot got a new tenant while its read was in flight"
            self._sources.ended(source, done.bytes, done.start_ns, done.end_ns, is_guess=read.is_guess)
            fault = None if done.cancelled else self._fault(read.key, done, source)
            if fault:
                read.faults[source.place] = fault
                if not slot.is_doomed and self._try_another(read):
                    continue
                fault = self._joined(list(read.faults.values()))
            if done.cancelled or fault:
                self.slab.empty(slot.index)
            else:
                self.slab.holds(slot.index, read.key)
            out.append((slot, done, fault))
        return out

    def _try_another(self, read: _Read) -> bool:
        """Reads another copy in place of one that failed; False when there is none."""
        source = self._sources.choose(read.key, is_guess=read.is_guess, tried=read.faults.keys())
        if source is None:
            return False
        self._submit(_Read(read.slot, read.generation, read.key, source, read.is_guess, read.faults))
        return True

    @staticmethod
    def _joined(faults: list[ReadFault]) -> ReadFault:
        """One fault for a record that no copy gave."""
        return ReadFault(faults[0].key, faults[-1].code, " ".join(fault.message for fault in faults))

    def _fault(self, key: Key, done: ReadDone, source: Source) -> ReadFault | None:
        layer, expert = key
        where = f"expert {expert} of layer {layer} in {source.path} at offset {source.offset}"
        if done.error:
            reason = f"expected {done.wanted} bytes, received {done.bytes} ({os.strerror(done.error)})"
            self._sources.failed(source, reason)
            return ReadFault(
                key,
                "expert_read_failed",
                f"Reading {where}: {reason}. Run `colibri verify` on the model directory and check the drive.",
            )
        if not self._sources.is_verified(source, key):
            found = f"{done.checksum:016x}"
            expected = self._sources.files[layer].checksums[expert]
            if found != expected:
                self._sources.found_damaged(source, key, f"its checksum is {found}, expected {expected}")
                return ReadFault(
                    key,
                    "expert_checksum_mismatch",
                    f"The checksum of {where} is {found}, expected {expected}: the file has changed since it was "
                    "converted. Run `colibri verify` on the model directory and convert or copy it again.",
                )
        self._sources.arrived(source, key)
        return None

    def counters(self) -> ReadCounters:
        """The read pools' totals; ``busy_ns`` is the mean over the drives."""
        each = [reader.counters() for reader in self.readers]
        total = ReadCounters(*(sum(values) for values in zip(*map(astuple, each), strict=True)))
        return replace(total, busy_ns=total.busy_ns // len(each))

    @property
    def n_copy_faults(self) -> int:
        """Reads of one copy that failed or came damaged."""
        return self._sources.n_faults

    @property
    def n_copies_damaged(self) -> int:
        return self._sources.n_damaged

    @property
    def n_places_resting(self) -> int:
        return self._sources.n_resting

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
        for reader in self.readers:
            reader.close()
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
