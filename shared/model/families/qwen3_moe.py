"""Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder: queries and keys normed per head, softmax gate, no shared expert."""

from __future__ import annotations

from shared.errors import ConfigError
from shared.model.config_reader import ConfigReader
from shared.model.mapping import grouped_attention, moe_model, n_layers_of, softmax_gate
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    read.only("hidden_act", "silu")
    read.only("use_sliding_window", False)
    has_bias = read.flag("attention_bias", False)
    attention = grouped_attention(
        read, default_eps=1e-6, qk_norm="head", has_qkv_bias=has_bias, has_output_bias=has_bias
    )
    layer_kinds = _layer_kinds(read, n_layers_of(read))
    return moe_model(
        "qwen3_moe",
        read,
        attention,
        softmax_gate(read, "num_experts", norm_topk=read.flag("norm_topk_prob", False)),
        layer_kinds=layer_kinds,
        dense_inner=read.integer("intermediate_size") if "dense" in layer_kinds else 0,
    )


def _layer_kinds(read: ConfigReader, n_layers: int) -> tuple[str, ...]:
    """Every ``decoder_sparse_step``-th layer has experts, those in ``mlp_only_layers`` have none."""
    step, dense = read.integer("decoder_sparse_step", 1, high=4000), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise read.complaint("mlp_only_layers", "a list of layer numbers", dense)
    kinds = tuple("dense" if layer in dense or (layer + 1) % step else "moe" for layer in range(n_layers))
    if "moe" not in kinds:
        raise ConfigError(
            f"config.json: all {n_layers} layers are dense; a model without experts has nothing to stream."
        )
    return kinds
