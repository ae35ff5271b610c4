"""How much memory the router's prompt process may take beyond what it has loaded. Read by the ledger and by the router."""

from __future__ import annotations

_BASE_BYTES = 32 << 20
_BYTES_PER_TOKEN = 512
"""Of the context. Prompts of all kinds that just fit, or just not, took 7 MB for 8,192 tokens and 52 MB for 131,072."""


def prompt_room_bytes(max_context: int) -> int:
    return _BASE_BYTES + max_context * _BYTES_PER_TOKEN
