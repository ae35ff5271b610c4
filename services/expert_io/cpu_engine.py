"""The engine of the host's own memory and processors: slots in RAM, filled from drives, and the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from native.kernels import ExpertJobs, Ffn
from native.matrix import Matrix, matrix
from native.reader import Reader
from services.expert_io.engine import EngineSetup, ExpertEngine, Work
from services.expert_io.events import Compute, Computed, Event, Read
from services.expert_io.reads import SlotReads
from services.expert_io.slots import Tier
from shared.container.entries import ExpertFile
from shared.container.format import ExpertLayout
from shared.experts.residency import Key
from shared.model.inner import Inner
from shared.run.config import GroupConfig


class CpuEngine(ExpertEngine):
    """Computes within ``start``."""

    name: ClassVar[str] = "cpu"
    is_in_budget: ClassVar[bool] = True

    def __init__(self, setup: EngineSetup, slots: range) -> None:
        config = setup.config
        self.slots = slots
        self._config, self._spec, self._layers = config, setup.container.spec, setup.layers
        self._pool = setup.pool
        new_reader = partial(Reader, config.read_depth, config.read_piece_bytes, engine=config.read_engine)
        self.reads = SlotReads(
            setup.container,
            setup.layers,
            len(slots),
            config.slot_bytes,
            config.direct_io,
            new_reader,
            setup.warn,
            setup.home,
            slots.start,
        )
        self.fds = tuple(reader.fd for reader in self.reads.readers)
        self._files = self.reads.sources.files
        self._layout_of = _number_layouts(self._files)
        self._ffns: dict[int, dict[int, Ffn]] = {layout: {} for layout in self._layout_of.values()}
        self._jobs = ExpertJobs(max(self._spec.n_experts, 1), 0)
        self._computed: Compute | None = None

    @classmethod
    def tier(cls, config: GroupConfig, n_slots: int) -> Tier:
        return Tier("ram", n_slots, max(n_slots, config.n_slots, config.reserved_slots))

    def read(self, order: Read) -> None:
        self.reads.read(order.slot, order.generation, order.key, is_speculative=order.is_speculative)

    def promote(self, slot: int) -> None:
        self.reads.promote(slot)

    def cancel(self, slot: int) -> None:
        self.reads.cancel(slot)

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.reads.release(slot)
            for ffns in self._ffns.values():
                ffns.pop(slot, None)

    def start(self, order: Compute, work: Work) -> None:
        jobs, ffns = self._jobs, self._ffns[self._layout_of[work.layer]]
        rows_at, places_at, begin_of, n_rows_of = work.rows_at, work.places_at, work.begin_of, work.n_rows_of
        jobs.clear()
        for expert, slot in zip(order.experts, order.slots, strict=True):
            at = 4 * begin_of[expert]
            jobs.add_at(ffns.get(slot) or self._ffn(slot, work.layer), rows_at + at, places_at + at, n_rows_of[expert])
        jobs.run(self._pool, work.hidden, work.parts)
        self._computed = order

    def _ffn(self, slot: int, layer: int) -> Ffn:
        """The three matrices of the layer's expert in the slot, pointing into it."""
        file, spec = self._files[layer], self._spec
        made = expert_ffn(self.reads.address(slot), file.layout, file.format, spec.inner)
        self._ffns[self._layout_of[layer]][slot] = made
        return made

    def take(self, now_ns: int) -> Sequence[Event]:
        order, self._computed = self._computed, None
        ended = self.reads.take(now_ns)
        return (Computed(now_ns, order.tier, order.experts), *ended) if order else ended

    def residents(self) -> dict[int, Key]:
        return self.reads.residents(self._layers, self._spec.n_experts)

    def facts(self) -> dict[str, str]:
        config, reads = self._config, self.reads
        return {
            "reads": "direct" if reads.sources.is_direct else "buffered",
            "read_engine": reads.readers[0].engine,
            "read_pieces": f"{config.read_depth} x {config.read_piece_bytes}",
            "memory": reads.slab.describe(),
        }

    def totals(self) -> dict[str, int]:
        found = self.reads.counters()
        return {
            "bytes_demand": found.bytes_demand,
            "bytes_speculative": found.bytes_speculative,
            "reads": found.n_reads,
            "retries": found.n_retries,
            "io_busy_ns": found.busy_ns,
            "copy_faults": self.reads.sources.n_faults,
        }

    def gauges(self) -> dict[str, int]:
        sources = self.reads.sources
        return {"copies_damaged": sources.n_damaged, "places_resting": sources.n_resting}

    def close(self) -> None:
        self.reads.close()


def _number_layouts(files: dict[int, ExpertFile]) -> dict[int, int]:
    """Layer -> a number that is the same for records of the same layout: their matrices lie alike in a slot."""
    numbers: dict[tuple[ExpertLayout, str], int] = {}
    return {layer: numbers.setdefault((file.layout, file.format), len(numbers)) for layer, file in files.items()}


def expert_ffn(address: int, layout: ExpertLayout, fmt: str, function: Inner) -> Ffn:
    """gate [F, D], up [F, D], down [D, F] of a record that lies at ``address``."""

    def part(weight: int, scale: int | None, out: int, in_: int) -> Matrix:
        return matrix(address + weight, None if scale is None else address + scale, fmt, out, in_)

    inner, hidden = layout.inner, layout.hidden
    return function.ffn(
        part(layout.gate_w, layout.gate_s, inner, hidden),
        part(layout.up_w, layout.up_s, inner, hidden),
        part(layout.down_w, layout.down_s, hidden, inner),
        [address + at for at in layout.biases] or None,
    )
