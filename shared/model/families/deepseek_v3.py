"""DeepSeek-V3, R1, V3.1: latent attention, sigmoid gate with groups, shared expert, MTP layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shared.errors import ConfigError
from shared.model.attention.kind import Attention
from shared.model.attention.latent import Indexer, Latent
from shared.model.config_reader import ConfigReader
from shared.model.gate import Gate
from shared.model.mapping import hidden_of, moe_model, n_layers_of
from shared.model.rope import Rope
from shared.model.spec import ModelSpec

Indexers = Callable[[ConfigReader, int, Rope], tuple[Indexer | None, ...]]
"""(reader, main layers, rope) -> the indexer of each main layer, then that of an MTP layer."""


def spec(read: ConfigReader) -> ModelSpec:
    return latent_model("deepseek_v3", read, lambda _, n_layers, rope: (None,) * (n_layers + 1))


def latent_model(family: str, read: ConfigReader, indexers: Indexers) -> ModelSpec:
    """What all families with latent attention have in common; they differ in the indexer."""
    config = read.config
    for key, allowed in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        read.only(key, allowed)
    n_layers = n_layers_of(read)
    if "q_lora_rank" not in config:
        read.integer("q_lora_rank")
    nope, rope_dim = read.integer("qk_nope_head_dim", high=1 << 16), read.integer("qk_rope_head_dim", high=1 << 16)
    if rope_dim % 2:
        raise read.complaint("qk_rope_head_dim", "even (rope turns pairs)", rope_dim)
    declared = config.get("qk_head_dim")
    if declared is not None and declared != nope + rope_dim:
        raise read.complaint("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {nope + rope_dim}", declared)
    rope = read.rope(rope_dim, is_interleaved=read.flag("rope_interleave", True))
    rms_eps = read.number("rms_norm_eps", high=1.0)
    plain = Latent(
        hidden=hidden_of(read),
        rms_eps=rms_eps,
        n_heads=read.integer("num_attention_heads", high=1 << 16),
        q_rank=None if config["q_lora_rank"] is None else read.integer("q_lora_rank", high=1 << 20),
        kv_rank=read.integer("kv_lora_rank", high=1 << 16),
        nope=nope,
        v_dim=read.integer("v_head_dim", high=1 << 16),
        latent_eps=read.number("latent_rms_norm_eps", rms_eps, high=1.0),
        softmax_scale=(nope + rope_dim) ** -0.5 * rope.score_factor,
        rope=rope.rope,
    )
    by_layer = indexers(read, n_layers, rope.rope)[: n_layers + read.n_mtp()]
    # One description per distinct indexer: layers that are alike share it.
    alike = {indexer: with_indexer(plain, indexer) for indexer in by_layer}
    return noaux_model(family, read, [alike[indexer] for indexer in by_layer])


def noaux_model(family: str, read: ConfigReader, attention: Sequence[Attention]) -> ModelSpec:
    """DeepSeek-V3's structure around any kind of attention: first dense layers, a shared expert, its gate, an MTP layer."""
    return moe_model(
        family,
        read,
        attention,
        noaux_gate(read),
        layer_kinds=dense_or_moe(read, n_layers_of(read)),
        dense_inner=read.integer("intermediate_size"),
        n_shared=read.integer("n_shared_experts", high=256),
        n_mtp=read.n_mtp(),
    )


def with_indexer(plain: Latent, indexer: Indexer | None) -> Latent:
    return msgspec.structs.replace(plain, indexer=indexer)


def noaux_gate(read: ConfigReader) -> Gate:
    """The gate of DeepSeek-V3 and of the GLM families."""
    n_experts, gate_k = read.routing("n_routed_experts")
    n_group = read.integer("n_group", 1, high=n_experts)
    topk_group = read.integer("topk_group", 1, high=n_experts)
    if n_experts % n_group:
        raise read.complaint("n_group", f"a divisor of n_routed_experts = {n_experts}", n_group)
    if topk_group > n_group:
        raise read.complaint("topk_group", f"at most n_group = {n_group}", topk_group)
    per_group = n_experts // n_group
    if n_group > 1 and per_group < 2:
        raise read.complaint(
            "n_group", "small enough for two experts in each group (a group's score is the sum of two)", n_group
        )
    if topk_group * per_group < gate_k:
        raise read.complaint(
            "topk_group",
            f"large enough for num_experts_per_tok = {gate_k} (a group has {per_group} experts)",
            topk_group,
        )
    return Gate(
        n_experts=n_experts,
        k=gate_k,
        scoring="sigmoid",
        n_group=n_group,
        topk_group=topk_group,
        norm_topk=read.flag("norm_topk_prob"),
        scaling=read.number("routed_scaling_factor", high=1e6),
        has_choice_bias=True,
    )


def dense_or_moe(read: ConfigReader, n_layers: int) -> tuple[str, ...]:
    """The layers' kinds by ``mlp_layer_types`` or ``first_k_dense_replace``, which must agree."""
    first = read.config.get("first_k_dense_replace")
    named = read.names("mlp_layer_types", n_layers, ("dense", "sparse"))
    if named is None:
        n_dense = read.integer("first_k_dense_replace", low=0, high=n_layers)
        kinds = ("dense",) * n_dense + ("moe",) * (n_layers - n_dense)
    else:
        kinds = tuple("dense" if kind == "dense" else "moe" for kind in named)
        if first is not None:
            n_dense = read.integer("first_k_dense_replace", low=0, high=n_layers)
            if kinds != ("dense",) * n_dense + ("moe",) * (n_layers - n_dense):
                raise ConfigError(
                    f'config.json: "first_k_dense_replace" = {n_dense} and "mlp_layer_types" '
                    f"({kinds.count('dense')} dense layers) contradict each other. Correct the one that does not fit the "
                    "weights."
                )
    if "moe" not in kinds:
        raise ConfigError(
            f"config.json: all {n_layers} layers are dense; a model without experts has nothing to stream."
        )
    return kinds
