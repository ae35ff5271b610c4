"""ModelSpec: what config.json says, in both spellings, and what is refused with which words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from conversion.presets import preset_config
from shared.errors import ConfigError
from shared.model.attention.delta import Delta
from shared.model.attention.grouped import Grouped
from shared.model.config_reader import without_mtp
from shared.model.family import load_spec, spec_of
from shared.model.spec import ModelSpec
from tests.oracle import MTP_ORACLES, ORACLES, oracle_config, oracle_dir

GLM_5_2_FULL = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)


def glm(**changes: Any) -> ModelSpec:
    return spec_of({**oracle_config("glm_moe_dsa"), **changes})


def deepseek(name: str = "deepseek_v3", **changes: Any) -> ModelSpec:
    return spec_of({**oracle_config(name), **changes})


def kinds(spec: ModelSpec) -> tuple[str, ...]:
    """Of each layer, the MTP layer last: whether it owns an indexer, shares a selection, or sees all keys."""
    return tuple(
        "none" if layer.indexer is None else "full" if layer.indexer.is_owner else "shared" for layer in spec.attention
    )


def without(name: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in oracle_config(name).items() if key not in keys}


def refused(config: dict[str, Any], *words: str, generation: dict[str, Any] | None = None) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(config, generation)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert text.endswith("."), text


def test_glm_5_2() -> None:
    config = preset_config("glm-5.2", 78, has_mtp=True) | {"first_k_dense_replace": 3}
    spec = spec_of(config)
    assert [i for i, kind in enumerate(kinds(spec)) if kind == "full"] == [*GLM_5_2_FULL, 78]
    mla = spec.attention[0]
    assert mla.softmax_scale == 0.0625
    assert mla.rope.amplitude == 1.0
    assert (spec.mtp_layer, mla.qk_head, mla.latent, spec.shared_inner) == (78, 256, 576, 2048)
    assert spec.moe_layers == tuple(range(3, 79))
    assert spec.layer_kinds == ("dense",) * 3 + ("moe",) * 75
    freq = mla.rope.inv_freq()
    assert len(freq) == 32
    assert freq[0] == 1.0
    assert math.isclose(freq[31], 8e6 ** (-62 / 64))


def test_indexer_kinds_by_list_pattern_and_rule_agree() -> None:
    listed = kinds(glm())
    assert listed == ("full", "full", "full", "shared", "shared", "shared", "full", "shared", "full")
    by_rule = kinds(spec_of(without("glm_moe_dsa", "indexer_types")))
    assert by_rule == listed
    by_pattern = kinds(spec_of(without("glm_moe_dsa", "indexer_types") | {"index_topk_pattern": "FFFSSSFS"}))
    assert by_pattern == listed
    no_rule = spec_of(without("glm_moe_dsa", "indexer_types", "index_topk_freq", "index_skip_topk_offset"))
    assert set(kinds(no_rule)) == {"full"}
    assert set(kinds(deepseek("deepseek_v32"))) == {"full"}
    assert set(kinds(deepseek())) == {"none"}


def test_indexer_rope_differs_by_family() -> None:
    """Interleaved in GLM, half-split in DeepSeek-V3.2, unless the config says so itself."""

    def turns_neighbours(spec: ModelSpec) -> bool:
        return all(layer.indexer.rope.is_interleaved for layer in spec.attention)

    assert turns_neighbours(spec_of(without("glm_moe_dsa", "indexer_rope_interleave")))
    assert not turns_neighbours(deepseek("deepseek_v32"))
    assert turns_neighbours(deepseek("deepseek_v32", indexer_rope_interleave=True))
    assert deepseek("deepseek_v32").attention[0].rope.is_interleaved


def test_both_spellings_of_rope() -> None:
    old = deepseek()
    config = without("deepseek_v3", "rope_theta", "rope_scaling")
    scaling = dict(oracle_config("deepseek_v3")["rope_scaling"])
    scaling["rope_type"] = scaling.pop("type")
    new = spec_of({**config, "rope_parameters": {"rope_theta": 10000, **scaling}})
    assert new == old
    plain = spec_of({**config, "rope_theta": 10000, "rope_scaling": None})
    assert plain.attention[0].rope.yarn_factor == 1.0
    assert plain.attention[0].softmax_scale == 40**-0.5


def test_yarn_of_deepseek_and_kimi() -> None:
    """The published scales: 0.13523 and 0.13086 (specification of the family)."""
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 163840}
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    spec = deepseek(rope_scaling=yarn, **sizes)
    assert math.isclose(spec.attention[0].softmax_scale, 0.13523, abs_tol=1e-5)
    assert spec.attention[0].rope.amplitude == 1.0
    freq = spec.attention[0].rope.inv_freq()
    base = [10000 ** (-2 * i / 64) for i in range(32)]
    assert freq[0] == base[0]
    assert math.isclose(freq[31], base[31] / 40)
    assert all(b / 40 - 1e-18 <= f <= b for f, b in zip(freq, base, strict=True))
    kimi = deepseek(model_type="kimi_k2", rope_scaling={**yarn, "factor": 32, "beta_fast": 1, "beta_slow": 1}, **sizes)
    assert math.isclose(kimi.attention[0].softmax_scale, 0.13086, abs_tol=1e-5)


def test_yarn_without_mscale_raises_the_amplitude() -> None:
    yarn = {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}
    spec = deepseek(rope_scaling=yarn)
    assert math.isclose(spec.attention[0].rope.amplitude, 0.1 * math.log(32) + 1)
    assert spec.attention[0].softmax_scale == 40**-0.5
    assert deepseek(rope_scaling={**yarn, "attention_factor": 1.25}).attention[0].rope.amplitude == 1.25


def test_latent_eps_defaults_to_rms_eps() -> None:
    assert glm().attention[0].latent_eps == 1e-5
    assert glm(latent_rms_norm_eps=1e-6).attention[0].latent_eps == 1e-6


def test_layer_kinds() -> None:
    assert glm().layer_kinds == ("dense",) * 3 + ("moe",) * 5
    assert spec_of(without("glm_moe_dsa", "mlp_layer_types")) == glm()
    assert spec_of(without("glm_moe_dsa", "first_k_dense_replace")) == glm()
    mixed = ["sparse", "dense"] + ["sparse"] * 6
    scattered = spec_of(without("glm_moe_dsa", "first_k_dense_replace") | {"mlp_layer_types": mixed})
    assert scattered.moe_layers == (0, 2, 3, 4, 5, 6, 7, 8)


def test_end_ids_are_the_union_of_both_files() -> None:
    config = oracle_config("deepseek_v3")
    assert spec_of(config, {"eos_token_id": [7, 1]}).eos_ids == (1, 7)
    assert spec_of(config, {}).eos_ids == (1,)
    assert spec_of(without("deepseek_v3", "eos_token_id")).eos_ids == ()
    refused(config, "eos_token_id", "generation_config.json", generation={"eos_token_id": 256})


def test_q_lora_rank_null_is_a_plain_projection() -> None:
    assert deepseek(q_lora_rank=None).attention[0].q_rank is None


def test_glm4_moe_lite() -> None:
    spec = deepseek("glm4_moe_lite")
    mla = spec.attention[0]
    assert kinds(spec) == ("none",) * 5
    assert (mla.latent, mla.rope.is_interleaved, mla.softmax_scale) == (48, True, 40**-0.5)
    silent = spec_of(without("glm4_moe_lite", "first_k_dense_replace", "rope_scaling"))
    assert silent.layer_kinds == spec.layer_kinds == ("dense", "moe", "moe", "moe")
    named = without("glm4_moe_lite", "first_k_dense_replace") | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
    assert spec_of(named).layer_kinds == ("dense", "dense", "moe", "moe")
    refused({**oracle_config("glm4_moe_lite"), "partial_rotary_factor": 0.5}, "partial_rotary_factor")


def gemma4(**changes: Any) -> dict[str, Any]:
    """The oracle's config.json with another text part; None takes a key away."""
    config = oracle_config("gemma4")
    text = {**config["text_config"], **changes}
    return {**config, "text_config": {key: value for key, value in text.items() if value is not None}}


