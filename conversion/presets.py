"""Sizes of well-known models as ``config.json``: what synth writes with random weights, and the tables of docs/models.md.

Only widths, counts and what changes the arithmetic is here; the values are those of the published ``config.json`` files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError
from shared.model.config_reader import MTP_KEYS

_NOAUX: Mapping[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
"""The gate of the DeepSeek-V3 line, without groups."""

_LATENT: Mapping[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "attention_bias": False, **_NOAUX}

_GLM_5_2: Mapping[str, Any] = {
    **_LATENT,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "vocab_size": 154880,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

_TINY: Mapping[str, Any] = {
    **_GLM_5_2,
    "eos_token_id": [1020, 1021, 1022],
    "pad_token_id": 1020,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "vocab_size": 1024,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "max_position_embeddings": 2048,
}

_DEEPSEEK_V3: Mapping[str, Any] = {
    **_LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}

_KIMI_K2: Mapping[str, Any] = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": [163585, 163586],
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rope_theta": 50000,
    "rope_scaling": {**_DEEPSEEK_V3["rope_scaling"], "factor": 32, "beta_fast": 1},
    "max_position_embeddings": 131072,
}

_GLM_4_5_AIR: Mapping[str, Any] = {
    **_NOAUX,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

_GLM_4_7: Mapping[str, Any] = {
    **_GLM_4_5_AIR,
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "max_position_embeddings": 202752,
}

_GLM_4_7_FLASH: Mapping[str, Any] = {
    **_LATENT,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "vocab_size": 154880,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

_QWEN3_30B: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "num_hidden_layers": 48,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}

_QWEN3_235B: Mapping[str, Any] = {
    **_QWEN3_30B,
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
}

_QWEN3_5_TEXT: Mapping[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "eos_token_id": 248044,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "vocab_size": 248320,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}


def _qwen3_5(**text: Any) -> Mapping[str, Any]:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {**_QWEN3_5_TEXT, **text},
    }


_QWEN3_5_35B = _qwen3_5()
_QWEN3_5_122B = _qwen3_5(
    num_hidden_layers=48,
    hidden_size=3072,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
    num_attention_heads=32,
    linear_num_value_heads=64,
)
_QWEN3_5_397B = _qwen3_5(
    num_hidden_layers=60,
    hidden_size=4096,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
    num_experts=512,
    num_experts_per_tok=10,
    num_attention_heads=32,
    linear_num_value_heads=64,
)

_OLMOE: Mapping[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "num_hidden_layers": 16,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "vocab_size": 50304,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_bias": False,
    "clip_qkv": None,
    "rope_theta": 10000,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

_MIXTRAL: Mapping[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 32,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

_GPT_OSS_20B: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "num_hidden_layers": 24,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "vocab_size": 201088,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

_GPT_OSS_120B: Mapping[str, Any] = {
    **_GPT_OSS_20B,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}

_GEMMA_4_26B: Mapping[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "eos_token_id": [1, 106],
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_text",
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_global_key_value_heads": 2,
        "global_head_dim": 512,
        "attention_bias": False,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        },
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, slots=True)
class Preset:
    """``config``: the whole model's config.json. ``n_short``: the layers that synth writes when none are asked for."""

    config: Mapping[str, Any]
    n_short: int
    mtp_key: str = ""
    """The key that counts MTP layers; empty: the family has none that we run."""

    @property
    def n_layers(self) -> int:
        """Of the whole model."""
        return int(self.config.get("text_config", self.config)["num_hidden_layers"])


_MTP, _QWEN_MTP = MTP_KEYS

PRESETS: Mapping[str, Preset] = {
    "glm-5.2": Preset(_GLM_5_2, 4, _MTP),
    "tiny": Preset(_TINY, 4, _MTP),
    "deepseek-v3": Preset(_DEEPSEEK_V3, 4, _MTP),
    "kimi-k2": Preset(_KIMI_K2, 4),
    "glm-4.7": Preset(_GLM_4_7, 8, _MTP),
    "glm-4.5-air": Preset(_GLM_4_5_AIR, 8, _MTP),
    "glm-4.7-flash": Preset(_GLM_4_7_FLASH, 47, _MTP),
    "qwen3-30b-a3b": Preset(_QWEN3_30B, 48),
    "qwen3-235b-a22b": Preset(_QWEN3_235B, 8),
    "qwen3.5-35b-a3b": Preset(_QWEN3_5_35B, 40, _QWEN_MTP),
    "qwen3.5-122b-a10b": Preset(_QWEN3_5_122B, 8, _QWEN_MTP),
    "qwen3.5-397b-a17b": Preset(_QWEN3_5_397B, 8, _QWEN_MTP),
    "olmoe-1b-7b": Preset(_OLMOE, 16),
    "mixtral-8x7b": Preset(_MIXTRAL, 16),
    "gpt-oss-20b": Preset(_GPT_OSS_20B, 24),
    "gpt-oss-120b": Preset(_GPT_OSS_120B, 8),
    "gemma-4-26b-a4b": Preset(_GEMMA_4_26B, 30),
}


def preset_config(preset: str, n_layers: int = 0, has_mtp: bool = False) -> dict[str, Any]:
    """config.json of a preset with another number of layers (0: the preset's short form), with or without an MTP layer.

    With all its layers a model has its own dense ones; shorter ones have at most one, as they should mostly be MoE.
    ConfigError for an unknown preset, fewer layers than two, or MTP where the family has none.
    """
    if preset not in PRESETS:
        raise ConfigError(f"--preset must be one of {', '.join(PRESETS)}, found {preset!r}.")
    chosen = PRESETS[preset]
    if has_mtp and not chosen.mtp_key:
        raise ConfigError(f"--mtp: {preset} has no MTP layer. Leave it out.")
    config = dict(chosen.config)
    n_layers = n_layers or chosen.n_short
    if n_layers < 2:
        raise ConfigError(f"--layers {n_layers}: at least 2 are needed, one dense and one with experts.")
    if n_layers < chosen.n_layers and config.get("first_k_dense_replace"):
        config["first_k_dense_replace"] = 1
    if "text_config" in config:
        config["text_config"] = _with_layers(config["text_config"], n_layers)
    else:
        config = _with_layers(config, n_layers)
    if chosen.mtp_key:
        part = config.get("text_config", config)
        part[chosen.mtp_key] = int(has_mtp)
    return config


def _with_layers(config: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    sized = {**config, "num_hidden_layers": n_layers}
    if kinds := config.get("layer_types"):
        # The pattern goes on; the last layer stays of the kind that the whole model ends with.
        sized["layer_types"] = [kinds[at % len(kinds)] for at in range(n_layers - 1)] + [kinds[-1]]
    return sized
