"""OLMoE-1B-7B: queries and keys normed as whole projections, softmax gate whose weights stay as they are."""

from __future__ import annotations

from shared.model.attention.grouped import Grouped
from shared.model.config_reader import ConfigReader
from shared.model.gate import Gate
from shared.model.inner import Inner
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    read.only("hidden_act", "silu")
    n_layers = read.integer("num_hidden_layers", high=4000)
    hidden, vocab = read.integer("hidden_size", high=1 << 20), read.integer("vocab_size")
    n_heads, n_kv_heads, head_dim = read.heads(hidden)
    n_experts, k = read.routing("num_experts")
    rms_eps = read.number("rms_norm_eps", 1e-5, high=1.0)  # absent in the first release
    has_bias = read.flag("attention_bias", False)
    attention = Grouped(
        hidden=hidden,
        rms_eps=rms_eps,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read.rope(read.turned(head_dim), is_interleaved=False, default_theta=10000.0).rope,
        qk_norm="whole",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        clip=0.0 if read.config.get("clip_qkv") is None else read.number("clip_qkv", high=1e6),
    )
    return ModelSpec(
        family="olmoe",
        n_layers=n_layers,
        hidden=hidden,
        vocab=vocab,
        attention=(attention,) * n_layers,
        layer_kinds=("moe",) * n_layers,
        dense_inner=0,
        n_experts=n_experts,
        expert_inner=read.integer("intermediate_size", high=1 << 20),
        n_shared=0,
        gate=Gate(n_experts=n_experts, k=k, scoring="softmax", norm_topk=read.flag("norm_topk_prob", False)),
        inner=Inner(),
        rms_eps=rms_eps,
        n_mtp=0,
        max_context=read.integer("max_position_embeddings", high=1 << 30),
        eos_ids=read.end_ids(vocab),
        tie_embeddings=read.flag("tie_word_embeddings", False),
    )
