"""Gemma 4 26B-A4B, its text part: windows on most layers, a dense branch beside the experts, norms around everything.

The embedding's factor is the exact root of the width; bf16 implementations round it (53 instead of 53.066).
"""

from __future__ import annotations

import math

import msgspec

from shared.model.attention.grouped import Grouped
from shared.model.branch import DenseBranch
from shared.model.config_reader import ConfigReader
from shared.model.gate import Gate
from shared.model.inner import Inner
from shared.model.mapping import hidden_of, moe_model, n_layers_of
from shared.model.rope import Rope
from shared.model.spec import ModelSpec
from shared.model.tensors import Source

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PERIOD = 6
"""Without a word on it, every sixth layer sees all positions."""
_GATE_NAMES = (("weight", "proj.weight"), ("norm.weight", "scale"), ("per_expert_scale", "per_expert_scale"))
_OTHER_TOWERS = ("model.vision_tower.", "model.embed_vision.")


def spec(read: ConfigReader) -> ModelSpec:
    read = read.within("text_config", "eos_token_id", "tie_word_embeddings")
    for key, allowed in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attention_bias", False),
        ("enable_moe_block", True),
        ("hidden_size_per_layer_input", 0),
        ("num_kv_shared_layers", 0),
        ("use_double_wide_mlp", False),
    ):
        read.only(key, allowed)
    hidden, inner = hidden_of(read), Inner(function="gelu")
    rms_eps = read.number("rms_norm_eps", 1e-6, high=1.0)
    n_experts, k = read.routing("num_experts", "top_k_experts")
    by_kind = {_SLIDING: _sliding(read, hidden, rms_eps), _FULL: _full(read, hidden, rms_eps)}
    return moe_model(
        "gemma4",
        read,
        [by_kind[kind] for kind in _kinds(read, n_layers_of(read))],
        Gate(n_experts=n_experts, k=k, scoring="softmax", norm_topk=True, has_expert_scale=True, norm_eps=rms_eps),
        inner=inner,
        ties_embeddings=True,
        branch=DenseBranch(hidden=hidden, width=read.integer("intermediate_size"), inner=inner, rms_eps=rms_eps),
        embedding_scale=math.sqrt(hidden),
        logit_cap=0.0
        if read.config.get("final_logit_softcapping") is None
        else read.number("final_logit_softcapping", high=1e6),
    )


def _kinds(read: ConfigReader, n_layers: int) -> tuple[str, ...]:
    kinds = read.names("layer_types", n_layers, (_SLIDING, _FULL))
    if kinds is None:
        kinds = tuple(_SLIDING if (layer + 1) % _PERIOD else _FULL for layer in range(n_layers))
    if kinds[-1] != _FULL:
        raise read.complaint("layer_types", f'a list that ends with "{_FULL}"', read.config.get("layer_types"))
    return kinds


def _sliding(read: ConfigReader, hidden: int, rms_eps: float) -> Grouped:
    n_heads, n_kv_heads, head_dim = read.heads(hidden)
    return Grouped(
        hidden=hidden,
        rms_eps=rms_eps,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        softmax_scale=1.0,
        rope=_rope(read, _SLIDING, head_dim),
        window=read.integer("sliding_window", high=1 << 30),
        qk_norm="head",
        has_value_norm=True,
        has_output_norm=True,
        post_norm="pre_feedforward_layernorm_2",
    )


def _full(read: ConfigReader, hidden: int, rms_eps: float) -> Grouped:
    """With heads of another size; where values are the keys, with another number of key heads as well."""
    sliding, head_dim = _sliding(read, hidden, rms_eps), read.integer("global_head_dim", high=1 << 12)
    n_kv_heads, is_shared = sliding.n_kv_heads, read.flag("attention_k_eq_v", False)
    if is_shared:
        n_kv_heads = read.integer("num_global_key_value_heads", high=1 << 12)
        if sliding.n_heads % n_kv_heads:
            expected = f"a divisor of num_attention_heads = {sliding.n_heads}"
            raise read.complaint("num_global_key_value_heads", expected, n_kv_heads)
    rope = _rope(read, _FULL, head_dim)
    return msgspec.structs.replace(
        sliding, head_dim=head_dim, n_kv_heads=n_kv_heads, rope=rope, window=0, has_values=not is_shared
    )


def _rope(read: ConfigReader, kind: str, head_dim: int) -> Rope:
    """Of the whole head; "proportional" turns only the first of its pairs, as fast as they turn where all do."""
    own = read.within("rope_parameters").within(kind)
    if own.config.get("rope_type") != "proportional":
        own.only("partial_rotary_factor", 1.0)
        return ConfigReader({"rope_parameters": own.config}).rope(head_dim, is_interleaved=False).rope
    own.only("factor", 1.0)
    theta = own.number("rope_theta", low=1.0, high=1e15)
    return Rope(dim=head_dim, theta=theta, is_interleaved=False, n_turning=own.turned(head_dim) // 2)


def source_name(name: str) -> str:
    for ours, own in _GATE_NAMES:
        name = name.replace(f".mlp.gate.{ours}", f".router.{own}")
    return name.replace("model.", "model.language_model.", 1)


def expert_source(prefix: str, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
    """All experts of a layer in one tensor; the rows of gate come before those of up."""
    projection, n_rows = part.removesuffix("_proj.weight"), shape[0]
    if projection == "down":
        return Source(f"{prefix}experts.down_proj", (n_experts, *shape), index=expert)
    start = n_rows if projection == "up" else 0
    whole = (n_experts, 2 * n_rows, *shape[1:])
    return Source(f"{prefix}experts.gate_up_proj", whole, start=start, n_rows=n_rows, index=expert)


def ignores(name: str) -> bool:
    """Of a checkpoint's tensors, those of the image tower."""
    return name.startswith(_OTHER_TOWERS)
