"""What a group holds, 20 times a second, and control groups to run one in."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from shared.machine.memory_probe import file_bytes
from shared.machine.processes import own_bytes, service_bytes
from shared.memory.segments import run_bytes
from tests.group.harness import Group

PERIOD_S = 0.05
V1 = Path("/sys/fs/cgroup/memory")


def held_bytes(group: Group) -> dict[str, int]:
    """What each process of the group holds by itself (keeper and colibri-up included), and the segments in full.

    A service's own child counts with it.
    """
    found = group.processes()
    pids = {name: int(entry["pid"]) for name, entry in found.get("services", {}).items() if entry.get("pid")}
    held = {name: service_bytes(pid) for name, pid in pids.items()}
    starters = {"keeper": int((found.get("keeper") or [0])[0]), "up": group.process.pid if group.process else 0}
    held |= {name: own_bytes(pid) for name, pid in starters.items() if pid}
    held["segments"] = run_bytes(group.run_id)
    for path in named_files(group):
        held[path.name.partition("+")[2]] = file_bytes(path)
    return held


def named_files(group: Group) -> list[Path]:
    """The group's named huge memory, where this machine has such."""
    directory = json.loads((group.run_dir / "group.json").read_text())["huge_dir"]
    return list(Path(directory).glob(f"colibri-*-{group.run_id}+*")) if directory else []


class MemorySampler:
    """Samples while it is entered. ``peak``: the largest sum; ``peak_of``: what was held then."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = 0
        self.peak_of: dict[str, int] = {}
        self.n_samples = 0

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def reset(self) -> None:
        """Forget the peak."""
        self.peak, self.peak_of = 0, {}

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            held = held_bytes(self._group)
            self.n_samples += 1
            if sum(held.values()) > self.peak:
                self.peak, self.peak_of = sum(held.values()), held


class ControlGroup:
    """A memory control group (version 1) inside our own. ``limit``: bytes, None for none."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.path = own_group() / f"colibri-test-{os.getpid()}-{name}"
        self.path.mkdir()
        self.limit_file = self.path / "memory.limit_in_bytes"
        if limit is not None:
            self.limit_file.write_text(str(limit))

    def wrap(self, argv: list[str]) -> list[str]:
        """A command that runs ``argv`` inside, in the same process."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *argv]

    def fill_cache(self, path: Path) -> None:
        """Reads a file twice, so that its pages count as active."""
        command = ["sh", "-c", 'cat "$0" "$0" > /dev/null', str(path)]
        subprocess.run(self.wrap(command), check=True)

    def value(self, name: str, key: str = "") -> int:
        text = (self.path / name).read_text()
        if not key:
            return int(text)
        return next(int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key)

    def remove(self) -> None:
        """Once its processes are gone."""
        deadline = time.monotonic() + 5.0
        while True:
            with contextlib.suppress(OSError):
                (self.path / "memory.force_empty").write_text("0")
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def own_group() -> Path:
    """The directory of our memory control group, version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return V1 / path.lstrip("/") if (V1 / path.lstrip("/")).is_dir() else V1
    raise OSError("no memory control group of version 1")


def why_no_control_groups() -> str:
    """Empty when groups can be made and limited here."""
    try:
        group = ControlGroup("probe", 1 << 30)
        group.remove()
    except OSError as error:
        return f"no memory control group can be made here ({error.strerror or error})"
    return ""


def colibri(*argv: str) -> subprocess.CompletedProcess[str]:
    """The command ``colibri`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *argv], capture_output=True, text=True, timeout=60, check=False
    )
