"""What llama.cpp's architectures are here: of each, the config.json that its keys stand for, and where our tensors are.

A config.json is made again, so that families read GGUF files like checkpoints and nothing is described twice. What the format
does not keep because llama.cpp knows it from the architecture (a gate's kind, which layers have windows) is said here. Method:
the converters of llama.cpp, read backwards; the tests compare with files that those wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from shared.container.format import DenseItem
from shared.container.safetensors_file import TensorEntry
from shared.errors import ContainerError
from shared.model.tensors import F32, Source

Json = dict[str, Any]
_ABSENT = object()

ARCHITECTURE = "general.architecture"
EMBEDDING, HEAD, HEAD_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

_TOP = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": HEAD_NORM, "lm_head.weight": HEAD}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
"""Below the layer: our name, without ``.weight`` or ``.bias`` where both have the same, and llama.cpp's."""
_NORM_BEHIND_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale.weight",
    "mlp.gate.norm.weight": "ffn_gate_inp.scale",
    "mlp.gate.per_expert_scale": "ffn_down_exps.scale",
}
_SPLIT_KV = {"self_attn.k_b.weight": "attn_k_b.weight", "self_attn.v_b.weight": "attn_v_b.weight"}
_PER_HEAD = tuple(_SPLIT_KV.values())
_FUSED_GATE_UP = "ffn_gate_up_exps.weight"
CHARACTERS = "gemma4"
"""A kind of vocabulary, named after who has it."""
_GATING = {1: "softmax", 2: "sigmoid"}


