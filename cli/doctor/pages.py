"""Whether weights lie in huge pages: sequential reads of memory and of the drive are much faster into them."""

from __future__ import annotations

import re

from cli.doctor.finding import Case, Finding

SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def look(case: Case) -> list[Finding]:
    return [judge(case.read(SETTING))]


def judge(setting: str) -> Finding:
    """``setting``: the file's text, like "always [madvise] never"."""
    chosen = re.search(r"\[(\w+)\]", setting)
    if chosen is None:
        return Finding("huge pages", "the kernel has none", "poor", "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    is_off = chosen[1] == "never"
    return Finding(
        "huge pages",
        f"transparent huge pages: {chosen[1]}",
        "poor" if is_off else "good",
        f"echo madvise | sudo tee {SETTING}" if is_off else "",
        facts={"enabled": chosen[1]},
    )
