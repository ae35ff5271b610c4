"""What a process is called in the system's tables."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_ARG_START, _ARG_END = 45, 46
"""Places behind the name in /proc/<pid>/stat."""


def rename_process(argv: list[str]) -> bool:
    """This process's command line, as others see it, becomes ``argv``. False: there is no room for it, nothing was changed.

    The new text takes the place of the old one in memory, so it must not be longer.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, IndexError, ValueError):
        return False
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)
    if not start or len(text) > end - start:
        return False
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    return True
