"""What a model is, read from ``config.json``: sizes, layer kinds, rope, routing, ids that end a turn.

Pure: no numpy, no native code, no weights. Every process that needs a shape asks here; nobody else reads ``config.json``.
A family that is not listed, a missing key, or values that contradict each other are a ``ConfigError``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.files import read_file, strict_json

Config = Mapping[str, Any]

FAMILIES = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2")
"""Values of ``model_type`` that are understood. kimi_k2 is deepseek_v3 with other sizes."""

_DSA_FAMILIES = ("glm_moe_dsa", "deepseek_v32")
_JSON_LIMIT_BYTES = 16 << 20
_ABSENT = object()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model's geometry. Sizes count values, not bytes; ``layer_kinds`` and ``index_kinds`` have ``n_layers`` entries."""

    family: str
    n_layers: int
    """Main layers; the MTP layer, when there is one, is layer ``n_layers``."""
    hidden: int
    vocab: int
    n_heads: int
    q_lora_rank: int | None
    """None: one ``q_proj`` maps hidden directly."""
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_head: int
    dense_inner: int
    expert_inner: int
    n_experts: int
    gate_k: int
    n_shared: int
    n_group: int
    topk_group: int
    norm_topk: bool
    routed_scaling: float
    layer_kinds: tuple[str, ...]
    """"dense" or "moe"."""
    index_kinds: tuple[str, ...]
    """"none", "full" (owns an indexer) or "shared" (uses the selection of the nearest earlier full layer)."""
    mtp_index_kind: str
    index_heads: int
    index_dim: int
    index_topk: int
    rope_theta: float
    rope_interleave: bool
    index_rope_interleave: bool
    rms_eps: float
    latent_eps: float
    """Of the two inner norms; ``latent_rms_norm_eps`` in config.json overrides rms_norm_eps."""
    n_mtp: int
    max_context: int
    softmax_scale: float
    rope_amplitude: float
    eos_ids: tuple[int, ...]
    tie_embeddings: bool
    yarn_factor: float = 1.0
    """1 = no YaRN."""
    yarn_original_context: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True

    @property
    def shared_inner(self) -> int:
        return self.expert_inner * self.n_shared

    @property
    def qk_head(self) -> int:
        return self.qk_nope + self.qk_rope

    @property
    def latent(self) -> int:
        """Cached values per token and layer: the latent and its rope part."""
        return self.kv_lora_rank + self.qk_rope

    @property
    def mtp_layer(self) -> int:
        return self.n_layers

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Main layers, then the MTP layer when there is one."""
        return tuple(range(self.n_layers + self.n_mtp))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending; the MTP layer is one."""
        return tuple(layer for layer in self.all_layers if self.layer_kind(layer) == "moe")

    def layer_kind(self, layer: int) -> str:
        return "moe" if layer == self.n_layers and self.n_mtp else self.layer_kinds[layer]

    def index_kind(self, layer: int) -> str:
        return self.mtp_index_kind if layer == self.n_layers and self.n_mtp else self.index_kinds[layer]

    def inv_freq(self) -> list[float]:
        """``qk_rope / 2`` angles per position, f64, YaRN applied."""
        d = self.qk_rope
        base = [self.rope_theta ** (-2.0 * i / d) for i in range(d // 2)]
        if self.yarn_factor <= 1.0:
            return base

        def pair_at(rotations: float) -> float:
            length = self.yarn_original_context / (rotations * 2.0 * math.pi)
            return d * math.log(length) / (2.0 * math.log(self.rope_theta))

        low, high = pair_at(self.yarn_beta_fast), pair_at(self.yarn_beta_slow)
        if self.yarn_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        result = []
        for i, freq in enumerate(base):
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            result.append(freq / self.yarn_factor * ramp + freq * (1.0 - ramp))
        return result

    @staticmethod
    def load(model_dir: Path | str) -> ModelSpec:
        """Reads ``config.json`` and, when present, ``generation_config.json`` of a checkpoint or a container."""
        model_dir = Path(model_dir)
        generation_path = model_dir / "generation_config.json"
        generation = read_json(generation_path) if os.path.lexists(generation_path) else None
        return ModelSpec.from_config(read_json(model_dir / "config.json"), generation)

    @staticmethod
    def from_config(config: Config, generation: Config | None = None) -> ModelSpec:
        """The spec of a parsed ``config.json``; ``generation`` is ``generation_config.json``."""
        return _build(config, generation)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError when it is missing, not JSON, or not an object."""
    try:
        value = strict_json(read_file(path, _JSON_LIMIT_BYTES), is_edited=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: {path.parent} is not a model directory. Give the directory that holds config.json."
        ) from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} is not a directory; give the directory that holds config.json.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}). Copy the file again from the checkpoint.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


class _Reader:
    """Typed access to config.json; every complaint names the key, what was expected and what was found."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def integer(self, key: str, default: Any = _ABSENT, low: int = 1, high: int = 1 << 24) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.complaint(key, f"an integer from {low:,} to {high:,}", value)
        return value

    def number(self, key: str, default: Any = _ABSENT, low: float = 0.0, high: float = 1e12) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.complaint(key, f"a number above {low:g}, at most {high:g}", value)
        return float(value)

    def flag(self, key: str, default: Any = _ABSENT) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.complaint(key, "true or false", value)
        return value

    def only(self, key: str, allowed: Any) -> None:
        """The key is absent, null or exactly ``allowed``: another value would change the arithmetic."""
        value = self.config.get(key)
        if value is not None and value != allowed:
            raise self.complaint(key, f"{allowed!r} (nothing else is implemented)", value)

    def names(self, key: str, length: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(item not in allowed for item in value):
            found = f"a list of {len(value)}" if isinstance(value, list) and len(value) != length else value
            raise self.complaint(key, f"a list of {length} values out of {', '.join(allowed)}", found)
        return tuple(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _ABSENT:
            raise ConfigError(
                f'config.json has no "{key}", which this family needs. '
                "Use the config.json that came with the weights, unchanged."
            )
        return default

    @staticmethod
    def complaint(key: str, expected: str, found: Any) -> ConfigError:
        text = repr(found)
        text = text if len(text) <= 120 else text[:117] + "..."
        return ConfigError(
            f'config.json: "{key}" must be {expected}, found {text}. Use the config.json that came with the weights.'
        )


def _build(config: Config, generation: Config | None) -> ModelSpec:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f'config.json: "model_type" is {family!r}; the families understood are {", ".join(FAMILIES)}. '
            "Choose a model of one of them."
        )
    read = _Reader(config)
    _refuse_variants(read)
    n_layers = read.integer("num_hidden_layers", high=4000)
    hidden, vocab = read.integer("hidden_size", high=1 << 20), read.integer("vocab_size")
    n_experts = read.integer("n_routed_experts", high=1 << 16)
    gate_k = read.integer("num_experts_per_tok", high=256)
    n_group, topk_group = _groups(read, n_experts, gate_k)
    n_mtp = read.integer("num_nextn_predict_layers", 0, low=0, high=1)
    if "q_lora_rank" not in config:
        read.integer("q_lora_rank")
    is_dsa = family in _DSA_FAMILIES
    nope, rope_dim = read.integer("qk_nope_head_dim", high=1 << 16), read.integer("qk_rope_head_dim", high=1 << 16)
    if rope_dim % 2:
        raise read.complaint("qk_rope_head_dim", "even (rope turns pairs)", rope_dim)
    declared = config.get("qk_head_dim")
    if declared is not None and declared != nope + rope_dim:
        raise read.complaint("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {nope + rope_dim}", declared)
    rope = _rope(read, nope + rope_dim)
    layer_kinds = _layer_kinds(read, n_layers)
    if "moe" not in layer_kinds:
        raise ConfigError(
            f"config.json: all {n_layers} layers are dense; a model without experts has nothing to stream."
        )
    index_dim = read.integer("index_head_dim", high=1 << 16) if is_dsa else 0
    if is_dsa and index_dim < rope_dim:
        raise read.complaint("index_head_dim", f"at least qk_rope_head_dim = {rope_dim}", index_dim)
    rms_eps = read.number("rms_norm_eps", high=1.0)
    return ModelSpec(
        family=family,
        n_layers=n_layers,
        hidden=hidden,
        vocab=vocab,
        n_heads=read.integer("num_attention_heads", high=1 << 16),
        q_lora_rank=None if config["q_lora_rank"] is None else read.integer("q_lora_rank", high=1 << 20),
        kv_lora_rank=read.integer("kv_lora_rank", high=1 << 16),
        qk_nope=nope,
        qk_rope=rope_dim,
        v_head=read.integer("v_head_dim", high=1 << 16),
        dense_inner=read.integer("intermediate_size"),
        expert_inner=read.integer("moe_intermediate_size", high=1 << 20),
        n_experts=n_experts,
        gate_k=gate_k,
        n_shared=read.integer("n_shared_experts", high=256),
        n_group=n_group,
        topk_group=topk_group,
        norm_topk=read.flag("norm_topk_prob"),
        routed_scaling=read.number("routed_scaling_factor", high=1e6),
        layer_kinds=layer_kinds,
        index_kinds=_index_kinds(read, n_layers) if is_dsa else ("none",) * n_layers,
        mtp_index_kind="full" if is_dsa and n_mtp else "none",
        index_heads=read.integer("index_n_heads", high=1 << 12) if is_dsa else 0,
        index_dim=index_dim,
        index_topk=read.integer("index_topk") if is_dsa else 0,
        rope_interleave=read.flag("rope_interleave", True),
        index_rope_interleave=read.flag("indexer_rope_interleave", family == "glm_moe_dsa"),
        rms_eps=rms_eps,
        latent_eps=read.number("latent_rms_norm_eps", rms_eps, high=1.0),
        n_mtp=n_mtp,
        max_context=read.integer("max_position_embeddings", high=1 << 30),
        eos_ids=_eos_ids(config, generation, vocab),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        **rope,
    )


def _refuse_variants(read: _Reader) -> None:
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("hidden_act", "silu")
    read.only("scoring_func", "sigmoid")
    read.only("topk_method", "noaux_tc")
    read.only("moe_layer_freq", 1)


def _groups(read: _Reader, n_experts: int, gate_k: int) -> tuple[int, int]:
    if gate_k > n_experts:
        raise read.complaint("num_experts_per_tok", f"at most n_routed_experts = {n_experts}", gate_k)
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
    return n_group, topk_group


def _layer_kinds(read: _Reader, n_layers: int) -> tuple[str, ...]:
    first = read.config.get("first_k_dense_replace")
    named = read.names("mlp_layer_types", n_layers, ("dense", "sparse"))
    if named is None:
        n_dense = read.integer("first_k_dense_replace", low=0, high=n_layers)
        return ("dense",) * n_dense + ("moe",) * (n_layers - n_dense)
    kinds = tuple("dense" if kind == "dense" else "moe" for kind in named)
    if first is not None:
        n_dense = read.integer("first_k_dense_replace", low=0, high=n_layers)
        if kinds != ("dense",) * n_dense + ("moe",) * (n_layers - n_dense):
            raise ConfigError(
                f'config.json: "first_k_dense_replace" = {n_dense} and "mlp_layer_types" '
                f"({kinds.count('dense')} dense layers) contradict each other. Correct the one that does not fit the weights."
            )
    return kinds


def _index_kinds(read: _Reader, n_layers: int) -> tuple[str, ...]:
    config = read.config
    kinds = read.names("indexer_types", n_layers, ("full", "shared"))
    pattern = config.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != n_layers or set(pattern) - set("FS"):
            raise read.complaint("index_topk_pattern", f"{n_layers} letters F (full) or S (shared)", pattern)
        kinds = tuple("full" if letter == "F" else "shared" for letter in pattern)
    if kinds is None:
        freq = read.integer("index_topk_freq", 1)
        offset = read.integer("index_skip_topk_offset", 2, low=0)
        kinds = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(n_layers))
    if kinds[0] != "full":
        raise ConfigError(
            'config.json: layer 0 must own an indexer ("full"), found "shared": there is no earlier selection to share. '
            'Correct "indexer_types" or "index_topk_pattern".'
        )
    return kinds


def _rope(read: _Reader, qk_head: int) -> dict[str, Any]:
    """Both spellings: ``rope_parameters`` (new), or ``rope_theta`` with ``rope_scaling`` (old)."""
    config = read.config
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise read.complaint(key, "an object or null", value)
    merged: dict[str, Any] = {**(old or {}), **(new or {})}
    thetas = {float(t) for t in (merged.get("rope_theta"), config.get("rope_theta")) if isinstance(t, int | float)}
    if len(thetas) > 1:
        raise ConfigError(
            f"config.json: rope_theta is given twice with different values ({', '.join(f'{t:g}' for t in sorted(thetas))}). "
            "Keep the one the model was trained with."
        )
    if "rope_theta" not in merged and config.get("rope_theta") is not None:
        merged["rope_theta"] = config["rope_theta"]
    inner = _Reader(merged)
    theta = inner.number("rope_theta", low=1.0, high=1e15)
    kinds = {merged[key] for key in ("rope_type", "type") if isinstance(merged.get(key), str)} or {"default"}
    if len(kinds) > 1 or not kinds <= {"default", "yarn"}:
        raise read.complaint("rope_type", '"default" or "yarn"', sorted(kinds))
    scale = qk_head**-0.5
    if kinds == {"default"}:
        return {"rope_theta": theta, "softmax_scale": scale, "rope_amplitude": 1.0}
    factor = inner.number("factor", low=0.0, high=1e6)
    original = inner.integer("original_max_position_embeddings", high=1 << 30)
    mscale = inner.number("mscale", high=1e3) if merged.get("mscale") else 0.0
    mscale_all = inner.number("mscale_all_dim", high=1e3) if merged.get("mscale_all_dim") else 0.0
    if merged.get("attention_factor") is not None:
        amplitude = inner.number("attention_factor", high=1e3)
    elif mscale and mscale_all:
        amplitude = _yarn_m(factor, mscale) / _yarn_m(factor, mscale_all)
    else:
        amplitude = _yarn_m(factor, 1.0)
    if mscale_all:
        scale *= _yarn_m(factor, mscale_all) ** 2
    return {
        "rope_theta": theta,
        "softmax_scale": scale,
        "rope_amplitude": amplitude,
        "yarn_factor": factor,
        "yarn_original_context": original,
        "yarn_beta_fast": inner.number("beta_fast", 32.0),
        "yarn_beta_slow": inner.number("beta_slow", 1.0),
        "yarn_truncate": inner.flag("truncate", True),
    }


def _yarn_m(factor: float, k: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * k * math.log(factor) + 1.0


def _eos_ids(config: Config, generation: Config | None, vocab: int) -> tuple[int, ...]:
    """The union of both files: either may list an id that the other forgot."""
    found: set[int] = set()
    for source, where in ((config, "config.json"), (generation or {}, "generation_config.json")):
        value = source.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
                raise ConfigError(f'{where}: "eos_token_id" must hold ids from 0 to {vocab - 1}, found {item!r}.')
            found.add(item)
    return tuple(sorted(found))
