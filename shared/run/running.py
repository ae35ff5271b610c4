"""Who runs in a run directory: what colibri-up and its keeper write there of a living group, for themselves and for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.files import read_file
from shared.kept import replace_file
from shared.machine.processes import process_start
from shared.run.config import FROZEN_NAME, GroupConfig, is_locked, load_frozen

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


def keeper_pid(run_dir: Path) -> int | None:
    """The keeper's pid if it lives (and is not another process with the same number)."""
    pid, start = processes(run_dir).get("keeper") or (0, 0)
    return int(pid) if pid and process_start(pid) == start else None