def test_gemma4() -> None:
    spec = spec_of(gemma4())
    sliding, full = spec.attention[0], spec.attention[2]
    assert isinstance(sliding, Grouped) and isinstance(full, Grouped)
    assert [layer is full for layer in spec.attention] == [False, False, True] * 2
    assert (sliding.n_kv_heads, sliding.head_dim, sliding.window, sliding.has_values) == (2, 32, 8, True)
    assert (full.n_kv_heads, full.head_dim, full.window, full.has_values) == (1, 64, 0, False)
    assert {sliding.softmax_scale, full.softmax_scale} == {1.0}
    turning = full.rope.inv_freq()
    assert len(turning) == 32 and turning[:8] == [1e6 ** (-2 * i / 64) for i in range(8)] and not any(turning[8:])
    assert sliding.rope.inv_freq() == [1e4 ** (-2 * i / 32) for i in range(16)]
    assert spec.branch is not None and (spec.branch.width, spec.inner.function) == (80, "gelu")
    assert (spec.embedding_scale, spec.logit_cap, spec.tie_embeddings) == (math.sqrt(96), 30.0, True)
    assert spec.gate.reads_residual and not spec_of(oracle_config("qwen3_moe")).gate.reads_residual
    assert spec_of(gemma4(), {"eos_token_id": 50}).eos_ids == (1, 50, 106)
    silent = spec_of(gemma4(layer_types=None, final_logit_softcapping=None))
    assert [layer.window for layer in silent.attention if isinstance(layer, Grouped)] == [8] * 5 + [0]
    assert silent.logit_cap == 0.0
    with_values = spec_of(gemma4(attention_k_eq_v=False)).attention[2]
    assert isinstance(with_values, Grouped) and (with_values.has_values, with_values.n_kv_heads) == (True, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_moe_block": False}, ("enable_moe_block",)),
        ({"hidden_size_per_layer_input": 256}, ("hidden_size_per_layer_input",)),
        ({"num_kv_shared_layers": 2}, ("num_kv_shared_layers",)),
        ({"hidden_activation": "silu"}, ("hidden_activation",)),
        ({"layer_types": ["sliding_attention"] * 6}, ("layer_types", "ends")),
        ({"num_global_key_value_heads": 3}, ("num_global_key_value_heads", "divisor")),
        ({"top_k_experts": 13}, ("top_k_experts", "num_experts = 12")),
        ({"rope_parameters": None}, ("rope_parameters",)),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": 3}}, ("sliding_attention", "object")),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            ("partial_rotary_factor",),
        ),
    ],
)
def test_a_gemma4_that_is_not_this_one_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(gemma4(**changes), *words)
    refused({**oracle_config("gemma4"), "text_config": [1]}, "text_config", "object")


