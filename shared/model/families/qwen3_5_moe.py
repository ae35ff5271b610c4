"""Qwen3.5 and Qwen3.6 MoE (35B-A3B, 122B-A10B, 397B-A17B), their text part: a gated delta rule in three layers of four, gated
full attention in the fourth, a shared expert with a gate of its own, an MTP layer.

Norms are stored less 1, but the one inside the delta rule. Text has the same position on all three axes of the rope.
"""

from __future__ import annotations

from shared.model.attention.delta import Delta
from shared.model.attention.kind import Attention
from shared.model.config_reader import ConfigReader
from shared.model.mapping import grouped_attention, hidden_of, moe_model, n_layers_of, softmax_gate
from shared.model.spec import ModelSpec
from shared.model.tensors import Source

_LINEAR, _FULL = "linear_attention", "full_attention"
_LANES = 16
"""Widths of the delta rule's heads are multiples of it."""
_ROOT, _MTP_ROOT = "model.language_model.", "mtp."
_OWN_NAMES = (
    (".mlp.shared_experts.own_gate.", ".mlp.shared_expert_gate."),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
)
_MTP_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}


def spec(read: ConfigReader) -> ModelSpec:
    read = read.within("text_config", "eos_token_id", "tie_word_embeddings")
    for key, allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("attn_output_gate", True),
        ("output_gate_type", "swish"),
        ("mamba_ssm_dtype", "float32"),
        ("mlp_only_layers", []),
        ("mtp_use_dedicated_embeddings", False),
    ):
        read.only(key, allowed)
    n_mtp, full = (
        read.n_mtp("mtp_num_hidden_layers"),
        grouped_attention(read, default_eps=1e-6, qk_norm="head", has_gate=True),
    )
    by_kind: dict[str, Attention] = {_LINEAR: _linear(read, full.rms_eps), _FULL: full}
    return moe_model(
        "qwen3_5_moe",
        read,
        [*(by_kind[kind] for kind in _kinds(read, n_layers_of(read))), *[full] * n_mtp],
        softmax_gate(read, "num_experts", norm_topk=True),
        n_shared=1,
        shared_width=read.integer("shared_expert_intermediate_size", high=1 << 20),
        has_shared_gate=True,
        n_mtp=n_mtp,
    )


def _kinds(read: ConfigReader, n_layers: int) -> tuple[str, ...]:
    period = read.integer("full_attention_interval", 4, high=4000)
    kinds = read.names("layer_types", n_layers, (_LINEAR, _FULL))
    return kinds or tuple(_LINEAR if (layer + 1) % period else _FULL for layer in range(n_layers))


def _linear(read: ConfigReader, rms_eps: float) -> Delta:
    n_key_heads = read.integer("linear_num_key_heads", high=1 << 12)
    n_value_heads = read.integer("linear_num_value_heads", high=1 << 12)
    if n_value_heads % n_key_heads:
        expected = f"a multiple of linear_num_key_heads = {n_key_heads}"
        raise read.complaint("linear_num_value_heads", expected, n_value_heads)
    widths = []
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        widths.append(read.integer(key, high=1 << 12))
        if widths[-1] % _LANES:
            raise read.complaint(key, f"a multiple of {_LANES}", widths[-1])
    return Delta(
        hidden=hidden_of(read),
        rms_eps=rms_eps,
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=widths[0],
        value_dim=widths[1],
        taps=read.integer("linear_conv_kernel_dim", high=16),
    )


def source_name(name: str) -> str:
    for ours, own in _OWN_NAMES:
        name = name.replace(ours, own)
    return name.replace("model.", _ROOT, 1)


def mtp_source_name(name: str) -> str:
    """Of the MTP layer; ``name`` is the one below it."""
    if name in _MTP_NAMES:
        return _MTP_ROOT + _MTP_NAMES[name]
    return source_name("model.layers.0." + name).replace(_ROOT, _MTP_ROOT, 1)


def expert_source(prefix: str, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
    """All experts of a layer in one tensor; the rows of gate come before those of up."""
    projection, n_rows = part.removesuffix("_proj.weight"), shape[0]
    if projection == "down":
        return Source(f"{prefix}mlp.experts.down_proj", (n_experts, *shape), index=expert)
    whole, start = (n_experts, 2 * n_rows, *shape[1:]), n_rows if projection == "up" else 0
    return Source(f"{prefix}mlp.experts.gate_up_proj", whole, start=start, n_rows=n_rows, index=expert)


def added(name: str) -> float:
    """To the stored values of a vector, ours by its name: norms are stored less 1."""
    return 1.0 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else 0.0


def ignores(name: str) -> bool:
    """Of a checkpoint's tensors, those of the image tower."""
    return name.startswith("model.visual.")
