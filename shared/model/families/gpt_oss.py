"""gpt-oss-20b, gpt-oss-120b: windows on every other layer, attention sinks, biases everywhere, experts stacked in MXFP4."""

from __future__ import annotations

import msgspec

from shared.model.attention.grouped import Grouped
from shared.model.config_reader import ConfigReader
from shared.model.gate import Gate
from shared.model.inner import Inner
from shared.model.spec import ModelSpec
from shared.model.tensors import Source


def spec(read: ConfigReader) -> ModelSpec:
    n_layers = read.integer("num_hidden_layers", high=4000)
    hidden, vocab = read.integer("hidden_size", high=1 << 20), read.integer("vocab_size")
    n_heads, n_kv_heads, head_dim = read.heads(hidden)
    n_experts, k = read.routing("num_local_experts")
    rms_eps = read.number("rms_norm_eps", 1e-5, high=1.0)
    read.only("attention_bias", True)
    kinds = read.names("layer_types", n_layers, ("sliding_attention", "full_attention"))
    if kinds is None:
        kinds = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(n_layers))
    full = Grouped(
        hidden=hidden,
        rms_eps=rms_eps,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read.rope(read.turned(head_dim), is_interleaved=False).rope,
        has_qkv_bias=True,
        has_output_bias=True,
        has_sinks=True,
    )
    sliding = msgspec.structs.replace(full, window=read.integer("sliding_window", high=1 << 30))
    return ModelSpec(
        family="gpt_oss",
        n_layers=n_layers,
        hidden=hidden,
        vocab=vocab,
        attention=tuple(sliding if kind == "sliding_attention" else full for kind in kinds),
        layer_kinds=("moe",) * n_layers,
        dense_inner=0,
        n_experts=n_experts,
        expert_inner=read.integer("intermediate_size", high=1 << 20),
        n_shared=0,
        gate=Gate(n_experts=n_experts, k=k, scoring="softmax", norm_topk=True, has_logit_bias=True),
        inner=Inner(function="swiglu", limit=read.number("swiglu_limit", 7.0, high=1e6), has_biases=True),
        rms_eps=rms_eps,
        n_mtp=0,
        max_context=read.integer("max_position_embeddings", high=1 << 30),
        eos_ids=read.end_ids(vocab),
        tie_embeddings=read.flag("tie_word_embeddings", False),
    )


def source_name(name: str) -> str:
    return name.replace(".mlp.gate.", ".mlp.router.")


def expert_source(layer: int, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
    """All experts of a layer in one tensor; of gate and up, the rows alternate."""
    projection, kind = part.split("_proj.")
    is_fused = projection != "down"
    name = (
        f"model.layers.{layer}.mlp.experts.{'gate_up' if is_fused else 'down'}_proj{'_bias' if kind == 'bias' else ''}"
    )
    whole = (n_experts, shape[0] * (2 if is_fused else 1), *shape[1:])
    return Source(name, whole, start=int(projection == "up"), index=expert, step=2 if is_fused else 1)
