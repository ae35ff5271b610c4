"""Where each layer's cached rows and sequence states lie in the KV segments. Pure; used by all who attach or plan them.

Blocks hold ``KV_BLOCK`` positions. What a layer caches of every position (``Attention.rows``) is ``n_blocks`` blocks in the
KV format (``native/include/colibri.h``), one behind the other; a sequence's block table names the same block numbers in every
layer and in the MTP layer's own segment. A main layer whose rows see a window only has a ring of blocks for each sequence
instead (``ring_blocks``), in the order of their states. Of a layer with a state per sequence, behind its rows, lie its slots,
two of each sequence (``SequenceState``): ``[2 * sequences + snapshots][n_values]`` f32 and
``[2 * sequences][drafts][draft_values]`` f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from native.attention import KV_BLOCK as KV_BLOCK
from native.attention import kv_row_bytes
from shared.model.attention.kind import Attention, LayerKv

if TYPE_CHECKING:
    from shared.run.config import GroupConfig

_ALIGN = 4096
STATE_ITEM_BYTES = 4
SLOTS = 2
"""Of each state: the one that a step reads, and the one that it writes."""


@dataclass(frozen=True)
class StatePlaces:
    """How many states a segment holds: one per open sequence, in two slots with ``n_drafts`` records each, and snapshots.

    ``step_rows``: the most rows of a sequence in a step, where layers with a window hold no more than they must; 0: they hold
    all positions.
    """

    n_sequences: int = 0
    n_drafts: int = 0
    n_snapshots: int = 0
    step_rows: int = 0


@dataclass(frozen=True)
class KvLayout:
    """One KV segment: its layers in order, the number of blocks and the size of all."""

    layers: tuple[LayerKv, ...]
    n_blocks: int
    total_bytes: int


def kv_layout(
    layers: Sequence[Attention], kv_dtype: str, n_blocks: int, states: StatePlaces = StatePlaces()
) -> KvLayout:
    """The segment of these layers (``spec.main_attention``, or ``spec.mtp_attention``)."""
    end = 0

    def place(n_bytes: int) -> int:
        nonlocal end
        start, end = end, end + _aligned(n_bytes)
        return start

    found = []
    for attention in layers:
        ring = ring_blocks(attention.reach, states, n_blocks)
        n_positions = (states.n_sequences * ring or n_blocks) * KV_BLOCK
        rows = tuple(
            place(n_positions * part.n_vectors * kv_row_bytes(kv_dtype, part.n_values)) for part in attention.rows
        )
        state = drafts = None
        if attention.state is not None:
            n_slots = SLOTS * states.n_sequences + states.n_snapshots
            state = place(n_slots * attention.state.n_values * STATE_ITEM_BYTES)
            n_records = SLOTS * states.n_sequences * states.n_drafts
            drafts = place(n_records * attention.state.draft_values * STATE_ITEM_BYTES)
        found.append(LayerKv(rows, state, drafts, ring))
    return KvLayout(tuple(found), n_blocks, max(end, _ALIGN))


def ring_blocks(reach: int, states: StatePlaces, n_blocks: int) -> int:
    """Blocks of each sequence that a layer uses in turn; 0: it holds every position of the ``n_blocks`` blocks of all.

    A step that comes to nothing is done again from its first row, so what that row sees must outlive the last one: the window
    and all rows of a step, wherever in a block they begin. Rejected drafts are such rows.
    """
    if not reach or not states.step_rows or not states.n_sequences:
        return 0
    ring = blocks_for(reach + states.step_rows) + 1
    return ring if ring * states.n_sequences < n_blocks else 0


def group_kv(layers: Sequence[Attention], config: GroupConfig, *, is_mtp: bool = False) -> KvLayout:
    """These layers' segment in a running group. No snapshots: no prefix is shared yet. An MTP layer has no rings."""
    step_rows = 0 if is_mtp else max(config.prefill_chunk, 1 + config.n_drafts)
    states = StatePlaces(config.max_sequences, config.n_drafts, step_rows=step_rows)
    return kv_layout(layers, config.kv_dtype, config.n_kv_blocks, states)


def blocks_for(n_positions: int) -> int:
    """Blocks that hold ``n_positions`` positions."""
    return -(-n_positions // KV_BLOCK)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
