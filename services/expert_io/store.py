"""The expert store's memory and files: one slab of slots, one file per MoE layer, reads into slots.

Owns the slab, the file descriptors and the read pool. Does not choose victims (``slots.py``) nor order work
(``layer_run.py``). Runs in expert_io.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from native.kernels import Ffn
from native.matrix import Matrix, matrix
from native.memory import HugeBuffer
from native.reader import ReadDone, Reader
from services.expert_io.slots import Slot
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
        self._files: dict[int, ExpertFile] = {layer: container.experts[layer] for layer in layers}
        largest = max((f.record_bytes for f in self._files.values()), default=READ_ALIGN)
        if slot_bytes < largest:
            raise StoreError(
                f"A slot has {slot_bytes} bytes but the largest expert record has {largest}; this is a fault."
            )
        self.slot_bytes = slot_bytes
        self._slab = HugeBuffer(n_slots * slot_bytes)
        self._spec = container.spec
        self._fds: dict[int, int] = {}
        self.is_direct = direct_io != "off"
        for layer, file in self._files.items():
            self._fds[layer] = self._open(str(file.path), direct_io)
        self.reader = Reader(PIECES_IN_FLIGHT, PIECE_BYTES)
        self._verified: set[Key] = set()
        self._reads: dict[int, tuple[Slot, int, Key]] = {}
        self._next_tag = 1
        self._tag_of_slot: dict[int, int] = {}
        self._ffns: dict[tuple[int, int], Ffn] = {}

    def _open(self, path: str, direct_io: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if self.is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError:
                if direct_io == "on":
                    raise StoreError(
                        f'{path} can\'t be opened for direct reads; this file system has none. Use direct_io = "auto".'
                    ) from None
                # One mount serves all files of a model: buffered for all, so that the facts say one thing.
                self.is_direct = False
        return os.open(path, flags)

    # -- reads -----------------------------------------------------------------------------------------------

    def start_read(self, slot: Slot, *, speculative: bool) -> None:
        """Read the record of ``slot.key`` into the slot; ``finished`` tells when it is there."""
        assert slot.key is not None
        layer, expert = slot.key
        file = self._files[layer]
        tag = self._next_tag
        self._next_tag += 1
        self._reads[tag] = (slot, slot.generation, slot.key)
        self._tag_of_slot[slot.index] = tag
        self.reader.submit(
            tag,
            self._fds[layer],
            file.offset_of(expert),
            file.record_bytes,
            self._slab.address + slot.index * self.slot_bytes,
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
            slot, generation, key = self._reads.pop(done.tag)
            if self._tag_of_slot.get(slot.index) == done.tag:
                del self._tag_of_slot[slot.index]
            assert slot.generation == generation, "a slot got a new tenant while its read was in flight"
            out.append((slot, done, None if done.cancelled else self._fault(key, done)))
        return out

    def _fault(self, key: Key, done: ReadDone) -> ReadFault | None:
        layer, expert = key
        file = self._files[layer]
        where = f"expert {expert} of layer {layer} in {file.path} at offset {file.offset_of(expert)}"
        if done.error:
            return ReadFault(
                key,
                "expert_read_failed",
                f"Reading {where}: expected {done.wanted} bytes, received {done.bytes} ({os.strerror(done.error)}). "
                "Run `colibri verify` on the model directory and check the drive.",
            )
        if key not in self._verified:
            found = f"{done.checksum:016x}"
            expected = file.checksums[expert]
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
        cached = self._ffns.get((slot.index, slot.key[0]))
        if cached is None:
            file = self._files[slot.key[0]]
            cached = expert_ffn(
                self._slab.address + slot.index * self.slot_bytes,
                file.layout,
                file.format,
                self._spec.hidden,
                self._spec.expert_inner,
            )
            self._ffns[(slot.index, slot.key[0])] = cached
        return cached

    def close(self) -> None:
        self.reader.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._slab.close()


def expert_ffn(address: int, layout: ExpertLayout, fmt: str, hidden: int, inner: int) -> Ffn:
    """gate [F, D], up [F, D], down [D, F] of a record that lies at ``address``."""

    def part(weight: int, scale: int | None, out: int, in_: int) -> Matrix:
        return matrix(address + weight, None if scale is None else address + scale, fmt, out, in_)

    return Ffn(
        part(layout.gate_w, layout.gate_s, inner, hidden),
        part(layout.up_w, layout.up_s, inner, hidden),
        part(layout.down_w, layout.down_s, hidden, inner),
    )
