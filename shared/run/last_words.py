"""What a service leaves in the run directory for those after it: its last sentence, and how often it has been started."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from shared.errors import ConfigError
from shared.files import read_file
from shared.kept import replace_file

_LIMIT_BYTES = 1 << 20


def write_last_words(run_dir: Path, service: str, exit_code: int, reason: str) -> None:
    """Leaves a failure's sentence in the run directory, where colibri-up looks for it."""
    path = run_dir / "failed" / f"{service}.json"
    with contextlib.suppress(OSError):  # nothing better can be done while dying
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, json.dumps({"service": service, "exit_code": exit_code, "reason": reason}).encode())


def read_last_words(run_dir: Path, service: str) -> tuple[int, str] | None:
    """(exit code, sentence) a failed service left, None when it left none."""
    try:
        words = json.loads(read_file(run_dir / "failed" / f"{service}.json", _LIMIT_BYTES))
        return int(words["exit_code"]), str(words["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def next_incarnation(run_dir: Path, service: str) -> int:
    """1, 2, 3, ... for each start of a service within a run; kept in the run directory. Raises ConfigError."""
    path = run_dir / "incarnation" / service
    try:
        incarnation = int(read_file(path, _LIMIT_BYTES)) + 1
    except (OSError, ValueError):
        incarnation = 1
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, str(incarnation).encode())
        (run_dir / "failed" / f"{service}.json").unlink(missing_ok=True)  # words of an earlier incarnation
    except OSError as error:
        raise ConfigError(f"run directory {run_dir} can't be written: {error.strerror}") from None
    return incarnation
