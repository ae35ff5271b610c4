"""The command line against real groups: ``profile`` tells the truth, ``run`` starts what it needs and ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from shared.memory.segments import COUNTERS, Segment
from shared.run.client import ask_status
from shared.run.config import load_frozen
from shared.step.counters import read_all
from tests.group.harness import Group, completion_body
from tests.support.waiting import wait_for

pytestmark = pytest.mark.group

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 14, 15, 92, 65, 35]
KEPT = {"lock", "log"}


@pytest.fixture(scope="module")
def model(converted: Callable[[str, str], Path]) -> Path:
    return converted("glm_moe_dsa", "int8")


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group for all that only look: few slots, so that it reads all the time, and drafts."""
    gate_k = json.loads((model / "config.json").read_text())["num_experts_per_tok"]
    base = Path(tempfile.mkdtemp(prefix="cbt-"))
    with Group(model, base / "run", draft=2, slots=gate_k + 1, max_sequences=1) as running:
        yield running
    shutil.rmtree(base, ignore_errors=True)


def colibri(*args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, stdin=subprocess.DEVNULL
    )


@pytest.mark.alone
def test_profile_rows_sum_to_the_wall_time_and_bytes_to_the_kernels(group: Group, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    length = ["--prompt-tokens", "40", "--max-tokens", "60"]
    done = colibri("profile", "--run-dir", str(group.run_dir), *length, "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows_s = sum(row["total_s"] for row in report["rows"])
    assert report["n_lost"] == 0
    assert rows_s == pytest.approx(report["wall_s"], rel=0.05)
    for kind in report["kinds"].values():
        assert sum(row["total_s"] for row in kind["rows"]) == pytest.approx(kind["wall_s"], rel=0.05)
    assert {"prefill", "decode"} <= set(report["kinds"])
    assert sum(row["total_s"] for row in report["rows"] if row["stage"] == "other") < 0.25 * rows_s
    # The steps are all there: between the first and the last lies the request, seen from outside.
    assert report["wall_s"] + report["between_steps_s"] == pytest.approx(report["request"]["wall_s"], rel=0.25, abs=0.2)
    assert report["request"]["n_generated"] == 60
    assert report["counters"]["router"]["tokens"] == 60
    assert report["io"]["bytes_counted"] > 0
    # A read that ends between two steps is in the counters but in no step's rows.
    assert report["reads"]["bytes"] == pytest.approx(report["io"]["bytes_counted"], rel=0.01)
    assert report["verdict"].startswith("Bottleneck: ")
    if reads_directly(group):
        assert report["io"]["difference"] is not None
        assert report["io"]["difference"] < 0.01, report["io"]
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {"router", "attention", "expert_io", "drafter"}


def reads_directly(group: Group) -> bool:
    """Whether expert_io reads past the page cache here; the file system decides."""
    status = ask_status(load_frozen(group.run_dir / "group.json"))
    assert status is not None
    facts = next(dict(service.facts) for service in status.services if service.service == "expert_io")
    return "direct" in facts.get("reads", "")


def test_profile_watches_what_others_ask(group: Group) -> None:
    watch = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "profile", "--run-dir", str(group.run_dir), "--seconds", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert watch.stderr is not None
    assert "watching" in watch.stderr.readline()
    group.tokens(PROMPT, 10)
    watch.send_signal(signal.SIGINT)
    out, _ = watch.communicate(timeout=30)
    assert watch.returncode == 0
    assert "decode: " in out
    assert "Bottleneck: " in out


def test_a_client_that_leaves_frees_its_place(group: Group) -> None:
    expected = group.tokens(PROMPT, 8)
    segment = Segment.attach(group.run_id, COUNTERS, is_readonly=True)
    for stream in (True, False):
        before = read_all(segment.buf)["router"]["aborted"]
        body = completion_body(PROMPT, 1000, stream=stream)
        if stream:
            with httpx2.stream("POST", f"{group.url}/v1/completions", json=body, timeout=10) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(f"{group.url}/v1/completions", json=body, timeout=httpx2.Timeout(10, read=0.3))
        wait_for(lambda b=before: read_all(segment.buf)["router"]["aborted"] == b + 1, "the abort to be counted", 5)
        assert group.tokens(PROMPT, 8) == expected
    segment.close()


@pytest.mark.parametrize("sig", [None, signal.SIGINT, signal.SIGKILL])
def test_run_starts_a_group_and_ends_it_whatever_happens(model: Path, run_dir: Path, sig: int | None) -> None:
    n_tokens = "12" if sig is None else "100000"
    run = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "run", "--run-dir", str(run_dir), "--model", str(model), "--ids", "3,14,15",
         "--max-tokens", n_tokens, "--temperature", "0"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert run.stderr is not None
    wait_for(lambda: "ready after" in (run.stderr.readline() if run.stderr else ""), "the group", 60)
    run_id = load_frozen(run_dir / "group.json").run_id
    if sig is not None:
        segment = Segment.attach(run_id, COUNTERS, is_readonly=True)
        wait_for(lambda: read_all(segment.buf)["router"]["tokens"] > 10, "the answer to be under way")
        segment.close()
        run.send_signal(sig)
    out, err = run.communicate(timeout=60)
    assert run.returncode == (0 if sig is None else 130 if sig == signal.SIGINT else -signal.SIGKILL), err
    if sig is None:
        assert len(out.strip().split(",")) == 12
    wait_for(lambda: {path.name for path in run_dir.iterdir()} <= KEPT, "the run directory to be empty")
    assert not list(Path("/dev/shm").glob(f"colibri-{os.getuid()}-{run_id}*"))


def test_run_waits_for_a_group_that_somebody_else_is_starting(model: Path, run_dir: Path) -> None:
    starting = Group(model, run_dir)
    with (run_dir.parent / "out").open("w") as out:
        starting.process = subprocess.Popen(starting.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True)
    wait_for(lambda: (run_dir / "lock").exists() and (run_dir / "log").exists(), "the start")
    done = colibri("run", "--run-dir", str(run_dir), "--ids", "3,14,15", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().split(",")) == 5
    assert "waiting for the group that is starting" in done.stderr
    assert starting.stop() == 0
