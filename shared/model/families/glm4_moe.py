"""GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7: grouped-query attention with DeepSeek-V3's gate, shared expert and MTP layer."""

from __future__ import annotations

from shared.model.attention.grouped import Grouped
from shared.model.config_reader import ConfigReader
from shared.model.families.deepseek_v3 import dense_or_moe, noaux_gate
from shared.model.inner import Inner
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    for key, allowed in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        read.only(key, allowed)
    n_layers = read.integer("num_hidden_layers", high=4000)
    hidden, vocab = read.integer("hidden_size", high=1 << 20), read.integer("vocab_size")
    n_heads, n_kv_heads, head_dim = read.heads(hidden)
    gate = noaux_gate(read)
    n_mtp = read.n_mtp()
    rms_eps = read.number("rms_norm_eps", 1e-5, high=1.0)
    attention = Grouped(
        hidden=hidden,
        rms_eps=rms_eps,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read.rope(read.turned(head_dim), is_interleaved=False).rope,
        qk_norm="head" if read.flag("use_qk_norm", False) else "none",
        has_qkv_bias=read.flag("attention_bias", False),
    )
    return ModelSpec(
        family="glm4_moe",
        n_layers=n_layers,
        hidden=hidden,
        vocab=vocab,
        attention=(attention,) * (n_layers + n_mtp),
        layer_kinds=dense_or_moe(read, n_layers),
        dense_inner=read.integer("intermediate_size"),
        n_experts=gate.n_experts,
        expert_inner=read.integer("moe_intermediate_size", high=1 << 20),
        n_shared=read.integer("n_shared_experts", high=256),
        gate=gate,
        inner=Inner(),
        rms_eps=rms_eps,
        n_mtp=n_mtp,
        max_context=read.integer("max_position_embeddings", high=1 << 30),
        eos_ids=read.end_ids(vocab),
        tie_embeddings=read.flag("tie_word_embeddings", False),
    )
