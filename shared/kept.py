"""Files that are replaced whole: a reader finds the old one or the new one, never a part. The one place that does so."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shared.files import open_file


def replace_file(
    path: Path, data: bytes, *, mode: int = 0o600, is_durable: bool = False, by_way_of: Path | None = None
) -> None:
    """Writes ``path``, by default for this user alone, at once or not at all. Raises OSError.

    ``is_durable``: it outlives a power cut from then on. ``by_way_of``: the name under which it is written, for places where
    leftovers of a kill are looked for; by default one of this process alone.
    """
    new = by_way_of or path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fd = open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        if is_durable:
            put_in_place(new, path)
        else:
            os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error says more
            new.unlink(missing_ok=True)
        raise


def put_in_place(partial: Path, final: Path) -> None:
    """Gives a file that is written and on disk its name, and puts that name on disk too. Raises OSError."""
    os.replace(partial, final)
    fd = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
