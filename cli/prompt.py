"""The prompt as it is given on a command line and by standard input, and the request's body that it becomes.

Used by ``colibri run``, ``chat`` and ``profile``.
"""

from __future__ import annotations

import select
import sys
from typing import Any

import click

from shared.run.terminal import complain, is_terminal

MAX_INPUT_BYTES = 16 << 20
"""Of standard input: no server of ours takes a longer body."""
PATIENCE_S = 2.0
"""After this long without the end of standard input the person is told what is waited for."""


def read_prompt(prompt: str | None) -> str:
    """The argument, what is piped in, or both: the argument, an empty line, the text. ``-`` stands for the text alone.

    Raises UsageError when there is neither.
    """
    is_piped = prompt == "-" or (sys.stdin is not None and not is_terminal(sys.stdin))
    if prompt is None and not is_piped:
        raise click.UsageError('a prompt is needed: colibri run "your question", or text on standard input')
    text = _read_input() if is_piped else ""
    parts = [clean_text(part) for part in (prompt if prompt != "-" else "", text) if part]
    if not parts:
        raise click.UsageError("the prompt is empty")
    return "\n\n".join(parts)


def _read_input() -> str:
    """All of standard input without its last newline. Somebody who forgot to end it is told what we wait for."""
    if sys.stdin is None:
        return ""
    fd = sys.stdin.fileno()
    _say_what_is_waited_for(fd)
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise click.UsageError(f"standard input has more than {MAX_INPUT_BYTES:,} bytes; no model reads that much")
    return data.decode("utf-8", "replace").replace("\r\n", "\n").removesuffix("\n")


def _say_what_is_waited_for(fd: int) -> None:
    if select.select([fd], [], [], PATIENCE_S)[0]:
        return
    how = "end it with Ctrl-D" if is_terminal(sys.stdin) else "add </dev/null if nothing is to come"
    complain(f"colibri: waiting for text on standard input ({how}) ...")


def clean_text(text: str) -> str:
    """Text from the command line without the placeholders Python uses for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def parse_ids(text: str) -> list[int]:
    """``1,2,3`` or ``1 2 3``. Raises UsageError."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise click.UsageError(f"--ids takes token ids like 1,2,3; got {text!r}")
    return ids


def request_of(
    text: str | list[int], *, raw: bool, system: str | None = None, options: dict[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """(path, body) of the request; options that are None are left out. Ids come back as ids."""
    body = {key: value for key, value in (options or {}).items() if value is not None}
    if isinstance(text, list):
        return "/v1/completions", {"prompt": text, "return_token_ids": True, "ignore_eos": True, **body}
    if raw:
        return "/v1/completions", {"prompt": text, **body}
    messages = [{"role": "system", "content": clean_text(system)}] if system is not None else []
    return "/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": text}], **body}