def qwen3_5(**changes: Any) -> dict[str, Any]:
    config = oracle_config("qwen3_5_moe")
    text = {key: value for key, value in (config["text_config"] | changes).items() if value is not ...}
    return config | {"text_config": text}


def test_qwen3_5_of_35b_a3b() -> None:
    """The sizes that its specification works out."""
    config = qwen3_5(
        num_hidden_layers=40, hidden_size=2048, vocab_size=248320, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, layer_types=...,
        max_position_embeddings=262144,
    )  # fmt: skip
    spec = spec_of(config, {"eos_token_id": [7, 250]})
    assert [isinstance(layer, Delta) for layer in spec.main_attention] == [(i + 1) % 4 != 0 for i in range(40)]
    linear, full = spec.attention[0], spec.attention[3]
    assert linear.channels == 8192
    assert linear.state.n_values * 4 == 64 + 98_304 + 2_097_152
    assert linear.state.draft_values == 8192 + 2048 + 4096 + 64
    assert sum(4 * layer.state.n_values for layer in spec.main_attention if layer.state) == pytest.approx(
        65.9e6, rel=1e-3
    )
    assert (full.rope.dim, full.has_gate) == (64, True)
    assert (full.rows[0].n_vectors, full.rows[0].n_values) == (4, 256)
    assert (spec.n_mtp, spec.shared_inner, spec.eos_ids) == (1, 512, (7, 250))
    assert isinstance(spec.mtp_attention[0], Grouped)
    assert not spec_of(without_mtp(config)).n_mtp


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_output_gate": False}, ("attn_output_gate",)),
        ({"output_gate_type": "sigmoid"}, ("output_gate_type",)),
        ({"mamba_ssm_dtype": "bfloat16"}, ("mamba_ssm_dtype",)),
        ({"mlp_only_layers": [1]}, ("mlp_only_layers",)),
        ({"linear_num_value_heads": 3}, ("linear_num_value_heads", "multiple")),
        ({"linear_key_head_dim": 24}, ("linear_key_head_dim", "multiple of 16")),
        ({"linear_conv_kernel_dim": 17}, ("linear_conv_kernel_dim",)),
        ({"layer_types": ["linear_attention"] * 3}, ("layer_types", "4 values")),
        ({"shared_expert_intermediate_size": ...}, ("shared_expert_intermediate_size",)),
        ({"mtp_num_hidden_layers": 2}, ("mtp_num_hidden_layers", "--no-mtp")),
        ({"mtp_use_dedicated_embeddings": True}, ("mtp_use_dedicated_embeddings",)),
    ],
)
def test_a_qwen3_5_that_is_not_this_one_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(qwen3_5(**changes), *words)


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_load_from_disk(name: str) -> None:
    spec = load_spec(oracle_dir(name))
    assert spec.n_mtp == (name in MTP_ORACLES)
    assert spec.eos_ids


