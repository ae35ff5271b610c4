"""What is mounted where, with the device numbers that tell which mount a file is on. psutil's table has none."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


class MountLine(NamedTuple):
    """A line of mountinfo."""

    device: str
    """"major:minor" of the files on it."""
    directory: Path
    fs: str
    options: frozenset[str]
    """Of the mount and of the file system."""


def read_mounts(mountinfo: Path = MOUNTINFO) -> list[MountLine]:
    """All mounts in the order of mounting; empty where the kernel has no such table."""
    found = []
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:  # id parent major:minor root MOUNT-POINT options ... - TYPE source options
        left, _, right = line.partition(" - ")
        words, kind = left.split(), right.split()
        if len(words) < 6 or not kind:
            continue
        where = Path(_ESCAPE.sub(lambda code: chr(int(code[1], 8)), words[4]))
        options = words[5].split(",") + (kind[2].split(",") if len(kind) > 2 else [])
        found.append(MountLine(words[2], where, kind[0], frozenset(options)))
    return found


def device_of(path: Path) -> str:
    """The device number of what a path names, as mounts have it. Raises OSError."""
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"
