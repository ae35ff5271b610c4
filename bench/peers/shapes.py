"""One model for both engines: a container's plan, and the same tensors under GGUF's names and in its formats.

Everything follows from the container's own plan, so widths, layers and experts can't differ. Pure arithmetic.

Bits. A Q4_0 weight costs 4.5 bits (an f16 for each 32), ours 4.25 (one for each 64); Q8_0 costs 8.5, our int8 8 and four
bytes a row. The embedding and the head are int8 with us; Q8_0 gives them the same bits there, Q4_0 half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conversion.presets import preset_config
from conversion.synth import Synthesis
from shared.container.format import ContainerPlan, DenseItem, ExpertFilePlan
from shared.errors import ConfigError
from shared.model.attention.latent import Latent
from shared.model.spec import ModelSpec

ARCHITECTURE = "glm-dsa"
PRECISION = "int4"
BLOCK_BYTES: Mapping[str, int] = {"Q4_0": 18, "Q8_0": 34}
"""Of 32 weights."""
BLOCK = 32
HEAD_TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0"}

_TINY: Mapping[str, Any] = {
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "moe_intermediate_size": 64,
    "index_head_dim": 64,
    "max_position_embeddings": 4096,
}
"""GGUF's blocks hold 32 inputs, and llama.cpp rotates index keys of 64 or more: the preset's own tiny widths don't do."""

SHAPES: Mapping[str, Mapping[str, Any]] = {"glm-5.2": {}, "tiny": _TINY}

_OF_LAYER: Mapping[str, str] = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.k_b.weight": "attn_k_b.weight",
    "self_attn.v_b.weight": "attn_v_b.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_OF_MODEL: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF file. ``shape``: slowest dimension first, as numpy has it; ``type``: F32, Q4_0 or Q8_0."""

    name: str
    shape: tuple[int, ...]
    type: str
    role: str
    """The container's: "expert", "embed", "head", "exact" ..."""

    @property
    def n_bytes(self) -> int:
        n = math.prod(self.shape)
        return 4 * n if self.type == "F32" else n // BLOCK * BLOCK_BYTES[self.type]


@dataclass(frozen=True)
class Model:
    """A shape with its numbers of layers, for both engines."""

    synthesis: Synthesis
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, Any]
    """GGUF's keys; Python int, float, bool, str or list[int]."""

    @property
    def spec(self) -> ModelSpec:
        return self.synthesis.spec

    @property
    def gguf_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def peer_bytes_per_token(self) -> int:
        """Weights that llama.cpp must read for one token: everything once, k experts, one row of the embedding."""
        return sum(self._read(tensor.n_bytes, tensor.role, tensor.shape[0]) for tensor in self.tensors)

    @property
    def our_bytes_per_token(self) -> int:
        """The same for our container."""
        plan = self.synthesis.plan
        dense = sum(self._read(item.n_bytes, item.role, item.shape[0]) for file in plan.dense for item in file.items)
        return dense + sum(self.spec.gate_k * layer.layout.record_bytes for layer in plan.experts)

    def _read(self, n_bytes: int, role: str, n: int) -> int:
        """Of a tensor whose first dimension is n."""
        return n_bytes * {"expert": self.spec.gate_k, "embed": 1}.get(role, n) // n


def make_model(shape: str, n_layers: int, n_dense: int, head_type: str, seed: int = 0) -> Model:
    """ConfigError when the numbers of layers or a width are impossible."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, found {shape!r}.")
    if not 1 <= n_dense < n_layers:
        raise ConfigError(f"--dense {n_dense} of --layers {n_layers}: at least one of each kind is needed.")
    config = {**preset_config(shape, n_layers), **SHAPES[shape], "first_k_dense_replace": n_dense}
    synthesis = Synthesis(config, PRECISION, seed)
    return Model(synthesis, tuple(_tensors(synthesis.plan, HEAD_TYPES[head_type])), _metadata(synthesis.spec))


def _tensors(plan: ContainerPlan, head_type: str) -> Iterator[Tensor]:
    for file in plan.dense:
        for item in file.items:
            yield _dense(item, head_type)
    for layer in plan.experts:
        yield from _experts(layer)


def _dense(item: DenseItem, head_type: str) -> Tensor:
    stem, name = item.name, _OF_MODEL.get(item.name)
    if name is None:
        layer, _, stem = item.name.removeprefix("model.layers.").partition(".")
        name = f"blk.{layer}.{_OF_LAYER[stem]}"
    kind = {"f32": "F32", "q4": "Q4_0", "q8": head_type}[item.format]
    shape = (item.stack, *item.shape) if item.stack > 1 else item.shape
    return _checked(Tensor(name, shape, kind, item.role))


def _experts(layer: ExpertFilePlan) -> Iterator[Tensor]:
    n, inner, hidden = layer.n_experts, layer.layout.inner, layer.layout.hidden
    for part, out, in_ in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield _checked(Tensor(f"blk.{layer.layer}.ffn_{part}_exps.weight", (n, out, in_), "Q4_0", "expert"))


def _checked(tensor: Tensor) -> Tensor:
    if tensor.type != "F32" and tensor.shape[-1] % BLOCK:
        raise ConfigError(f"{tensor.name}: {tensor.shape[-1]} inputs can't be cut into blocks of {BLOCK}.")
    return tensor


def _metadata(spec: ModelSpec) -> dict[str, Any]:
    """What llama.cpp needs to know of a glm-dsa model; the keys without prefix are below the architecture's name."""
    layers = [layer for layer in spec.main_attention if isinstance(layer, Latent)]
    mla, index = layers[0], layers[0].indexer
    assert index is not None
    own: dict[str, Any] = {
        "block_count": spec.n_layers,
        "context_length": spec.max_context,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.dense_inner,
        "vocab_size": spec.vocab,
        "leading_dense_block_count": spec.layer_kinds.count("dense"),
        "expert_count": spec.n_experts,
        "expert_used_count": spec.gate_k,
        "expert_shared_count": spec.n_shared,
        "expert_feed_forward_length": spec.expert_inner,
        "expert_weights_scale": float(spec.gate.scaling),
        "expert_weights_norm": spec.gate.norm_topk,
        "expert_gating_func": 2,  # sigmoid
        "rope.freq_base": float(mla.rope.theta),
        "rope.dimension_count": mla.rope.dim,
        "attention.head_count": mla.n_heads,
        "attention.head_count_kv": 1,  # absorbed: all heads share one latent
        "attention.layer_norm_rms_epsilon": float(spec.rms_eps),
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
    return {
        "general.architecture": ARCHITECTURE,
        "general.name": "random weights",
        "tokenizer.ggml.model": "no_vocab",
        **{f"{ARCHITECTURE}.{key}": value for key, value in own.items()},
    }
