"""How a service lives: states, the main loop, signals, heartbeats, the parent's death, the last message.

    state     enters when                     leaves by
    starting  exec                            loaded -> ready; error -> failed
    ready     loaded, ``Ready`` sent          Drain or SIGTERM -> draining; Stop -> stopped; exception -> failed
    draining  Drain or SIGTERM                SIGTERM or Stop -> stopped, when idle or at the deadline
    stopped   asked to                        exit 0
    failed    exception                       ``Dead`` sent, exit 70, or 78 for what a restart can't mend

``python -m services.<name> --config FILE`` is ``run_service`` (four engine services: one thread, one poll loop) or
``run_service_async`` (gateway: the same states on an event loop). A drain by message leaves the process alive, so that
others may finish; SIGTERM ends it. SIGINT is ignored: Ctrl-C is colibri-up's affair. supervisor holds the other end of
stdin: when it is gone, stdin ends and so does the service.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import stat
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared.awake import AwakeClock
from shared.errors import EXIT_CONFIG, EXIT_FAULT, EXIT_OK, ChecksumMismatch, ColibriError, ConfigError, ShortRead
from shared.kept import replace_file
from shared.log import Log
from shared.messages import SCHEMA_VERSION, control
from shared.messages.base import Msg
from shared.messages.control import Ram, RamWanted, ServiceState
from shared.run.config import GroupConfig, load_frozen
from shared.run.descriptors import raise_descriptor_limit
from shared.steering import shown
from shared.wire.bus import Bus
from shared.wire.control_plane import ControlClient
from shared.wire.endpoints import Endpoints

if TYPE_CHECKING:
    import asyncio

    from shared.wire.async_bus import AsyncBus

LAST_WORDS_S = 2.0
"""How long a failed service tries to deliver its last message."""
CONNECT_S = 0.5
"""How long it looks for a router to tell: a service may fail before its socket is connected."""


class Service(ABC):
    """An engine service. Subclasses set ``name`` and ``receives`` and fill the methods; all run on one thread."""

    name: ClassVar[str]
    receives: ClassVar[tuple[type[Msg], ...]]
    term_grace_s: ClassVar[float] = 0.0
    """After SIGTERM without a drain before it: how long work may go on before ``cut``."""

    def attach(self, ctx: ServiceContext) -> None:  # noqa: B027
        """Before ``load``, sockets are bound: add further sockets of this process to the loop."""

    @abstractmethod
    def load(self, ctx: ServiceContext) -> dict[str, str]:
        """Attach segments, load weights; returns the facts for ``Ready``. May add fds with ``ctx.bus.add_fd``."""

    @abstractmethod
    def handle(self, msg: Any, sender: str) -> None:
        """One data message."""

    def work(self) -> bool:
        """One piece of work after the messages of a poll; True: call again without waiting for an event."""
        return False

    def tick(self) -> None:  # noqa: B027
        """At least every quarter of a heartbeat, unless a call above lasts longer."""

    def peer_changed(self, service: str, incarnation: int) -> None:  # noqa: B027
        """A peer that was known before has been replaced. Its old messages are dropped from now on."""

    def is_idle(self) -> bool:
        """Nothing in progress: a drain is complete."""
        return True

    def begin_drain(self, reason: str) -> None:  # noqa: B027
        """Refuse new work from now on."""

    def cut(self, reason: str) -> int:
        """The drain's deadline passed: end what is left, with a reply. Returns how much that was."""
        return 0

    def change_ram(self, msg: RamWanted) -> Ram:
        """Another memory budget; only the service that holds what can shrink is asked."""
        return Ram(msg.asker, 0, 0, 0, 0, f"{self.name} has no part of the budget that could change.")

    def close(self) -> None:  # noqa: B027
        """Give back threads and memory; called once, after a successful ``load``."""


