"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """The first true value of ``condition``; AssertionError when there is none within the time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)
    return value
