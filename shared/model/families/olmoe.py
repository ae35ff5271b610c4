"""OLMoE-1B-7B: queries and keys normed as whole projections, softmax gate whose weights stay as they are."""

from __future__ import annotations

from shared.model.config_reader import ConfigReader
from shared.model.mapping import grouped_attention, moe_model, softmax_gate
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    read.only("hidden_act", "silu")
    has_bias = read.flag("attention_bias", False)
    attention = grouped_attention(  # the first release says neither eps nor theta
        read,
        default_theta=10000.0,
        qk_norm="whole",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        clip=0.0 if read.config.get("clip_qkv") is None else read.number("clip_qkv", high=1e6),
    )
    gate = softmax_gate(read, "num_experts", norm_topk=read.flag("norm_topk_prob", False))
    return moe_model("olmoe", read, attention, gate, expert_key="intermediate_size")
