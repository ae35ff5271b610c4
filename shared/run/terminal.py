"""What the commands write for people: one way out, so that no text of a model, a server or a file can steer the terminal.

``say`` and ``complain`` write a line, ``write`` a piece of one; all of them pass their text through ``shown``. ``say_json`` is
for programs: JSON has its own escapes, and the text comes back from them exactly. Standard library alone.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TextIO

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 without tab and newline, DEL, C1, and the marks that override the direction of text. Marks that only hint at it
(U+200E, U+200F) and joiners stay: languages and emoji need them."""
_PLAIN_NAMES = ("ascii", "us-ascii", "ansi-x3.4-1968", "646")


def shown(text: str) -> str:
    r"""``text`` with every character that steers a terminal written out, like ``\x1b`` or ``\u202e``. CR LF becomes LF.

    Newlines and tabs stay. Applying it twice changes nothing more.
    """
    return _STEERING.sub(_write_out, text.replace("\r\n", "\n"))


def shown_line(text: str) -> str:
    r"""The same for a fact that has one line, like a name: a newline is written out too, as ``\x0a``."""
    return shown(text).replace("\n", "\\x0a")


def _write_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def say(text: str = "") -> None:
    """A line (or several) on standard output, at once. Raises OSError."""
    _put(sys.stdout, shown(text) + "\n")


def complain(text: str) -> None:
    """A line (or several) on standard error, at once. Raises OSError."""
    _put(sys.stderr, shown(text) + "\n")


def write(text: str) -> None:
    """A piece of text on standard output, at once. Raises OSError."""
    _put(sys.stdout, shown(text))


def say_json(document: object, *, indent: int | None = None) -> None:
    """A JSON document on standard output, in ASCII. Raises OSError."""
    _put(sys.stdout, json.dumps(document, indent=indent) + "\n")


def _put(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before we were started
        return
    stream.write(text.encode("utf-8", "replace").decode("utf-8"))  # a lone surrogate has no encoding
    stream.flush()


def make_streams_safe() -> None:
    """Standard streams never raise an encoding error; a file, a pipe or a C locale gets UTF-8."""
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        name = (stream.encoding or "ascii").lower().replace("_", "-")
        is_utf8 = name in _PLAIN_NAMES or not is_terminal(stream)
        reconfigure(encoding="utf-8" if is_utf8 else None, errors="replace")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody sits at this stream; False for one that is closed."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def can_show(text: str, stream: TextIO | None = None) -> bool:
    """Whether a decoration can be shown as it is."""
    target = stream or sys.stdout
    try:
        text.encode((target.encoding if target else None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
