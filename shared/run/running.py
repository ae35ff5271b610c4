"""Who runs in a run directory: what colibri-up and its keeper write there of a living group, for themselves and for tools."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.files import read_file
from shared.kept import replace_file
from shared.machine.processes import process_start
from shared.run.config import FROZEN_NAME, GroupConfig, is_locked, load_frozen
from shared.wire.endpoints import SERVICES

PROCESSES_NAME = "processes.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when there is none (yet)."""
    try:
        value = json.loads(read_file(path, 1 << 20))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: object) -> None:
    """Replaces the file at once. Raises OSError."""
    replace_file(path, json.dumps(value).encode())


def running_config(run_dir: Path) -> GroupConfig:
    """The configuration of the group that lives in ``run_dir``. ConfigError when there is none."""
    if not is_locked(run_dir):
        raise ConfigError(
            f"no group runs in {run_dir}. Start one with `colibri-up`, or name its directory with --run-dir."
        )
    return load_frozen(run_dir / FROZEN_NAME)


def processes(run_dir: Path) -> dict[str, Any]:
    """{"keeper": [pid, start time], "services": {name: {"pid", "state", "exit", "n_starts"}}}; empty before the start."""
    return read_json(run_dir / PROCESSES_NAME)


def members(run_dir: Path) -> list[tuple[int, int]]:
    """(pid, start time) of every process that serves or keeps a group of ``run_dir``, whoever started it and when.

    Told by what can't be an accident: our user, the command line of a service or keeper, and the run directory in it or as
    the process's own. Nothing on disk is believed: a keeper that was killed had no time to write.
    """
    try:
        wanted = run_dir.stat()
    except OSError:
        return []
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _is_member(Path("/proc") / name, run_dir, wanted):
            start = process_start(int(name))
            if start is not None:
                found.append((int(name), start))
    return found


def _is_member(process: Path, run_dir: Path, wanted: os.stat_result) -> bool:
    configs = (FROZEN_NAME.encode(), os.fsencode(run_dir / FROZEN_NAME))
    try:
        argv = (process / "cmdline").read_bytes().split(b"\0")
        module, *arguments = argv[argv.index(b"-m") + 1 :]
        if module == b"deploy.keeper":
            return arguments[:1] == [os.fsencode(run_dir)] and process.stat().st_uid == os.getuid()
        room, service, *helper = module.decode().split(".")
        if room != "services" or service not in SERVICES:
            return False
        if not helper and arguments[arguments.index(b"--config") + 1] not in configs:
            return False
        place = (process / "cwd").stat()
    except (OSError, ValueError, IndexError):
        return False
    return process.stat().st_uid == os.getuid() and (place.st_dev, place.st_ino) == (wanted.st_dev, wanted.st_ino)


def kill_process(pid: int, start: int) -> None:
    """SIGKILL, to this very process or to none."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if process_start(pid) == start:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


def keeper_pid(run_dir: Path) -> int | None:
    """The keeper's pid if it lives (and is not another process with the same number)."""
    pid, start = processes(run_dir).get("keeper") or (0, 0)
    return int(pid) if pid and process_start(pid) == start else None
