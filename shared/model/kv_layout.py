"""Where each layer's cached latents and index keys lie in the KV segments. Pure; used by all who attach or plan them.

Blocks hold ``KV_BLOCK`` positions. The latent cache of a layer is ``[n_blocks][KV_BLOCK][kv_lora_rank + qk_rope]``; a
layer that owns an indexer has ``[n_blocks][KV_BLOCK][index_dim]`` behind it. A sequence's block table names the same
block numbers in every layer and in the MTP layer's own segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.model.spec import ModelSpec

KV_BLOCK = 64
KV_ITEM_BYTES = {"f32": 4, "bf16": 2}
_ALIGN = 4096


@dataclass(frozen=True)
class LayerKv:
    """Byte offsets of one layer in its segment; ``index_offset`` is None where the layer owns no indexer."""

    latent_offset: int
    index_offset: int | None


@dataclass(frozen=True)
class KvLayout:
    """One KV segment: its layers in order, the number of blocks and the size of all."""

    layers: tuple[LayerKv, ...]
    n_blocks: int
    total_bytes: int


def token_bytes(spec: ModelSpec, index_kinds: tuple[str, ...], kv_dtype: str) -> int:
    """Bytes that one cached position takes over the layers whose indexer kinds are given."""
    item = KV_ITEM_BYTES[kv_dtype]
    latent = (spec.kv_lora_rank + spec.qk_rope) * item
    return sum(latent + (spec.index_dim * item if kind == "full" else 0) for kind in index_kinds)


def kv_layout(spec: ModelSpec, index_kinds: tuple[str, ...], kv_dtype: str, n_blocks: int) -> KvLayout:
    """The segment for layers with these indexer kinds (``spec.index_kinds``, or the MTP layer's alone)."""
    item = KV_ITEM_BYTES[kv_dtype]
    latent_bytes = _aligned(n_blocks * KV_BLOCK * (spec.kv_lora_rank + spec.qk_rope) * item)
    index_bytes = _aligned(n_blocks * KV_BLOCK * spec.index_dim * item)
    layers = []
    offset = 0
    for kind in index_kinds:
        latent_offset = offset
        offset += latent_bytes
        index_offset = None
        if kind == "full":
            index_offset = offset
            offset += index_bytes
        layers.append(LayerKv(latent_offset, index_offset))
    return KvLayout(tuple(layers), n_blocks, max(offset, _ALIGN))


def blocks_for(n_positions: int) -> int:
    """Blocks that hold ``n_positions`` positions."""
    return -(-n_positions // KV_BLOCK)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
