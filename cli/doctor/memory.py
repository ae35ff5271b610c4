"""Whether weights can outlive their processes: named memory with huge pages, and what lies in it already."""

from __future__ import annotations

from pathlib import Path

from cli.doctor.finding import Case, Finding
from shared.machine.memory_probe import probe_memory
from shared.memory.huge_pages import SETTING_FILE, SHM_DIR, Place, candidate_dirs, probe_place
from shared.memory.warm_sets import WarmSet, find_sets, known_dirs

GIB = 1 << 30
MOUNT_POINT = "/mnt/colibri"
ENOUGH_SHARE = 0.8
"""Of what is available: about what a group takes when it is not told otherwise."""


def look(case: Case) -> list[Finding]:
    places = [probe_place(directory) for directory in candidate_dirs()]
    available = probe_memory(case.root).available_bytes
    return judge(places, available, case.read(str(SETTING_FILE)), find_sets(known_dirs("auto")))


def judge(places: list[Place], available_bytes: int, setting: str, sets: list[WarmSet]) -> list[Finding]:
    """``setting``: the text of shmem_enabled; ``sets``: what is kept warm now."""
    needed = int(available_bytes * ENOUGH_SHARE)
    huge = [place for place in places if place.is_huge and not place.problem]
    best = next((place for place in huge if place.free_bytes >= needed), None)
    shm = next((place for place in places if place.directory == SHM_DIR), None)
    subject = "warm restart"
    if best:
        found = [
            Finding(
                subject,
                f"named huge memory in {best.directory}, {best.free_bytes / GIB:.1f} GiB free: weights survive a crash of "
                "their process, and `colibri-up --stop --keep-warm`",
                "good",
                facts={"mode": "named", "directory": str(best.directory), "free_bytes": best.free_bytes},
            )
        ]
    elif huge:
        place = huge[0]
        found = [
            Finding(
                subject,
                f"{place.directory} has huge pages but room for {place.free_bytes / GIB:.1f} GiB only: a larger group keeps "
                "its weights private and reads them again after a restart",
                "fair",
                f"sudo mount -o remount,size={_size_option(needed)} {place.directory}",
                facts={"mode": "named", "directory": str(place.directory), "free_bytes": place.free_bytes},
            )
        ]
    else:
        now, always, others = _ways(needed, setting, shm.free_bytes if shm else 0)
        found = [
            Finding(
                subject,
                "no named memory with huge pages: weights are private to their processes, a restart reads them again",
                "fair",
                now,
                (f"for good: {always}", f"or: {others}"),
                facts={"mode": "private"},
            )
        ]
    found += [Finding("kept warm", warm.describe(), "good", "colibri-up --drop-warm frees it") for warm in sets]
    return found


def _ways(needed: int, setting: str, shm_bytes: int) -> tuple[str, str, str]:
    """(the command that enables it until the next boot, the one that does for good, another way)."""
    mount = (
        f"sudo mkdir -p {MOUNT_POINT} && sudo mount -t tmpfs -o huge=always,mode=1777,size={_size_option(needed)} "
        f"tmpfs {MOUNT_POINT}"
    )
    fstab = f"tmpfs {MOUNT_POINT} tmpfs huge=always,mode=1777,size={_size_option(needed)} 0 0"
    pool = (
        f"sudo sysctl vm.nr_hugepages={-(-needed // (2 << 20))} && sudo mkdir -p {MOUNT_POINT} && "
        f"sudo mount -t hugetlbfs -o pagesize=2M,mode=1777 none {MOUNT_POINT} (a pool that nothing else can use)"
    )
    if setting and shm_bytes >= needed and Path(SHM_DIR).is_dir():
        return (
            f"echo advise | sudo tee {SETTING_FILE}",
            f"echo 'w {SETTING_FILE} - - - - advise' | sudo tee /etc/tmpfiles.d/colibri.conf",
            mount,
        )
    return mount, f"echo '{fstab}' | sudo tee -a /etc/fstab", pool


def _size_option(n_bytes: int) -> str:
    return f"{-(-n_bytes // GIB)}g"
