"""DeepSeek-V3.2: DeepSeek-V3 with a sparse indexer."""

from __future__ import annotations

import msgspec

from shared.errors import ConfigError
from shared.model.attention.latent import Indexer
from shared.model.config_reader import ConfigReader
from shared.model.families.deepseek_v3 import latent_model
from shared.model.rope import Rope
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    def indexers(read: ConfigReader, n_layers: int, rope: Rope) -> tuple[Indexer, ...]:
        return sparse_indexers(read, n_layers, rope, is_interleaved=False)

    return latent_model("deepseek_v32", read, indexers)


def sparse_indexers(read: ConfigReader, n_layers: int, rope: Rope, *, is_interleaved: bool) -> tuple[Indexer, ...]:
    """Of each main layer, then that of an MTP layer, which owns one. ``is_interleaved``: unless the config says so itself."""
    dim = read.integer("index_head_dim", high=1 << 16)
    if dim < rope.dim:
        raise read.complaint("index_head_dim", f"at least qk_rope_head_dim = {rope.dim}", dim)
    turned = msgspec.structs.replace(rope, is_interleaved=read.flag("indexer_rope_interleave", is_interleaved))
    owner = Indexer(
        n_heads=read.integer("index_n_heads", high=1 << 12),
        dim=dim,
        topk=read.integer("index_topk"),
        rope=turned,
        is_owner=True,
    )
    shared = msgspec.structs.replace(owner, is_owner=False)
    return (*(owner if owns else shared for owns in _owners(read, n_layers)), owner)


def _owners(read: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    config = read.config
    kinds = read.names("indexer_types", n_layers, ("full", "shared"))
    pattern = config.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != n_layers or set(pattern) - set("FS"):
            raise read.complaint("index_topk_pattern", f"{n_layers} letters F (full) or S (shared)", pattern)
        kinds = tuple("full" if letter == "F" else "shared" for letter in pattern)
    if kinds is None:
        freq = read.integer("index_topk_freq", 1)
        offset = read.integer("index_skip_topk_offset", 2, low=0)
        kinds = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(n_layers))
    if kinds[0] != "full":
        raise ConfigError(
            'config.json: layer 0 must own an indexer ("full"), found "shared": there is no earlier selection to share. '
            'Correct "indexer_types" or "index_topk_pattern".'
        )
    return tuple(kind == "full" for kind in kinds)
