"""Where a layer's rows and states lie: nothing overlaps, and all of it is in the ledger."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from conversion.presets import preset_config
from shared.container.format import PRECISIONS, plan_container, plan_facts
from shared.model.attention.kind import Attention, SequenceState
from shared.model.family import spec_of
from shared.model.kv_layout import KV_BLOCK, KvLayout, StatePlaces, blocks_for, kv_layout, ring_blocks
from shared.planning.ledger import make_ledger
from shared.run.config import Settings
from tests.oracle import oracle_config


class Recurrent(Attention, frozen=True, kw_only=True):
    """A kind that keeps a state of each sequence instead of rows, as gated delta rules do."""

    n_values: int
    draft_values: int

    @property
    def state(self) -> SequenceState:
        return SequenceState("sum over the past", self.n_values, self.draft_values)

    def measure(self, dry: object, n_rows: int, context: int, kv_dtype: str) -> None:
        """No kernel yet."""


def spans(
    layout: KvLayout, layers: tuple[Attention, ...], item: Callable[[int], int], states: StatePlaces
) -> list[tuple[int, int]]:
    """(start, bytes) of everything in the segment."""
    found = []
    for at, layer in zip(layout.layers, layers, strict=True):
        found += [
            (start, layout.n_blocks * KV_BLOCK * part.n_vectors * item(part.n_values))
            for start, part in zip(at.rows, layer.rows, strict=True)
        ]
        if layer.state:
            n_slots = 2 * states.n_sequences + states.n_snapshots
            found.append((at.state, 4 * n_slots * layer.state.n_values))
            found.append((at.drafts, 4 * 2 * states.n_sequences * states.n_drafts * layer.state.draft_values))
        else:
            assert (at.state, at.drafts) == (None, None)
    return found


def mixed() -> tuple[Attention, ...]:
    spec = spec_of(preset_config("tiny", 3))
    grouped = spec_of(oracle_config("glm4_moe")).attention[0]
    recurrent = Recurrent(hidden=64, rms_eps=1e-6, n_values=5000, draft_values=300)
    return (recurrent, *spec.main_attention, recurrent, grouped)


def test_a_layer_with_a_window_holds_the_window_and_a_step() -> None:
    """Wherever in a block they begin: 1,024 positions and 512 rows touch 25 blocks at most."""
    states = StatePlaces(n_sequences=3, step_rows=512)
    assert ring_blocks(1024, states, 3 * 1000) == 25
    first, last = 63, 63 + 1024 - 1 + 512 - 1
    assert last // KV_BLOCK - first // KV_BLOCK + 1 == 25
    assert ring_blocks(0, states, 3000) == 0, "no window"
    assert ring_blocks(1024, states, 3 * 25) == 0, "the context is no longer"
    assert ring_blocks(1024, StatePlaces(3), 3000) == 0
    spec = spec_of(oracle_config("gpt_oss"))
    whole, rings = (kv_layout(spec.main_attention, "bf16", 300, places) for places in (StatePlaces(3), states))
    n_window = blocks_for(8 + 512) + 1
    assert [layer.ring for layer in rings.layers] == [n_window, 0, n_window, 0]
    rows = [2 * KV_BLOCK * layer.rows[0].n_vectors * layer.rows[0].n_values for layer in spec.main_attention]
    assert whole.total_bytes - rings.total_bytes == pytest.approx(2 * (300 - 3 * n_window) * rows[0], abs=4096 * 4)


def test_windows_are_in_the_ledger() -> None:
    """A longer context costs where all positions are seen."""
    spec = spec_of({**oracle_config("gpt_oss"), "max_position_embeddings": 1 << 20})
    facts = plan_facts(spec, plan_container(spec, PRECISIONS["int4"]))

    def kv_bytes(context: int) -> int:
        made = make_ledger(spec, facts, Settings(max_context=context, max_sequences=1, prefill_chunk=64), 2 << 30)
        return sum(line.bytes for line in made.lines if line.what.startswith("KV of"))

    grown = kv_bytes(64_000) - kv_bytes(32_000)
    part = spec.attention[1].rows[0]
    assert grown == pytest.approx(2 * 32_000 * 2 * part.n_vectors * part.n_values, rel=0.01)


ITEMS = {"f32": lambda n: 4 * n, "bf16": lambda n: 2 * n, "int8": lambda n: 4 * -(-n // 4) + 2 * -(-n // 64)}
"""Bytes of a position's vector by its number of values."""


@pytest.mark.parametrize("kv_dtype", ITEMS)
def test_nothing_overlaps(kv_dtype: str) -> None:
    layers, states = mixed(), StatePlaces(n_sequences=3, n_drafts=2, n_snapshots=4)
    layout = kv_layout(layers, kv_dtype, 5, states)
    end = 0
    for start, n_bytes in sorted(spans(layout, layers, ITEMS[kv_dtype], states)):
        assert start >= end
        assert start % 4096 == 0
        end = start + n_bytes
    assert end <= layout.total_bytes < end + 4096


def test_addresses_are_offsets_from_the_start() -> None:
    layout = kv_layout(mixed(), "f32", 2, StatePlaces(1, 1))
    for layer in layout.layers:
        moved = layer.at(1 << 30)
        assert [a - b for a, b in zip(moved.rows, layer.rows, strict=True)] == [1 << 30] * len(layer.rows)
        assert moved.state is None if layer.state is None else moved.state == layer.state + (1 << 30)


def test_states_are_in_the_ledger() -> None:
    """Of each sequence, whatever its length, twice, with what drafts need."""
    plain = spec_of(preset_config("tiny", 4, True))
    facts = plan_facts(plain, plan_container(plain, PRECISIONS["int4"]))
    recurrent = Recurrent(hidden=64, rms_eps=1e-6, n_values=1 << 20, draft_values=1 << 18)
    spec = msgspec.structs.replace(plain, attention=(recurrent, *plain.attention[1:]))

    def line(n_sequences: int, n_drafts: int, context: int = 512) -> int:
        settings = Settings(max_context=context, max_sequences=n_sequences, draft=n_drafts or "off")
        made = make_ledger(spec, facts, settings, 2 << 30)
        kv = [line.bytes for line in made.lines if line.what.startswith("KV of")]
        rows = (
            2
            * KV_BLOCK
            * context
            // 64
            * n_sequences
            * sum(p.n_vectors * p.n_values for a in spec.main_attention for p in a.rows)
        )
        assert 0 <= kv[0] - rows < 4096 * 2 * len(spec.main_attention), "the rows' own line"
        [found] = [line.bytes for line in made.lines if line.what.startswith("states of")]
        return found

    assert line(1, 0) == line(1, 0, 1024) == 8 << 20
    assert line(3, 0) == 24 << 20
    assert line(3, 2) == (24 << 20) + 2 * 3 * 2 * (1 << 20)


def test_states_do_not_make_the_context_shorter() -> None:
    """They are the same for any context."""
    plain = spec_of(preset_config("tiny", 4, True))
    facts = plan_facts(plain, plan_container(plain, PRECISIONS["int4"]))
    recurrent = Recurrent(hidden=64, rms_eps=1e-6, n_values=40 << 20, draft_values=1)
    spec = msgspec.structs.replace(plain, attention=(recurrent, *plain.attention[1:]))
    made = [make_ledger(model, facts, Settings(max_sequences=1, draft="off"), 2 << 30) for model in (plain, spec)]
    assert made[0].max_context == made[1].max_context
