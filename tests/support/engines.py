"""A second expert engine, as unlike the real one as the interface allows: a device that answers later, and in its own order.

It copies records into memory of its own, keeps every order for a while, tells the ends of several in any order, and computes
when nobody waits for it. What it computes is what the kernels compute, so that text can be compared bit by bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from native.kernels import ExpertJobs
from services.expert_io import engines
from services.expert_io.cpu_engine import expert_ffn
from services.expert_io.engine import EngineSetup, ExpertEngine, Work
from services.expert_io.events import (
    Compute,
    Computed,
    ComputeFailed,
    Event,
    Read,
    ReadCancelled,
    ReadFailed,
    ReadLanded,
)
from services.expert_io.slots import Tier
from shared.container.format import ExpertLayout
from shared.errors import ErrorCode
from shared.memory.big_memory import PrivateMemory
from shared.run.config import GroupConfig


class FakeDevice(ExpertEngine):
    """``n_slots`` slots. ``loses_every``: of its computations every so manieth fails."""

    name: ClassVar[str] = "fake"
    n_slots: ClassVar[int] = 8
    loses_every: ClassVar[int] = 0
    seed: ClassVar[int] = 0

    def __init__(self, setup: EngineSetup, slots: range) -> None:
        self.slots = slots
        self._setup, self._spec = setup, setup.container.spec
        self._files = {layer: setup.container.experts[layer] for layer in setup.layers}
        self._slot_bytes = max(file.record_bytes for file in self._files.values())
        self._memory = PrivateMemory(len(slots) * self._slot_bytes)
        self._holds: dict[int, ExpertLayout] = {}
        self._rng = random.Random(self.seed)
        self._reads: list[Read] = []
        self._cancelled: set[int] = set()
        self._work: tuple[Compute, Work, dict[int, tuple[Any, Any]]] | None = None
        self._n_computed = 0
        self.is_stuck = False
        """It computes and computes."""
        self.seen: set[str] = set()
        # Readable as long as it has anything to do.
        self._wakes, self._pulse = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.fds = (self._wakes,)

    @classmethod
    def tier(cls, config: GroupConfig, n_slots: int) -> Tier:
        return Tier("device", cls.n_slots, cls.n_slots)

    def _look_again(self) -> None:
        os.write(self._pulse, b".")

    def read(self, order: Read) -> None:
        assert order.slot in self.slots and all(read.slot != order.slot for read in self._reads)
        self._holds.pop(order.slot, None)
        self._reads.append(order)
        self._look_again()

    def promote(self, slot: int) -> None:
        self.seen.add("promote")

    def cancel(self, slot: int) -> None:
        self.seen.add("cancel")
        self._cancelled.add(slot)

    def give_back(self, slots: Sequence[int]) -> None:
        self.seen.add("give_back")
        for slot in slots:
            self._holds.pop(slot, None)

    def start(self, order: Compute, work: Work) -> None:
        assert self._work is None, "one order at a time"
        mine = {}
        for expert in order.experts:
            begin, n = work.begin_of[expert], work.n_rows_of[expert]
            mine[expert] = work.rows[begin : begin + n].copy(), work.places[begin : begin + n].copy()
        self._work = order, work, mine
        self._look_again()

    def take(self, now_ns: int) -> Sequence[Event]:
        out: list[Event] = []
        try:
            os.read(self._wakes, 4096)
        except BlockingIOError:
            return out
        self._rng.shuffle(self._reads)
        n_ready = self._rng.randint(0, len(self._reads))
        ready, self._reads = self._reads[:n_ready], self._reads[n_ready:]
        for order in ready:
            out.append(self._copy(order, now_ns))
        if self._work and not self.is_stuck and self._rng.random() < 0.5:
            out.append(self._compute(now_ns))
        if len(out) > 1:
            self.seen.add("several at once")
        if self._reads or self._work:
            self._look_again()
        return out

    def _copy(self, order: Read, now_ns: int) -> Event:
        layer, expert = order.key
        file = self._files[layer]
        at = (order.slot - self.slots.start) * self._slot_bytes
        what = (now_ns, order.slot, order.generation, now_ns - 1000, now_ns, file.record_bytes)
        if order.slot in self._cancelled:
            self._cancelled.discard(order.slot)
            self._memory.array[at : at + self._slot_bytes] = 0xEE
            return ReadCancelled(*what)
        with file.path.open("rb") as source:
            source.seek(file.offset_of(expert))
            data = source.read(file.record_bytes)
        if len(data) < file.record_bytes:
            return ReadFailed(*what, ErrorCode.EXPERT_READ_FAILED, f"{file.path} is too short")
        self._memory.array[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._holds[order.slot] = file.layout
        return ReadLanded(*what)

    def _compute(self, now_ns: int) -> Event:
        assert self._work is not None
        (order, work, mine), self._work = self._work, None
        self._n_computed += 1
        if self.loses_every and self._n_computed % self.loses_every == 0:
            return ComputeFailed(
                now_ns, order.tier, order.experts, ErrorCode.KERNEL_FAILED, "The device does not answer."
            )
        jobs = ExpertJobs(len(order.experts), sum(len(rows) for rows, _ in mine.values()))
        for expert, slot in zip(order.experts, order.slots, strict=True):
            address = self._memory.address + (slot - self.slots.start) * self._slot_bytes
            fmt = self._files[work.layer].format
            ffn = expert_ffn(address, self._holds[slot], fmt, self._spec.inner)
            jobs.add(ffn, *mine[expert])
        jobs.run(self._setup.pool, work.hidden, work.parts)
        return Computed(now_ns, order.tier, order.experts)

    def close(self) -> None:
        os.close(self._wakes)
        os.close(self._pulse)
        self._memory.close()


def use_engines(monkeypatch: Any, *kinds: type[ExpertEngine]) -> None:
    """The engines of stores that start from now on: what registering one comes to."""
    monkeypatch.setattr(engines, "ENGINES", kinds)
