"""Named memory between processes: shared, reserved, surviving its users, swept when its run is dead."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.errors import CapacityError, ConfigError
from shared.machine.processes import process_start
from shared.memory.segments import (
    Segment,
    add_owner,
    is_run_alive,
    list_run,
    segment_path,
    sweep_dead_runs,
    unlink,
    unlink_run,
)


@pytest.fixture
def run_id() -> Iterator[str]:
    name = os.urandom(5).hex()
    yield name
    unlink_run(name)


def in_other_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_see_the_same_bytes_and_exit_keeps_the_segment(run_id: str) -> None:
    add_owner(run_id, os.getpid())
    segment = Segment.create(run_id, "frames", 10_000)
    assert segment.n_bytes == 12_288
    values = np.frombuffer(segment.buf, np.int64)
    assert not values.any()
    values[3] = 77
    code = (
        "from shared.memory.segments import Segment; import numpy as np\n"
        f"s = Segment.attach({run_id!r}, 'frames'); v = np.frombuffer(s.buf, np.int64); print(v[3]); v[4] = 78; s.close()"
    )
    assert in_other_process(code).strip() == "77"
    assert values[4] == 78
    assert list_run(run_id) == ["frames"]  # an attached process that exits does not take it along


def test_segment_is_private_to_the_user(run_id: str) -> None:
    Segment.create(run_id, "kv", 1)
    assert segment_path(run_id, "kv").stat().st_mode & 0o777 == 0o600


def test_create_twice_fails_and_attach_of_nothing_is_a_sentence(run_id: str) -> None:
    Segment.create(run_id, "kv", 1)
    with pytest.raises(FileExistsError):
        Segment.create(run_id, "kv", 1)
    with pytest.raises(ConfigError, match="no segment trace"):
        Segment.attach(run_id, "trace")


def test_memory_is_reserved_when_created(run_id: str) -> None:
    Segment.create(run_id, "kv", 1 << 20)
    assert segment_path(run_id, "kv").stat().st_blocks * 512 >= 1 << 20


def test_too_large_a_segment_says_how_much_is_free(run_id: str) -> None:
    with pytest.raises(CapacityError, match=r"needs 1,152,921,504,606,846,976 bytes of /dev/shm but [\d,]+ are free"):
        Segment.create(run_id, "kv", 1 << 60)
    assert list_run(run_id) == []


def test_readonly_attachment_can_not_write(run_id: str) -> None:
    Segment.create(run_id, "trace", 100)
    view = Segment.attach(run_id, "trace", is_readonly=True)
    with pytest.raises(TypeError):
        view.buf[0] = 1


def test_close_with_arrays_alive_keeps_them_valid(run_id: str) -> None:
    segment = Segment.create(run_id, "frames", 4096)
    array = np.frombuffer(segment.buf, np.uint8)
    segment.close()
    unlink(run_id, "frames")
    assert array.sum() == 0


def test_sweep_takes_dead_runs_and_leaves_living_ones(run_id: str) -> None:
    add_owner(run_id, os.getpid())
    Segment.create(run_id, "frames", 1)
    dead = os.urandom(5).hex()
    code = (
        "import os; from shared.memory.segments import *\n"
        f"add_owner({dead!r}, os.getpid()); Segment.create({dead!r}, 'frames', 1); print(is_run_alive({dead!r}))"
    )
    assert in_other_process(code).strip() == "True"
    assert list_run(dead) == ["frames"]
    assert dead in sweep_dead_runs()
    assert list_run(dead) == []
    assert list_run(run_id) == ["frames"]


def test_reused_pid_is_not_the_owner(run_id: str) -> None:
    add_owner(run_id, os.getpid())
    assert is_run_alive(run_id)
    owner = Path(f"/dev/shm/colibri-{os.getuid()}-{run_id}.owner")
    owner.write_text(f"[[{os.getpid()}, {(process_start(os.getpid()) or 0) - 1}]]")
    assert not is_run_alive(run_id)


def test_damaged_owner_record_counts_as_dead(run_id: str) -> None:
    Segment.create(run_id, "frames", 1)
    Path(f"/dev/shm/colibri-{os.getuid()}-{run_id}.owner").write_text("{")
    assert run_id in sweep_dead_runs()


def test_run_without_owner_record_gets_a_minute(run_id: str) -> None:
    """It may be just starting, in another process of this user."""
    Segment.create(run_id, "frames", 1)
    assert run_id not in sweep_dead_runs()
    assert list_run(run_id) == ["frames"]
    old = time.time() - 3600
    os.utime(segment_path(run_id, "frames"), (old, old))
    assert run_id in sweep_dead_runs()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOENT, "is missing"),
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission"),
        (errno.ENOSPC, "is full"),
    ],
)
def test_shared_memory_that_can_not_be_used_is_named(
    run_id: str, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), "/dev/shm/x")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr("shared.memory.segments.replace_file", refuse)
    for use in (lambda: Segment.create(run_id, "frames", 1), lambda: add_owner(run_id, 1), sweep_dead_runs):
        with pytest.raises(ConfigError, match=f"^/dev/shm .*{words}.*: .*mount|enlarge"):
            use()
