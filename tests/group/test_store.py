"""The expert store of real groups: what it remembers from run to run, and that it writes nothing when told so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.counters import read_all
from shared.segments import COUNTERS, Segment
from shared.traces import TraceReader
from tests.group.harness import Group

pytestmark = pytest.mark.group

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
    assert group.stop() == 0
    assert not path.exists()
    assert sum(s.n_prefill for s in TraceReader(trace)) == len(PROMPT)

    cold = start_group(model, slots=40, draft="off", history=True)
    assert cold.tokens(PROMPT, 20) == first
    n_cold = counters_of(cold)["misses"]
    assert cold.stop() == 0
    assert path.is_file()

    warm = start_group(model, slots=40, draft="off", history=True)
    assert warm.tokens(PROMPT, 20) == first
    counters = counters_of(warm)
    assert counters["warm_reads"] > 0 and counters["misses"] < n_cold
