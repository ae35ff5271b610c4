"""Facts about processes of this machine: the one place that asks for them.

psutil is asked where a tool or a suspicion waits for the answer. What every start looks at, or a loop several times a second,
is one line of the kernel's own table, read here: 20 µs, and no module to load (7 ms, 3 MB a process).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessLine(NamedTuple):
    """Of /proc/<pid>/stat."""

    state: str
    """R, S, D (waits for a drive), T (stopped by a signal), Z, X ..."""
    cpu_ticks: int
    """Processor time used, ``TICKS_PER_S`` of them a second."""
    start_ticks: int
    """When it began, since boot: tells a reused pid from the old one."""


def process_line(pid: int) -> ProcessLine | None:
    """What the kernel says of a process; None when there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcessLine(state, int(fields[10]) + int(fields[11]), int(fields[18]))
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return None


def process_start(pid: int) -> int | None:
    """``start_ticks`` of a process, None when there is none or it has ended."""
    line = process_line(pid)
    return None if line is None or line.state in "ZX" else line.start_ticks


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process (SIGSTOP): it will do nothing until another one lets it go on."""
    line = process_line(pid)
    return line is not None and line.state == "T"


def read_counts(pid: int) -> tuple[int, int] | None:
    """(bytes asked for, bytes read from storage) of a process so far; None when it is gone or another user's."""
    import psutil

    try:
        counts = psutil.Process(pid).io_counters()
    except psutil.Error:
        return None
    return int(counts.read_chars), int(counts.read_bytes)


def children_of(pid: int) -> list[int]:
    """Processes that this one has started and that still are."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def own_bytes(pid: int) -> int:
    """What a process holds beside named memory: private pages and its share of the code that it maps, by the kernel's own
    account (proportional set size). 0 when it is gone or belongs to somebody else.

    Read here, because psutil gives the sum only, with the named memory in it.
    """
    sizes: dict[str, int] = {}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            words = line.split()
            sizes[words[0]] = int(words[1]) * 1024
    except OSError:
        return 0
    return sizes.get("Pss:", 0) - sizes.get("Pss_Shmem:", 0)


def service_bytes(pid: int) -> int:
    """``own_bytes`` of a service and of its children (the router's prompt process)."""
    return own_bytes(pid) + sum(map(own_bytes, children_of(pid)))
