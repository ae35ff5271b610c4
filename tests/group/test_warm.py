"""Named memory of real groups: what is read once stays, through deaths of services, a stop that keeps it, a death of all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.memory.segments import COUNTERS, Segment
from shared.step.counters import read_all
from tests.group.harness import UP, Group, event_tokens, wait_clean

pytestmark = pytest.mark.group

PROMPT = [3, 14, 15, 92, 65, 35]
N_TOKENS = 100


def counters_of(group: Group) -> dict[str, int]:
    segment = Segment.attach(group.run_id, COUNTERS)
    try:
        return read_all(segment.buf)["expert_io"]
    finally:
        segment.close()


def bytes_read(group: Group) -> int:
    counters = counters_of(group)
    return counters["bytes_demand"] + counters["bytes_speculative"]


def facts_of(group: Group, service: str) -> dict[str, str]:
    (found,) = [entry for entry in group.status()["services"] if entry["name"] == service]
    return dict(found["facts"])


def up(group: Group, *flags: str) -> str:
    """``colibri-up`` with these flags on the group's run directory; its output."""
    command = [*UP, "--run-dir", str(group.run_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_services_that_die_find_their_weights_again(
    converted: Callable[[str, str], Path], start_group: Callable[..., Group], huge_dir: Path
) -> None:
    model = converted("glm_moe_dsa", "int8")
    private = start_group(model, draft=1, huge_dir="off")
    solo = private.tokens(PROMPT, N_TOKENS)
    assert facts_of(private, "expert_io")["memory"] == "private"
    assert private.stop() == 0

    group = start_group(model, draft=1, huge_dir=huge_dir)
    assert group.tokens(PROMPT, N_TOKENS) == solo
    n_read, n_resident = bytes_read(group), counters_of(group)["resident"]
    assert n_read > 0 and n_resident > 0
    for service in ("expert_io", "attention", "drafter"):
        got: list[int] = []
        for event in group.stream(PROMPT, N_TOKENS):
            assert "error" not in event, f"{event}\n{group.logs()}"
            is_first = not got
            got += event_tokens(event)
            if is_first and got:
                group.kill(service)
        assert got == solo
        group.wait_ready()
    assert bytes_read(group) == n_read, "what lay in the slots was read again"
    assert int(facts_of(group, "expert_io")["adopted"]) == n_resident
    assert facts_of(group, "attention")["memory"].endswith("adopted")
    assert facts_of(group, "drafter")["memory"].endswith("adopted")
    assert group.stop() == 0
    wait_clean(group)
    assert not list(huge_dir.iterdir())


def test_a_set_that_was_kept_serves_the_next_start(
    converted: Callable[[str, str], Path], run_dir: Path, huge_dir: Path
) -> None:
    model = converted("glm_moe_dsa", "int8")
    other = converted("deepseek_v3", "int8")
    options: dict[str, Any] = {"huge_dir": huge_dir, "draft": "off"}
    group = Group(model, run_dir, **options).start()
    text = group.tokens(PROMPT, N_TOKENS)
    n_resident = counters_of(group)["resident"]
    assert "kept warm for model" in up(group, "--stop", "--keep-warm", "--huge-dir", str(huge_dir))
    assert group.process is not None and group.process.wait(20) == 0
    wait_clean(group)
    assert {path.name.split("+")[0] for path in huge_dir.iterdir()} == {f"colibri-{os.getuid()}-warm"}

    with Group(other, run_dir, **options) as foreign:  # beside it, and not with its bytes
        assert "kept warm for model" in foreign.said and facts_of(foreign, "expert_io")["adopted"] == "0"

    again = Group(model, run_dir, **options).start()
    assert "still warm" in again.said and int(facts_of(again, "expert_io")["adopted"]) == n_resident
    assert counters_of(again)["resident"] == n_resident
    assert again.tokens(PROMPT, N_TOKENS) == text
    assert bytes_read(again) == 0

    again.kill_all()  # nobody was asked to keep anything, but the next start of the same model may have it
    smaller = Group(model, run_dir, slots=9, **options).start()
    assert 0 < int(facts_of(smaller, "expert_io")["adopted"]) <= 9
    assert smaller.tokens(PROMPT, N_TOKENS) == text
    up(smaller, "--stop", "--keep-warm")
    assert smaller.process is not None and smaller.process.wait(20) == 0
    assert "freed: " in up(smaller, "--drop-warm", "--huge-dir", str(huge_dir))
    assert not list(huge_dir.iterdir())


def test_what_a_killed_group_left_goes_when_another_model_starts(
    converted: Callable[[str, str], Path], run_dir: Path, huge_dir: Path
) -> None:
    options: dict[str, Any] = {"huge_dir": huge_dir, "draft": "off"}
    group = Group(converted("glm_moe_dsa", "int8"), run_dir, **options).start()
    group.kill_all()
    assert list(huge_dir.iterdir())
    with Group(converted("deepseek_v3", "int8"), run_dir, **options) as other:
        assert all(other.run_id in path.name for path in huge_dir.iterdir())
    assert not list(huge_dir.iterdir())
