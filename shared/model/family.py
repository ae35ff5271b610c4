"""Finds the family of a model and asks it: for the model's spec, and for the names that its checkpoints use.

Families are the modules in ``families``. A model of none of them, a missing key, and values that contradict each other
are a ConfigError. Nobody else reads ``config.json`` of a model.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ConfigError
from shared.model import families
from shared.model.config_reader import Config, ConfigReader, read_json, without_mtp
from shared.model.spec import ModelSpec
from shared.model.tensors import Source


class Family(Protocol):
    """What a family's module holds."""

    def spec(self, read: ConfigReader) -> ModelSpec:
        """ConfigError for a missing key, or values that contradict each other or are not implemented."""


@cache
def names() -> tuple[str, ...]:
    """Values of ``model_type`` that are understood."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(families.__path__)))


def module(model_type: Any) -> Family:
    """The family's module. ConfigError when there is none."""
    if not isinstance(model_type, str) or model_type not in names():
        raise ConfigError(
            f'config.json: "model_type" is {model_type!r}; the families understood are {", ".join(names())}. '
            "Choose a model of one of them."
        )
    found: Any = importlib.import_module(f"{families.__name__}.{model_type}")
    return found  # type: ignore[no-any-return]


def expert_source(
    family: str, layer: int, expert: int, n_experts: int, part: str, shape: tuple[int, ...], mtp_layer: int = -1
) -> Source:
    """What a checkpoint of ``family`` has of an expert. ``part``: "gate_proj.weight", "up_proj.bias", ... of this shape."""
    own, prefix = getattr(module(family), "expert_source", None), f"model.layers.{layer}."
    if own:
        found: Source = own(source_name(family, prefix, mtp_layer), expert, n_experts, part, shape)
        return found
    return Source(source_name(family, f"{prefix}mlp.experts.{expert}.{part}", mtp_layer), shape)


def source_name(family: str, name: str, mtp_layer: int = -1) -> str:
    """The name under which a checkpoint of ``family`` has the tensor that is ``name`` in every container.

    ``mtp_layer``: the number of the MTP layer, which some families have under names of its own.
    """
    found, prefix = module(family), f"model.layers.{mtp_layer}."
    if name.startswith(prefix) and hasattr(found, "mtp_source_name"):
        return str(found.mtp_source_name(name.removeprefix(prefix)))
    own = getattr(found, "source_name", None)
    return str(own(name)) if own else name


def added(family: str, name: str) -> float:
    """What is to be added to the values that a checkpoint of ``family`` has of the vector ``name``."""
    own = getattr(module(family), "added", None)
    return float(own(name)) if own else 0.0


def ignores(family: str, name: str) -> bool:
    """Whether a checkpoint's tensor ``name`` belongs to a part of ``family`` that is left out (an image tower)."""
    own = getattr(module(family), "ignores", None)
    return bool(own and own(name))


def load_spec(model_dir: Path | str, *, has_mtp: bool = True) -> ModelSpec:
    """Reads ``config.json`` and, when present, ``generation_config.json`` of a checkpoint or a container.

    ``has_mtp``: False for the model without its MTP layer, whatever config.json says of one.
    """
    model_dir = Path(model_dir)
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if os.path.lexists(generation_path) else None
    config = read_json(model_dir / "config.json")
    return spec_of(config if has_mtp else without_mtp(config), generation)


def spec_of(config: Config, generation: Config | None = None) -> ModelSpec:
    """The spec of a parsed ``config.json``; ``generation`` is ``generation_config.json``."""
    return module(config.get("model_type")).spec(ConfigReader(config, generation))
