"""GLM-4.7-Flash: DeepSeek-V3's structure; without a word on dense layers, the first one is."""

from __future__ import annotations

from shared.model.config_reader import ConfigReader
from shared.model.families.deepseek_v3 import latent_model
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    read.only("partial_rotary_factor", 1.0)
    if read.config.get("mlp_layer_types") is None:
        read = read.with_default("first_k_dense_replace", 1)
    return latent_model("glm4_moe_lite", read, lambda _, n_layers, rope: (None,) * (n_layers + 1))
