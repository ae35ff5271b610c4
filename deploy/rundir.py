"""A group's run directory: its lock, its files, what is left of a dead group and how it goes away.

lock              held (flock) by colibri-up and the keeper as long as the group lives; holds who
group.json        the frozen configuration
supervisord.conf  what the keeper runs
budget            the memory budget, once `colibri ram` has changed it
processes.json    pids and states of the services, kept up to date by the keeper
sock/             sockets (elsewhere when the path would be too long)
log/              one log per service, kept after the group's end
incarnation/      how often each service was started in this run
failed/           last words of services that failed
keep-warm         there while the group is stopped with --keep-warm: its named memory is to be kept
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from shared.awake import Countdown
from shared.errors import ConfigError
from shared.files import open_file
from shared.locks import try_lock
from shared.machine.processes import process_start
from shared.memory.segments import unlink_run
from shared.run import running
from shared.run.config import BUDGET_NAME, FROZEN_NAME, LOCK_NAME, load_frozen
from shared.run.running import PROCESSES_NAME, read_json
from shared.wire.endpoints import Endpoints

SUPERVISOR_CONF_NAME = "supervisord.conf"
KEEP_NAME = "keep-warm"
ENDING_S = 15.0
"""So long a start waits for a group that is about to end: more than its keeper needs."""
# The mark goes last: whoever else cleans up at the same time must not miss it while there is still something to keep.
_VOLATILE = (SUPERVISOR_CONF_NAME, PROCESSES_NAME, BUDGET_NAME, "supervisor.pid", FROZEN_NAME, KEEP_NAME)
_VOLATILE_DIRS = ("sock", "incarnation", "failed")


def prepare(run_dir: Path) -> None:
    """Makes the run directory, for this user alone. Raises ConfigError when that can't be."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, above = run_dir.stat(), run_dir.parent.stat()
    except OSError as error:
        raise ConfigError(f"run directory {run_dir}: {error.strerror}; choose another with --run-dir") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"run directory {run_dir} belongs to user {found.st_uid}; choose another with --run-dir")
    if above.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"run directory {run_dir} lies in a directory of user {above.st_uid}; choose another with --run-dir"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"run directory {run_dir} can be written by others; make it private (chmod 700) or choose another"
        )


def take_lock(run_dir: Path) -> int:
    """The lock's descriptor, to be kept open (and inherited by the keeper). ConfigError when a group runs here.

    A group that has lost its head and is about to end is waited for.
    """
    path = run_dir / LOCK_NAME
    fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    limit = Countdown(ENDING_S)
    was_ending = False  # who ends removes on its way what says so
    try:
        while not try_lock(fd, path):
            was_ending = was_ending or is_ending(run_dir)
            if limit.is_over or not was_ending:
                owner = read_json(path)
                where = f", serving {owner['url']}" if owner.get("url") else ""
                raise ConfigError(
                    f"a group already runs in {run_dir} (process {owner.get('pid', 'unknown')}{where}). "
                    f"Stop it with `colibri-up --stop --run-dir {shlex.quote(str(run_dir))}`, or choose another --run-dir."
                )
            time.sleep(0.02)
        describe_lock(fd, os.getpid())
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_ending(run_dir: Path) -> bool:
    """Whether who keeps the group alive is dead already, so that the others who hold the lock are about to leave."""
    keepers = [read_json(run_dir / LOCK_NAME).get("holder"), running.processes(run_dir).get("keeper")]
    return any(process_start(known[0]) != known[1] for known in keepers if known)


def describe_lock(fd: int, pid: int, **facts: Any) -> None:
    """Writes who holds the lock, for a second start. ``pid``: the process whose end is the group's."""
    _write_lock(fd, {"pid": pid, "holder": [pid, process_start(pid)], **facts})


def describe_end(fd: int) -> None:
    """Writes that nobody keeps the group alive any more: whoever still holds the lock is about to leave."""
    _write_lock(fd, {"pid": os.getpid(), "holder": [0, 0]})


def _write_lock(fd: int, facts: dict[str, Any]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(facts).encode(), 0)


def clean_run(run_dir: Path, run_id: str, *, was_killed: bool = False) -> None:
    """Removes all that must not outlive a group: segments, sockets, its files. Logs and the lock file stay.

    Named memory stays too when ``--keep-warm`` asked for it, under its model's name, or when the group ``was_killed`` as a
    whole: then the start that finds it adopts or removes it.
    """
    _clean_named_memory(run_dir, run_id, was_killed)
    unlink_run(run_id)
    shutil.rmtree(Endpoints(run_dir, run_id).socket_dir, ignore_errors=True)
    for name in _VOLATILE_DIRS:
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for path in (*(run_dir / name for name in _VOLATILE), *run_dir.glob("*.new")):  # .new: killed while writing
        with contextlib.suppress(OSError):
            path.unlink()


def _clean_named_memory(run_dir: Path, run_id: str, was_killed: bool) -> None:
    try:
        config = load_frozen(run_dir / FROZEN_NAME)
    except ConfigError:
        return
    if config.huge_dir is None or config.run_id != run_id:
        return
    from shared.memory import warm_sets  # with NumPy and the kernels: not needed by most starts and stops

    directory = Path(config.huge_dir)
    if (run_dir / KEEP_NAME).exists():
        warm_sets.keep(directory, run_id, config.fingerprint, config.model_name)
    if not was_killed:
        warm_sets.drop_run(directory, run_id)


def clean_leftovers(run_dir: Path) -> str | None:
    """With the lock held: removes what a group that died here left behind. Returns its run id, None when clean."""
    try:
        run_id = load_frozen(run_dir / FROZEN_NAME).run_id
    except ConfigError:
        run_id = str(read_json(run_dir / FROZEN_NAME).get("run_id", ""))
    if not run_id.isalnum():
        for name in _VOLATILE_DIRS:
            shutil.rmtree(run_dir / name, ignore_errors=True)
        return None
    clean_run(run_dir, run_id, was_killed=True)
    return run_id
