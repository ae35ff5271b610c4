"""From the bytes of a body to values: JSON that is not too deep, and values of the types that were asked for. Pure.

Runs in the gateway.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from services.gateway.errors import invalid

MAX_DEPTH: Final = 64

_TOKENS_OF_DEPTH = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


def decode_body(body: bytes) -> dict[str, Any]:
    """JSON object in ``body``; nesting beyond MAX_DEPTH is refused before any recursive decoder sees it."""
    depth = 0
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return _decode(body)
    for match in _TOKENS_OF_DEPTH.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise invalid(None, f"the JSON body nests deeper than {MAX_DEPTH} levels", "invalid_json")
        elif first in b"]}":
            depth -= 1
    return _decode(body)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    return raw


def convert(raw: Any, kind: type[Any], prefix: str = "") -> Any:
    """``raw`` as ``kind``; an error names the field by its path."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`").removeprefix("$").removeprefix(".")
        param = ".".join(part for part in (prefix, path) if part).replace(".[", "[")
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing:
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise invalid(param or None, f"{param}: {message}" if param else message, "invalid_type") from None
