"""The comparison under memory limits, without llama.cpp: the kernel's read-ahead, ratios, what is said of a missing figure."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.limits import LimitedGroup
from bench.peers import limited
from bench.peers.limited import FOUND, OURS, SMALL, Comparison, Limit, as_json, as_text, read_ahead, read_ahead_file
from bench.roofline import BenchError


@pytest.fixture
def knob(tmp_path: Path) -> Path:
    path = tmp_path / "read_ahead_kb"
    path.write_text("8192\n")
    return path


@pytest.mark.parametrize("end", [KeyboardInterrupt, BenchError, SystemExit])
def test_the_read_ahead_is_restored_whatever_the_end(knob: Path, end: type[BaseException]) -> None:
    with contextlib.suppress(end), read_ahead(knob, 128):
        assert knob.read_text() == "128"
        raise end("x")
    assert knob.read_text().strip() == "8192"


def test_it_is_left_alone_where_nothing_changes(knob: Path) -> None:
    before = knob.stat().st_mtime_ns
    with read_ahead(knob, 8192):
        pass
    assert knob.stat().st_mtime_ns == before


def test_a_partition_has_the_read_ahead_of_its_disk(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    device = file.stat().st_dev
    disk = tmp_path / "devices/vda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/read_ahead_kb").write_text("8192\n")
    (disk / "vda1").mkdir()
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / f"{os.major(device)}:{os.minor(device)}").symlink_to(disk / "vda1")
    assert read_ahead_file(file, tmp_path / "block").resolve() == disk / "queue/read_ahead_kb"
    with pytest.raises(BenchError, match="no block device"):
        read_ahead_file(file, tmp_path / "nothing")


def limit_of(ours: list[float], found: list[float], small: list[float]) -> Limit:
    limit = Limit(4 << 30, n_slots=74)
    limit.rates = {OURS: ours, FOUND: found, SMALL: small}
    return limit


def test_ratios_are_of_medians() -> None:
    limit = limit_of([5.0, 7.0, 6.0], [1.0], [2.0, 4.0])
    assert (limit.ratio(FOUND), limit.ratio(SMALL), limit.best_ratio) == (6.0, 2.0, 2.0)
    assert limit_of([5.0], [], [2.0]).best_ratio == 2.5
    assert limit_of([], [1.0], [2.0]).best_ratio is None
    document = as_json(Comparison("s", 12, 2, 8192, "1", [limit]))
    assert document["limits"][0]["ratio"] == {"as_found": 6.0, "small": 2.0, "best": 2.0}


def test_a_missing_figure_is_said_with_its_reason() -> None:
    limit = limit_of([], [1.0], [2.0])
    limit.faults[OURS] = "does not fit"
    text = as_text(Comparison("s", 12, 2, 8192, "1", [limit]))
    assert "4 GiB, colibri: does not fit" in text
    assert "2.00 (2.00 to 2.00)" in text


class Turns:
    """Engines that only note what they would run under."""

    def __init__(self, knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        self.knob = knob
        self.n_killed = 0
        monkeypatch.setattr(limited, "drop_cache", lambda _: None)
        monkeypatch.setattr(limited, "read_ahead_file", lambda _: knob)
        monkeypatch.setattr(limited, "memory_limit", self.limit)
        monkeypatch.setattr(limited, "_ours", self.ours)
        monkeypatch.setattr(limited, "_llama", self.llama)

    @contextlib.contextmanager
    def limit(self, n_bytes: int) -> Iterator[object]:
        yield type("Group", (), {"n_killed": self.n_killed, "limit_bytes": n_bytes})()

    def ours(self, limit: Limit, group: LimitedGroup, setup: object, turn: int) -> float:
        self.seen.append((OURS, self.knob.read_text().strip()))
        if limit.n_bytes < 3 << 30:
            raise BenchError("too small")
        return 6.0

    def llama(self, group: LimitedGroup, setup: object, turn: int) -> tuple[float, str]:
        self.seen.append(("llama", self.knob.read_text().strip()))
        return 2.0, "1.0"


def setup(tmp_path: Path, n_rounds: int) -> limited.Setup:
    def private() -> contextlib.AbstractContextManager[Path]:
        return contextlib.nullcontext(tmp_path)

    return limited.Setup(tmp_path, tmp_path, 10, 2, 12, n_rounds, "python", tmp_path / "log", private)


def test_engines_take_turns_back_and_forth(tmp_path: Path, knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(knob, monkeypatch)
    found = limited.compare_limited("s", [4 << 30, 2 << 30], setup(tmp_path, 2), lambda _: None)
    each = [(OURS, "8192"), ("llama", "8192"), ("llama", "128")]
    # Who did not run under a limit is not asked again under it.
    assert turns.seen == [*each, *each[::-1], *each, *each[:0:-1]]
    assert (found.read_ahead_kb, found.peer_version) == (8192, "1.0")
    first, second = found.limits
    assert first.rates == {OURS: [6.0, 6.0], FOUND: [2.0, 2.0], SMALL: [2.0, 2.0]}
    assert second.faults == {OURS: "too small"}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_who_was_killed_has_no_rate(tmp_path: Path, knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(knob, monkeypatch)
    turns.n_killed = 1
    (limit,) = limited.compare_limited("s", [4 << 30], setup(tmp_path, 2), lambda _: None).limits
    assert not any(limit.rates.values())
    assert "ended 1 of its processes" in limit.faults[SMALL]