@dataclass
class ServiceContext:
    """What a service gets to work with. ``bus`` is an AsyncBus in the gateway."""

    config: GroupConfig
    endpoints: Endpoints
    bus: Any
    log: Log
    incarnation: int
    control: ControlClient
    ticks: list[Callable[[], None]] = field(default_factory=list)
    state: ServiceState = ServiceState.STARTING
    stage: str = ""
    stage_since: float = 0.0
    _beat_at: float = 0.0

    def __post_init__(self) -> None:
        self.awake = AwakeClock(self.config.heartbeat_s)
        """What limits of this process are measured by; read with every ``tick``."""

    def set_stage(self, name: str) -> None:
        """Names what goes on, for heartbeats and the log ('' = nothing special). Sends a heartbeat when one is due."""
        self.stage = name
        self.stage_since = time.monotonic()
        self.beat()

    def add_tick(self, callback: Callable[[], None]) -> None:
        """``callback`` is called before each ``tick`` of the service."""
        self.ticks.append(callback)

    def beat(self) -> None:
        """A heartbeat, when the last is old enough."""
        now = time.monotonic()
        if now - self._beat_at >= self.config.heartbeat_s:
            self._beat_at = now
            stage_s = now - self.stage_since if self.stage else 0.0
            self.control.send(
                control.Heartbeat(self._service, self.incarnation, self.state, self.stage, round(stage_s, 3))
            )

    @property
    def _service(self) -> str:
        return str(self.bus.service)


