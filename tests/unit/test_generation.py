"""What generation_config.json says of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.model.generation import defaults_of, read_defaults
from shared.run.config import RequestDefaults

EMBEDDED = Path(__file__).parents[2] / "models" / "fledgling"


def test_the_file_and_what_it_leaves_open(tmp_path: Path) -> None:
    assert read_defaults(EMBEDDED) == RequestDefaults({"temperature": 0.7, "top_p": 0.95})
    assert read_defaults(tmp_path) == RequestDefaults()
    assert defaults_of({"temperature": 0, "top_k": 20, "do_sample": False}) == RequestDefaults({"temperature": 0.0})
    assert defaults_of({"top_p": None, "max_new_tokens": 1 << 40}) == RequestDefaults(max_tokens=(1 << 31) - 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in ("temperature", "top_p")
        for value in ("0.5", True, -0.1, 2.5, float("nan"), float("inf"), [1])
    ]
    + [("max_new_tokens", value) for value in (0, -1, 1.5, "9", True)],
)
def test_what_is_no_default_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f'generation_config.json: "{key}" must be'):
        defaults_of({key: value})
