"""A memory limit for a command and everything it starts, page cache included, as on a machine with that little memory.

Linux counts the page cache of a file to the control group that read it first: take the model's files out of the cache
before (``drop_cache``), or what others have read comes for free. Needs a control group of the memory controller that we may
write to: usual as root under version 1; under version 2 only where the controller is handed down to us.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.roofline import BenchError

EMPTY_WAIT_S = 20.0
_ENTER = 'echo $$ > "$0" && exec "$@"'
"""For sh: enters the group, then becomes the command, so that nothing of it ever runs outside."""


@dataclass(frozen=True)
class _Names:
    """Files of a version's controller."""

    limit: str
    limit_with_swap: str
    swap: str
    peak: str
    events: str
    """The file with a line "oom_kill N"."""


_V1 = _Names(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.max_usage_in_bytes", "memory.oom_control"
)
_V2 = _Names("memory.max", "", "memory.swap.max", "memory.peak", "memory.events")


@dataclass(frozen=True)
class LimitedGroup:
    """A control group with a limit. ``limit_bytes``: of anonymous memory, shared memory and page cache together."""

    directory: Path
    limit_bytes: int
    names: _Names

    def command(self, arguments: list[str]) -> list[str]:
        """The same command, inside."""
        return ["sh", "-c", _ENTER, str(self.directory / "cgroup.procs"), *arguments]

    @property
    def peak_bytes(self) -> int | None:
        """The most that was ever charged; None where the kernel does not tell. Page cache fills any limit in time."""
        text = _read(self.directory / self.names.peak).strip()
        return int(text) if text.isdecimal() else None

    @property
    def n_killed(self) -> int:
        """Processes that the kernel ended because the limit was reached and nothing could be given back."""
        for line in _read(self.directory / self.names.events).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    @property
    def pids(self) -> list[int]:
        return [int(word) for word in _read(self.directory / "cgroup.procs").split()]


@contextlib.contextmanager
def memory_limit(limit_bytes: int, root: Path = Path("/")) -> Iterator[LimitedGroup]:
    """A group below our own, removed at the end; by then its processes must be gone.

    BenchError, with what would be needed, where it can't be made. ``root``: another file system root, for tests.
    """
    parent, names = _own_group(root)
    group = LimitedGroup(parent / f"colibri-bench-{os.getpid()}", limit_bytes, names)
    try:
        group.directory.mkdir()
    except OSError as error:
        raise BenchError(
            f"a memory limit needs a control group of its own, and {group.directory} can't be made ({error.strerror}). "
            "Run as root, or where the memory controller is handed down to this user."
        ) from None
    try:
        _set_limit(group)
        yield group
    finally:
        _remove(group)


def _own_group(root: Path) -> tuple[Path, _Names]:
    """Our group of the memory controller; version 1 goes first, as in a mixed system it is the one that has it."""
    unified: str | None = None
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            own = base / path.lstrip("/")
            return (own if own.is_dir() else base), _V1  # inside a container the path may be that of the host
        if not controllers:
            unified = path
    if unified is not None:
        base = root / "sys/fs/cgroup"
        own = base / unified.lstrip("/")
        own = own if own.is_dir() else base
        if "memory" in _read(own / "cgroup.subtree_control").split():
            return own, _V2
        # A group with processes of its own hands nothing down: then beside us, if our parent does.
        if own != base and "memory" in _read(own.parent / "cgroup.subtree_control").split():
            return own.parent, _V2
    raise BenchError(
        "a memory limit needs the memory controller of control groups, and this system hands it to nobody here. "
        "Use a virtual machine with that much memory instead."
    )


def _set_limit(group: LimitedGroup) -> None:
    names = group.names
    try:
        (group.directory / names.limit).write_text(str(group.limit_bytes))
    except OSError as error:
        raise BenchError(f"{group.directory / names.limit} can't be set ({error.strerror})") from None
    # No swap; where the kernel does not count it there is none to forbid.
    for name, value in ((names.limit_with_swap, group.limit_bytes), (names.swap, 0)):
        if name and (group.directory / name).exists():
            with contextlib.suppress(OSError):
                (group.directory / name).write_text(str(value))


def _remove(group: LimitedGroup) -> None:
    """Waits for the last process; the page cache it leaves is given back first, or the group could not go."""
    deadline = time.monotonic() + EMPTY_WAIT_S
    while True:
        with contextlib.suppress(OSError):
            (group.directory / "memory.force_empty").write_text("0")  # version 1 only
        try:
            group.directory.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"{group.directory} can't be removed ({error.strerror}); processes in it: {group.pids}"
                ) from None
        time.sleep(0.1)


def drop_cache(paths: Iterable[Path]) -> None:
    """Takes these files (of directories: all below) out of the page cache."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
