r"""Characters that steer a terminal: written out wherever text of others may come to one, on a screen or in a log.

These are C0 without tab and newline, DEL, C1, and the marks that override the direction of text. Marks that only hint at it
(U+200E, U+200F) and joiners stay: languages and emoji need them. Standard library alone.
"""

from __future__ import annotations

import re

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    r"""``text`` with every character that steers a terminal written out, like ``\x1b`` or ``\u202e``. CR LF becomes LF.

    Newlines and tabs stay. Applying it twice changes nothing more.
    """
    return STEERING.sub(_write_out, text.replace("\r\n", "\n"))


def shown_line(text: str) -> str:
    r"""The same for a fact that has one line, like a name: a newline is written out too, as ``\x0a``."""
    return shown(text).replace("\n", "\\x0a")


def shown_json(text: str) -> str:
    r"""The same within a JSON string, whose escapes of four digits give the characters back."""
    return STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _write_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
