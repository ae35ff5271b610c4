"""Where named memory has huge pages, found by trying.

A file that outlives its process lies in a memory file system, and whether that one gives huge pages is a matter of the machine:
/dev/shm does when the administrator set ``shmem_enabled`` (or mounted it with ``huge=``), a hugetlbfs mount when its pool has
free pages, another tmpfs when it was mounted with ``huge=``. With small pages weights would be read 20 to 35 % slower than
private memory, so such a place is used only when asked for by name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from native.library import NativeError
from native.memory import HUGE_PAGE, MappedFile
from shared.machine.mounts import MOUNTINFO, MountLine, device_of, read_mounts

SHM_DIR = Path("/dev/shm")
SETTING_FILE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
POOL_DIR = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@dataclass(frozen=True)
class Place:
    """A directory of a memory file system. ``is_huge``: a file made there a moment ago got a huge page."""

    directory: Path
    fs: str
    """"tmpfs" or "hugetlbfs"; "" for anything else, which is no memory."""
    free_bytes: int
    is_huge: bool
    problem: str = ""
    """Why it can't be used at all; empty when it can."""


def memory_mounts(mountinfo: Path = MOUNTINFO) -> list[MountLine]:
    """The mounted memory file systems, in the order of mounting."""
    return [mount for mount in read_mounts(mountinfo) if mount.fs in ("tmpfs", "hugetlbfs")]


def candidate_dirs(mountinfo: Path = MOUNTINFO) -> list[Path]:
    """Directories that may give huge pages, best first: /dev/shm, hugetlbfs, tmpfs mounted with ``huge=``."""
    mounts = memory_mounts(mountinfo)
    pools = [m.directory for m in mounts if m.fs == "hugetlbfs" and "pagesize=1024M" not in m.options]
    huge = {"huge=always", "huge=within_size", "huge=advise"}
    others = [m.directory for m in mounts if m.fs == "tmpfs" and huge & m.options]
    return list(dict.fromkeys([SHM_DIR, *pools, *others]))


def probe_place(directory: Path) -> Place:
    """Makes a file of one huge page in the directory and looks what it got; nothing stays."""
    try:
        real = directory.resolve(strict=True)
        fs = _fs_of(real)
        if fs not in ("tmpfs", "hugetlbfs"):
            return Place(directory, "", 0, False, f"{directory} is not in a memory file system (tmpfs or hugetlbfs)")
        free = free_room(real, fs)
        if free < HUGE_PAGE:
            return Place(directory, fs, free, False, f"{directory} has no free room")
        fd = os.open(real, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return Place(directory, "", 0, False, f"{directory}: {error.strerror}")
    try:
        os.ftruncate(fd, HUGE_PAGE)
        memory = MappedFile(fd, HUGE_PAGE)
        try:
            is_huge = memory.populate(0, HUGE_PAGE) and huge_bytes(memory.address, HUGE_PAGE)[0] == HUGE_PAGE
        finally:
            memory.close()
        return Place(directory, fs, free, is_huge)
    except (OSError, NativeError) as error:
        return Place(directory, fs, 0, False, f"{directory}: {error}")
    finally:
        os.close(fd)


def huge_bytes(address: int, n_bytes: int) -> tuple[int, int]:
    """(bytes in huge pages, bytes present) of the mapping of ``n_bytes`` at ``address``, in this process's page tables."""
    huge = present = 0
    is_ours = False
    page = 4096
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            begin, end = int(span[1], 16), int(span[2], 16)
            is_ours = begin < address + n_bytes and end > address
            page = 4096
        elif is_ours:
            key, _, value = line.partition(":")
            if key == "KernelPageSize":
                page = int(value.split()[0]) * 1024
            elif key == "Rss":
                present += int(value.split()[0]) * 1024
            elif key in ("ShmemPmdMapped", "AnonHugePages"):
                huge += int(value.split()[0]) * 1024
            elif key in ("Shared_Hugetlb", "Private_Hugetlb") and page == HUGE_PAGE:
                huge += int(value.split()[0]) * 1024
                present += int(value.split()[0]) * 1024
    return huge, present


def free_room(directory: Path, fs: str = "") -> int:
    """Bytes that files in this directory of a memory file system could still take. Raises OSError."""
    if (fs or _fs_of(directory)) == "hugetlbfs":
        return _free_pool_bytes()
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _free_pool_bytes() -> int:
    """Free pages of the pool that nobody has reserved."""
    try:
        free, reserved = (int((POOL_DIR / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return (free - reserved) * HUGE_PAGE


def _fs_of(directory: Path) -> str:
    """The kind of file system that the directory is on."""
    device = device_of(directory)
    return next((mount.fs for mount in read_mounts() if mount.device == device), "")
