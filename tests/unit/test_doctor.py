"""``colibri doctor``: each verdict follows from what was found, and each one that is not good says what to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.doctor import budget, command, drive, memory, pages, processor, tokenizer
from cli.doctor.finding import Case
from conversion.presets import preset_config
from conversion.synth import Synthesis
from shared.container.reader import Container
from shared.machine.drive import BUFFERED, DEFAULT, DriveProfile, Mount, profile_of
from shared.machine.memory_probe import MemoryProbe
from shared.memory.huge_pages import SHM_DIR, Place
from shared.memory.warm_sets import WarmSet

GIB = 1 << 30
HERE = Mount("8:1", "ext4", "/data", 10**12)
NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("isa", "available", "verdict", "word"),
    [
        ("avx2", ["ref", "avx2"], "good", ""),
        ("avx2", ["ref", "avx2", "avx512"], "fair", "unset COLIBRI_ISA"),
        ("ref", ["ref"], "poor", "another machine"),
    ],
)
def test_processor(isa: str, available: list[str], verdict: str, word: str) -> None:
    found = processor.judge(isa, available, 2, 4)
    assert found.verdict == verdict and word in found.advice and "2 compute threads on 4 CPUs" in found.found


def test_memory_names_the_limit_that_decides() -> None:
    memory, shm = budget.judge(MemoryProbe(20 * GIB, "MemAvailable", 4 * GIB), 0)
    assert (memory.verdict, memory.advice, shm.verdict) == ("good", "", "good")
    memory, swap, shm = budget.judge(MemoryProbe(2 * GIB, "/sys/fs/cgroup/memory.max", 64 << 20), GIB)
    assert "memory.max" in memory.found and "--memory" in memory.advice
    assert swap.verdict == "fair" and (shm.verdict, "--shm-size" in shm.advice) == ("poor", True)


@pytest.mark.parametrize(
    ("text", "verdict", "word"),
    [
        ("always [madvise] never", "good", ""),
        ("[always] madvise never", "good", ""),
        ("always madvise [never]", "poor", "sudo tee /sys"),
        ("", "poor", "CONFIG_TRANSPARENT_HUGEPAGE"),
    ],
)
def test_huge_pages(text: str, verdict: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / pages.SETTING.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_text(text + "\n")
    [found] = pages.look(Case(None, root=tmp_path))
    assert found.verdict == verdict and word in found.advice


def test_warm_restart_names_the_mode_and_the_commands_that_enable_it() -> None:
    shm = Place(SHM_DIR, "tmpfs", 20 * GIB, is_huge=False)
    [found] = memory.judge([shm], 20 * GIB, "always within_size advise [never] deny force", [])
    assert (found.verdict, found.facts["mode"]) == ("fair", "private")
    assert found.advice == "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    assert "/etc/tmpfiles.d" in found.details[0] and "huge=always" in found.details[1]
    small = replace(shm, free_bytes=GIB)
    [found] = memory.judge([small], 20 * GIB, "[never]", [])  # no setting helps where there is no room
    assert "mount -t tmpfs -o huge=always,mode=1777,size=16g" in found.advice and "/etc/fstab" in found.details[0]
    assert "hugetlbfs" in found.details[1]
    [found] = memory.judge([replace(small, is_huge=True)], 20 * GIB, "[advise]", [])
    assert found.verdict == "fair" and found.advice == "sudo mount -o remount,size=16g /dev/shm"
    kept = WarmSet(SHM_DIR, "0123456789abcdef", n_bytes=3 * GIB, kept_at=1, label="GLM")
    good, warm = memory.judge([replace(shm, is_huge=True)], 20 * GIB, "[advise]", [kept])
    assert good.verdict == "good" and "/dev/shm" in good.found
    assert "3.0 GiB in /dev/shm kept warm for model GLM" in warm.found and "--drop-warm" in warm.advice


def test_io_uring_says_why_not() -> None:
    assert drive.judge_uring("", "0").found == "allowed"
    assert "sysctl" in drive.judge_uring("Operation not permitted", "2").advice
    refused = drive.judge_uring("Operation not permitted", "0")
    assert "seccomp" in refused.advice and "not permitted" in refused.found and refused.facts["allowed"] is False


def test_a_measured_drive_is_shown_with_every_setting_and_the_choice() -> None:
    profile = profile_of({DEFAULT: [2.0e9, 2.2e9], BUFFERED: [0.8e9, 0.7e9]}, NOW - 7200)
    found = drive.judge_drive(profile, HERE, False, 4_200_000_000, NOW)
    assert found.verdict == "good" and found.advice == ""
    assert "/data (ext4" in found.found and "2.10 GB/s" in found.found
    text = "\n".join(found.details)
    assert "2.10 GB/s (2.00 to 2.20)  direct reads by threads" in text and text.count("<- chosen") == 1
    assert "2.0 hours ago" in text and "reads 4.20 GB: 2.00 s" in text


@pytest.mark.parametrize(
    ("rates", "is_spinning", "verdict", "word"),
    [
        ({DEFAULT: [0.2e9, 0.2e9]}, True, "poor", "spinning"),
        ({DEFAULT: [0.2e9, 0.2e9]}, False, "poor", "colibri mirror"),
        ({DEFAULT: [2.0e9, 2.0e9]}, True, "good", ""),
        ({BUFFERED: [1.2e9, 1.2e9]}, False, "fair", "buffered"),
        ({DEFAULT: [2.0e9, 1.0e9]}, False, "fair", "--measure"),
    ],
)
def test_what_a_drive_lacks(rates: dict, is_spinning: bool, verdict: str, word: str) -> None:  # type: ignore[type-arg]
    found = drive.judge_drive(profile_of(rates, NOW), HERE, is_spinning, 0, NOW)
    assert found.verdict == verdict and word in found.advice


def test_a_drive_that_was_not_measured_says_so() -> None:
    found = drive.judge_drive(DriveProfile(DEFAULT, "the model is small: not measured"), HERE, False, 0, NOW)
    assert "small" in found.found and "--measure" in found.advice
    memory = Mount("0:5", "tmpfs", "/dev/shm", 10**9)
    found = drive.judge_drive(DriveProfile(BUFFERED, "in memory"), memory, False, 0, NOW)
    assert (found.verdict, found.advice) == ("good", "")


def test_the_command_looks_at_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model = str(Path(__file__).parents[2] / "models" / "fledgling")
    shown = CliRunner().invoke(command.command, [model])
    assert shown.exit_code == 0, shown.output
    assert all(f" {subject} " in shown.output for subject in ("processor", "memory", "io_uring", "drive"))
    assert not list(tmp_path.iterdir()), "a small model's drive is not measured"
    plain = CliRunner().invoke(command.command, ["--json"])
    assert {entry["verdict"] for entry in json.loads(plain.output)} <= {"good", "fair", "poor"}
    assert CliRunner().invoke(command.command, ["--measure"]).exit_code == 2


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    Synthesis(preset_config("tiny", 2), "int4").run(tmp_path / "m")
    (found,) = tokenizer.look(Case(Container.open(tmp_path / "m")))
    assert found.verdict == "poor" and "tokenizer.json" in found.advice and "token ids" in found.advice
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (found,) = tokenizer.look(Case(Container.open(tmp_path / "m")))
    assert found.verdict == "poor" and str(tmp_path / "m" / "tokenizer.json") in found.advice
    shutil.copy(Path(__file__).parents[2] / "models" / "fledgling" / "tokenizer.json", tmp_path / "m")
    (found,) = tokenizer.look(Case(Container.open(tmp_path / "m")))
    assert found.verdict == "good"
    assert tokenizer.look(Case(None)) == []