class _Life:
    """The states, signals and control messages of one process; what both kinds of main loop share."""

    def __init__(self, ctx: ServiceContext, service: Any) -> None:
        self.ctx = ctx
        self.service = service
        self.stop_reason = ""
        self._facts: tuple[tuple[str, str], ...] = ()
        self._peers: dict[str, int] = {}
        self._drain_deadline = 0.0
        self._drain_reason = ""
        self._has_drained = False
        self._is_leaving = False
        self._is_connected = False

    @property
    def ctx_state(self) -> ServiceState:
        return self.ctx.state

    def hello(self) -> None:
        ctx = self.ctx
        self._is_connected = ctx.control.send(
            control.Hello(self.service.name, ctx.incarnation, os.getpid(), SCHEMA_VERSION)
        )

    def look_for_router(self) -> None:
        """A router that appeared (again) hears at once who we are, before it has to ask."""
        was_connected, self._is_connected = self._is_connected, self.ctx.control.can_send()
        if self._is_connected and not was_connected:
            self.hello()
            if self.ctx.state in (ServiceState.READY, ServiceState.DRAINING):
                self._say_ready()

    def ready(self, facts: dict[str, str]) -> None:
        ctx = self.ctx
        self._facts = tuple(facts.items())
        gc.collect()
        gc.freeze()  # what was loaded stays; a collection in the middle of a step need not walk through it
        ctx.state = ServiceState.READY if ctx.state == ServiceState.STARTING else ctx.state
        ctx.set_stage("")
        ctx.log.info("service_ready", **facts)
        self._say_ready()

    def _say_ready(self) -> None:
        self.ctx.control.send(control.Ready(self.service.name, self.ctx.incarnation, os.getpid(), self._facts))

    def on_control(self) -> None:
        for msg in self.ctx.control.receive_all():
            self._hear(msg)

    def _hear(self, msg: Any) -> None:
        ctx = self.ctx
        if isinstance(msg, control.HelloWanted):
            self.hello()
            if ctx.state in (ServiceState.READY, ServiceState.DRAINING):
                self._say_ready()
        elif isinstance(msg, control.PeerChanged):
            self.peer(msg.service, msg.incarnation)
        elif isinstance(msg, control.Drain):
            self.drain(msg.reason, msg.deadline_s)
        elif isinstance(msg, control.Stop):
            self.stop(msg.reason)
        elif isinstance(msg, control.RamWanted) and ctx.state in (ServiceState.READY, ServiceState.DRAINING):
            ctx.control.send(self.service.change_ram(msg))

    def peer(self, service: str, incarnation: int) -> None:
        """A peer's incarnation became known."""
        known = self._peers.get(service, 0)
        if incarnation <= known:
            return
        self._peers[service] = incarnation
        self.ctx.bus.peer_changed(service, incarnation)
        if known:
            self.ctx.log.info("peer_changed", peer=service, peer_incarnation=incarnation, before=known)
            self.service.peer_changed(service, incarnation)

    def drain(self, reason: str, deadline_s: float) -> None:
        deadline = self.ctx.awake.now() + deadline_s
        if self.ctx.state == ServiceState.DRAINING:
            self._drain_deadline = min(self._drain_deadline, deadline)
            return
        self.ctx.state = ServiceState.DRAINING
        self._drain_reason = reason
        self._drain_deadline = deadline
        self.ctx.log.info("service_draining", reason=reason, deadline_s=deadline_s)
        self.service.begin_drain(reason)

    def stop(self, reason: str) -> None:
        self._is_leaving = True
        self.stop_reason = self.stop_reason or reason

    def leave(self, reason: str, grace_s: float) -> None:
        """Drain briefly, then end this process."""
        if not self._has_drained:
            self.drain(reason, grace_s)
            self._drain_deadline = min(self._drain_deadline, self.ctx.awake.now() + grace_s)
        self._is_leaving = True
        self.stop_reason = self.stop_reason or reason

    @property
    def is_over(self) -> bool:
        """Whether the process may end now; looks after the drain on the way."""
        if self.ctx.state == ServiceState.DRAINING and not self._has_drained:
            is_idle = self.service.is_idle()
            is_late = self.ctx.awake.now() >= self._drain_deadline
            if is_idle or is_late:
                n_cut = 0 if is_idle else self.service.cut(self._drain_reason)
                self._has_drained = True
                self.ctx.log.info("service_drained", n_cut=n_cut)
                self.ctx.control.send(control.Drained(self.service.name, n_cut))
        return self._is_leaving and (self._has_drained or self.ctx.state != ServiceState.DRAINING)

    def tick(self) -> None:
        self.ctx.awake.now()
        self.look_for_router()
        for callback in self.ctx.ticks:
            callback()
        self.service.tick()
        self.ctx.beat()

    def failed(self, error: BaseException) -> int:
        """Last words to the router, the log and colibri-up; returns the exit code."""
        exit_code = error.exit_code if isinstance(error, ColibriError) else EXIT_FAULT
        if self.ctx.state == ServiceState.STARTING and isinstance(error, (ChecksumMismatch, ShortRead)):
            exit_code = EXIT_CONFIG  # what is damaged on disk is damaged at the next try too
        reason = str(error) or type(error).__name__
        if not isinstance(error, ColibriError):
            reason = f"{type(error).__name__}: {reason}"
        text = "" if exit_code == EXIT_CONFIG else "".join(traceback.format_exception(error))
        self.ctx.state = ServiceState.FAILED
        write_last_words(Path(self.ctx.config.run_dir), self.service.name, exit_code, reason)
        self.ctx.log.error("service_failed", exit_code=exit_code, reason=reason)
        if text:
            sys.stderr.write(shown(text))
        dead = control.Dead(self.service.name, self.ctx.incarnation, reason, text)
        deadline = time.monotonic() + CONNECT_S
        if not self._is_connected:
            self.hello()  # without it the router would not know whose last words these are
        while not self.ctx.control.send(dead) and time.monotonic() < deadline:
            time.sleep(0.01)
            if not self._is_connected:
                self.hello()
        return exit_code


def write_last_words(run_dir: Path, service: str, exit_code: int, reason: str) -> None:
    """Leaves a failure's sentence in the run directory, where colibri-up looks for it."""
    path = run_dir / "failed" / f"{service}.json"
    with contextlib.suppress(OSError):  # nothing better can be done while dying
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, json.dumps({"service": service, "exit_code": exit_code, "reason": reason}).encode())


