"""The drive's profile: what rates speak for which setting, and that a kept file is used only where and while it is true."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from shared.container.entries import Copy, ExpertFile
from shared.container.format import ExpertLayout
from shared.machine.drive import (
    BUFFERED,
    CANDIDATES,
    DEFAULT,
    MAX_AGE_BUSY_S,
    MAX_AGE_S,
    Mount,
    ReadSetting,
    choose,
    kept_folder,
    kept_path,
    load_kept,
    profile_of,
    save_kept,
    size_class,
)
from shared.planning import drive_probe
from shared.planning.drive_probe import DriveProbe, drive_profile, mount_of, rate_at

FEW = ReadSetting("threads", True, 2, 4 << 20)
MANY = ReadSetting("uring", True, 16, 1 << 20)
HERE = Mount("8:1", "ext4", "/", 10**12)
NOW = 1_800_000_000.0
MIB = 1 << 20


def test_the_default_stays_unless_another_wins_clearly_and_in_every_round() -> None:
    base = [2.0, 1.0, 2.1, 1.9]
    assert choose({DEFAULT: base, FEW: base}) == DEFAULT
    assert choose({DEFAULT: base, FEW: [1.05 * rate for rate in base]}) == DEFAULT
    assert choose({DEFAULT: base, FEW: [1.2 * rate for rate in base]}) == FEW
    assert choose({DEFAULT: base, FEW: [3.0, 3.0, 3.0, 1.8]}) == DEFAULT, "one lost round is enough to doubt"
    assert choose({DEFAULT: base, FEW: [1.2 * r for r in base], MANY: [1.3 * r for r in base]}) == MANY


def test_rounds_are_compared_pairwise_for_drives_drift() -> None:
    base = [3.0, 1.0, 0.5, 2.0]
    assert choose({FEW: [1.1 * rate for rate in base], DEFAULT: base}) == FEW
    # The same medians, but the fast rounds are those in which everything was fast.
    assert choose({DEFAULT: [1.0, 2.0, 3.0], FEW: [3.0, 1.1, 3.3]}) == DEFAULT


def test_buffered_reads_must_win_by_far_or_be_all_there_is() -> None:
    base = [1.0, 1.1, 0.9]
    assert choose({DEFAULT: base, BUFFERED: [1.3 * rate for rate in base]}) == DEFAULT
    slow_direct = {DEFAULT: base, BUFFERED: [1.5 * rate for rate in base]}
    assert choose(slow_direct) == BUFFERED
    assert "much slower" in profile_of(slow_direct, NOW).note
    only = {BUFFERED: [0.5, 0.6]}
    assert choose(only) == BUFFERED
    assert "no direct reads" in profile_of(only, NOW).note
    assert choose({}) == BUFFERED


def test_the_ceiling_is_the_fastest_settings_and_a_busy_drive_is_noticed() -> None:
    profile = profile_of({DEFAULT: [2.0, 2.1, 1.9], FEW: [2.05, 2.15, 1.95], BUFFERED: [0.5, 0.5, 0.5]}, NOW)
    assert (profile.setting, profile.ceiling, profile.was_busy, profile.note) == (DEFAULT, 2.05, False, "")
    assert profile_of({DEFAULT: [2.0, 1.0]}, NOW).was_busy


RATES = {DEFAULT: [2.0e9, 2.2e9], MANY: [2.5e9, 2.6e9], BUFFERED: [0.8e9, 0.7e9]}


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    path = kept_path(tmp_path / "drives", HERE, 20 * MIB)
    profile = profile_of(RATES, NOW)
    save_kept(path, HERE, 20 * MIB, profile)
    save_kept(path, HERE, 20 * MIB, profile)
    assert [p.name for p in path.parent.iterdir()] == ["8-1-ext4-16777216"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_kept(path, HERE, 30 * MIB, NOW + 5) == (profile, "")
    assert profile.setting == MANY


@pytest.mark.parametrize(
    ("mount", "record", "age", "why"),
    [
        (Mount("8:2", "ext4", "/", 10**12), 20 * MIB, 5, "another file system"),
        (Mount("8:1", "xfs", "/", 10**12), 20 * MIB, 5, "another file system"),
        (Mount("8:1", "ext4", "/", 10**12 + 1), 20 * MIB, 5, "another file system"),
        (HERE, 40 * MIB, 5, "another file system"),
        (HERE, 20 * MIB, MAX_AGE_S + 1, "too old"),
        (HERE, 20 * MIB, -100, "future"),
    ],
)
def test_a_result_counts_only_where_and_while_it_is_true(
    mount: Mount, record: int, age: float, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    save_kept(path, HERE, 20 * MIB, profile_of(RATES, NOW))
    found, reason = load_kept(path, mount, record, NOW + age)
    assert found is None and why in reason


def test_what_was_measured_on_a_busy_drive_is_kept_for_a_day(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_kept(path, HERE, MIB, profile_of({DEFAULT: [2.0e9, 0.5e9]}, NOW))
    assert load_kept(path, HERE, MIB, NOW + MAX_AGE_BUSY_S - 1)[1] == ""
    assert load_kept(path, HERE, MIB, NOW + MAX_AGE_BUSY_S + 1)[1] == "it is too old"


def test_no_file_is_no_reason_and_damage_is_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert load_kept(path, HERE, MIB, NOW) == (None, "")
    save_kept(path, HERE, MIB, profile_of(RATES, NOW))
    data = path.read_bytes()
    file = json.loads(data)
    changes: list[dict[str, object]] = [{"version": 2}, {"format": "x"}, {"checksum": "0"}, {"body": {}}, {"body": 5}]
    for change in changes:
        path.write_text(json.dumps({**file, **change}))
        found, why = load_kept(path, HERE, MIB, NOW)
        assert found is None and why, change
    rng = random.Random(1)
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        found, why = load_kept(path, HERE, MIB, NOW)
        assert found is None and why
    path.write_bytes(data[:-3])
    assert load_kept(path, HERE, MIB, NOW)[1] == "it is damaged"
    save_kept(path, HERE, MIB, profile_of({ReadSetting("magic", True, 4, 4096): [1.0]}, NOW))
    assert load_kept(path, HERE, MIB, NOW)[1] == "its numbers are impossible"


def test_a_place_that_cannot_be_written_is_an_oserror_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_kept(tmp_path / "file" / "f", HERE, MIB, profile_of(RATES, NOW))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_records_of_one_power_of_two_share_a_result() -> None:
    assert size_class(16 * MIB) == size_class(20 * MIB) == size_class(32 * MIB - 1) != size_class(32 * MIB)


# ---- mounts and measuring -------------------------------------------------------------------------------------------


def test_the_mount_of_a_file_is_the_deepest_and_the_last_one(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    deep = tmp_path / "a b"
    deep.mkdir()
    place = str(deep).replace(" ", "\\040")
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:9 / {place} rw,relatime shared:5 - xfs /dev/b rw\n"
        f"3 1 0:7 / {place} rw - tmpfs none rw\n"
        f"4 1 0:8 / {place}2 rw - btrfs none rw\n"
        "damaged line\n"
    )
    assert mount_of(deep, table).fs_type == "tmpfs" and mount_of(deep, table).is_memory
    assert mount_of(tmp_path, table).fs_type == "ext4"
    assert mount_of(tmp_path, tmp_path / "none").fs_type == "unknown"
    with pytest.raises(OSError):
        mount_of(tmp_path / "missing")


def expert_file(path: Path, n: int, record: int) -> ExpertFile:
    path.write_bytes(os.urandom(n * record))
    layout = ExpertLayout("f32", 1, 1, 0, 0, 0, None, None, None, record)
    return ExpertFile(1, path.name, "f32", 0, record, n, ("",) * n, layout, (Copy(path, 0),))


def test_measuring_gives_a_rate_per_setting_and_round(tmp_path: Path) -> None:
    with DriveProbe(expert_file(tmp_path / "e", 3, 3 * 4096), seed=1) as probe:
        rates = probe.rates(n_rounds=2, sample_s=0.002)
    assert set(rates) <= set(CANDIDATES) and BUFFERED in rates
    assert all(len(found) == 2 and min(found) > 0 for found in rates.values())


def test_a_start_measures_once_keeps_it_and_writes_nothing_when_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = expert_file(tmp_path / "e", 2, 1 << 16)
    folder = tmp_path / "state" / "drives"
    measured: list[int] = []

    def rates(self: DriveProbe) -> dict[ReadSetting, list[float]]:
        measured.append(1)
        return {s: list(found) for s, found in RATES.items()}

    monkeypatch.setattr(DriveProbe, "rates", rates)
    monkeypatch.setattr(drive_probe, "mount_of", lambda path: HERE)
    small = drive_profile([file], folder, may_write=True)
    assert (small.setting, small.ceiling, measured) == (DEFAULT, 0.0, []) and "small" in small.note
    monkeypatch.setattr(drive_probe, "SMALL_MODEL_BYTES", 1000)
    assert drive_profile([file], folder, may_write=False).setting == MANY
    assert not folder.exists() and len(measured) == 1
    said: list[str] = []
    first = drive_profile([file], folder, may_write=True, report=said.append)
    assert len(measured) == 2 and "measuring" in said[0]
    assert drive_profile([file], folder, may_write=True, report=said.append) == first
    assert len(measured) == 2 and len(said) == 1
    next(folder.iterdir()).write_text("{}")
    assert drive_profile([file], folder, may_write=True, report=said.append).rates == first.rates
    assert "ignored: it is damaged" in said[1] and len(measured) == 3
    assert drive_profile([], folder, may_write=True).setting == DEFAULT


def test_what_doctor_measured_is_what_the_next_command_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model too, for which nobody measures unasked; and nothing is kept that would be refused later."""
    file = expert_file(tmp_path / "e", 2, 1 << 16)
    folder = tmp_path / "drives"
    monkeypatch.setattr(drive_probe, "mount_of", lambda path: HERE)
    found: dict[ReadSetting, list[float]] = {s: list(rates) for s, rates in RATES.items()}
    monkeypatch.setattr(DriveProbe, "rates", lambda self: found)
    said: list[str] = []
    for bad in (0.0, float("nan"), float("inf"), 1e16):
        found[DEFAULT][0] = bad
        refused = drive_profile([file], folder, may_write=True, must_measure=True)
        assert (refused.setting, refused.ceiling) == (DEFAULT, 0.0) and "measuring failed" in refused.note
        assert not folder.exists()
    found[DEFAULT][0] = RATES[DEFAULT][0]
    measured = drive_profile([file], folder, may_write=True, must_measure=True)
    assert measured.ceiling > 0
    assert drive_profile([file], folder, may_write=True, report=said.append) == measured
    assert said == []


