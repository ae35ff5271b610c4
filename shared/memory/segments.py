"""Named memory that several processes map: create, attach, close, unlink, sweep. The only module that maps segments.

A segment is the file ``/dev/shm/colibri-<uid>-<run id>-<name>``, mode 0600. ``colibri-up`` creates and unlinks them, services
attach by name; a crash of a service loses none. Beside them lies ``colibri-<uid>-<run id>.owner`` with the processes
whose life keeps the run alive (pid and start time); when all are gone, the next start sweeps the run's segments.

Not ``multiprocessing.shared_memory``: before Python 3.13 a segment is unlinked when any attached process exits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from shared.errors import CapacityError, ConfigError
from shared.files import read_file
from shared.kept import replace_file
from shared.machine.memory_probe import file_bytes
from shared.machine.processes import process_start

SHM_DIR = Path("/dev/shm")
PAGE_BYTES = 4096
OWNERLESS_S = 60.0
_OWNERS_LIMIT_BYTES = 1 << 20
FRAMES, KV, MTP_KV, TRACE, COUNTERS = "frames", "kv", "mtp_kv", "trace", "counters"


def segment_path(run_id: str, name: str) -> Path:
    return SHM_DIR / f"colibri-{os.getuid()}-{run_id}-{name}"


def _owner_path(run_id: str) -> Path:
    return SHM_DIR / f"colibri-{os.getuid()}-{run_id}.owner"


@contextlib.contextmanager
def _cause_named() -> Iterator[None]:
    """An OSError of shared memory as a ConfigError that says what is wrong with it and what helps."""
    try:
        yield
    except FileExistsError:
        raise  # no matter of the surroundings
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            problem, remedy = "is missing", "mount a tmpfs there"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem, remedy = "is full", "free some of it, or enlarge it (docker run --shm-size, or remount with size=)"
        else:
            problem, remedy = f"can't be written ({error.strerror})", "mount a tmpfs there that this user may write"
        raise ConfigError(f"{SHM_DIR} {problem}; the processes of a group share memory there: {remedy}") from None


class Segment:
    """One mapped segment. ``buf`` is the mapping (for ``numpy.frombuffer``), zeroed when created."""

    def __init__(self, run_id: str, name: str, buf: mmap.mmap, n_bytes: int) -> None:
        self.run_id = run_id
        self.name = name
        self.buf = buf
        self.n_bytes = n_bytes

    @classmethod
    def create(cls, run_id: str, name: str, n_bytes: int) -> Segment:
        """A new segment of zeroes whose memory is reserved now. Raises CapacityError when there is no room for it."""
        size = max(PAGE_BYTES, -(-n_bytes // PAGE_BYTES) * PAGE_BYTES)
        path = segment_path(run_id, name)
        with _cause_named():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            free = os.statvfs(path)
            free_bytes = free.f_bavail * free.f_frsize
            if size > free_bytes:
                raise OSError("too large")
            # Reserved, not only sized: otherwise a full /dev/shm shows later, as a bus error in some service.
            os.posix_fallocate(fd, 0, size)
            buf = mmap.mmap(fd, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CapacityError(
                f"segment {name} needs {size:,} bytes of {SHM_DIR} but {free_bytes:,} are free ({error.strerror or error});"
                " lower the context, the number of sequences or the prefill chunk, or enlarge that file system"
            ) from None
        finally:
            os.close(fd)
        return cls(run_id, name, buf, size)

    @classmethod
    def attach(cls, run_id: str, name: str, *, is_readonly: bool = False) -> Segment:
        """Maps an existing segment. Raises ConfigError when the run has none of this name."""
        path = segment_path(run_id, name)
        try:
            fd = os.open(path, (os.O_RDONLY if is_readonly else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ConfigError(f"run {run_id} has no segment {name}: is its group still running?") from None
        try:
            size = os.fstat(fd).st_size
            buf = mmap.mmap(fd, size, access=mmap.ACCESS_READ if is_readonly else mmap.ACCESS_WRITE)
        finally:
            os.close(fd)
        return cls(run_id, name, buf, size)

    def close(self) -> None:
        """Unmaps, unless arrays still point into the mapping: then it goes with the last of them."""
        try:
            self.buf.close()
        except BufferError:
            return


def list_run(run_id: str) -> list[str]:
    """Names of the run's segments."""
    prefix = f"colibri-{os.getuid()}-{run_id}-"
    return sorted(path.name[len(prefix) :] for path in SHM_DIR.glob(f"{prefix}*"))


def run_bytes(run_id: str) -> int:
    """Memory that the run's segments hold, touched or reserved."""
    return sum(file_bytes(segment_path(run_id, name)) for name in list_run(run_id))


def unlink(run_id: str, name: str) -> None:
    """Removes a segment's name; processes that have it mapped keep their view. Absent is fine."""
    segment_path(run_id, name).unlink(missing_ok=True)


def unlink_run(run_id: str) -> None:
    """Removes all segments of a run and its owner record, as far as that is possible."""
    for path in [*(segment_path(run_id, name) for name in list_run(run_id)), _owner_path(run_id)]:
        with contextlib.suppress(OSError):  # a read-only file system says so even of a file that is not there
            path.unlink()


def add_owner(run_id: str, pid: int) -> None:
    """Records a process that keeps the run alive. Raises ConfigError when shared memory can't be used."""
    path = _owner_path(run_id)
    owners = _read_owners(path)
    owners.append([pid, process_start(pid) or 0])
    with _cause_named():
        replace_file(path, json.dumps(owners).encode(), by_way_of=path.with_suffix(".owner-new"))


def _read_owners(path: Path) -> list[list[int]]:
    try:
        return [[int(pid), int(start)] for pid, start in json.loads(read_file(path, _OWNERS_LIMIT_BYTES))]
    except (OSError, ValueError, TypeError):
        return []


def is_run_alive(run_id: str) -> bool:
    """Whether one of the run's owners lives."""
    return any(process_start(pid) == start for pid, start in _read_owners(_owner_path(run_id)))


def sweep_dead_runs() -> list[str]:
    """Removes the segments of this user's runs whose owners are all gone; returns their run ids.

    A run without any owner record is left alone for a minute: somebody may be about to write it. Raises ConfigError.
    """
    pattern = re.compile(rf"colibri-{os.getuid()}-([0-9a-z]+)[-.].+")
    youngest: dict[str, float] = {}
    with _cause_named():
        found = list(SHM_DIR.iterdir())
    for path in found:
        match = pattern.fullmatch(path.name)
        if match:
            with contextlib.suppress(FileNotFoundError):
                youngest[match[1]] = max(path.stat().st_mtime, youngest.get(match[1], 0.0))
    dead = []
    for run_id, changed in sorted(youngest.items()):
        has_owner = _owner_path(run_id).exists()
        if not is_run_alive(run_id) and (has_owner or time.time() - changed > OWNERLESS_S):
            unlink_run(run_id)
            dead.append(run_id)
    return dead
