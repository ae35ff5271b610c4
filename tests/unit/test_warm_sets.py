"""Warm sets: kept, found, adopted, dropped; of others nothing is touched. And where named memory may go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from native.memory import HUGE_PAGE
from shared.log import Log
from shared.memory import warm_sets
from shared.memory.big_memory import Home
from shared.memory.huge_pages import candidate_dirs, huge_bytes, memory_mounts, probe_place
from shared.memory.named_file import DENSE, SLAB, parse_name, run_path, warm_path
from shared.memory.segments import add_owner, sweep_dead_runs, unlink_run

MODEL, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def directory(huge_dir: Path) -> Path:
    return huge_dir


def make_run(directory: Path, fingerprint: str = MODEL, is_complete: bool = True) -> str:
    """The memory of a run that has ended: a dense part and a slab."""
    run_id = os.urandom(4).hex()
    home = Home(directory, run_id, fingerprint, Log("test"))
    dense = home.open(DENSE, 5, 10_000)
    slab = home.open(SLAB, 6, 2 * HUGE_PAGE, 8, HUGE_PAGE)
    assert dense and slab
    if is_complete:
        dense.set_complete()
    slab.array[:] = 1
    dense.close()
    slab.close()
    return run_id


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_kept_sets_are_found_adopted_and_dropped(directory: Path) -> None:
    run_id = make_run(directory)
    assert warm_sets.keep(directory, run_id, MODEL, "My model\n") == [SLAB, DENSE]
    assert names(directory) == {warm_path(directory, MODEL, kind).name for kind in (SLAB, DENSE)}
    (warm,) = warm_sets.find_sets([directory])
    assert warm.is_kept and warm.fingerprint == MODEL and set(warm.files) == {SLAB, DENSE}
    assert warm.n_bytes >= 2 * HUGE_PAGE + 10_000
    assert "kept warm for model My model since 20" in warm.describe()
    new = os.urandom(4).hex()
    warm_sets.adopt(warm, new)
    assert names(directory) == {run_path(directory, new, kind).name for kind in (SLAB, DENSE)}
    warm_sets.drop_run(directory, new)
    assert not names(directory)


def test_what_a_killed_group_left_is_found_while_a_living_one_is_not(directory: Path) -> None:
    dead, alive = make_run(directory), make_run(directory, OTHER)
    add_owner(alive, os.getpid())
    try:
        (warm,) = warm_sets.find_sets([directory])
        assert warm.run_id == dead and not warm.is_kept
        warm_sets.drop(warm)
        assert len(names(directory)) == 2
    finally:
        unlink_run(alive)


def test_memory_that_a_process_still_has_is_left_alone(directory: Path) -> None:
    run_id = make_run(directory)
    memory = Home(directory, run_id, MODEL, Log("test")).open(DENSE, 5, 10_000)
    assert memory
    (warm,) = warm_sets.find_sets([directory])
    assert set(warm.files) == {SLAB}
    assert len(names(directory)) == 2
    memory.close()


def test_what_can_never_be_used_is_removed(directory: Path, tmp_path: Path) -> None:
    make_run(directory, is_complete=False)
    warm_path(directory, MODEL, SLAB).write_bytes(b"garbage" * 1000)
    warm_path(directory, OTHER, SLAB).symlink_to(tmp_path)
    sets = warm_sets.find_sets([directory])
    assert [set(s.files) for s in sets] == [{SLAB}]
    assert len(names(directory)) == 1 and tmp_path.exists()


def test_a_file_under_another_models_name_is_removed(directory: Path) -> None:
    run_id = make_run(directory)
    run_path(directory, run_id, SLAB).rename(warm_path(directory, OTHER, SLAB))
    assert all(s.fingerprint == MODEL for s in warm_sets.find_sets([directory]))
    assert not warm_path(directory, OTHER, SLAB).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_files_of_other_users_are_neither_believed_nor_touched(directory: Path) -> None:
    run_id = make_run(directory)
    warm_sets.keep(directory, run_id, MODEL, "m")
    for kind in (SLAB, DENSE):
        os.chown(warm_path(directory, MODEL, kind), 12345, 12345)
    assert warm_sets.find_sets([directory]) == []
    assert len(names(directory)) == 2
    assert parse_name(f"colibri-12345-warm+{MODEL}+slab") != parse_name(f"colibri-{os.getuid()}-warm+{MODEL}+slab")


def test_a_new_set_replaces_the_models_old_one(directory: Path) -> None:
    for _ in range(2):
        warm_sets.keep(directory, make_run(directory), MODEL, "m")
    assert len(names(directory)) == 2


def test_the_sweep_of_segments_leaves_warm_sets(directory: Path) -> None:
    """Its pattern takes anything that is named like a segment of a run."""
    home = Path("/dev/shm")
    run_id = make_run(home)
    warm_sets.keep(home, run_id, MODEL, "m")
    try:
        os.utime(warm_path(home, MODEL, SLAB), (1, 1))
        sweep_dead_runs()
        assert warm_path(home, MODEL, SLAB).exists()
    finally:
        for kind in (SLAB, DENSE):
            warm_path(home, MODEL, kind).unlink()


@pytest.mark.parametrize(
    "name", ["colibri-0-abc-frames", "colibri-0-warm+../x+slab", "colibri-0-a+slab2", "colibri-0-A+slab", ""]
)
def test_other_names_are_no_named_memory(name: str) -> None:
    assert parse_name(name) is None


def test_places_are_found_in_the_mount_table(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "24 1 0:6 / / rw shared:1 - ext4 /dev/sda rw\n"
        "25 24 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=1k\n"
        "26 24 0:24 / /dev/hugepages rw - hugetlbfs hugetlbfs rw,pagesize=2M\n"
        "27 24 0:25 / /mnt/one\\040big rw - tmpfs tmpfs rw,huge=always\n"
        "28 24 0:26 / /mnt/giant rw - hugetlbfs none rw,pagesize=1024M\n"
        "29 24 0:27 / /run rw - tmpfs tmpfs rw\n"
        "damaged line\n"
    )
    assert candidate_dirs(table) == [Path("/dev/shm"), Path("/dev/hugepages"), Path("/mnt/one big")]
    assert len(memory_mounts(table)) == 5
    assert candidate_dirs(tmp_path / "absent") == [Path("/dev/shm")]


def test_places_are_judged_by_trying(directory: Path, tmp_path: Path) -> None:
    place = probe_place(directory)
    assert not place.problem and place.fs == "tmpfs" and place.free_bytes > 0
    assert not names(directory)
    assert "is not in a memory file system" in probe_place(Path("/proc")).problem
    assert "No such file" in probe_place(directory / "absent").problem


def test_huge_pages_are_counted_where_they_are() -> None:
    from native.memory import HugeBuffer

    with HugeBuffer(2 * HUGE_PAGE) as buffer:
        assert huge_bytes(buffer.address, buffer.n_bytes) == (0, 0)
        buffer.array[:HUGE_PAGE] = 1
        huge, present = huge_bytes(buffer.address, buffer.n_bytes)
        assert present == HUGE_PAGE and huge in (0, HUGE_PAGE)
