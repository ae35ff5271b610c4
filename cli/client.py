"""Sessions of the command line: the group that runs, or one of our own.

Used by ``colibri run``, ``chat`` and ``profile``. Imports no service and no numpy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from native.process import die_with_parent
from shared.awake import Countdown
from shared.errors import ColibriError, ConfigError
from shared.messages.control import ServiceState
from shared.run.child import child_environment
from shared.run.client import Client, ask_status, find_group
from shared.run.config import GroupConfig, is_locked
from shared.run.forks import Process, start_module
from shared.run.terminal import complain
from shared.wire.endpoints import default_run_dir

STOP_WAIT_S = 60.0
START_WAIT_S = 600.0
"""How long a group that somebody else starts may take; a large model takes minutes."""


# ---- finding and starting a group ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """A server to talk to. ``run_dir`` is known for a group of this machine only."""

    client: Client
    run_dir: Path | None
    is_ours: bool = False
    """We started it, so we stop it."""


@contextlib.contextmanager
def open_session(
    url: str | None,
    run_dir: str | None,
    model: str | None,
    *,
    may_start: bool = True,
    record_routing: str | None = None,
) -> Iterator[Session]:
    """The group at ``url``, else the one of ``run_dir``, else a new one that is stopped at the end. Raises ConfigError.

    ``record_routing``: the trace file of a group that is started here; one that runs already can't begin to record.
    """
    if record_routing is not None:
        record_routing = str(Path(os.path.expanduser(record_routing)).absolute())
    if url is not None:
        if record_routing is not None:
            raise ConfigError("a server elsewhere can't be told to record; start it with colibri-up --record-routing")
        yield Session(Client(url), Path(os.path.expanduser(run_dir)) if run_dir else None)
        return
    directory = Path(os.path.expanduser(run_dir)).absolute() if run_dir else default_run_dir()
    found = _await_group(directory)
    if found is not None:
        if model and not os.path.isdir(Path(os.path.expanduser(model))):
            from shared.container.recognise import why_no_container  # brings numpy

            raise ConfigError(why_no_container(model))
        if model and os.path.realpath(Path(os.path.expanduser(model))) != os.path.realpath(found[0].model_dir):
            raise ConfigError(
                f"the group in {directory} runs {found[0].model_dir}, not {model};"
                f" stop it with colibri-up --stop, or choose another --run-dir"
            )
        if record_routing not in (None, found[0].record_routing):
            raise ConfigError(
                f"the group in {directory} runs without --record-routing {record_routing}; stop it with colibri-up --stop,"
                " or choose another --run-dir"
            )
        yield Session(Client(found[1]), directory)
        return
    if not may_start:
        raise ConfigError(f"no group is running in {directory}; start one with colibri-up")
    flags = ["--record-routing", record_routing] if record_routing else []
    with _own_group(directory, [*flags, *([model] if model else [])]) as url:
        yield Session(Client(url), directory, is_ours=True)


def _await_group(directory: Path) -> tuple[GroupConfig, str] | None:
    """``find_group``, but a group that is still starting there is waited for."""
    limit = Countdown(START_WAIT_S)
    is_told = False
    while True:
        found = find_group(directory)
        if found is not None and _can_answer(found[0]):
            return found
        if not is_locked(directory) or limit.is_over:
            return found
        if not is_told:
            complain(f"waiting for the group that is starting in {directory} ...")
            is_told = True
        time.sleep(0.2)


def _can_answer(config: GroupConfig) -> bool:
    """Whether waiting is useless: it is ready, or on its way out and will say so itself."""
    status = ask_status(config)
    return status is not None and (status.is_ready or any(s.state == ServiceState.DRAINING for s in status.services))


@contextlib.contextmanager
def _own_group(directory: Path, arguments: list[str]) -> Iterator[str]:
    """A group that lives as long as this block, and ends too when this process is killed. Yields its address."""
    # Any free port: the group is ours alone and must not meet one of another run directory.
    process = start_module(
        "deploy.up",
        *("--run-dir", str(directory), "--port", "0", *arguments),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        new_session=True,  # Ctrl-C is ours: it may only stop an answer
        before=functools.partial(die_with_parent, signal.SIGTERM),
    )
    ready = threading.Event()
    relay = threading.Thread(target=_relay, args=(process.stdout, ready), daemon=True)
    relay.start()
    old_handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        while not ready.wait(0.05):
            if process.poll() is not None:
                relay.join(5)
                raise _StartFailed("the group could not be started (its words are above)", process.returncode or 70)
        found = find_group(directory)
        if found is None:
            raise ConfigError(f"colibri-up reported success but no group answers in {directory}")
        yield found[1]
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        _stop_process(process)


def _relay(source: IO[bytes] | None, ready: threading.Event) -> None:
    """colibri-up's progress, on standard error until it is ready; what it says later is about a terminal it has not got."""
    assert source is not None
    for line in source:
        if not ready.is_set():
            with contextlib.suppress(OSError):
                complain(line.decode("utf-8", "replace").removesuffix("\n"))
            if line.startswith(b"ready "):
                ready.set()


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _stop_process(process: Process) -> None:
    """The first SIGTERM lets it drain and stop; nothing of ours is running any more, so that is quick."""
    if process.poll() is None:
        process.terminate()
        limit = Countdown(STOP_WAIT_S)
        while not limit.is_over:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit.step_s)
                return
        process.terminate()
        process.wait()


class _StartFailed(ColibriError):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
