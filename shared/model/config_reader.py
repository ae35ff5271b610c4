"""``config.json`` as families read it: typed access, rope in both spellings, end ids. Every complaint names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.files import read_file, strict_json
from shared.model.rope import Rope

Config = Mapping[str, Any]

_JSON_LIMIT_BYTES = 16 << 20
_ABSENT = object()


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


MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Where config.json says how many MTP layers there are."""


def quantization_of(config: Config) -> Config:
    """What config.json says of how its weights are stored; {} when nothing."""
    found = config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def without_mtp(config: Config) -> dict[str, Any]:
    """A config.json that promises no MTP layer."""
    found = {**config, MTP_KEYS[0]: 0}
    for part in (found, text := config.get("text_config")):
        if isinstance(part, dict) and MTP_KEYS[1] in part:
            found = {**found, "text_config": {**text, MTP_KEYS[1]: 0}} if part is text else {**found, MTP_KEYS[1]: 0}
    return found


class ReadRope(msgspec.Struct, frozen=True):
    """What config.json says of rope. ``score_factor``: latent attention multiplies its softmax scale with it."""

    rope: Rope
    score_factor: float


class ConfigReader:
    """Typed access to config.json; every complaint names the key, what was expected and what was found."""

    def __init__(self, config: Config, generation: Config | None = None) -> None:
        """``generation``: generation_config.json."""
        self.config, self._generation = config, generation

    def with_default(self, key: str, value: Any) -> ConfigReader:
        """The same with ``value`` where the key is absent or null."""
        is_there = self.config.get(key) is not None
        return self if is_there else ConfigReader({**self.config, key: value}, self._generation)

    def within(self, key: str, *outer: str) -> ConfigReader:
        """Of the object that is the key's value; what stands outside under the ``outer`` keys replaces its own."""
        value = self._get(key, _ABSENT)
        if not isinstance(value, dict):
            raise self.complaint(key, "an object", value)
        over = {name: self.config[name] for name in outer if self.config.get(name) is not None}
        return ConfigReader({**value, **over}, self._generation)

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

    def n_mtp(self, key: str = MTP_KEYS[0]) -> int:
        """MTP layers: none or one."""
        n_layers = self.integer(key, 0, low=0)
        if n_layers > 1:
            raise ConfigError(
                f'config.json: "{key}" is {n_layers:,}, but only one MTP layer is understood. Convert the '
                "model without: --no-mtp (the same text, but no drafts)."
            )
        return n_layers

    # ---- what several families spell alike ----

    def rope(self, dim: int, *, is_interleaved: bool, default_theta: float | None = None) -> ReadRope:
        """Both spellings: ``rope_parameters`` (new), or ``rope_theta`` with ``rope_scaling`` (old)."""
        config = self.config
        new, old = config.get("rope_parameters"), config.get("rope_scaling")
        for key, value in (("rope_parameters", new), ("rope_scaling", old)):
            if value is not None and not isinstance(value, dict):
                raise self.complaint(key, "an object or null", value)
        merged: dict[str, Any] = {**(old or {}), **(new or {})}
        thetas = {float(t) for t in (merged.get("rope_theta"), config.get("rope_theta")) if isinstance(t, int | float)}
        if len(thetas) > 1:
            raise ConfigError(
                "config.json: rope_theta is given twice with different values "
                f"({', '.join(f'{t:g}' for t in sorted(thetas))}). Keep the one the model was trained with."
            )
        if "rope_theta" not in merged and config.get("rope_theta") is not None:
            merged["rope_theta"] = config["rope_theta"]
        inner = ConfigReader(merged)
        theta = inner.number("rope_theta", _ABSENT if default_theta is None else default_theta, low=1.0, high=1e15)
        kinds = {merged[key] for key in ("rope_type", "type") if isinstance(merged.get(key), str)} or {"default"}
        if len(kinds) > 1 or not kinds <= {"default", "yarn"}:
            raise self.complaint("rope_type", '"default" or "yarn"', sorted(kinds))
        if kinds == {"default"}:
            return ReadRope(Rope(dim=dim, theta=theta, is_interleaved=is_interleaved), 1.0)
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
        rope = Rope(
            dim=dim,
            theta=theta,
            is_interleaved=is_interleaved,
            amplitude=amplitude,
            yarn_factor=factor,
            yarn_original_context=original,
            yarn_beta_fast=inner.number("beta_fast", 32.0),
            yarn_beta_slow=inner.number("beta_slow", 1.0),
            yarn_truncate=inner.flag("truncate", True),
        )
        return ReadRope(rope, _yarn_m(factor, mscale_all) ** 2 if mscale_all else 1.0)

    def routing(self, experts_key: str, chosen_key: str = "num_experts_per_tok") -> tuple[int, int]:
        """(routed experts of a layer, how many of them a token uses)."""
        n_experts = self.integer(experts_key, high=1 << 16)
        k = self.integer(chosen_key, high=256)
        if k > n_experts:
            raise self.complaint(chosen_key, f"at most {experts_key} = {n_experts}", k)
        return n_experts, k

    def heads(self, hidden: int) -> tuple[int, int, int]:
        """(query heads, key heads, components of a head) of grouped-query attention."""
        n_heads = self.integer("num_attention_heads", high=1 << 12)
        n_kv_heads = self.integer("num_key_value_heads", n_heads, high=1 << 12)
        if n_heads % n_kv_heads:
            raise self.complaint("num_key_value_heads", f"a divisor of num_attention_heads = {n_heads}", n_kv_heads)
        if self.config.get("head_dim") is None and hidden % n_heads:
            raise self.complaint("num_attention_heads", f"a divisor of hidden_size = {hidden}", n_heads)
        return n_heads, n_kv_heads, self.integer("head_dim", hidden // n_heads, high=1 << 12)

    def turned(self, head_dim: int) -> int:
        """Leading components of a head that turn: ``partial_rotary_factor`` of them, an even number."""
        nested = self.config.get("rope_parameters")
        own = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
        share = self.number("partial_rotary_factor", 1.0, high=1.0) if own is None else own
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise self.complaint("partial_rotary_factor", "a number above 0, at most 1", share)
        dim = int(head_dim * share)
        if not dim or dim % 2:
            raise self.complaint(
                "partial_rotary_factor", f"such that an even part of head_dim = {head_dim} turns", share
            )
        return dim

    def end_ids(self, vocab: int) -> tuple[int, ...]:
        """The union of both files: either may list an id that the other forgot."""
        found: set[int] = set()
        for source, where in ((self.config, "config.json"), (self._generation or {}, "generation_config.json")):
            value = source.get("eos_token_id")
            ids = [] if value is None else value if isinstance(value, list) else [value]
            for item in ids:
                if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
                    raise ConfigError(f'{where}: "eos_token_id" must hold ids from 0 to {vocab - 1}, found {item!r}.')
                found.add(item)
        return tuple(sorted(found))


def _yarn_m(factor: float, k: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * k * math.log(factor) + 1.0
