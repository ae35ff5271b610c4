"""GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7: grouped-query attention with DeepSeek-V3's gate, shared expert and MTP layer."""

from __future__ import annotations

from shared.model.config_reader import ConfigReader
from shared.model.families.deepseek_v3 import noaux_model
from shared.model.mapping import grouped_attention, n_layers_of
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    for key, allowed in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        read.only(key, allowed)
    attention = grouped_attention(
        read,
        qk_norm="head" if read.flag("use_qk_norm", False) else "none",
        has_qkv_bias=read.flag("attention_bias", False),
    )
    return noaux_model("glm4_moe", read, (attention,) * (n_layers_of(read) + read.n_mtp()))