class Facts:
    """Typed access to a file's keys; complaints name the key, what was expected and what was found."""

    def __init__(
        self, where: str, metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], read: Callable[[str], F32]
    ) -> None:
        """``read``: the values of a tensor."""
        self.where, self.metadata, self.tensors, self.read = where, metadata, tensors, read
        self.name = self._text(ARCHITECTURE)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.name}.{key}", default)

    def integer(self, key: str, default: Any = _ABSENT) -> int:
        value = self._needed(key, default)
        if type(value) is not int or value < 0:
            raise self._complaint(key, "a whole number", value)
        return value

    def number(self, key: str, default: Any = _ABSENT) -> float:
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._complaint(key, "a number", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._complaint(key, "true or false", value)
        return value

    def per_layer(self, key: str, n_layers: int, kind: type) -> list[Any]:
        """A list of at least ``n_layers`` values (those behind belong to an MTP layer), or one value for all."""
        value = self._needed(key, _ABSENT)
        values = value if isinstance(value, list) else [value] * n_layers
        if len(values) < n_layers or any(type(item) is not kind for item in values):
            raise self._complaint(key, f"{n_layers} values, one for each layer", value)
        return values[:n_layers]

    def has(self, tensor: str, layer: int = 0) -> bool:
        return f"blk.{layer}.{tensor}" in self.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.tensors:
            what = "a vocabulary without weights" if not self.tensors else "no whole model"
            raise ContainerError(
                f"{self.where} has no tensor {tensor!r}: it is {what}. Use the file that holds the model's weights."
            )
        return self.tensors[tensor].shape

    @property
    def n_mtp(self) -> int:
        return self.integer("nextn_predict_layers", 0)

    @property
    def n_layers(self) -> int:
        n_blocks = self.integer("block_count")
        if n_blocks <= self.n_mtp:
            raise self._complaint("block_count", f"more than nextn_predict_layers = {self.n_mtp}", n_blocks)
        return n_blocks - self.n_mtp

    def _text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise ContainerError(
                f'{self.where} has no text under the key "{key}", so nobody can tell which model it is. Use a file that '
                "llama.cpp's converter made."
            )
        return value

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is _ABSENT:
            raise ContainerError(
                f'{self.where} has no key "{self.name}.{key}", which this architecture needs. Use a file that a current '
                "llama.cpp made from the model."
            )
        return value

    def _complaint(self, key: str, expected: str, found: Any) -> ContainerError:
        text = repr(found)
        text = text if len(text) <= 120 else text[:117] + "..."
        return ContainerError(
            f'{self.where}: the key "{self.name}.{key}" must be {expected}, found {text}. Use a file that llama.cpp\'s '
            "converter made."
        )


class Architecture(msgspec.Struct, frozen=True):
    """``config``: the keys that it does not share with all others, ``model_type`` among them. ``names`` go before those of all.

    ``turned``: rows of q and k lie in the order of interleaved rope, and are put back.
    """

    config: Callable[[Facts], Json]
    names: Mapping[str, str] = {}
    turned: bool = False
    seen: tuple[str, ...] = ()
    """Tensors that ``config`` has looked at; nothing else reads them."""


def _common(facts: Facts) -> Json:
    embedding = facts.shape(EMBEDDING)
    if len(embedding) != 2:
        raise ContainerError(f"{facts.where}: tensor {EMBEDDING!r} has shape {list(embedding)}, a matrix is needed.")
    return {
        "hidden_size": facts.integer("embedding_length"),
        "vocab_size": embedding[0],
        "num_hidden_layers": facts.n_layers,
        "num_nextn_predict_layers": facts.n_mtp,
        "num_attention_heads": facts.integer("attention.head_count"),
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": facts.integer("expert_used_count", 0),
        "tie_word_embeddings": HEAD not in facts.tensors,
    }


def _rope(facts: Facts, **more: Any) -> Json:
    """``more``: what belongs to yarn besides."""
    rope: Json = {"rope_theta": facts.number("rope.freq_base", 10000.0), "rope_scaling": None}
    kind = facts.get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    scaling: Json = {"rope_type": kind, "factor": facts.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": facts.integer("rope.scaling.original_context_length"),
            "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if facts.get("rope.scaling.yarn_attn_factor") is not None:
            scaling["attention_factor"] = facts.number("rope.scaling.yarn_attn_factor")
    return rope | {"rope_scaling": scaling | more}


def _grouped(facts: Facts) -> Json:
    """Of grouped-query attention. Without a key for it a head's width is the rows of q shared among the heads."""
    n_heads = max(facts.integer("attention.head_count"), 1)
    rows = facts.shape("blk.0.attn_q.weight")[0]
    return {
        "num_key_value_heads": facts.integer("attention.head_count_kv"),
        "head_dim": facts.integer("attention.key_length", rows // n_heads),
    }


def _partial(facts: Facts, head_dim: int) -> Json:
    turned = facts.integer("rope.dimension_count", head_dim)
    return {"partial_rotary_factor": turned / max(head_dim, 1)}


def _shared_and_routed(facts: Facts) -> Json:
    """The gate of DeepSeek-V3, which GLM has too."""
    n_experts = facts.integer("expert_count")
    # Older files of DeepSeek-V3 and R1 (alone with 256 of these) do not say that their gate chooses 4 of 8 groups.
    groups = (8, 4) if n_experts == 256 and facts.integer("embedding_length") == 7168 else (1, 1)
    gating = facts.integer("expert_gating_func", 1)
    return {
        "n_routed_experts": n_experts,
        "n_shared_experts": facts.integer("expert_shared_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "intermediate_size": facts.integer("feed_forward_length"),
        "first_k_dense_replace": facts.integer("leading_dense_block_count"),
        "n_group": facts.integer("expert_group_count", groups[0]),
        "topk_group": facts.integer("expert_group_used_count", groups[1]),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "scoring_func": _GATING.get(gating, f"gating function {gating}"),
    }


_BY_VOCABULARY = {"glm4": "glm4_moe_lite", "chatglm-bpe": "glm4_moe_lite", "kimi-k2": "kimi_k2"}


def _deepseek2(facts: Facts) -> Json:
    """Three families share the name and the arithmetic; their vocabularies tell them apart."""
    family = _BY_VOCABULARY.get(facts.metadata.get("tokenizer.ggml.pre", ""), "deepseek_v3")
    return {"model_type": family} | _latent(facts)


def _latent(facts: Facts) -> Json:
    head = facts.integer("attention.key_length_mla", facts.integer("attention.key_length"))
    rope_dim = facts.integer("rope.dimension_count")
    yarn: Json = {}
    if (
        facts.get("rope.scaling.yarn_log_multiplier") is not None
    ):  # a tenth of mscale_all_dim; mscale is the same number
        mscale = round(10 * facts.number("rope.scaling.yarn_log_multiplier"), 6)
        yarn = {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "q_lora_rank": None if facts.get("attention.q_lora_rank") is None else facts.integer("attention.q_lora_rank"),
        "kv_lora_rank": facts.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": head - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": facts.integer("attention.value_length_mla", facts.integer("attention.value_length")),
        **_shared_and_routed(facts),
        **_rope(facts, **yarn),
    }


def _indexed(facts: Facts) -> Json:
    return _latent(facts) | {
        "index_n_heads": facts.integer("attention.indexer.head_count"),
        "index_head_dim": facts.integer("attention.indexer.key_length"),
        "index_topk": facts.integer("attention.indexer.top_k"),
    }


def _glm_dsa(facts: Facts) -> Json:
    config = {"model_type": "glm_moe_dsa"} | _indexed(facts)
    if facts.get("attention.indexer.types") is None:
        owners = [facts.has("indexer.attn_k.weight", layer) for layer in range(facts.n_layers)]
    else:
        owners = facts.per_layer("attention.indexer.types", facts.n_layers, bool)
    return config | {"indexer_types": ["full" if owns else "shared" for owns in owners]}


def _glm4moe(facts: Facts) -> Json:
    grouped = _grouped(facts)
    return {
        "model_type": "glm4_moe",
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "attention_bias": facts.has("attn_q.bias"),
        **grouped,
        **_partial(facts, grouped["head_dim"]),
        **_shared_and_routed(facts),
        **_rope(facts),
    }


def _qwen3moe(facts: Facts) -> Json:
    dense = [layer for layer in range(facts.n_layers) if not facts.has("ffn_gate_inp.weight", layer)]
    grouped = _grouped(facts)
    return {
        "model_type": "qwen3_moe",
        "num_experts": facts.integer("expert_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "intermediate_size": facts.integer("feed_forward_length", 0),
        "mlp_only_layers": dense,
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "attention_bias": facts.has("attn_q.bias"),
        **grouped,
        **_partial(facts, grouped["head_dim"]),
        **_rope(facts),
    }


def _olmoe(facts: Facts) -> Json:
    clamp = facts.number("attention.clamp_kqv", 0.0)
    return {
        "model_type": "olmoe",
        "num_experts": facts.integer("expert_count"),
        "intermediate_size": facts.integer("expert_feed_forward_length", facts.integer("feed_forward_length")),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "clip_qkv": clamp or None,
        **_grouped(facts),
        **_rope(facts),
    }


def _llama(facts: Facts) -> Json:
    """Mixtral; other models with experts under this name have its arithmetic."""
    n_experts = facts.integer("expert_count", 0)
    if not n_experts:
        raise ContainerError(
            f"{facts.where} is a dense model (architecture llama without experts), which has nothing to stream. Use a model "
            "with experts."
        )
    grouped = _grouped(facts)
    window = facts.integer("attention.sliding_window", 0)
    return {
        "model_type": "mixtral",
        "num_local_experts": n_experts,
        "intermediate_size": facts.integer("expert_feed_forward_length", facts.integer("feed_forward_length")),
        "sliding_window": window or None,
        **grouped,
        **_partial(facts, grouped["head_dim"]),
        **_rope(facts),
    }


def _gpt_oss(facts: Facts) -> Json:
    """Windows on every other layer, the first among them; yarn's borders are not rounded."""
    return {
        "model_type": "gpt_oss",
        "num_local_experts": facts.integer("expert_count"),
        "intermediate_size": facts.integer("expert_feed_forward_length"),
        "sliding_window": facts.integer("attention.sliding_window"),
        "attention_bias": facts.has("attn_q.bias"),
        **_grouped(facts),
        **_rope(facts, truncate=False),
    }


def _gemma4(facts: Facts) -> Json:
    n_layers = facts.n_layers
    slides = facts.per_layer("attention.sliding_window_pattern", n_layers, bool)
    kv_heads = facts.per_layer("attention.head_count_kv", n_layers, int)
    by_kind = dict(zip(slides, kv_heads))
    full = slides.index(False) if False in slides else n_layers - 1
    head_dim, full_dim = facts.integer("attention.key_length_swa"), facts.integer("attention.key_length")
    text = {
        "model_type": "gemma4_text",
        **_common(facts),
        "num_experts": facts.integer("expert_count"),
        "top_k_experts": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "intermediate_size": facts.integer("feed_forward_length"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "num_key_value_heads": by_kind.get(True, kv_heads[0]),
        "num_global_key_value_heads": by_kind.get(False, kv_heads[-1]),
        "head_dim": head_dim,
        "global_head_dim": full_dim,
        "attention_k_eq_v": not facts.has("attn_v.weight", full),
        "sliding_window": facts.integer("attention.sliding_window"),
        "hidden_size_per_layer_input": facts.integer("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": facts.integer("attention.shared_kv_layers", 0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.number("rope.freq_base_swa", 10000.0),
                "partial_rotary_factor": facts.integer("rope.dimension_count_swa", head_dim) / max(head_dim, 1),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": facts.number("rope.freq_base"),
                "partial_rotary_factor": _turning(facts, full_dim),
            },
        },
    }
    return {"model_type": "gemma4", "text_config": text}


def _turning(facts: Facts, head_dim: int) -> float:
    """The part of a full layer's pairs that turns: the others are slowed down beyond all measure, behind the first."""
    if ROPE_FACTORS not in facts.tensors:
        return 1.0
    factors = facts.read(ROPE_FACTORS).reshape(-1)
    n = int(np.count_nonzero(factors == 1))
    if 2 * len(factors) != head_dim or not n or (factors[:n] != 1).any() or (factors[n:] < 1e20).any():
        raise ContainerError(
            f"{facts.where}: tensor {ROPE_FACTORS!r} should hold {head_dim // 2} factors, 1 for pairs that turn and 1e30 for "
            "the others behind them. Use a file that llama.cpp's converter made."
        )
    return n / len(factors)


_ARCHITECTURES: dict[str, Architecture] = {
    "deepseek2": Architecture(_deepseek2),
    "deepseek32": Architecture(lambda facts: {"model_type": "deepseek_v32"} | _indexed(facts)),
    "glm-dsa": Architecture(_glm_dsa),
    "glm4moe": Architecture(_glm4moe, _NORM_BEHIND_ATTENTION),
    "qwen3moe": Architecture(_qwen3moe),
    "olmoe": Architecture(_olmoe),
    "llama": Architecture(_llama, turned=True),
    "gpt-oss": Architecture(_gpt_oss, _NORM_BEHIND_ATTENTION),
    "gemma4": Architecture(_gemma4, _GEMMA, seen=(ROPE_FACTORS,)),
}


def architecture_of(facts: Facts) -> Architecture:
    """ContainerError for one that is not understood."""
    if facts.name not in _ARCHITECTURES:
        raise ContainerError(
            f"{facts.where} has the architecture {facts.name!r}; those understood are {', '.join(_ARCHITECTURES)}. Choose a "
            "model of one of them."
        )
    return _ARCHITECTURES[facts.name]


def config_of(facts: Facts) -> Json:
    """The config.json that the file's keys stand for, without the ids that end a turn: those are the vocabulary's."""
    own = architecture_of(facts).config(facts)
    return own if "text_config" in own else _common(facts) | own


def joined_heads(name: str, entry: TensorEntry) -> TensorEntry:
    """A tensor with a matrix for each head as one matrix, which has the heads' rows one after the other."""
    if name.endswith(_PER_HEAD) and len(entry.shape) == 3:
        heads, rows, width = entry.shape
        return msgspec.structs.replace(entry, shape=(heads * rows, width))
    return entry


class GgufNames:
    """Where a file has what our tensors are made from; see ``conversion.names``."""

    def __init__(self, facts: Facts) -> None:
        self._architecture, self._tensors = architecture_of(facts), facts.tensors
        self._table = {**_LAYER, **_SPLIT_KV, **self._architecture.names}
        self._back = {theirs: ours for ours, theirs in self._table.items()}
        self.turned_rows = self._turned_rows(facts) if self._architecture.turned else {}

    @staticmethod
    def _turned_rows(facts: Facts) -> dict[str, int]:
        """Names of q and k, their biases too -> rows of a head."""
        head_dim = _grouped(facts)["head_dim"]
        stems = [f"blk.{layer}.attn_{part}" for layer in range(facts.n_layers) for part in "qk"]
        return {f"{stem}.{kind}": head_dim for stem in stems for kind in ("weight", "bias")}

    def layer(self, layer: int) -> str:
        return f"blk.{layer}."

    def tensor(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        _, _, layer, below = name.split(".", 3)
        return f"blk.{layer}.{self._below(below, self._table)}"

    def ours(self, name: str) -> str:
        parts = name.split(".", 2)
        if parts[0] != "blk" or len(parts) < 3:
            return name
        return f"model.layers.{parts[1]}.{self._below(parts[2], self._back)}"

    @staticmethod
    def _below(name: str, table: Mapping[str, str]) -> str:
        stem, _, kind = name.rpartition(".")
        return table[name] if name in table else f"{table.get(stem, stem)}.{kind}"

    def dense(self, item: DenseItem) -> Source:
        name = self.tensor(item.name)
        if item.source is None:
            return Source(name, item.shape)
        if name in self._tensors:
            rows, width = item.shape
            return Source(name, (item.stack * rows, width), stride=rows, n_rows=rows)
        return msgspec.structs.replace(item.source, name=self.tensor(item.source.name))

    def expert(self, layer: int, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
        """All experts of a layer lie in one tensor of each projection; gate and up may be one, gate's rows first."""
        projection, kind = part.split("_proj.")
        fused = f"blk.{layer}.{_FUSED_GATE_UP}"
        if fused in self._tensors and part in ("gate_proj.weight", "up_proj.weight"):
            rows = shape[0]
            start = rows if projection == "up" else 0
            return Source(fused, (n_experts, 2 * rows, *shape[1:]), start=start, n_rows=rows, index=expert)
        return Source(f"blk.{layer}.ffn_{projection}_exps.{kind}", (n_experts, *shape), index=expert)

    def added(self, name: str) -> float:
        """Nothing: llama.cpp's converter has added it."""
        return 0.0

    def ignores(self, name: str) -> bool:
        return name in self._architecture.seen
