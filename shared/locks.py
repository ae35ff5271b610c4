"""Whole-file locks: who holds one, and whether there are any. The only module that calls flock."""

from __future__ import annotations

import fcntl
from pathlib import Path

from shared.errors import ConfigError


class LocksMissing(ConfigError):
    """The file system gives no locks: nobody holds one, and nobody can."""


def try_lock(fd: int, path: Path, *, is_shared: bool = False) -> bool:
    """Locks the open file until its last descriptor is closed. False: another process holds it. Raises LocksMissing."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LocksMissing(
            f"{path}: the file system there gives no locks ({error.strerror}), and a lock has to keep others out. "
            "Choose a directory on another file system."
        ) from None
    return True
