"""Starting, watching and stopping a group: plan, segments, keeper, readiness, drain. Prints nothing.

Used by ``colibri-up`` and by commands that need a group for a while. Knows services by name only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import rundir
from deploy.supervisor_conf import ENVIRONMENT, render, services_of
from shared.awake import Countdown
from shared.errors import EXIT_CONFIG, EXIT_FAULT, ColibriError, ConfigError
from shared.files import is_file, open_file, read_file
from shared.kept import replace_file
from shared.machine.processes import is_stopped
from shared.messages import control
from shared.messages.control import ServiceState
from shared.run import running
from shared.run.address import listen, url_of
from shared.run.child import child_environment
from shared.run.config import FROZEN_NAME, GroupConfig, Settings, freeze, is_locked, passed_on
from shared.run.forks import Process, start_module
from shared.run.last_words import read_last_words
from shared.wire.endpoints import DRAFTER, GATEWAY, Endpoints, default_run_dir

if TYPE_CHECKING:
    from shared.container.reader import Container
    from shared.memory.warm_sets import WarmSet
    from shared.model.spec import ModelSpec
    from shared.planning.drive_probe import Drives
    from shared.planning.ledger import Ledger

EMBEDDED_MODEL = "fledgling"
TRACE_ROWS = 1 << 16
KEEPER_STOP_S = 12.0
KEEPER_LOG = "keeper.log"
_LOG_LIMIT_BYTES = 64 << 20
POLL_S = 0.05
QUESTION_S = 1.0
"""So long an answer is waited for before it is asked again: the router that was asked may have ended."""


class StartFailed(ColibriError):
    """A service failed before the group was ready; the text is that service's own last message."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class StartPlan:
    """What a start would do."""

    config: GroupConfig
    spec: ModelSpec
    ledger: Ledger
    n_drives: int
    """Drives that experts are read from."""
    adopts: WarmSet | None = None
    notes: list[str] = field(default_factory=list)
    """For people: what happened to memory that was kept warm."""


def run_dir_of(settings: Settings) -> Path:
    """The run directory that was asked for, or the user's default one."""
    return Path(os.path.expanduser(settings.run_dir)).absolute() if settings.run_dir else default_run_dir()


def model_dir_of(settings: Settings) -> Path:
    """The model directory that was asked for, or the embedded model's."""
    if settings.model:
        path = Path(os.path.expanduser(settings.model)).absolute()
        if not os.path.isdir(path):
            from shared.container.recognise import why_no_container

            raise ConfigError(why_no_container(settings.model if settings.model[:1] != "~" else path))
        return path
    embedded = Path(str(resources.files("models"))) / EMBEDDED_MODEL
    if not embedded.is_dir():
        raise ConfigError(f"the embedded model is not at {embedded}; name a model directory: `colibri-up MODEL`")
    return embedded


def claim_port(host: str, port: int) -> int:
    """Checks that ``port`` can be listened on before anything is loaded; 0 finds a free one. Raises ConfigError."""
    listeners = listen(host, port)
    port = int(listeners[0].getsockname()[1])
    for listener in listeners:
        listener.close()
    return port