def grouped(name: str, **changes: Any) -> Grouped:
    found = spec_of({**oracle_config(name), **changes}).attention[0]
    assert isinstance(found, Grouped)
    return found


def test_what_grouped_families_differ_in() -> None:
    qwen, olmoe, mixtral, glm4 = (grouped(name) for name in ("qwen3_moe", "olmoe", "mixtral", "glm4_moe"))
    assert [layer.qk_norm for layer in (qwen, olmoe, mixtral, glm4)] == ["head", "whole", "none", "head"]
    assert grouped("glm4_moe", use_qk_norm=False).qk_norm == "none"
    assert (mixtral.head_dim, glm4.head_dim, glm4.rope.dim) == (16, 32, 16)
    assert (mixtral.window, grouped("mixtral", sliding_window=7).window) == (0, 7)
    assert (olmoe.clip, grouped("olmoe", clip_qkv=2.5).clip) == (0.0, 2.5)
    assert [layer.has_qkv_bias for layer in (qwen, glm4)] == [False, True]
    assert not glm4.has_output_bias
    assert grouped("qwen3_moe", attention_bias=True).has_output_bias
    older = {key: value for key, value in oracle_config("olmoe").items() if key != "rms_norm_eps"}
    assert spec_of(older).rms_eps == 1e-5
    gates = [spec_of(oracle_config(name)).gate for name in ("qwen3_moe", "olmoe", "mixtral", "glm4_moe")]
    assert [gate.scoring for gate in gates] == ["softmax"] * 3 + ["sigmoid"]
    assert [gate.norm_topk for gate in gates] == [True, False, True, True]
    gpt = spec_of(oracle_config("gpt_oss"))
    assert [layer.window for layer in gpt.attention] == [8, 0, 8, 0]
    assert all(layer.has_sinks and layer.has_output_bias for layer in gpt.attention)
    assert not gpt.attention[0].rope.yarn_truncate
    assert math.isclose(gpt.attention[0].rope.amplitude, 0.1 * math.log(4) + 1)
    assert (gpt.inner.function, gpt.inner.limit, gpt.gate.has_logit_bias) == ("swiglu", 7.0, True)
    some_dense = spec_of(oracle_config("qwen3_moe") | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert some_dense.layer_kinds == ("dense", "moe", "dense", "dense")
    assert some_dense.dense_inner == 160


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"num_key_value_heads": 3}, ("num_key_value_heads", "divisor")),
        ("qwen3_moe", {"use_sliding_window": True}, ("use_sliding_window",)),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, ("mlp_only_layers",)),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, ("dense",)),
        ("qwen3_moe", {"num_experts": 3}, ("num_experts_per_tok", "num_experts = 3")),
        ("mixtral", {"num_attention_heads": 7, "num_key_value_heads": 7}, ("num_attention_heads", "hidden_size")),
        ("mixtral", {"sliding_window": 0}, ("sliding_window",)),
        ("mixtral", {"hidden_act": "gelu"}, ("hidden_act",)),
        ("olmoe", {"clip_qkv": -1}, ("clip_qkv",)),
        ("glm4_moe", {"partial_rotary_factor": 0.1}, ("partial_rotary_factor", "even")),
        ("glm4_moe", {"partial_rotary_factor": 2}, ("partial_rotary_factor",)),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": "x"}},
            ("partial_rotary_factor",),
        ),
        ("glm4_moe", {"scoring_func": "softmax"}, ("scoring_func",)),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 3}, ("layer_types", "4 values")),
        ("gpt_oss", {"sliding_window": None}, ("sliding_window",)),
        ("gpt_oss", {"attention_bias": False}, ("attention_bias",)),
    ],
)
def test_contradictions_of_grouped_families_are_refused(
    name: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused({**oracle_config(name), **changes}, *words)


REQUIRED = (
    "num_hidden_layers", "hidden_size", "vocab_size", "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "n_shared_experts", "rms_norm_eps", "routed_scaling_factor", "norm_topk_prob", "max_position_embeddings", "index_n_heads",
    "index_head_dim", "index_topk",
)  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str) -> None:
    refused(without("glm_moe_dsa", key), f'"{key}"')


