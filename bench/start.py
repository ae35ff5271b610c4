"""How long a start takes, beside bare interpreters that import the same: ``colibri bench start``.

One round starts a group in the background until it is ready, stops it, and answers one prompt with ``colibri run``, which
starts and stops a group of its own. The floor starts, at once, one interpreter for each process of a group, which imports what
that process does and ends: what a start would take that shares nothing and does nothing.
"""

from __future__ import annotations

import calendar
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.roofline import BenchError
from shared.machine.processes import TICKS_PER_S, children_of, process_line
from shared.run import running
from shared.run.child import child_environment, python_command

READY_BAR_S, RUN_BAR_S = 0.8, 1.5
"""Of the embedded model on a quiet machine."""
N_TOKENS = 20
_OF_SERVICE = re.compile(r"(\S+)\.(\d{3})Z INFO \w+/\d+ (service_\w+|peer_ready peer=\w+)")
_OF_KEEPER = re.compile(r"(\S+ \S+),(\d{3}) INFO (supervisord started|spawned: '\w+')")
TIMEOUT_S = 120
PROCESSES = {
    "colibri-up": "deploy.up, deploy.launch, deploy.warm",
    "keeper": "deploy.keeper",
    "gateway": "services.gateway.service, uvloop",
    "router": "services.router.service",
    "prompts": "services.router.prompt_worker",
    "attention": "services.attention.service",
    "expert_io": "services.expert_io.service",
    "drafter": "services.drafter.service",
}
"""What the processes of a group import."""


@dataclass(frozen=True)
class Moment:
    """What a log says of a start: ``at_s`` behind the moment at which colibri-up was started."""

    at_s: float
    process: str
    event: str


def moments_of(log: str, process: str, began: float) -> list[Moment]:
    """Lines of a service's log or of the keeper's, not older than ``began`` (seconds since 1970, as the lines have them)."""
    found = []
    for line in log.splitlines():
        if match := _OF_SERVICE.match(line):
            at = calendar.timegm(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) + int(match[2]) / 1000
        elif match := _OF_KEEPER.match(line):
            at = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1000
        else:
            continue
        if at >= began - 0.001:
            found.append(Moment(at - began, process, match[3]))
    return found


@dataclass(frozen=True)
class Round:
    """Seconds. ``cpu_s``: processor time of all processes of the group until it is ready."""

    ready_s: float
    cpu_s: float
    stop_s: float
    run_s: float
    bare_s: float
    bare_cpu_s: float
    timeline: tuple[Moment, ...] = ()
    """Of the start."""


def run_start(model: Path | None, n_rounds: int, progress: Callable[[str], None]) -> list[Round]:
    """Raises BenchError when a group does not start (its words go to stderr)."""
    rounds = []
    for number in range(n_rounds + 1):
        with tempfile.TemporaryDirectory(prefix="colibri-start-") as base:
            found = _round([str(model)] if model else [], Path(base) / "run")
        if number:  # the first brings files into memory, and measures the drive where nobody has yet
            rounds.append(found)
            progress(f"round {number}: ready after {found.ready_s:.2f} s, a whole run {found.run_s:.2f} s")
    return rounds


def _round(model: list[str], run_dir: Path) -> Round:
    up = python_command("deploy.up", "--run-dir", str(run_dir))
    before, began = os.times(), time.time()
    ready_s = _timed([*up, *model, "--port", "0", "--daemon"])
    cpu_s = _children_s(before) + sum(map(_processor_s, _members(run_dir)))
    logs = [(path.stem, path.read_text(errors="replace")) for path in (run_dir / "log").glob("*.log")]
    timeline = [
        moment for process, text in logs if process != "supervisor" for moment in moments_of(text, process, began)
    ]
    timeline.append(Moment(ready_s, "colibri-up", "ready, and gone into the background"))
    stop_s = _timed([*up, "--stop"])
    run = python_command("cli.main", "run", "--run-dir", str(run_dir), "--max-tokens", str(N_TOKENS), "--seed", "1")
    run_s = _timed([*run, *(["--model", *model] if model else []), "--raw", "Once upon a time"])
    before, bare_began = os.times(), time.monotonic()
    bare = [
        subprocess.Popen([sys.executable, "-P", "-c", f"import shared.run.first, {modules}"], env=child_environment())
        for modules in PROCESSES.values()
    ]
    if any(process.wait(TIMEOUT_S) for process in bare):
        raise BenchError("an interpreter with a process's imports ended with an error (its words are above)")
    bare_s = time.monotonic() - bare_began
    ordered = tuple(sorted(timeline, key=lambda moment: moment.at_s))
    return Round(ready_s, cpu_s, stop_s, run_s, bare_s, _children_s(before), ordered)


def _timed(command: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(command[3:])} ended with {done.returncode} (its words are above)")
    return time.monotonic() - began


def _children_s(before: os.times_result) -> float:
    """Processor time of the children that ended since."""
    now = os.times()
    return now.children_user + now.children_system - before.children_user - before.children_system


def _members(run_dir: Path) -> list[int]:
    pids = [pid for pid, _ in running.members(run_dir)]
    return list({*pids, *(child for pid in pids for child in children_of(pid))})


def _processor_s(pid: int) -> float:
    line = process_line(pid)
    return line.cpu_ticks / TICKS_PER_S if line else 0.0


FACTS = ("ready_s", "cpu_s", "run_s", "stop_s", "bare_s", "bare_cpu_s")


def as_json(rounds: list[Round]) -> dict[str, Any]:
    """``schema`` 1; all in seconds."""
    middle = {fact: statistics.median(getattr(found, fact) for found in rounds) for fact in FACTS}
    every = [{fact: getattr(found, fact) for fact in FACTS} for found in rounds]
    bars = {"ready_s": READY_BAR_S, "run_s": RUN_BAR_S}
    return {
        "schema": 1,
        "n_tokens": N_TOKENS,
        "n_processors": os.cpu_count(),
        "bars": bars,
        "median": middle,
        "rounds": every,
        "timeline": [dataclasses.asdict(moment) for moment in _middle_start(rounds).timeline],
    }


def _middle_start(rounds: list[Round]) -> Round:
    return sorted(rounds, key=lambda found: found.ready_s)[len(rounds) // 2]


def timeline_text(rounds: list[Round]) -> str:
    """Who did what when, in the round whose start is the median one."""
    moments = _middle_start(rounds).timeline
    return "\n".join(f"{moment.at_s * 1000:6.0f} ms  {moment.process:<11}{moment.event}" for moment in moments)


def as_text(rounds: list[Round]) -> str:
    words = {
        "ready_s": f"colibri-up until ready (wanted for the embedded model: {READY_BAR_S} s)",
        "cpu_s": "  processor time of all its processes",
        "bare_s": "  bare interpreters with the same imports, all at once",
        "bare_cpu_s": "  their processor time",
        "run_s": f"colibri run, {N_TOKENS} tokens, start and stop included (wanted: {RUN_BAR_S} s)",
        "stop_s": "colibri-up --stop",
    }
    lines = []
    for fact, text in words.items():
        values = sorted(getattr(found, fact) for found in rounds)
        lines.append(f"{text:<76} {statistics.median(values):6.2f} s   ({values[0]:.2f} to {values[-1]:.2f})")
    return "\n".join(lines)
