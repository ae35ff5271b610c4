"""What llama.cpp calls the parts of a model: per shape the architecture, its names of tensors and its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.model.attention.grouped import Grouped
from shared.model.attention.latent import Latent
from shared.model.spec import ModelSpec

OF_MODEL: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

_OF_ALL: Mapping[str, str] = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}
_OF_LATENT: Mapping[str, str] = {
    **_OF_ALL,
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.k_b.weight": "attn_k_b.weight",
    "self_attn.v_b.weight": "attn_v_b.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_OF_GROUPED: Mapping[str, str] = {
    **_OF_ALL,
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}


@dataclass(frozen=True)
class Shape:
    """A preset as llama.cpp knows it."""

    architecture: str
    of_layer: Mapping[str, str]
    """Our names within a layer -> GGUF's."""
    keys: Callable[[ModelSpec], dict[str, Any]]
    """The metadata below the architecture's name."""
    has_dense: bool
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the preset's config.json."""

    def metadata(self, spec: ModelSpec) -> dict[str, Any]:
        """GGUF's keys; Python int, float, bool, str or list[int]."""
        return {
            "general.architecture": self.architecture,
            "general.name": "random weights",
            "tokenizer.ggml.model": "no_vocab",
            **{f"{self.architecture}.{key}": value for key, value in self.keys(spec).items()},
        }


def _common(spec: ModelSpec) -> dict[str, Any]:
    return {
        "block_count": spec.n_layers,
        "context_length": spec.max_context,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.dense_inner or spec.expert_inner,
        "vocab_size": spec.vocab,
        "expert_count": spec.n_experts,
        "expert_used_count": spec.gate_k,
        "expert_feed_forward_length": spec.expert_inner,
        "attention.layer_norm_rms_epsilon": float(spec.rms_eps),
    }


def _glm_dsa(spec: ModelSpec) -> dict[str, Any]:
    layers = [layer for layer in spec.main_attention if isinstance(layer, Latent)]
    mla, index = layers[0], layers[0].indexer
    assert index is not None
    return {
        **_common(spec),
        "leading_dense_block_count": spec.layer_kinds.count("dense"),
        "expert_shared_count": spec.n_shared,
        "expert_weights_scale": float(spec.gate.scaling),
        "expert_weights_norm": spec.gate.norm_topk,
        "expert_gating_func": 2,  # sigmoid
        "rope.freq_base": float(mla.rope.theta),
        "rope.dimension_count": mla.rope.dim,
        "attention.head_count": mla.n_heads,
        "attention.head_count_kv": 1,  # absorbed: all heads share one latent
        "attention.q_lora_rank": mla.q_rank,
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.key_length": mla.latent,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.qk_head,
        "attention.value_length_mla": mla.v_dim,
        "attention.indexer.head_count": index.n_heads,
        "attention.indexer.key_length": index.dim,
        "attention.indexer.top_k": index.topk,
        "attention.indexer.types": [int(layer.owns_indexer) for layer in layers],
    }


def _qwen3moe(spec: ModelSpec) -> dict[str, Any]:
    first = spec.main_attention[0]
    assert isinstance(first, Grouped)
    return {
        **_common(spec),
        "rope.freq_base": float(first.rope.theta),
        "rope.dimension_count": first.rope.dim,
        "attention.head_count": first.n_heads,
        "attention.head_count_kv": first.n_kv_heads,
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
    }


_TINY: Mapping[str, Any] = {
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "moe_intermediate_size": 64,
    "index_head_dim": 64,
    "max_position_embeddings": 4096,
}
"""GGUF's blocks hold 32 inputs, and llama.cpp rotates index keys of 64 or more: the preset's own tiny widths don't do."""

SHAPES: Mapping[str, Shape] = {
    "glm-5.2": Shape("glm-dsa", _OF_LATENT, _glm_dsa, has_dense=True),
    "tiny": Shape("glm-dsa", _OF_LATENT, _glm_dsa, has_dense=True, changes=_TINY),
    "qwen3-30b-a3b": Shape("qwen3moe", _OF_GROUPED, _qwen3moe, has_dense=False),
}
