"""How fast the model's drive is, which way of reading it is chosen, and whether io_uring may be used."""

from __future__ import annotations

import statistics
import time

from cli.doctor.finding import Case, Finding, Verdict
from native.reader import uring_refusal
from shared.container.reader import Container
from shared.machine.drive import DriveProfile, Mount, kept_folder
from shared.planning.drive_probe import drive_profile, mount_of
from shared.run.terminal import complain

SLOW_BYTES_S = 0.5e9


def look(case: Case) -> list[Finding]:
    found = [judge_uring(uring_refusal(), case.read("/proc/sys/kernel/io_uring_disabled"))]
    if case.container is None:
        found.append(Finding("drive", "not looked at", "fair", "name a model directory: colibri doctor MODEL"))
        return found
    container = case.container
    profile = drive_profile(
        list(container.experts.values()),
        kept_folder(),
        may_write=True,
        must_measure=case.must_measure,
        report=lambda text: complain(f"colibri: {text}"),
    )
    mount = mount_of(container.path)
    is_spinning = case.read(f"/sys/dev/block/{mount.device}/queue/rotational") == "1"
    found.append(judge_drive(profile, mount, is_spinning, _cold_bytes(container), time.time()))
    return found


def judge_uring(refusal: str, disabled: str) -> Finding:
    """``refusal``: the system's words or ""; ``disabled``: the kernel's switch, "0" to "2" or ""."""
    facts = {"allowed": not refusal, "refusal": refusal}
    if not refusal:
        return Finding("io_uring", "allowed", "good", facts=facts)
    if disabled in ("1", "2"):
        advice = "sudo sysctl kernel.io_uring_disabled=0"
    else:
        advice = "a container's seccomp filter forbids it, or the kernel is older than 5.6"
    return Finding("io_uring", f"{refusal}: threads read instead, which costs little", "good", advice, facts=facts)


def judge_drive(profile: DriveProfile, mount: Mount, is_spinning: bool, cold_bytes: int, now: float) -> Finding:
    """``cold_bytes``: of experts that one token uses. ``now``: seconds since the epoch.

    ``is_spinning``: as the kernel has it, which believes it of every virtual drive; so only a slow one is called so.
    """
    where = f"{mount.mount_point or 'unknown mount'} ({mount.fs_type}, device {mount.device})"
    facts = {
        "mount_point": mount.mount_point,
        "fs_type": mount.fs_type,
        "device": mount.device,
        "is_spinning": is_spinning,
        "setting": str(profile.setting),
        "note": profile.note,
        "ceiling_bytes_s": profile.ceiling,
        "measured_at": profile.measured_at,
        "rates": {str(setting): list(rates) for setting, rates in profile.rates.items()},
    }
    note = f"; {profile.note}" if profile.note else ""
    if not profile.ceiling:
        is_memory = mount.is_memory
        advice = "" if is_memory else "colibri doctor MODEL --measure"
        return Finding(
            "drive", f"{where}: {profile.setting}{note}", "good" if is_memory else "fair", advice, facts=facts
        )
    details = [
        f"{statistics.median(rates) / 1e9:6.2f} GB/s ({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})  {setting}"
        f"{'   <- chosen' if setting == profile.setting else ''}"
        for setting, rates in profile.rates.items()
    ]
    details.append(
        f"measured {_age(now - profile.measured_at)}"
        + ("; something else used the drive meanwhile, so it counts for a day only" if profile.was_busy else "")
    )
    if cold_bytes:
        details.append(
            f"a token without any expert in memory reads {cold_bytes / 1e9:.2f} GB: {cold_bytes / profile.ceiling:.2f} s"
        )
    verdict: Verdict = "good"
    advice = ""
    if profile.ceiling < SLOW_BYTES_S:
        kind = "a spinning disk: move the model to an SSD" if is_spinning else "slow: move the model to a faster drive"
        verdict, advice = "poor", f"{kind}, or read from two (colibri mirror)"
    elif not profile.setting.is_direct:
        verdict, advice = "fair", "buffered reads cost most of a core: keep the model on a local file system"
    elif profile.was_busy:
        verdict, advice = "fair", "colibri doctor MODEL --measure, when nothing else reads"
    found = f"{where}: {profile.ceiling / 1e9:.2f} GB/s; {profile.setting}{note}"
    return Finding("drive", found, verdict, advice, tuple(details), facts)


def _cold_bytes(container: Container) -> int:
    spec = container.spec
    return sum(f.record_bytes * spec.gate_k for layer, f in container.experts.items() if layer < spec.n_layers)


def _age(seconds: float) -> str:
    if seconds < 120:
        return "just now"
    return f"{seconds / 3600:.1f} hours ago" if seconds < 172800 else f"{seconds / 86400:.0f} days ago"
