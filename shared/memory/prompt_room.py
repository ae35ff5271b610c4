"""How much memory the router's prompt process may take beyond what it has loaded. Read by the ledger and by the router."""

from __future__ import annotations

_BASE_BYTES = 48 << 20
_BYTES_PER_TOKEN = 1 << 10
"""Of the context. The costliest are very many tiny messages, 1,350 bytes each: the most that are looked at take 30 MB with
2,048 tokens, 46 MB with 8,192 and 117 MB with 131,072. Texts take less: 7 MB and 52 MB with the latter two."""


def prompt_room_bytes(max_context: int) -> int:
    return _BASE_BYTES + max_context * _BYTES_PER_TOKEN
