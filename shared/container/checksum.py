"""XXH64 of anything that has a buffer, as the 16 hex digits that ``colibri.json`` holds."""

from __future__ import annotations

from typing import Any


def checksum(data: Any) -> str:
    """16 hex digits of XXH64, seed 0, over a contiguous buffer."""
    return f"{_hash64(data):016x}"


try:
    from native.memory import hash64 as _hash64
except ImportError:  # TEMPORARY until the native library is there
    import xxhash

    def _hash64(data: Any) -> int:
        return xxhash.xxh64_intdigest(data)
