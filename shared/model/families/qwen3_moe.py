"""Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder: queries and keys normed per head, softmax gate, no shared expert."""

from __future__ import annotations

from shared.errors import ConfigError
from shared.model.attention.grouped import Grouped
from shared.model.config_reader import ConfigReader
from shared.model.gate import Gate
from shared.model.inner import Inner
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    read.only("hidden_act", "silu")
    read.only("use_sliding_window", False)
    n_layers = read.integer("num_hidden_layers", high=4000)
    hidden, vocab = read.integer("hidden_size", high=1 << 20), read.integer("vocab_size")
    n_heads, n_kv_heads, head_dim = read.heads(hidden)
    n_experts, k = read.routing("num_experts")
    rms_eps = read.number("rms_norm_eps", 1e-6, high=1.0)
    has_bias = read.flag("attention_bias", False)
    layer_kinds = _layer_kinds(read, n_layers)
    attention = Grouped(
        hidden=hidden,
        rms_eps=rms_eps,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read.rope(read.turned(head_dim), is_interleaved=False).rope,
        qk_norm="head",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    return ModelSpec(
        family="qwen3_moe",
        n_layers=n_layers,
        hidden=hidden,
        vocab=vocab,
        attention=(attention,) * n_layers,
        layer_kinds=layer_kinds,
        dense_inner=read.integer("intermediate_size") if "dense" in layer_kinds else 0,
        n_experts=n_experts,
        expert_inner=read.integer("moe_intermediate_size", high=1 << 20),
        n_shared=0,
        gate=Gate(n_experts=n_experts, k=k, scoring="softmax", norm_topk=read.flag("norm_topk_prob", False)),
        inner=Inner(),
        rms_eps=rms_eps,
        n_mtp=0,
        max_context=read.integer("max_position_embeddings", high=1 << 30),
        eos_ids=read.end_ids(vocab),
        tie_embeddings=read.flag("tie_word_embeddings", False),
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
