"""GLM-5, GLM-5.1, GLM-5.2: DeepSeek-V3.2's structure; its indexer turns neighbours."""

from __future__ import annotations

from shared.model.attention.latent import Indexer
from shared.model.config_reader import ConfigReader
from shared.model.families.deepseek_v3 import latent_model
from shared.model.families.deepseek_v32 import sparse_indexers
from shared.model.rope import Rope
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    def indexers(read: ConfigReader, n_layers: int, rope: Rope) -> tuple[Indexer, ...]:
        return sparse_indexers(read, n_layers, rope, is_interleaved=True)

    return latent_model("glm_moe_dsa", read, indexers)
