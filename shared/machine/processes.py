"""Facts about processes of this machine, from the kernel's own tables."""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None when there is none; tells a reused pid from the old one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
