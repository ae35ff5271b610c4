"""``colibri bench decode`` and ``prefill`` without a group: memory limits, what stage rows say, arithmetic, reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import decode, prefill
from bench.cold import Place, Reads, reads_between
from bench.columns import Figure, spread, table
from bench.group import Moment
from bench.limits import LimitedGroup, memory_limit
from bench.roofline import BenchError
from bench.steps import steps_of
from shared.step.stages import NO_LAYER, Stage, StepKind, TraceRing, pack_found
from shared.wire.endpoints import ATTENTION, EXPERT_IO, ROUTER, SERVICES

# ---- memory limits ---------------------------------------------------------------------------------------------------


def fake_root(tmp_path: Path, cgroup: str, directory: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "sys/fs/cgroup" / directory).mkdir(parents=True)
    return tmp_path


def test_a_system_without_the_controller_is_told_so(tmp_path: Path) -> None:
    root = fake_root(tmp_path, "0::/user\n", "user")
    with pytest.raises(BenchError, match="memory controller"), memory_limit(1 << 30, root):
        pass
    assert not list((root / "sys/fs/cgroup/user").iterdir())


def test_a_group_that_may_not_be_made_is_told_so(tmp_path: Path) -> None:
    root = fake_root(tmp_path, "4:memory:/x\n0::/\n", "memory/x")
    (root / "sys/fs/cgroup/memory/x" / f"colibri-bench-{os.getpid()}").write_text("")
    with pytest.raises(BenchError, match="can't be made"), memory_limit(1 << 30, root):
        pass


def in_version_2(root: Path) -> None:
    with memory_limit(123 << 20, root) as group:
        assert group.directory.parent == root / "sys/fs/cgroup/user"
        assert (group.directory / "memory.max").read_text() == str(123 << 20)
        (group.directory / "memory.events").write_text("oom 5\noom_kill 2\n")
        (group.directory / "memory.peak").write_text("77\n")
        assert (group.n_killed, group.peak_bytes) == (2, 77)
        # The files of a plain directory remain, so that its end says what is in the way.


def test_version_2_uses_the_group_that_hands_the_controller_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_root(tmp_path, "0::/user/session\n", "user/session")
    (root / "sys/fs/cgroup/user/cgroup.subtree_control").write_text("cpu memory\n")
    monkeypatch.setattr("bench.limits.EMPTY_WAIT_S", 0.0)
    with pytest.raises(BenchError, match="removed"):
        in_version_2(root)


def real_limit(n_bytes: int) -> LimitedGroup:
    """Whether this machine allows it at all; else the test is skipped with the reason."""
    try:
        with memory_limit(n_bytes) as group:
            return group
    except BenchError as error:
        pytest.skip(str(error))


TAKE = "import sys; b = bytearray(int(sys.argv[1])); print(len(b))"


def test_a_command_inside_is_held_to_its_limit_and_the_group_is_gone_afterwards() -> None:
    directory = real_limit(64 << 20).directory
    assert not directory.exists()
    with memory_limit(64 << 20) as group:
        small = subprocess.run(
            group.command([sys.executable, "-c", TAKE, str(4 << 20)]), capture_output=True, check=False
        )
        assert small.returncode == 0
        assert group.n_killed == 0
        large = subprocess.run(
            group.command([sys.executable, "-c", TAKE, str(512 << 20)]), capture_output=True, check=False
        )
        assert large.returncode != 0
        assert group.n_killed == 1
        peak = group.peak_bytes
        assert peak is not None
        assert peak <= 64 << 20
    assert not directory.exists()


# ---- stage rows ------------------------------------------------------------------------------------------------------

MS = 1_000_000


def rows(*lines: tuple[str, Stage, int, float, float, int], step: int = 1) -> np.ndarray:
    """(service, stage, layer, begin ms, end ms, bytes)."""
    ring = TraceRing(bytearray(TraceRing.HEAD_BYTES))
    out = np.zeros(len(lines), ring.dtype)
    for row, (service, stage, layer, begin, end, n_bytes) in zip(out, lines):
        row["service"], row["stage"], row["layer"] = SERVICES.index(service), stage, layer
        row["start_ns"], row["end_ns"], row["bytes"], row["step"] = begin * MS, end * MS, n_bytes, step
    return out


def one_token(step: int = 1, kind: StepKind = StepKind.DECODE) -> np.ndarray:
    """A dense layer 0 and a MoE layer 1, 100 ms: 30 outside of the MoE layer, 20 + 25 + 5 computing in it."""
    return rows(
        (ROUTER, Stage.STEP, kind, 0, 100, 1),
        (ATTENTION, Stage.EMBED, NO_LAYER, 0, 2, 0),
        (ATTENTION, Stage.ATTENTION, 0, 2, 6, 0),
        (ATTENTION, Stage.DENSE_FFN, 0, 6, 10, 0),
        (ATTENTION, Stage.ATTENTION, 1, 10, 30, 0),
        (ROUTER, Stage.GATE, 1, 30, 40, 0),
        (EXPERT_IO, Stage.SHARED_FFN, 1, 30, 55, 0),  # beside the gate
        (ROUTER, Stage.PILOT, 1, 40, 60, 0),  # nobody waits for it
        (EXPERT_IO, Stage.UNION, 1, 55, 55, pack_found(3, 1, 4)),
        (EXPERT_IO, Stage.IO_WAIT, 1, 55, 75, 0),
        (EXPERT_IO, Stage.IO_READ, 1, 50, 60, 100),
        (EXPERT_IO, Stage.IO_READ, 1, 60, 75, 100),
        (EXPERT_IO, Stage.EXPERT_FFN, 1, 75, 80, 0),
        (ATTENTION, Stage.HEAD, NO_LAYER, 80, 95, 0),
        (ROUTER, Stage.SAMPLE, NO_LAYER, 95, 100, 0),
        step=step,
    )


def test_the_time_of_moe_layers_is_what_is_left_of_a_step() -> None:
    found = steps_of(one_token(), StepKind.DECODE, {0})
    assert (found.n_steps, found.wall_ns) == (1, 100 * MS)
    assert found.moe_ns == (100 - 2 - 4 - 4 - 15 - 5) * MS
    assert found.compute_ns == (10 + 20 + 25 + 5 + 15 + 5) * MS  # gate and shared expert overlap: counted once
    assert found.n_asked == {1: 8}
    assert found.n_reads == {1: 2}


def test_only_steps_of_the_kind_and_the_span_count() -> None:
    both = np.concatenate([one_token(1), one_token(2, StepKind.PREFILL)])
    assert steps_of(both, StepKind.DECODE, {0}).n_steps == 1
    assert steps_of(both, StepKind.PREFILL, {0}).n_asked == {1: 8}
    assert steps_of(both, StepKind.DECODE, {0}, begin_ns=1).n_steps == 0
    assert steps_of(both, StepKind.DRAFT, {0}).compute_ns == 0


# ---- arithmetic and reports ------------------------------------------------------------------------------------------


def reads(seconds: float = 2.0, demand: int = 3_000, speculative: int = 1_000, needed: int = 3_500) -> Reads:
    return Reads(seconds, 4_000.0, demand, speculative, needed, 6, 1, 3, 1.0, 0.5)


def test_counters_become_rates_and_shares() -> None:
    names: tuple[str, ...] = ("bytes_demand", "bytes_speculative", "pilot_wasted", "ahead_wasted", "hits", "late_hits")
    names += ("misses", "io_busy_ns", "io_wait_ns")
    before = Moment(1_000_000_000, dict.fromkeys(names, 5))
    values = (3_000, 1_000, 1, 1, 6, 1, 3, 1_000_000_000, 500_000_000)
    after = Moment(3_000_000_000, {name: 5 + value for name, value in zip(names, values)})
    found = reads_between(before, after, (3_000.0, 5_000.0), 250)
    assert found == reads()
    assert (found.bytes, found.rate, found.share) == (4_000, 2_000.0, 0.5)
    assert (found.busy_share, found.busy_rate, found.wait_share, found.hit_share) == (0.5, 4_000.0, 0.25, 0.6)
    assert found.floor_s == 3_500 / 4_000


def test_a_token_is_compared_with_the_longer_of_reading_and_computing() -> None:
    found = decode.Round(4, reads(), moe_ns=0.4e9, compute_ns=0.1e9)
    assert found.tokens_s == 2.0
    assert found.moe_rate == pytest.approx(4_000 / 4 / 0.4)
    assert found.moe_share == pytest.approx(2_500 / 4_000)
    assert found.bound_ns == pytest.approx(3_500 / 4_000 / 4 * 1e9)
    assert found.bound_share == pytest.approx(3_500 / 4_000 / 4 / 0.5)
    slow = decode.Round(4, reads(), moe_ns=0.4e9, compute_ns=0.45e9)
    assert slow.bound_share == pytest.approx(0.9)


PLACE = Place(10, 100, 5_000_000_000, 2, 512, 8_000_000_000)


def decode_report(*tokens_s: tuple[float, float]) -> decode.DecodeResults:
    def rounds(which: int) -> list[decode.Round]:
        return [decode.Round(4, reads(seconds=4 / pair[which]), 1e8, 1e8) for pair in tokens_s]

    return decode.DecodeResults(
        "m", 250, 4, {"on": decode.Setting(PLACE, rounds(0)), "off": decode.Setting(PLACE, rounds(1))}
    )


def test_the_ratio_is_taken_round_by_round() -> None:
    report = decode_report((2.0, 1.0), (3.0, 3.0), (6.0, 4.0))
    assert report.ratios == pytest.approx([2.0, 1.0, 1.5])
    document = json.loads(json.dumps(decode.as_json(report)))
    assert document["ratio"] == pytest.approx({"median": 1.5, "least": 1.0, "most": 2.0})
    assert document["settings"][0]["medians"]["tokens_s"] == pytest.approx({"median": 3.0, "least": 2.0, "most": 6.0})
    assert document["settings"][1]["place"]["slot_share"] == 0.1
    text = decode.as_text(report)
    assert "over without: 1.50 (1.00 to 2.00)" in text
    assert "limit 8.00 GB" in text
    assert "10 slots for 100 experts (10%)" in text


def test_one_setting_has_no_ratio() -> None:
    whole = decode_report((2.0, 1.0))
    single = decode.DecodeResults("m", 250, 4, {"off": whole.settings["off"]})
    assert single.ratios == []
    assert decode.as_json(single)["ratio"] is None


def prompt_round(n_reads: dict[int, int], n_wasted: int = 0, compute_s: float = 0.5) -> prefill.Round:
    return prefill.Round(100, 2.5, reads(), compute_s, 1, {1: 50, 2: 50}, n_reads, n_wasted)


def test_a_prompt_is_compared_with_what_binds_it() -> None:
    assert (prompt_round({}).bound, prompt_round({}).bound_s) == ("drive", 1.0)
    slow = prompt_round({}, compute_s=2.0)
    assert (slow.bound, slow.bound_share) == ("computing", 0.8)


@pytest.mark.parametrize(
    ("n_reads", "n_wasted", "n_again"),
    [({1: 50, 2: 40}, 0, 0), ({1: 52, 2: 40}, 0, 2), ({1: 52, 2: 40}, 2, 0), ({1: 53, 3: 1}, 2, 2)],
)
def test_what_is_read_again_in_a_layer_is_a_fault(n_reads: dict[int, int], n_wasted: int, n_again: int) -> None:
    """Fewer reads in another layer are no excuse; guesses thrown away are."""
    report = prefill.PrefillResults("m", 250, 100, PLACE, [prompt_round(n_reads, n_wasted)])
    assert report.rounds[0].n_again == n_again
    assert report.is_read_once is (n_again == 0)
    assert ("FAULT" in prefill.as_text(report)) is (n_again > 0)
    document = json.loads(json.dumps(prefill.as_json(report)))
    assert document["is_read_once"] is (n_again == 0)
    assert document["rounds"][0]["read"] == sum(n_reads.values())


def test_tables_have_a_column_for_each_setting() -> None:
    figures: list[Figure[float]] = [Figure("twice", lambda x: 2 * x, ".0f"), Figure("as it is", lambda x: x, ".1f")]
    lines = table(figures, {"a": [1.0, 3.0], "b": [2.0]})
    assert lines[0].split() == ["a", "b"]
    assert lines[1].split() == ["twice", "4", "(2", "to", "6)", "4"]
    assert lines[2].endswith("2.0")
    assert spread([3.0, 1.0, 2.0], ".0f") == "2 (1 to 3)"


def test_a_bench_that_is_told_to_end_stops_its_group(tmp_path: Path) -> None:
    up = tmp_path / "up"
    up.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    up.chmod(0o755)
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from bench import group\n"
        f"sys.executable = {str(up)!r}\n"
        "group.find_group = lambda _: (None, 'http://127.0.0.1:1')\n"
        "with group.run_group(Path('model'), Path('run'), 10, []):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(10)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "-P -m deploy.up --run-dir run --stop"