def test_a_file_system_on_a_pool_has_no_size_that_could_change(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    for fs_type, is_fixed in (("zfs", False), ("nfs4", False), ("fuse.sshfs", False), ("ext4", True), ("xfs", True)):
        table.write_text(f"1 0 8:1 / / rw - {fs_type} a rw\n")
        assert (mount_of(tmp_path, table).fs_bytes > 0) == is_fixed


def test_files_in_memory_are_read_buffered_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = expert_file(tmp_path / "e", 2, 1 << 16)
    monkeypatch.setattr(drive_probe, "mount_of", lambda path: Mount("0:5", "tmpfs", "/dev/shm", 10**9))
    profile = drive_profile([file], tmp_path / "drives", may_write=True)
    assert profile.setting == BUFFERED and "in memory" in profile.note
    assert not (tmp_path / "drives").exists()


def test_without_direct_reads_only_buffered_ones_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(drive_probe, "open_direct", refuse)
    with DriveProbe(expert_file(tmp_path / "e", 2, 1 << 16)) as probe:
        assert probe.settings == (BUFFERED,)
        assert profile_of(probe.rates(1, 0.002), NOW).setting == BUFFERED


def test_a_user_without_a_home_keeps_nothing_and_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setattr(Path, "home", homeless)
    assert kept_folder() is None
    file = expert_file(tmp_path / "e", 2, 1 << 16)
    assert drive_profile([file], kept_folder(), may_write=True).setting in (*CANDIDATES, DEFAULT)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert kept_folder() == tmp_path / "colibri" / "drives"


def test_the_rate_where_no_model_is_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with a file of its own that goes away again, kept by nobody; a kept rate is taken instead."""
    rates = {DEFAULT: [2e9] * 8}
    sizes = []

    def measured(probe: DriveProbe) -> dict[ReadSetting, list[float]]:
        sizes.append(probe.path.stat().st_size)
        assert probe.sample(DEFAULT if DEFAULT in probe.settings else BUFFERED, 0.001) > 0
        return rates

    monkeypatch.setattr(drive_probe, "mount_of", lambda _: HERE)
    monkeypatch.setattr(drive_probe, "SCRATCH_BYTES", 3 * MIB)
    monkeypatch.setattr(DriveProbe, "rates", measured)
    folder = tmp_path / "kept"
    assert rate_at(tmp_path, MIB, folder) == 2e9
    assert len(sizes) == 1 and sizes[0] >= 3 * MIB
    assert list(tmp_path.iterdir()) == []
    save_kept(kept_path(folder, HERE, MIB), HERE, MIB, profile_of({DEFAULT: [1e9] * 8}, drive_probe.time.time()))
    assert rate_at(tmp_path, MIB, folder) == 1e9
    assert len(sizes) == 1
    complaints: list[str] = []
    assert rate_at(tmp_path / "nowhere", MIB, None, report=complaints.append) == 0.0
    assert "measuring failed" in complaints[-1]
