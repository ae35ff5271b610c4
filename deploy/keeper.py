"""The process that keeps a group alive: supervisor, plus what must happen when the group ends, however it ends.

``python -m deploy.keeper RUN_DIR`` is forked by colibri-up early, loads modules while colibri-up plans, and waits for
``start`` on its stdin. It holds the run's lock through an inherited descriptor, runs supervisor in its own process and at last
removes segments and sockets. It ends when told to (SIGTERM) and when its stdin closes: that is how it learns of colibri-up's
death. ``detach`` before the close means: go on alone.

``processes.json`` in the run directory always says which process serves what; it is the truth about pids.
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from supervisor import events
from supervisor.medusa import asyncore_25
from supervisor.options import ServerOptions
from supervisor.states import ProcessStates, SupervisorStates, getProcessStateDescription
from supervisor.supervisord import Supervisor

from deploy import loading
from deploy.rundir import SUPERVISOR_CONF_NAME, clean_run
from deploy.supervisor_conf import INTERPRETER
from shared.awake import AwakeClock
from shared.machine.processes import is_stopped, process_start
from shared.memory.segments import add_owner
from shared.run import forks
from shared.run.config import FROZEN_NAME, load_frozen
from shared.run.running import PROCESSES_NAME, write_json

START = b"start\n"
POLL_LONGEST_S = 3.0
"""Supervisor polls for a second at most; the rest is for a busy machine."""
STOPPED_S = 4.0
_HAS_PROCESS = (ProcessStates.STARTING, ProcessStates.RUNNING, ProcessStates.STOPPING)


class _Descriptor:
    """A descriptor in supervisor's poll loop."""

    def __init__(self, fd: int, on_read: Any) -> None:
        self.fd = fd
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        self._on_read()

    def handle_error(self) -> None:
        raise


class _Poller:
    """Supervisor's poller, with a word before and after each poll; the first one does not wait, for nothing runs yet."""

    def __init__(self, poller: Any, on_polled: Any) -> None:
        self._poller = poller
        self._on_polled = on_polled
        self._is_first = True

    def poll(self, timeout_s: float) -> Any:
        found = self._poller.poll(0 if self._is_first else timeout_s)
        self._is_first = False
        self._on_polled()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)


