"""XXH64 of anything that has a buffer, as the 16 hex digits that ``colibri.json`` holds."""

from __future__ import annotations

from typing import Any

from native.memory import hash64


def checksum(data: Any) -> str:
    """16 hex digits of XXH64, seed 0, over a contiguous buffer."""
    return f"{hash64(data):016x}"
