"""Mixtral-8x7B, Mixtral-8x22B: plain grouped-query attention, softmax gate over few large experts."""

from __future__ import annotations

from shared.model.config_reader import ConfigReader
from shared.model.mapping import grouped_attention, moe_model, softmax_gate
from shared.model.spec import ModelSpec

_OWN_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def spec(read: ConfigReader) -> ModelSpec:
    read.only("hidden_act", "silu")
    window = 0 if read.config.get("sliding_window") is None else read.integer("sliding_window", high=1 << 30)
    attention = grouped_attention(read, window=window)
    gate = softmax_gate(read, "num_local_experts", norm_topk=True)
    return moe_model("mixtral", read, attention, gate, expert_key="intermediate_size")


def source_name(name: str) -> str:
    """Every layer has experts: whatever is below ``mlp`` is theirs or the gate's."""
    for ours, own in _OWN_NAMES:
        name = name.replace(ours, own)
    return name