def make_plan(
    settings: Settings, run_dir: Path, port: int, report: Callable[[str], None] = lambda _: None
) -> StartPlan:
    """Reads the model's description, shares out the memory and finds out how the drive is read fastest.

    ``report`` is told what takes a moment. What an earlier group kept warm for another model may go. Raises ContainerError,
    CapacityError, ConfigError.
    """
    from deploy.warm import plan_memory
    from native.library import default_threads
    from shared.container.reader import Container, no_tokenizer
    from shared.experts.usage import usage_path
    from shared.machine.memory_probe import MemoryProbe, probe_memory
    from shared.machine.processes import own_bytes
    from shared.model.generation import read_defaults
    from shared.planning.ledger import make_ledger
    from shared.planning.rates import chunk_for

    model_dir = model_dir_of(settings)
    mirrors = tuple(str(Path(os.path.expanduser(text)).absolute()) for text in settings.mirror)
    container = Container.open(model_dir, mirrors)
    spec = container.spec_for(settings.attention)
    facts = container.facts()
    drives = _drives(container, settings, report)
    drive = drives.first
    chunk = chunk_for(container, facts, drives.bytes_s, settings.threads or default_threads())
    ours = own_bytes(os.getpid())  # has a line in the ledger: not to be counted twice

    def make(memory: MemoryProbe) -> Ledger:
        return make_ledger(
            spec,
            facts,
            settings,
            memory.available_bytes + ours,
            memory.shm_bytes,
            reservable_bytes=memory.reservable_bytes,
            source=memory.source,
            chunk=chunk,
        )

    warm = plan_memory(settings, container.fingerprint, facts, probe_memory, make)
    ledger = warm.ledger
    usage = usage_path(container.fingerprint) if settings.usage_history else None
    config = GroupConfig(
        **passed_on(settings),
        run_id=secrets.token_hex(4),
        run_dir=str(run_dir),
        model_dir=str(model_dir),
        model_name=model_dir.name,
        defaults=read_defaults(model_dir),
        fingerprint=container.fingerprint,
        host=settings.host,
        port=port,
        ram_bytes=ledger.budget_bytes,
        n_slots=ledger.n_slots,
        slot_bytes=ledger.slot_bytes,
        reserved_slots=ledger.reserved_slots,
        n_experts=ledger.n_experts,
        memory=ledger.fixed,
        n_threads=ledger.n_threads,
        prefill_chunk=ledger.prefill_chunk,
        usage_path=str(usage) if usage else None,
        n_drafts=ledger.n_drafts,
        max_sequences=ledger.max_sequences,
        max_context=ledger.max_context,
        n_kv_blocks=ledger.n_kv_blocks,
        n_frames=ledger.n_frames,
        logit_rows=ledger.logit_rows,
        record_logits=_path_or_none(settings.record_logits),
        record_routing=_path_or_none(settings.record_routing),
        direct_io="off" if settings.direct_io == "auto" and not drive.setting.is_direct else settings.direct_io,
        read_engine="uring" if drive.setting.engine == "uring" else "threads",
        read_depth=drive.setting.depth,
        read_piece_bytes=drive.setting.piece_bytes,
        read_note=drive.note,
        drive_bytes_s=int(drives.bytes_s),
        mirrors=mirrors,
        huge_dir=warm.huge_dir,
        embedding_on_disk=ledger.embedding_on_disk,
    )
    notes = [*container.notes, *warm.notes, *([] if facts.has_tokenizer else [no_tokenizer(model_dir)])]
    return StartPlan(config, spec, ledger, drives.n_drives, warm.adopts, notes)


def _drives(container: Container, settings: Settings, report: Callable[[str], None]) -> Drives:
    """Kept from an earlier start, or measured now. Without usage history nothing is written."""
    from shared.machine.drive import kept_folder
    from shared.planning.drive_probe import drives_of

    return drives_of(container, kept_folder(), may_write=settings.usage_history, report=report)


def _path_or_none(text: str) -> str | None:
    """An absolute path: services work in the run directory."""
    return str(Path(os.path.expanduser(text)).absolute()) if text else None


def create_segments(plan: StartPlan) -> None:
    """All named memory of the group. Raises CapacityError; what was created by then is removed by ``clean_run``."""
    from shared.memory import segments
    from shared.model.kv_layout import group_kv
    from shared.step import counters
    from shared.step.frame import frame_bytes, frame_dims
    from shared.step.stages import TraceRing

    config, spec = plan.config, plan.spec
    dims = frame_dims(config, spec)
    # A reader looks twice a second: the largest step must not push itself out of the ring.
    n_trace = max(TRACE_ROWS, 2 * dims.stages)
    sizes = {
        segments.FRAMES: config.n_frames * frame_bytes(dims),
        segments.KV: group_kv(spec.main_attention, config).total_bytes,
        segments.TRACE: TraceRing.HEAD_BYTES + n_trace * TraceRing.ROW_BYTES,
        segments.COUNTERS: counters.SEGMENT_BYTES,
    }
    if config.n_drafts:
        sizes[segments.MTP_KV] = group_kv(spec.mtp_attention, config, is_mtp=True).total_bytes
    for name, n_bytes in sizes.items():
        segments.Segment.create(config.run_id, name, n_bytes).close()


