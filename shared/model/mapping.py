"""What many families' ``config.json`` say in the same words. A family's own file has what is its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.model.attention.grouped import Grouped
from shared.model.attention.kind import Attention
from shared.model.config_reader import ConfigReader
from shared.model.gate import Gate
from shared.model.inner import Inner
from shared.model.spec import ModelSpec


def n_layers_of(read: ConfigReader) -> int:
    """Main layers."""
    return read.integer("num_hidden_layers", high=4000)


def hidden_of(read: ConfigReader) -> int:
    """Width of the residual stream."""
    return read.integer("hidden_size", high=1 << 20)


def grouped_attention(
    read: ConfigReader, *, default_eps: float = 1e-5, default_theta: float | None = None, **own: Any
) -> Grouped:
    """Grouped-query attention over every position, scores by the root of the head, rope in halves; ``own``: further fields."""
    hidden = hidden_of(read)
    n_heads, n_kv_heads, head_dim = read.heads(hidden)
    return Grouped(
        hidden=hidden,
        rms_eps=read.number("rms_norm_eps", default_eps, high=1.0),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read.rope(read.turned(head_dim), is_interleaved=False, default_theta=default_theta).rope,
        **own,
    )


def softmax_gate(read: ConfigReader, experts_key: str, **own: Any) -> Gate:
    """Softmax over the experts; ``own``: further fields."""
    n_experts, k = read.routing(experts_key)
    return Gate(n_experts=n_experts, k=k, scoring="softmax", **own)


def moe_model(
    family: str,
    read: ConfigReader,
    attention: Attention | Sequence[Attention],
    gate: Gate,
    *,
    expert_key: str = "moe_intermediate_size",
    ties_embeddings: bool = False,
    **own: Any,
) -> ModelSpec:
    """The spec of a model. ``attention``: of all layers, or of each (an MTP layer last). ``expert_key`` has the experts' width.

    ``ties_embeddings``: without a word on it. ``own``: further fields of ModelSpec; without them every layer has experts and
    nothing beside them, their function is the usual one, and there is no MTP layer.
    """
    n_layers, vocab = n_layers_of(read), read.integer("vocab_size")
    by_layer = (attention,) * n_layers if isinstance(attention, Attention) else tuple(attention)
    plain: dict[str, Any] = {
        "layer_kinds": ("moe",) * n_layers,
        "dense_inner": 0,
        "n_shared": 0,
        "inner": Inner(),
        "n_mtp": 0,
    }
    return ModelSpec(
        family=family,
        n_layers=n_layers,
        hidden=by_layer[0].hidden,
        vocab=vocab,
        attention=by_layer,
        n_experts=gate.n_experts,
        expert_inner=read.integer(expert_key, high=1 << 20),
        gate=gate,
        rms_eps=by_layer[0].rms_eps,
        max_context=read.integer("max_position_embeddings", high=1 << 30),
        eos_ids=read.end_ids(vocab),
        tie_embeddings=read.flag("tie_word_embeddings", ties_embeddings),
        **(plain | own),
    )
