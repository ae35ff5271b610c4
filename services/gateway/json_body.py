"""From the bytes of a body to values: JSON that everybody reads the same way, and values of the types asked for. Pure.

What readers of JSON disagree on is refused with its place: a key that comes twice, numbers that no double and no 64-bit
integer can hold, half surrogates, NaN. Runs in the gateway.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from services.gateway.errors import ApiError, invalid, short
from shared.errors import ErrorCode

MAX_DEPTH: Final = 64
MAX_NESTED: Final = 1 << 18
MAX_VALUES: Final = 1 << 20
"""Arrays and objects of one body, and commas in it: what is more makes nothing that could be answered, and takes seconds."""
MAX_KEYS: Final = 1 << 16
"""Of one object, which the decoder makes in one go: other threads wait that long."""
MAX_DIGITS: Final = 300
BEYOND_INTEGERS: Final = "does not fit into 64 bits"
CLAMPED: Final = ("max_tokens", "max_completion_tokens")
"""Where an integer may be as large as it likes."""

_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"?'
_BRACKETS = re.compile(_STRING + rb"|[\[{\]}]", re.DOTALL)
_KEYS = re.compile(_STRING + rb"|[\[{\]}:]", re.DOTALL)
_COMMAS = re.compile(_STRING + rb"|,", re.DOTALL)
_LONG_INTEGER = re.compile(rb"\d{19}")
_WINDOW_BYTES: Final = 1 << 20
_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# A JSON text begins with two ASCII characters, so where its first bytes are zero tells the encoding.
_ENCODINGS: Final = (
    (re.compile(rb"\xef\xbb\xbf"), "begins with a byte order mark; send UTF-8 without one"),
    (
        re.compile(rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff|[^\x00]\x00\x00\x00|\x00\x00\x00[^\x00]"),
        "is UTF-32; send UTF-8",
    ),
    (re.compile(rb"\xff\xfe|\xfe\xff|[^\x00]\x00|\x00[^\x00]"), "is UTF-16; send UTF-8"),
)


class _Unusable:
    """Stands for a number that can be spelt and not be held, until its place is known. ``words``: what is wrong with it."""

    def __init__(self, spelling: str, words: str) -> None:
        shown = spelling if len(spelling) <= 40 else spelling[:37] + "..."
        self.words = f"{shown} {words}"


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises ApiError (400) with the place of what is wrong."""
    for pattern, words in _ENCODINGS:
        if pattern.match(body):
            raise invalid(None, f"the body {words}", ErrorCode.INVALID_JSON)
    if not body.strip():
        raise invalid(None, "the body is empty; send a JSON object", ErrorCode.INVALID_JSON)
    _check_depth(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise invalid(
            None, f"the body is not UTF-8: {error.reason} at byte {error.start}", ErrorCode.INVALID_JSON
        ) from None
    value = _decode(text, "the body", has_long=_has_long_integer(body))
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object", ErrorCode.INVALID_JSON)
    if _HALF_SURROGATE.search(body):
        _check_surrogates(value)
    return value


def decode_text(text: str, at: str) -> Any:
    """JSON that came as a string, e.g. the arguments of a call; ``at`` is its place. Raises ApiError (400)."""
    body = text.encode()
    try:
        _check_depth(body)
        value = _decode(text, "the text", has_long=_has_long_integer(body))
        if _HALF_SURROGATE.search(body):
            _check_surrogates(value)
    except ApiError as error:
        raise invalid(at, f"{at}: {error.message}", error.code or ErrorCode.INVALID_JSON) from None
    return value


def _check_depth(body: bytes) -> None:
    """Depth and number of values, before any decoder sees them. Loops, so that the event loop's thread gets its turns."""
    if body.count(b",") > MAX_VALUES:
        n_commas = 0
        for match in _COMMAS.finditer(body):
            n_commas += body[match.start()] == 0x2C
            if n_commas > MAX_VALUES:
                raise invalid(None, f"the JSON body has more than {MAX_VALUES:,} values", ErrorCode.INVALID_JSON)
    if body.count(b":") > MAX_KEYS:
        _check_keys(body)
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = n_nested = 0
    for match in _BRACKETS.finditer(body):
        bracket = body[match.start()]
        if bracket in b"[{":
            depth += 1
            n_nested += 1
            if depth > MAX_DEPTH:
                raise invalid(None, f"the JSON body nests deeper than {MAX_DEPTH} levels", ErrorCode.INVALID_JSON)
            if n_nested > MAX_NESTED:
                raise invalid(
                    None, f"the JSON body has more than {MAX_NESTED:,} arrays and objects", ErrorCode.INVALID_JSON
                )
        elif bracket in b"]}":
            depth -= 1


def _check_keys(body: bytes) -> None:
    open_keys = [0]
    for match in _KEYS.finditer(body):
        byte = body[match.start()]
        if byte == 0x3A:
            open_keys[-1] += 1
            if open_keys[-1] > MAX_KEYS:
                raise invalid(
                    None, f"an object of the JSON body has more than {MAX_KEYS:,} keys", ErrorCode.INVALID_JSON
                )
        elif byte in b"[{" and len(open_keys) <= MAX_DEPTH:
            open_keys.append(0)
        elif byte in b"]}" and len(open_keys) > 1:
            open_keys.pop()


def _has_long_integer(body: bytes) -> bool:
    # In windows: a single search through megabytes would keep every other thread waiting.
    starts = range(0, len(body), _WINDOW_BYTES)
    return any(_LONG_INTEGER.search(body, start, start + _WINDOW_BYTES + 18) for start in starts)


def _decode(text: str, what: str, *, has_long: bool) -> Any:
    is_suspect = False

    def give_up(spelling: str, words: str = "is not JSON; send a finite number") -> _Unusable:
        nonlocal is_suspect
        is_suspect = True
        return _Unusable(spelling, words)

    def number(spelling: str) -> float | _Unusable:
        value = float(spelling)
        return value if math.isfinite(value) else give_up(spelling, "is beyond the range of numbers")

    def integer(spelling: str) -> int | _Unusable:
        nonlocal is_suspect
        if len(spelling) > MAX_DIGITS:
            return give_up(spelling, BEYOND_INTEGERS)
        value = int(spelling)
        is_suspect = is_suspect or not _fits(value)
        return value

    try:
        value = json.loads(
            text,
            parse_float=number,
            parse_int=integer if has_long else None,
            parse_constant=give_up,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise invalid(None, f"{what} is not valid JSON: {error.msg} ({place})", ErrorCode.INVALID_JSON) from None
    if is_suspect:
        for place, item in _walk(value):
            if isinstance(item, int) and not _fits(item) and place not in CLAMPED:
                item = _Unusable(str(item), BEYOND_INTEGERS)
            if isinstance(item, _Unusable):
                raise invalid(place or None, f"{place}: {item.words}" if place else item.words)
    return value


def _fits(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 64


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise invalid(
            _printable(twice), f"{short(twice)} is twice in the same object; send it once", ErrorCode.INVALID_JSON
        )
    return made


def _check_surrogates(value: Any) -> None:
    for place, item in _walk(value):
        if isinstance(item, str) and not _is_text(item):
            raise invalid(
                place, f"{place} has half of a surrogate pair, which is no character", ErrorCode.INVALID_VALUE
            )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(key: str) -> str:
    return short(key)[1:-1] if _is_text(key) else ascii(key)[1:-1][:60]


def _walk(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value and every key below ``value`` with its place, in order. Bounded by MAX_DEPTH."""
    yield place, value
    if isinstance(value, dict):
        for key, item in value.items():
            below = f"{place}.{_printable(key)}" if place else _printable(key)
            yield below, key
            yield from _walk(item, below)
    elif isinstance(value, list):
        for idx, item in enumerate(value):
            yield from _walk(item, f"{place}[{idx}]")


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
        raise invalid(param or None, f"{param}: {message}" if param else message, ErrorCode.INVALID_TYPE) from None
