"""Reads that bring records from their sources into slots in RAM, verified.

Joins the slab (``slab.py``), the files (``sources.py``) and the read pools, one per drive. A read that fails goes to another
copy of the record; only when none is left it is a fault. Chooses neither slots nor experts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace

from native.memory import HugeBuffer
from native.reader import ReadCounters, ReadDone, Reader
from services.expert_io.events import ReadCancelled, ReadFailed, ReadLanded
from services.expert_io.slab import Slab
from services.expert_io.sources import RecordSources, Source
from shared.container.reader import Container
from shared.errors import ErrorCode, StoreError
from shared.experts.residency import Key
from shared.memory.big_memory import Home, content_of
from shared.planning.ledger import N_STAGES

READ_ALIGN = 4096


@dataclass
class _Read:
    """A read under way. ``is_guess``: nobody waits for it yet."""

    slot: int
    generation: int
    key: Key
    source: Source
    is_guess: bool
    is_cancelled: bool = False
    faults: dict[int, tuple[ErrorCode, str]] = field(
        default_factory=dict
    )  # of the places already tried: code, sentence


class SlotReads:
    """``n_slots`` slots in RAM, the first with the number ``first``, and the reads that fill them.

    ``layers``: those whose experts may be asked for. ``warn`` takes an event and its facts when a copy turns out bad.
    """

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
        first: int = 0,
    ) -> None:
        """``new_reader`` is called once per drive."""
        self.sources = RecordSources(container, layers, direct_io, warn)
        largest = max((f.record_bytes for f in self.sources.files.values()), default=READ_ALIGN)
        if slot_bytes < largest:
            raise StoreError(
                f"A slot has {slot_bytes} bytes but the largest expert record has {largest}; this is a fault."
            )
        n_records = sum(file.n_experts for file in container.experts.values())
        content = content_of(container.experts_content()) if home else 0
        self.slab = Slab(n_slots, slot_bytes, home, n_records, content)
        self.readers = [new_reader() for _ in range(self.sources.n_drives)]
        self._stages = [self._new_stages(reader) for reader in self.readers]
        self._first = first
        self._reads: dict[int, _Read] = {}
        self._next_tag = 1
        self._tag_of_slot: dict[int, int] = {}

    def _new_stages(self, reader: Reader) -> HugeBuffer | None:
        """Memory in which records are put together, where they do not lie whole."""
        n_bytes = max((file.raw.stage_bytes for file in self.sources.files.values() if file.raw), default=0)
        if not n_bytes:
            return None
        memory = HugeBuffer(N_STAGES * n_bytes)
        reader.stages(memory.address, N_STAGES, n_bytes)
        return memory

    def address(self, slot: int) -> int:
        """Where the slot's bytes lie."""
        return self.slab.address(slot - self._first)

    def release(self, slot: int) -> None:
        """The slot holds nothing any more: its memory goes back to the system."""
        self.slab.release(slot - self._first)

    def residents(self, layers: tuple[int, ...], n_experts: int) -> dict[int, Key]:
        """What ``Slab.residents`` finds; those experts were verified when they were read."""
        return {slot + self._first: key for slot, key in self.slab.residents(layers, n_experts).items()}

    def read(self, slot: int, generation: int, key: Key, *, is_speculative: bool) -> None:
        """Read the record of ``key`` into the slot; ``take`` tells when it is there."""
        source = self.sources.choose(key, is_guess=is_speculative)
        assert source is not None, "an opened container has a copy of every record"
        self._submit(_Read(slot, generation, key, source, is_speculative))

    def _submit(self, read: _Read) -> None:
        tag = self._next_tag
        self._next_tag += 1
        self._reads[tag] = read
        self._tag_of_slot[read.slot] = tag
        self.slab.reading(read.slot - self._first, read.key)
        source = read.source
        if source.extents:
            self.readers[source.drive].submit_extents(
                tag, source.extents, source.matrices, self.address(read.slot), speculative=read.is_guess
            )
            return
        self.readers[source.drive].submit(
            tag,
            source.fd,
            source.offset,
            source.n_bytes,
            self.address(read.slot),
            speculative=read.is_guess,
            checksum=not self.sources.is_verified(source, read.key),
        )

    def promote(self, slot: int) -> None:
        """Somebody waits for this guessed read now."""
        tag = self._tag_of_slot.get(slot)
        if tag is not None:
            read = self._reads[tag]
            self.readers[read.source.drive].promote(tag)
            if read.is_guess:
                read.is_guess = False
                self.sources.promoted(read.source)

    def cancel(self, slot: int) -> None:
        """Stop this read at its next piece; its end still comes."""
        tag = self._tag_of_slot.get(slot)
        if tag is not None:
            read = self._reads[tag]
            read.is_cancelled = True
            self.readers[read.source.drive].cancel(tag)

    def take(self, now_ns: int) -> list[ReadLanded]:
        """Reads that ended since the last call."""
        if not self._reads:
            return []
        out: list[ReadLanded] = []
        for done in (done for reader in self.readers for done in reader.take()):
            read = self._reads.pop(done.tag)
            if self._tag_of_slot.get(read.slot) == done.tag:
                del self._tag_of_slot[read.slot]
            event = self._ended(read, done, now_ns)
            if event:
                out.append(event)
        return out

    def _ended(self, read: _Read, done: ReadDone, now_ns: int) -> ReadLanded | None:
        """What became of the read; None when it goes on with another copy."""
        source = read.source
        self.sources.ended(source, done.bytes, done.start_ns, done.end_ns, is_guess=read.is_guess)
        what = (now_ns, read.slot, read.generation, done.start_ns, done.end_ns, done.bytes)
        fault = None if done.cancelled else self._fault(read.key, done, source)
        if fault:
            read.faults[source.place] = fault
            if not read.is_cancelled:
                if self._try_another(read):
                    return None
                self.slab.empty(read.slot - self._first)
                code, message = fault[0], " ".join(sentence for _, sentence in read.faults.values())
                return ReadFailed(*what, code, message)
        if done.cancelled or fault:
            self.slab.empty(read.slot - self._first)
            return ReadCancelled(*what)
        self.slab.holds(read.slot - self._first, read.key)
        return ReadLanded(*what)

    def _try_another(self, read: _Read) -> bool:
        """Reads another copy in place of one that failed; False when there is none."""
        source = self.sources.choose(read.key, is_guess=read.is_guess, tried=read.faults.keys())
        if source is None:
            return False
        self._submit(replace(read, source=source))
        return True

    def _fault(self, key: Key, done: ReadDone, source: Source) -> tuple[ErrorCode, str] | None:
        """A code and a sentence, when what came is not the record."""
        layer, expert = key
        where = f"expert {expert} of layer {layer} in {source.path} at offset {source.offset}"
        if done.error == errno.EILSEQ:
            reason = "a scale is NaN, infinite or too large for f16"
            self.sources.found_damaged(source, key, reason)
            return ErrorCode.EXPERT_READ_FAILED, f"Reading {where}: {reason}. Copy the model directory again."
        if done.error:
            reason = f"expected {done.wanted} bytes, received {done.bytes} ({os.strerror(done.error)})"
            self.sources.failed(source, reason)
            return (
                ErrorCode.EXPERT_READ_FAILED,
                f"Reading {where}: {reason}. Run `colibri verify` on the model directory and check the drive.",
            )
        if not self.sources.is_verified(source, key):
            found = f"{done.checksum:016x}"
            expected = self.sources.files[layer].checksums[expert]
            if found != expected:
                self.sources.found_damaged(source, key, f"its checksum is {found}, expected {expected}")
                return (
                    ErrorCode.EXPERT_CHECKSUM_MISMATCH,
                    f"The checksum of {where} is {found}, expected {expected}: the file has changed since it was "
                    "converted. Run `colibri verify` on the model directory and convert or copy it again.",
                )
        self.sources.arrived(source, key)
        return None

    def counters(self) -> ReadCounters:
        """The read pools' totals; ``busy_ns`` is the mean over the drives."""
        each = [reader.counters() for reader in self.readers]
        if len(each) == 1:
            return each[0]
        total = ReadCounters(*(sum(values) for values in zip(*map(astuple, each), strict=True)))
        return replace(total, busy_ns=total.busy_ns // len(each))

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        for stages in self._stages:
            if stages is not None:
                stages.close()
        self.sources.close()
        self.slab.close()
