"""How much memory a group could take now, which limit decides, and whether the named segments have room."""

from __future__ import annotations

from cli.doctor.finding import Case, Finding, Verdict
from shared.machine.memory_probe import MemoryProbe, probe_memory, swapped_bytes

MIB, GIB = 1 << 20, 1 << 30
SMALL_SHM_BYTES = 256 * MIB


def look(case: Case) -> list[Finding]:
    return judge(probe_memory(case.root), swapped_bytes())


def judge(probe: MemoryProbe, swap_bytes: int) -> list[Finding]:
    """``swap_bytes``: swap in use; what is swapped out is read from the disk twice."""
    is_limited = probe.source != "MemAvailable"
    verdict: Verdict = "good" if probe.available_bytes >= 4 * GIB else "fair"
    advice = "end other programs" if verdict == "fair" else ""
    if is_limited:
        advice = "a control group decides; raise its limit (docker run --memory) for more slots"
    found = [
        Finding(
            "memory",
            f"{probe.available_bytes / GIB:.1f} GiB available now ({probe.source})",
            verdict,
            advice,
            facts={"available_bytes": probe.available_bytes, "source": probe.source},
        )
    ]
    if swap_bytes:
        found.append(
            Finding(
                "swap",
                f"{swap_bytes / GIB:.1f} GiB in use",
                "fair",
                "give --ram less than what is available, so that no slot is swapped out",
                facts={"used_bytes": swap_bytes},
            )
        )
    is_small = probe.shm_bytes < SMALL_SHM_BYTES
    found.append(
        Finding(
            "/dev/shm",
            f"{probe.shm_bytes / GIB:.1f} GiB free",
            "poor" if is_small else "good",
            "enlarge it: docker run --shm-size 2g, or mount -o remount,size=2g /dev/shm" if is_small else "",
            facts={"free_bytes": probe.shm_bytes},
        )
    )
    return found
