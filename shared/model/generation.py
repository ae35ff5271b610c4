"""``generation_config.json``: how a checkpoint's makers want it sampled when a request does not say.

Ids that end a turn are read from it by ``spec``. What is none of ``SAMPLING_RANGES`` (top_k, penalties, beams) is not applied;
docs/api.md says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.messages.router import SAMPLING_RANGES
from shared.model.config_reader import read_json
from shared.run.config import RequestDefaults

NAME = "generation_config.json"
MAX_TOKENS = (1 << 31) - 1


def read_defaults(model_dir: Path) -> RequestDefaults:
    """What the file says. Raises ConfigError naming the key."""
    path = model_dir / NAME
    return defaults_of(read_json(path)) if os.path.lexists(path) else RequestDefaults()


def defaults_of(generation: Mapping[str, Any]) -> RequestDefaults:
    """As ``read_defaults``, from the parsed file."""
    limit = generation.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f'{NAME}: "max_new_tokens" must be an integer from 1 on, found {limit!r}.')
    return RequestDefaults(
        sampling={key: _value(generation, key) for key in SAMPLING_RANGES if generation.get(key) is not None},
        max_tokens=None if limit is None else min(limit, MAX_TOKENS),
    )


def _value(generation: Mapping[str, Any], key: str) -> float:
    value, (low, high) = generation[key], SAMPLING_RANGES[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f'{NAME}: "{key}" must be a number from {low:g} to {high:g}, found {value!r}.')
    return float(value)
