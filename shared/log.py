"""One event per line on stderr: time, level, service and incarnation, event, then ``key=value`` pairs.

Runs in every process; imports ``shared.steering`` and the standard library alone. supervisor keeps the lines of each service in
``<run dir>/log/<service>.log``. INFO is for changes of life and for requests; nothing per token.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TextIO

from shared.steering import shown_json

_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+.,:/@%[](){}<>*#~")


def format_value(value: object) -> str:
    """A value as it stands behind ``key=``: bare when it has no blanks or quotes, else a JSON string."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and _BARE.issuperset(text) else shown_json(json.dumps(text, ensure_ascii=False))


class Log:
    """Writes events of one service. A line is one write, so lines of several processes do not mix."""

    def __init__(self, service: str, incarnation: int = 0, stream: TextIO | None = None, **fields: object) -> None:
        self._head = f"{service}/{incarnation}"
        self._service = service
        self._incarnation = incarnation
        self._stream = stream
        self._fields = "".join(f" {key}={format_value(value)}" for key, value in fields.items())

    def bind(self, **fields: object) -> Log:
        """A log that adds ``fields`` to every event."""
        log = Log(self._service, self._incarnation, self._stream)
        log._fields = self._fields + "".join(f" {key}={format_value(value)}" for key, value in fields.items())
        return log

    def info(self, event: str, **fields: object) -> None:
        self._write("INFO", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("WARN", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("ERROR", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        pairs = "".join(f" {key}={format_value(value)}" for key, value in fields.items())
        stream = self._stream or sys.stderr
        try:
            stream.write(f"{stamp} {level} {self._head} {event}{self._fields}{pairs}\n")
            stream.flush()
        except (OSError, ValueError):  # a full disk or a closed pipe must not end a service
            return
