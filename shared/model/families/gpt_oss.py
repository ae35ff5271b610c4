"""gpt-oss-20b, gpt-oss-120b: windows on every other layer, attention sinks, biases everywhere, experts stacked in MXFP4."""

from __future__ import annotations

import msgspec

from shared.model.config_reader import ConfigReader
from shared.model.inner import Inner
from shared.model.mapping import grouped_attention, moe_model, n_layers_of, softmax_gate
from shared.model.spec import ModelSpec
from shared.model.tensors import Source


def spec(read: ConfigReader) -> ModelSpec:
    n_layers = n_layers_of(read)
    read.only("attention_bias", True)
    kinds = read.names("layer_types", n_layers, ("sliding_attention", "full_attention"))
    if kinds is None:
        kinds = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(n_layers))
    full = grouped_attention(read, has_qkv_bias=True, has_output_bias=True, has_sinks=True)
    sliding = msgspec.structs.replace(full, window=read.integer("sliding_window", high=1 << 30))
    return moe_model(
        "gpt_oss",
        read,
        [sliding if kind == "sliding_attention" else full for kind in kinds],
        softmax_gate(read, "num_local_experts", norm_topk=True, has_logit_bias=True),
        expert_key="intermediate_size",
        inner=Inner(function="swiglu", limit=read.number("swiglu_limit", 7.0, high=1e6), has_biases=True),
    )


def source_name(name: str) -> str:
    return name.replace(".mlp.gate.", ".mlp.router.")


def expert_source(prefix: str, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
    """All experts of a layer in one tensor; of gate and up, the rows alternate."""
    projection, kind = part.split("_proj.")
    is_fused = projection != "down"
    name = f"{prefix}mlp.experts.{'gate_up' if is_fused else 'down'}_proj{'_bias' if kind == 'bias' else ''}"
    whole = (n_experts, shape[0] * (2 if is_fused else 1), *shape[1:])
    return Source(name, whole, start=int(projection == "up"), index=expert, step=2 if is_fused else 1)