def spawn_keeper(run_dir: Path, lock_fd: int) -> Process:
    """Starts the keeper, which loads its modules and waits for ``start`` (or ends when its stdin does). Raises OSError."""
    log_dir = run_dir / "log"
    log_dir.mkdir(mode=0o700, exist_ok=True)
    for path in log_dir.glob("*.log"):  # supervisor would open anything
        is_file(path)
    with os.fdopen(open_file(log_dir / KEEPER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        return start_module(
            "deploy.keeper",
            str(run_dir),
            env=child_environment() | ENVIRONMENT,  # the services inherit it
            stdin=subprocess.PIPE,
            stdout=log.fileno(),
            stderr=log.fileno(),
            new_session=True,  # Ctrl-C and Ctrl-Z at the terminal are ours
            pass_fds=(lock_fd,),
        )


def dismiss_keeper(keeper: Process) -> None:
    """Ends a keeper that was not told to start."""
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait()


class GroupProcess:
    """A started group, seen from the process that started it. ``stdin`` of the keeper ties its life to ours."""

    def __init__(self, config: GroupConfig, keeper: Process, lock_fd: int) -> None:
        from shared.wire.control_plane import ControlClient

        self.config = config
        self.run_dir = Path(config.run_dir)
        self.services = services_of(config)
        self.endpoints = Endpoints(self.run_dir, config.run_id)
        self.keeper = keeper
        self._lock_fd = lock_fd
        self._log_path = self.run_dir / "log" / KEEPER_LOG
        self._control = ControlClient(self.endpoints)
        self._question: Countdown | None = None
        self._tell_keeper(b"start\n")

    def _tell_keeper(self, line: bytes) -> None:
        assert self.keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: ``check`` will say so
            self.keeper.stdin.write(line)
            self.keeper.stdin.flush()

    def status(self, timeout_s: float = 0.2) -> control.Status | None:
        """The control plane's view, None while there is no router, or none that answers yet.

        One question is open at a time: a router that starts would answer all of them with what it knew when it began.
        """
        if self._question is None or self._question.is_over:
            if not self._control.send(control.StatusWanted()):
                time.sleep(min(timeout_s, POLL_S / 5))
                return None
            self._question = Countdown(QUESTION_S)
        if not self._control.socket.wait(timeout_s * 1000):
            return None
        found = [msg for msg in self._control.receive_all() if isinstance(msg, control.Status)]
        self._question = None if found else self._question
        return found[-1] if found else None

    def wait_ready(self) -> Iterator[control.Status | None]:
        """Yields the control plane's view several times a second, last the one that is ready.

        Raises StartFailed with the words of the service that failed.
        """
        while True:
            self.check()
            for service, entry in running.processes(self.run_dir).get("services", {}).items():
                words = read_last_words(self.run_dir, service)
                if words or entry.get("state") in ("BACKOFF", "EXITED", "FATAL"):
                    raise self._start_failed(service, words)
            status = self.status(POLL_S)
            yield status
            if status and status.is_ready and gateway_serves(status):
                return  # the gateway learns of the group's state a moment later than the router
            time.sleep(POLL_S / 5)

    def _start_failed(self, service: str, words: tuple[int, str] | None) -> StartFailed:
        if words is None:  # it may be on its way
            time.sleep(0.2)
            words = read_last_words(self.run_dir, service)
        if words:
            return StartFailed(f"{service}: {words[1]}", words[0])
        log = self.run_dir / "log" / f"{service}.log"
        exit_code = running.processes(self.run_dir).get("services", {}).get(service, {}).get("exit")
        code = EXIT_CONFIG if exit_code == EXIT_CONFIG else EXIT_FAULT
        return StartFailed(f"{service} ended while starting. The end of {log}:\n{tail(log)}", code)

    def check(self) -> None:
        """Raises StartFailed when the keeper is gone, or a service that can't be missed was given up."""
        code = self.keeper.poll()
        if code is not None:
            raise StartFailed(
                f"supervisor ended (exit {code}). The end of {self._log_path}:\n{tail(self._log_path)}", EXIT_FAULT
            )

    def given_up(self) -> str | None:
        """The sentence about a service that supervisor does not start any more, None when all is well."""
        for service, entry in running.processes(self.run_dir).get("services", {}).items():
            if service == DRAFTER or entry.get("state") not in ("FATAL", "EXITED"):
                continue
            if entry["state"] == "EXITED" and entry.get("exit") != EXIT_CONFIG:
                continue  # about to be started again
            words = read_last_words(self.run_dir, service)
            return f"{service} failed for good: {words[1] if words else tail(self.run_dir / 'log' / f'{service}.log')}"
        return None

    def describe(self, pid: int) -> None:
        """Says in the lock whose end will be the end of the group."""
        url = url_of(self.config.host, self.config.port)
        rundir.describe_lock(self._lock_fd, pid, url=url, run_id=self.config.run_id)

    def detach(self) -> None:
        """The group lives on without us."""
        self.describe(self.keeper.pid)
        self._tell_keeper(b"detach\n")
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        self._control.close(0)

    def drain(self, reason: str, is_urgent: Callable[[], bool]) -> int | None:
        """Lets running requests finish. Returns how many were cut, None when nobody answered or it became urgent."""
        return drain(self._control, self.config, reason, is_urgent)

    def stop(self) -> None:
        """Ends the keeper (and so all services), waits, kills what remains, removes what must not remain."""
        rundir.describe_end(self._lock_fd)
        stop_keeper(self.keeper.pid, lambda: self.keeper.poll() is not None)
        self._control.close(0)
        wait_services_gone(self.run_dir)
        rundir.clean_run(self.run_dir, self.config.run_id)


def gateway_serves(status: control.Status) -> bool:
    """Whether the gateway itself says that the group can serve."""
    import socket
    from urllib.parse import urlsplit

    url = next((value for s in status.services if s.service == GATEWAY for name, value in s.facts if name == "url"), "")
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=1.0) as connection:
            connection.sendall(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.makefile("rb").readline(64).split()[1:2] == [b"200"]
    except OSError:
        return False


def start(plan: StartPlan, lock_fd: int, keeper: Process) -> GroupProcess:
    """Creates segments and files, tells the keeper to start. Whatever fails, nothing but the keeper is left."""
    from shared.memory import warm_sets
    from shared.memory.segments import add_owner

    config = plan.config
    run_dir = Path(config.run_dir)
    try:
        add_owner(config.run_id, os.getpid())
        if plan.adopts:
            warm_sets.adopt(plan.adopts, config.run_id)
        create_segments(plan)
        Endpoints(run_dir, config.run_id).socket_dir.mkdir(mode=0o700, exist_ok=True)
        replace_file(run_dir / rundir.SUPERVISOR_CONF_NAME, render(config).encode())
        freeze(config, run_dir / FROZEN_NAME)
        group = GroupProcess(config, keeper, lock_fd)
        group.describe(os.getpid())
        return group
    except BaseException:
        if config.huge_dir:
            warm_sets.drop_run(Path(config.huge_dir), config.run_id)
        rundir.clean_run(run_dir, config.run_id)
        raise


def drain(client: Any, config: GroupConfig, reason: str, is_urgent: Callable[[], bool]) -> int | None:
    """Asks the group to finish; see ``GroupProcess.drain``."""
    limit = Countdown(1.0)
    while not client.send(control.Drain(reason, config.drain_s)):
        if limit.is_over:
            return None
        time.sleep(0.01)
    limit = Countdown(config.drain_s + 3.0)
    while not limit.is_over and not is_urgent():
        if client.socket.wait(50):
            for msg in client.receive_all():
                if isinstance(msg, control.Drained):
                    return int(msg.n_cut)
    return None


def stop_keeper(pid: int, is_gone: Callable[[], bool]) -> None:
    """SIGTERM, most of the allowance, SIGKILL."""
    import signal

    for sig, wait_s in ((signal.SIGTERM, KEEPER_STOP_S), (signal.SIGKILL, 2.0)):
        if is_gone():
            return
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            return
        limit = Countdown(wait_s)
        while not limit.is_over and not is_gone():
            time.sleep(0.01)


def wait_services_gone(run_dir: Path, timeout_s: float = 5.0) -> None:
    """After a keeper that died hard: its services notice by their stdin; wait for that, then kill. Who is frozen, at once.

    A service that ends removes its socket, and it must not be the socket of its successor. Raises ConfigError when one can't
    be ended.
    """
    limit = Countdown(timeout_s)
    is_killed = False
    while left := running.members(run_dir):
        if limit.is_over and is_killed:
            raise ConfigError(
                f"process {left[0][0]} of a group that ended in {run_dir} does not end: choose another --run-dir and --port"
            )
        for pid, start in left:
            if limit.is_over or is_stopped(pid):  # who is stopped notices nothing
                running.kill_process(pid, start)
        if limit.is_over:
            limit, is_killed = Countdown(timeout_s), True
        time.sleep(0.05)


def end_leftovers(run_dir: Path) -> bool:
    """Ends and removes what a group that died left in ``run_dir``. False: there is nothing of that kind. Raises ConfigError."""
    has_died = rundir.is_ending(run_dir) if is_locked(run_dir) else bool(running.members(run_dir))
    if not has_died:
        return False
    lock_fd = rundir.take_lock(run_dir)
    try:
        wait_services_gone(run_dir)
        rundir.clean_leftovers(run_dir)
    finally:
        os.close(lock_fd)
    return True


def tail(path: Path, n_lines: int = 12) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(read_file(path, _LOG_LIMIT_BYTES).decode(errors="replace").splitlines()[-n_lines:])
    except OSError:
        return "(no log)"


def describe(run_dir: Path) -> dict[str, Any]:
    """All that is known about the group in ``run_dir``: for ``--status``. Raises ConfigError when none runs."""
    from shared.wire.control_plane import ControlClient

    config = running.running_config(run_dir)
    client = ControlClient(Endpoints(run_dir, config.run_id))
    status = client.ask(control.StatusWanted(), control.Status, 1.0)
    client.close(0)
    heard = {s.service: s for s in status.services} if status else {}
    found = running.processes(run_dir)
    services = []
    for name in services_of(config):
        entry = found.get("services", {}).get(name, {})
        seen = heard.get(name)
        is_same = seen is not None and seen.pid == entry.get("pid")
        unheard = ServiceState.STARTING if entry.get("pid") else ServiceState.ABSENT
        services.append(
            {
                "name": name,
                "pid": entry.get("pid", 0),
                "state": seen.state if seen is not None and is_same else unheard,
                "incarnation": seen.incarnation if seen is not None and is_same else entry.get("n_starts", 0),
                "stage": seen.stage if seen is not None and is_same else "",
                "heartbeat_age_s": seen.heartbeat_age_s if seen is not None and is_same else None,
                "facts": dict(seen.facts) if seen is not None and is_same else {},
            }
        )
    return {
        "run_dir": str(run_dir),
        "run_id": config.run_id,
        "url": url_of(config.host, config.port),
        "model": config.model_name,
        "model_dir": config.model_dir,
        "ready": bool(status and status.is_ready),
        "detail": status.detail if status else "the router does not answer",
        "n_running": status.n_running if status else 0,
        "n_waiting": status.n_waiting if status else 0,
        "keeper_pid": running.keeper_pid(run_dir) or 0,
        "services": services,
    }


def stop_running(run_dir: Path, is_urgent: Callable[[], bool] = lambda: False, keep_warm: bool = False) -> int | None:
    """Drains and stops the group in ``run_dir`` from outside. Returns how many requests were cut (None: no drain).

    ``keep_warm``: its named memory stays, for the next start of the same model.
    """
    from shared.wire.control_plane import ControlClient

    config = running.running_config(run_dir)
    pid = running.keeper_pid(run_dir)
    client = ControlClient(Endpoints(run_dir, config.run_id))
    n_cut = drain(client, config, "colibri-up --stop", is_urgent)
    client.close(0)
    if pid is None:
        raise ConfigError(f"the group in {run_dir} has no keeper any more; it is ending or still starting: try again")
    if keep_warm:
        (run_dir / rundir.KEEP_NAME).touch(mode=0o600)
    stop_keeper(pid, lambda: running.keeper_pid(run_dir) != pid)
    limit = Countdown(KEEPER_STOP_S)
    while is_locked(run_dir) and not limit.is_over:
        time.sleep(0.02)
    if not is_locked(run_dir):
        wait_services_gone(run_dir)
        rundir.clean_run(run_dir, config.run_id)
    return n_cut


def huge_dir_of(run_dir: Path) -> str | None:
    """Where the group that runs in ``run_dir`` has its named memory. Raises ConfigError when none runs."""
    return running.running_config(run_dir).huge_dir
