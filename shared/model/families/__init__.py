"""The model families, one module each, named like ``model_type`` in ``config.json``.

A family's module maps config.json to a ``ModelSpec`` (``spec``) and says under which names its checkpoints have the
tensors, where they differ from ours (``source_name``, ``expert_source``). Nothing else in the engine knows a family. A
new one is a new file here.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from shared.errors import ConfigError
from shared.model.tensors import Source

if TYPE_CHECKING:
    from shared.model.config_reader import ConfigReader
    from shared.model.spec import ModelSpec


class Family(Protocol):
    """What a family's module holds."""

    def spec(self, read: ConfigReader) -> ModelSpec:
        """ConfigError for a missing key, or values that contradict each other or are not implemented."""


@cache
def names() -> tuple[str, ...]:
    """Values of ``model_type`` that are understood."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def module(model_type: Any) -> Family:
    """The family's module. ConfigError when there is none."""
    if not isinstance(model_type, str) or model_type not in names():
        raise ConfigError(
            f'config.json: "model_type" is {model_type!r}; the families understood are {", ".join(names())}. '
            "Choose a model of one of them."
        )
    found: Any = importlib.import_module(f"{__name__}.{model_type}")
    return found  # type: ignore[no-any-return]


def expert_source(family: str, layer: int, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
    """What a checkpoint of ``family`` has of an expert. ``part``: "gate_proj.weight", "up_proj.bias", ... of this shape."""
    own = getattr(module(family), "expert_source", None)
    if own:
        found: Source = own(layer, expert, n_experts, part, shape)
        return found
    return Source(source_name(family, f"model.layers.{layer}.mlp.experts.{expert}.{part}"), shape)


def source_name(family: str, name: str) -> str:
    """The name under which a checkpoint of ``family`` has the tensor that is ``name`` in every container."""
    own = getattr(module(family), "source_name", None)
    return str(own(name)) if own else name
