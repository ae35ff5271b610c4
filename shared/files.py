"""Opening what a person, a download or a stranger has put somewhere: regular files only, read up to a limit.

A named pipe, a device or a socket in the place of a file would block or never end. Every complaint is an OSError whose
``strerror`` completes "PATH can't be read: ...". Used by every process; imports the standard library alone.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

TOKENIZER_LIMIT_BYTES = 256 << 20
"""Of ``tokenizer.json`` and what lies around it; the largest known has 40 MB."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of the regular file at ``path``, inherited by nobody. OSError for anything else, without waiting for it.

    With O_CREAT in ``flags`` it may be missing.
    """
    try:
        # Looked at first: to open some devices is to do something to them.
        _require_regular(path, os.stat(path).st_mode)
    except FileNotFoundError:
        if os.path.islink(path):
            raise _complaint(errno.ELOOP, f"it is a link to {os.readlink(path)}, which does not exist", path) from None
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, mode)
    try:
        _require_regular(path, os.fstat(fd).st_mode)
        os.set_blocking(fd, True)  # io_uring gives up on a descriptor that must not wait
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(path: Path | str, limit_bytes: int) -> bytes:
    """The content of a regular file of at most ``limit_bytes``. OSError."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit_bytes else file.read(limit_bytes + 1)
        size = max(size, len(data))
    if size > limit_bytes:
        raise _complaint(
            errno.EFBIG, f"it has {size:,} bytes, more than the {limit_bytes:,} such a file may have", path
        )
    return data


def is_file(path: Path | str) -> bool:
    """Whether a regular file is there, or a link to one. OSError when something else is: that is no absence."""
    try:
        os.close(open_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _require_regular(path: Path | str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise _complaint(
            errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {kind}, a regular file is needed", path
        )


def _complaint(number: int, text: str, path: Path | str) -> OSError:
    return OSError(number, text, str(path))


def strict_json(data: bytes, *, is_edited: bool = False) -> Any:
    """A JSON document as RFC 8259 has it: UTF-8, no NaN, no key twice in an object. ValueError says what is wrong.

    ``is_edited``: for files that people and Python write: a key may come again with the same value, and NaN may be there.
    """

    def joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: dict[str, Any] = {}
            for key, value in pairs:
                if key in seen and not (is_edited and seen[key] == value):
                    raise ValueError(f"the key {key!r} is there twice")
                seen[key] = value
        return found

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=joined, parse_constant=None if is_edited else refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
