"""What memory there is: the machine and its control groups (version 1 and 2). ``processes`` says who holds it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import msgspec

from shared.errors import ConfigError


class MemoryProbe(msgspec.Struct, frozen=True):
    """What the machine offers now."""

    available_bytes: int
    source: str
    """Which limit decided: "MemAvailable" or the control group's file."""
    shm_bytes: int
    """Free in /dev/shm, where the named segments go."""
    reservable_bytes: int = 0
    """Address space that may be reserved beyond the budget: as much as the machine's memory, 0 where that costs something."""


class LimitUse(msgspec.Struct, frozen=True):
    """One memory control group with a limit."""

    limit_file: str
    limit_bytes: int
    used_bytes: int
    cache_bytes: int
    """Part of what is used: page cache, which the kernel takes back when somebody needs memory."""

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes + self.cache_bytes


def probe_memory(root: Path = Path("/")) -> MemoryProbe:
    """Memory that can be taken now: the smallest of MemAvailable and what every control group above us leaves.

    Reclaimable page cache counts as free on both levels. ``root`` is another file system root, for tests.
    """
    memory = _meminfo(root)
    available, source = memory.get("MemAvailable"), "MemAvailable"
    if available is None:
        raise ConfigError("/proc/meminfo has no MemAvailable line; give the memory to use with ram.")
    for group in limits_of("self", root):
        if group.left_bytes < available:
            available, source = group.left_bytes, group.limit_file
    try:
        stat = os.statvfs(root / "dev/shm")
        shm = stat.f_bavail * stat.f_frsize
    except OSError:
        shm = 0
    reservable = memory.get("MemTotal", 0) if _is_reserving_free(root) else 0
    return MemoryProbe(max(available, 0), source, shm, reservable)


def page_cache_bytes() -> int:
    """The machine's page cache: files that somebody has read, not memory that anybody holds."""
    import psutil  # only tools ask this

    memory = psutil.virtual_memory()
    return int(memory.cached - memory.shared + memory.buffers)


def swapped_bytes() -> int:
    """Swap in use on this machine."""
    import psutil

    return int(psutil.swap_memory().used)


def limits_of(pid: int | str, root: Path = Path("/")) -> list[LimitUse]:
    """Every memory control group with a limit that holds the process, version 1 and 2, from the inside out."""
    found = []
    for line in _read(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be that of the host: then only the mount's root exists.
        for directory in [group, *group.parents] if group.exists() else [base]:
            if base not in (directory, *directory.parents):
                break
            use = _limit_use(directory, *names)
            if use is not None:
                found.append(use)
    return found


def file_bytes(path: Path) -> int:
    """Memory that a file of a memory file system holds, touched or reserved; 0 when it is gone."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _limit_use(directory: Path, limit_name: str, usage_name: str, prefix: str) -> LimitUse | None:
    limit, usage = _read(directory / limit_name).strip(), _read(directory / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= 1 << 62:  # none, or no such file
        return None
    cache = 0
    for line in _read(directory / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in (f"{prefix}inactive_file", f"{prefix}active_file"):
            cache += int(value)
    return LimitUse(str(directory / limit_name), int(limit), int(usage), cache)


def _is_reserving_free(root: Path) -> bool:
    """Whether address space costs nothing as long as it is not touched."""
    is_strict = _read(root / "proc/sys/vm/overcommit_memory").strip() == "2"
    return not is_strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
