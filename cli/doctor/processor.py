"""Which instructions the kernels use, and how many threads."""

from __future__ import annotations

import os

from cli.doctor.finding import Case, Finding, Verdict
from native.library import available_isas, default_threads, dispatch_text, isa_current


def look(case: Case) -> list[Finding]:
    return [judge(isa_current(), available_isas(), default_threads(), len(os.sched_getaffinity(0)))]


def judge(isa: str, available: list[str], n_threads: int, n_cpus: int) -> Finding:
    """``isa``: the rung in use; ``available``: all that the machine offers, the lowest first."""
    verdict: Verdict = "good"
    advice = ""
    if isa != available[-1]:
        verdict, advice = "fair", f"the machine offers {available[-1]}: unset COLIBRI_ISA"
    elif isa == "ref":
        verdict, advice = (
            "poor",
            "no vector instructions are used: expect a small part of the speed; use another machine",
        )
    return Finding(
        "processor",
        f"{isa}, {n_threads} compute threads on {n_cpus} CPUs",
        verdict,
        advice,
        (f"kernels: {dispatch_text()}",),
        {"isa": isa, "available": available, "threads": n_threads, "cpus": n_cpus},
    )
