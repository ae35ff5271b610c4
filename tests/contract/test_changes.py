"""What a typical change touches stays as little as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.gateway.bodies import Common
from shared.messages.router import Sampling

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_sampling_field_is_declared_bounded_and_used_in_one_file_each(field: str) -> None:
    """The message, the body's range, the sampler; docs/api.md is the fourth."""
    files = [path for room in ("services", "shared") for path in (ROOT / room).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if re.search(rf"\b{field}\b", path.read_text())} == {
        "shared/messages/router.py",
        "services/gateway/bodies.py",
        "services/router/sampler.py",
    }


def test_a_client_can_name_every_sampling_field() -> None:
    assert set(Sampling.__struct_fields__) <= set(Common.__struct_fields__)
