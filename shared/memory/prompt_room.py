"""How much memory the router's prompt process may take beyond what it has loaded. Read by the ledger and by the router."""

from __future__ import annotations

_BASE_BYTES = 96 << 20
"""A request of a megabyte, its parts as objects, what a template makes of it, 32,768 characters being split."""
_BYTES_PER_TOKEN = 1 << 10
"""Of the context. 600 were measured for two digits, which are two tokens; words take 800 for what becomes one."""


def prompt_room_bytes(max_context: int) -> int:
    return _BASE_BYTES + max_context * _BYTES_PER_TOKEN