class Keeper(Supervisor):  # type: ignore[misc]
    """Supervisor that starts its services at once, notices signals and ended children at once, follows its parent, writes down
    who runs, and does not count the time in which it stood still itself."""

    def __init__(self, options: ServerOptions, run_dir: Path) -> None:
        super().__init__(options)
        options.poller = _Poller(options.poller, self._on_polled)
        self._run_dir = run_dir
        # Supervisor's limits are moments of this clock, which goes on while a machine is suspended.
        self._awake = AwakeClock(POLL_LONGEST_S, time.time)
        self._slept_s = 0.0
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._extra = {self._wake_read: _Descriptor(self._wake_read, self._on_wake), 0: _Descriptor(0, self._on_parent)}
        self._services: dict[str, dict[str, Any]] = {}
        self._stopped_since: dict[int, float] = {}

    def runforever(self) -> None:
        # Python retries an interrupted poll, so without this a signal would wait for the poll's timeout of a second.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        events.subscribe(events.ProcessStateEvent, self._on_state)
        events.subscribe(events.Tick5Event, self._on_tick)
        super().runforever()

    def get_process_map(self) -> dict[int, Any]:
        return {**super().get_process_map(), **self._extra}

    def _on_polled(self) -> None:
        self._awake.now()
        slept_s = self._awake.slept_s - self._slept_s
        if slept_s:
            self._slept_s = self._awake.slept_s
            self.options.logger.warn(f"paused for {slept_s:.0f} s: limits count from now on")
            self._stopped_since.clear()
            for group in self.process_groups.values():
                for process in group.processes.values():
                    process.delay += slept_s if process.delay else 0.0
                    process.laststart += slept_s if process.laststart else 0.0

    def _on_wake(self) -> None:
        os.read(self._wake_read, 512)

    def _on_parent(self) -> None:
        if not os.read(0, 64):
            self.options.logger.warn("colibri-up is gone: stopping")
            self.options.mood = SupervisorStates.SHUTDOWN
        del self._extra[0]
        self.options.poller.unregister_readable(0)

    def _on_state(self, event: events.ProcessStateEvent) -> None:
        process = event.process
        entry = self._services.setdefault(process.config.name, {"n_starts": 0})
        entry["state"] = getProcessStateDescription(process.state)
        entry["pid"] = process.pid if process.state in _HAS_PROCESS else 0
        entry["exit"] = process.exitstatus
        if process.state == ProcessStates.STARTING:
            entry["n_starts"] += 1
        self._write()
        if process.state in (ProcessStates.EXITED, ProcessStates.STOPPED):
            os.write(
                self._wake_write, b"!"
            )  # the next round of the loop starts it again (or ends): now, not in a second

    def _on_tick(self, _event: events.Tick5Event) -> None:
        """A service that a signal has stopped for so long will not go on by itself. The router watches its peers more
        closely, but nobody else watches the router."""
        now = self._awake.now()
        if self._awake.is_waking:
            return
        stopped = {entry["pid"] for entry in self._services.values() if entry["pid"] and is_stopped(entry["pid"])}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_since.items():
            if now - since >= STOPPED_S:
                self.options.logger.warn(
                    f"process {pid} is stopped by a signal: killing it, so that it is started again"
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def add_pids(self) -> None:
        """A pid is known only after the event of its start."""
        is_new = False
        for group in self.process_groups.values():
            for process in group.processes.values():
                entry = self._services.get(process.config.name)
                if entry is not None and process.state in _HAS_PROCESS and entry["pid"] != process.pid:
                    entry["pid"] = process.pid
                    is_new = True
        if is_new:
            self._write()

    def reap(self, once: bool = False, recursionguard: int = 0) -> None:
        self.add_pids()
        super().reap(once, recursionguard)

    def _write(self) -> None:
        pid = os.getpid()
        with contextlib.suppress(OSError):  # a full disk must not end the group
            write_json(
                self._run_dir / PROCESSES_NAME, {"keeper": [pid, process_start(pid)], "services": self._services}
            )


class ForkingOptions(ServerOptions):  # type: ignore[misc]
    """Supervisor's options; a child that is one of our modules needs no new program."""

    _may_stay = False

    def fork(self) -> int:
        self._may_stay = forks.is_clean()
        pid = os.fork()
        if pid == 0:
            forks.forget_parent()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return pid

    def execve(self, filename: str, argv: list[str], env: dict[str, str]) -> None:
        if self._may_stay and forks.is_module_command(argv):
            forks.become(argv, env)
        super().execve(filename, argv, env)


def use_own_interpreter(options: ServerOptions) -> None:
    """Past supervisor's file, whose rules no path survives that holds " ;", "%" or a line's end."""
    for group in options.process_group_configs:
        for program in group.process_configs:
            word, *arguments = shlex.split(program.command)
            assert word == INTERPRETER
            program.command = shlex.join([sys.executable, *arguments])


def main() -> None:
    run_dir = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loading.load_for_services(0)
    if os.read(0, len(START)) != START:
        return  # colibri-up found a reason not to start
    run_id = load_frozen(run_dir / FROZEN_NAME).run_id
    add_owner(run_id, os.getpid())
    os.chdir(run_dir)  # the configuration's paths are relative to it
    tempfile.tempdir = str(run_dir)  # supervisor asks for a default place, and asking writes a file to find one
    try:
        options = ForkingOptions()
        options.realize(["-c", SUPERVISOR_CONF_NAME], doc=__doc__)
        use_own_interpreter(options)
        options.first = True
        options.test = False
        Keeper(options, run_dir).main()
    except asyncore_25.ExitNow:
        pass
    finally:
        clean_run(run_dir, run_id)


if __name__ == "__main__":
    main()