def read_last_words(run_dir: Path, service: str) -> tuple[int, str] | None:
    """(exit code, sentence) a failed service left, None when it left none."""
    try:
        words = json.loads((run_dir / "failed" / f"{service}.json").read_text())
        return int(words["exit_code"]), str(words["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def next_incarnation(run_dir: Path, service: str) -> int:
    """1, 2, 3, ... for each start of a service within a run; kept in the run directory. Raises ConfigError."""
    path = run_dir / "incarnation" / service
    try:
        incarnation = int(path.read_text()) + 1
    except (OSError, ValueError):
        incarnation = 1
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, str(incarnation).encode())
    except OSError as error:
        raise ConfigError(f"run directory {run_dir} can't be written: {error.strerror}") from None
    (run_dir / "failed" / f"{service}.json").unlink(missing_ok=True)  # words of an earlier incarnation
    return incarnation


def _parse(service: str, argv: list[str] | None) -> GroupConfig:
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}", description="Started by colibri-up.")
    parser.add_argument("--config", required=True, help="the frozen configuration in the run directory")
    return load_frozen(parser.parse_args(argv).config)


def _is_held_by_parent(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def run_service(service: Service, argv: list[str] | None = None) -> int:
    """The whole life of an engine service; returns the exit code for ``sys.exit``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    try:
        config = _parse(service.name, argv)
        run_dir = Path(config.run_dir)
        incarnation = next_incarnation(run_dir, service.name)
        log = Log(service.name, incarnation)
        endpoints = Endpoints(run_dir, config.run_id)
        bus = Bus(endpoints, service.name, incarnation, service.receives, log=log, transport=config.transport)
    except ColibriError as error:
        Log(service.name).error("service_failed", exit_code=error.exit_code, reason=error)
        return error.exit_code
    client = ControlClient(endpoints, bus.context)
    ctx = ServiceContext(config, endpoints, bus, log, incarnation, client)
    life = _Life(ctx, service)
    wake_fd = _wake_on_signals(life, service)
    bus.add_control(client, life.on_control)
    bus.add_fd(wake_fd, lambda: os.read(wake_fd, 64))
    if _is_held_by_parent(0):
        bus.add_fd(0, lambda: _read_parent(life, bus))
    is_loaded = False
    linger_ms = 500
    try:
        log.info("service_starting", pid=os.getpid())
        service.attach(ctx)
        life.hello()
        facts = service.load(ctx)
        is_loaded = True
        life.ready(facts)
        _loop(life, bus, service, config.heartbeat_s / 4)
        exit_code = EXIT_OK
        log.info("service_stopped", reason=life.stop_reason)
    except Exception as error:  # noqa: BLE001  (every fault ends in a last message)
        exit_code = life.failed(error)
        linger_ms = int(LAST_WORDS_S * 1000)
    if is_loaded:
        with contextlib.suppress(Exception):
            service.close()
    bus.close(linger_ms)
    return exit_code


def _loop(life: _Life, bus: Bus, service: Service, tick_s: float) -> None:
    handle, work, poll = service.handle, service.work, bus.poll
    next_tick = 0.0
    is_busy = False
    while True:
        now = time.monotonic()
        if now >= next_tick:
            life.tick()
            next_tick = now + tick_s
        if life.ctx.state == ServiceState.DRAINING or life._is_leaving:
            if life.is_over:
                return
            next_tick = min(next_tick, now + 0.02)
        wait_ms = 0.0 if is_busy else max(1.0, (next_tick - now) * 1000)
        for received in poll(wait_ms):
            handle(received.msg, received.sender)
        is_busy = work()


def _wake_on_signals(life: _Life, service: Service) -> int:
    """SIGTERM only sets a state; the pipe wakes the poll."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: life.leave("SIGTERM", service.term_grace_s))
    return read_fd


def _read_parent(life: _Life, bus: Bus) -> None:
    if not os.read(0, 4096):
        bus.remove_fd(0)
        life.leave("the supervisor is gone", life.service.term_grace_s)


class AsyncService(ABC):
    """The gateway's kind: ``load`` and ``close`` are coroutines, the rest is called on the event loop and never blocks."""

    name: ClassVar[str]
    receives: ClassVar[tuple[type[Msg], ...]]
    term_grace_s: ClassVar[float] = 2.0

    @abstractmethod
    async def load(self, ctx: ServiceContext) -> dict[str, str]:
        """Start serving; returns the facts for ``Ready``."""

    @abstractmethod
    def handle(self, msg: Any, sender: str, incarnation: int) -> None:
        """One data message and the incarnation of its sender."""

    def tick(self) -> None:  # noqa: B027
        """Every quarter of a heartbeat."""

    def peer_changed(self, service: str, incarnation: int) -> None:  # noqa: B027
        """A peer that was known before has been replaced."""

    def is_idle(self) -> bool:
        return True

    def begin_drain(self, reason: str) -> None:  # noqa: B027
        """Refuse new work from now on."""

    def cut(self, reason: str) -> int:
        return 0

    async def close(self) -> None:  # noqa: B027
        """Stop serving; called once, after a successful ``load``."""


def run_service_async(service: AsyncService, argv: list[str] | None = None) -> int:
    """``run_service`` on uvloop, for the gateway."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    try:
        config = _parse(service.name, argv)
        incarnation = next_incarnation(Path(config.run_dir), service.name)
    except ColibriError as error:
        Log(service.name).error("service_failed", exit_code=error.exit_code, reason=error)
        return error.exit_code
    return uvloop.run(_run_async(service, config, incarnation))


async def _run_async(service: AsyncService, config: GroupConfig, incarnation: int) -> int:
    import asyncio  # here, because the four other services start sooner without it

    from shared.wire.async_bus import AsyncBus

    log = Log(service.name, incarnation)
    endpoints = Endpoints(config.run_dir, config.run_id)
    bus = AsyncBus(endpoints, service.name, incarnation, service.receives, log=log, transport=config.transport)
    client = ControlClient(endpoints, bus.context)
    ctx = ServiceContext(config, endpoints, bus, log, incarnation, client)
    life = _Life(ctx, service)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, life.leave, "SIGTERM", service.term_grace_s)
    loop.add_reader(client.fd, life.on_control)
    if _is_held_by_parent(0):
        loop.add_reader(0, _read_parent_async, life, loop)
    is_loaded = False
    linger_ms = 500
    tasks: list[asyncio.Task[None]] = []
    try:
        log.info("service_starting", pid=os.getpid())
        life.hello()
        facts = await service.load(ctx)
        is_loaded = True
        life.ready(facts)
        tasks = [loop.create_task(_receive(service, bus)), loop.create_task(_look_after(life, config.heartbeat_s / 4))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        exit_code = EXIT_OK
        log.info("service_stopped", reason=life.stop_reason)
    except Exception as error:  # noqa: BLE001  (every fault ends in a last message)
        exit_code = life.failed(error)
        linger_ms = int(LAST_WORDS_S * 1000)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if is_loaded:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(service.close(), LAST_WORDS_S)
    loop.remove_reader(client.fd)
    client.close(linger_ms)
    bus.close(linger_ms)
    return exit_code


async def _receive(service: AsyncService, bus: AsyncBus) -> None:
    while True:
        received = await bus.receive()
        service.handle(received.msg, received.sender, received.incarnation)


async def _look_after(life: _Life, tick_s: float) -> None:
    from asyncio import sleep

    next_tick = 0.0
    while not life.is_over:
        now = time.monotonic()
        if now >= next_tick:
            life.tick()
            next_tick = now + tick_s
        life.on_control()  # the socket's descriptor is edge-triggered: look again after our own sends
        await sleep(0.02 if life.ctx_state == ServiceState.DRAINING or life.stop_reason else min(0.1, tick_s))


def _read_parent_async(life: _Life, loop: asyncio.AbstractEventLoop) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        life.leave("the supervisor is gone", life.service.term_grace_s)
