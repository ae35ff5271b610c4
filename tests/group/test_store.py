"""The expert store of real groups: what it remembers from run to run, and that it writes nothing when told so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.experts.traces import TraceReader
from shared.memory.segments import COUNTERS, Segment
from shared.step.counters import read_all
from tests.group.harness import Group

pytestmark = pytest.mark.group

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 14, 15, 92, 65, 35]


def counters_of(group: Group) -> dict[str, int]:
    segment = Segment.attach(group.run_id, COUNTERS)
    try:
        return read_all(segment.buf)["expert_io"]
    finally:
        segment.close()


def test_the_next_run_starts_warm_and_a_run_without_history_leaves_no_trace(
    converted: Callable[[str, str], Path], start_group: Callable[..., Group], tmp_path: Path
) -> None:
    model = converted("glm_moe_dsa", "int8")
    fingerprint = json.loads((model / "colibri.json").read_text())["fingerprint"]
    path = Path(os.environ["XDG_STATE_HOME"]) / "colibri" / "usage" / fingerprint
    path.unlink(missing_ok=True)
    trace = tmp_path / "routing.trace"

    group = start_group(model, slots=40, draft="off", record_routing=trace)
    first = group.tokens(PROMPT, 20)
    ask = [
        sys.executable,
        "-m",
        "cli.main",
        "run",
        "--run-dir",
        str(group.run_dir),
        "--ids",
        "1,2,3",
        "--max-tokens",
        "2",
    ]
    same = subprocess.run([*ask, "--record-routing", str(trace)], capture_output=True, text=True, cwd=ROOT)
    assert same.returncode == 0, same.stderr
    other = subprocess.run(
        [*ask, "--record-routing", str(tmp_path / "other")], capture_output=True, text=True, cwd=ROOT
    )
    assert other.returncode == 78 and "runs without --record-routing" in other.stderr
    assert group.stop() == 0
    assert not path.exists()
    assert sum(s.n_prefill for s in TraceReader(trace)) == len(PROMPT) + 3

    cold = start_group(model, slots=40, draft="off", history=True)
    assert cold.tokens(PROMPT, 20) == first
    n_cold = counters_of(cold)["misses"]
    assert cold.stop() == 0
    assert path.is_file()

    warm = start_group(model, slots=40, draft="off", history=True)
    assert warm.tokens(PROMPT, 20) == first
    counters = counters_of(warm)
    assert counters["warm_reads"] > 0 and counters["misses"] < n_cold
