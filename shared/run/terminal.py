"""What the commands write for people: one way out, so that no text of a model, a server or a file can steer the terminal.

``say`` and ``complain`` write a line, ``write`` a piece of one; all pass their text through ``shared.steering.shown``.
``say_json`` is for programs: JSON has its own escapes, and the text comes back from them exactly. Standard library alone.
"""

from __future__ import annotations

import json
import sys
from typing import TextIO

from shared.steering import shown

_PLAIN_NAMES = ("ascii", "us-ascii", "ansi-x3.4-1968", "646")


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