@pytest.mark.parametrize("key", [key for key in REQUIRED if key not in ("norm_topk_prob", "q_lora_rank")])
@pytest.mark.parametrize("value", [0, -1, "8", True, [], {}, 1e300, float("nan"), 1 << 70])
def test_absurd_value_is_refused(key: str, value: Any) -> None:
    refused({**oracle_config("glm_moe_dsa"), key: value}, f'"{key}"')


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neo"}, ("gpt_neo", "glm_moe_dsa")),
        ({"model_type": None}, ("model_type",)),
        ({"model_type": ["x"]}, ("model_type",)),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "silu")),
        ({"scoring_func": "softmax"}, ("scoring_func", "sigmoid")),
        ({"topk_method": "greedy"}, ("topk_method", "noaux_tc")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq",)),
        ({"num_experts_per_tok": 13}, ("num_experts_per_tok", "12")),
        ({"n_group": 5}, ("n_group", "divisor")),
        ({"n_group": 4, "topk_group": 5}, ("topk_group", "n_group")),
        ({"n_group": 12, "topk_group": 4}, ("n_group", "two experts")),
        ({"n_group": 4, "topk_group": 1}, ("topk_group", "3 experts")),
        ({"num_nextn_predict_layers": 2}, ("num_nextn_predict_layers",)),
        ({"qk_rope_head_dim": 15, "qk_head_dim": None}, ("qk_rope_head_dim", "even")),
        ({"qk_head_dim": 41}, ("qk_head_dim", "40")),
        ({"index_head_dim": 8}, ("index_head_dim", "16")),
        (
            {"mlp_layer_types": ["dense"] * 4 + ["sparse"] * 4},
            ("first_k_dense_replace", "mlp_layer_types", "contradict"),
        ),
        ({"mlp_layer_types": ["dense"] * 3}, ("mlp_layer_types", "8 values")),
        ({"mlp_layer_types": None, "first_k_dense_replace": 8}, ("dense",)),
        ({"indexer_types": ["shared"] * 8}, ("layer 0", "full")),
        ({"indexer_types": ["full"] * 7}, ("indexer_types", "8 values")),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, ("index_topk_pattern",)),
        ({"rope_parameters": None}, ("rope_theta",)),
        ({"rope_parameters": 5}, ("rope_parameters",)),
        ({"rope_theta": 10000}, ("rope_theta", "twice")),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, ("rope_type", "yarn")),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, ("factor",)),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4}},
            ("original_max_position_embeddings",),
        ),
        ({"rope_parameters": {"rope_theta": float("inf")}}, ("rope_theta",)),
        ({"eos_token_id": -1}, ("eos_token_id",)),
        ({"eos_token_id": "end"}, ("eos_token_id",)),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings",)),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused({**oracle_config("glm_moe_dsa"), **changes}, *words)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", True, [1]])
@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim"])
def test_mscale_must_be_a_number(key: str, bad: Any) -> None:
    scaling = {**oracle_config("deepseek_v3")["rope_scaling"], key: bad}
    refused({**oracle_config("deepseek_v3"), "rope_scaling": scaling}, key)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_spec(tmp_path)
    for text in ("", "{", "[" * 100_000, "nonsense", b"\xff\xfe\x00".decode("latin1")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected an object"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(oracle_config("glm_moe_dsa")))
    (tmp_path / "generation_config.json").write_text("oops")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_spec(tmp_path)
