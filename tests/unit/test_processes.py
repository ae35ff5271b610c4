"""Facts about processes and mounts, compared with what this process knows about itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from shared.machine.memory_probe import page_cache_bytes, swapped_bytes
from shared.machine.mounts import device_of, read_mounts
from shared.machine.processes import (
    TICKS_PER_S,
    children_of,
    own_bytes,
    process_line,
    process_start,
    read_counts,
    service_bytes,
)
from tests.support.waiting import wait_for


def test_a_process_from_its_start_to_its_end(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert child.pid in children_of(os.getpid())
    start = process_start(child.pid)
    assert start is not None
    booted_at = psutil.boot_time() + start / TICKS_PER_S
    assert abs(booted_at - psutil.Process(child.pid).create_time()) < 1.5
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: (line := process_line(child.pid)) and line.state == "T", "the stop")
    child.send_signal(signal.SIGCONT)
    child.stdin.close()
    wait_for(lambda: (line := process_line(child.pid)) and line.state == "Z", "the end")
    assert process_start(child.pid) is None
    child.wait()
    assert process_line(child.pid) is None
    assert read_counts(child.pid) is None
    assert children_of(child.pid) == []
    assert own_bytes(child.pid) == 0


def test_what_is_read_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))
    before = read_counts(os.getpid())
    file.read_bytes()
    after = read_counts(os.getpid())
    assert before is not None and after is not None
    assert after[0] - before[0] >= 1 << 20


def test_memory_beside_named_memory() -> None:
    whole = psutil.Process().memory_full_info().pss
    assert 0.5 * whole < own_bytes(os.getpid()) < 1.5 * whole
    assert service_bytes(os.getpid()) >= 0.9 * own_bytes(os.getpid())
    assert page_cache_bytes() > 0
    assert swapped_bytes() >= 0


def test_every_mount_has_a_device(tmp_path: Path) -> None:
    here = device_of(Path("/"))
    assert any(mount.device == here and mount.directory == Path("/") for mount in read_mounts())
    table = tmp_path / "mountinfo"
    table.write_text("1 0 8:1 / /a\\040b rw,noatime - ext4 /dev/a rw,huge=always\ntoo short - x\n\n")
    assert [(m.device, m.directory, m.fs, m.options) for m in read_mounts(table)] == [
        ("8:1", Path("/a b"), "ext4", frozenset({"rw", "noatime", "huge=always"}))
    ]
    assert read_mounts(tmp_path / "absent") == []
