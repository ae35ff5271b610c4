"""How a service lives: states, the main loop, signals, heartbeats, the parent's death, the last message.

    state     enters when                     leaves by
    starting  exec                            loaded -> ready; error -> failed
    ready     loaded, ``Ready`` sent          Drain or SIGTERM -> draining; Stop -> stopped; exception -> failed
    draining  Drain or SIGTERM                SIGTERM or Stop -> stopped, when idle or at the deadline
    stopped   asked to                        exit 0
    failed    exception                       ``Dead`` sent, exit 70, or 78 for what a restart can't mend

``python -m services.<name> --config FILE`` is ``run_service`` (four engine services: one thread, one poll loop) or
``run_service_async`` (gateway: an event loop). Start and end are one sequence, ``_live``; a *pump* is what differs: it brings
messages, signals and time to the service. A drain by message leaves the process alive, so that others may finish; SIGTERM
ends it. SIGINT is ignored: Ctrl-C is colibri-up's affair. supervisor holds the other end of stdin: when it is gone, stdin
ends and so does the service.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from shared.errors import EXIT_OK, ColibriError
from shared.log import Log
from shared.run.config import GroupConfig, load_frozen
from shared.run.descriptors import raise_descriptor_limit
from shared.run.last_words import next_incarnation
from shared.run.life import Life
from shared.run.service import AsyncService, BaseService, Service, ServiceContext
from shared.wire.bus import Bus, DataLinks
from shared.wire.control_plane import ControlClient
from shared.wire.endpoints import Endpoints
from shared.wire.protocols import ControlBus
from shared.wire.zeromq import LINGER_MS

if TYPE_CHECKING:
    import asyncio

LAST_WORDS_MS = 2000
"""How long a failed service tries to deliver its last message."""


class Pump(Protocol):
    """The loop of one kind of service. ``_live`` calls these in this order, ``close`` only after a successful ``load``."""

    def open_bus(self, endpoints: Endpoints, incarnation: int, config: GroupConfig, log: Log) -> DataLinks:
        """Binds the service's sockets."""

    def watch(self, life: Life) -> None:
        """From now on signals, control messages and the parent's end reach ``life``."""

    async def load(self, life: Life) -> dict[str, str]:
        """The service's own start; its facts."""

    async def run(self, life: Life, tick_s: float) -> None:
        """Until ``life`` is over; raises what the service raises."""

    async def close(self) -> None:
        """The service's own end."""

    def unwatch(self) -> None:
        """The end of ``watch``."""


async def _live(service: BaseService, pump: Pump, argv: list[str] | None) -> int:
    """The whole life of a service; returns the exit code. Suspends only where its pump does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    try:
        config = _parse(service.name, argv)
        service.prepare(config)
        run_dir = Path(config.run_dir)
        incarnation = next_incarnation(run_dir, service.name)
        log = Log(service.name, incarnation)
        endpoints = Endpoints(run_dir, config.run_id)
        bus = pump.open_bus(endpoints, incarnation, config, log)
    except ColibriError as error:
        Log(service.name).error("service_failed", exit_code=error.exit_code, reason=error)
        return error.exit_code
    client = ControlClient(endpoints, bus.context)
    life = Life(ServiceContext(config, endpoints, bus, log, incarnation, client), service)
    pump.watch(life)
    is_loaded = False
    linger_ms = LINGER_MS
    try:
        log.info("service_starting", pid=os.getpid())
        facts = await pump.load(life)
        is_loaded = True
        life.ready(facts)
        await pump.run(life, config.heartbeat_s / 4)
        exit_code = EXIT_OK
        log.info("service_stopped", reason=life.stop_reason)
    except Exception as error:  # noqa: BLE001  (every fault ends in a last message)
        exit_code = life.failed(error)
        linger_ms = LAST_WORDS_MS
    if is_loaded:
        with contextlib.suppress(Exception):
            await pump.close()
    pump.unwatch()
    client.close(linger_ms)
    bus.close(linger_ms)
    return exit_code


def _parse(service: str, argv: list[str] | None) -> GroupConfig:
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}", description="Started by colibri-up.")
    parser.add_argument("--config", required=True, help="the frozen configuration in the run directory")
    return load_frozen(parser.parse_args(argv).config)


def _is_held_by_parent(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


# -- engine services -------------------------------------------------------------------------------------------------


def run_service(service: Service, argv: list[str] | None = None) -> int:
    """The whole life of an engine service; returns the exit code for ``sys.exit``."""
    return _run_without_loop(_live(service, _PollPump(service), argv))


def _run_without_loop(life: Coroutine[Any, Any, int]) -> int:
    """A coroutine that never suspends is a function."""
    try:
        life.send(None)
    except StopIteration as end:
        return int(end.value)
    raise RuntimeError("an engine service waited for an event loop")


class _PollPump:
    """One thread and one poll: ``Bus.poll`` waits for everything."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def open_bus(self, endpoints: Endpoints, incarnation: int, config: GroupConfig, log: Log) -> Bus:
        service = self._service
        self._bus = Bus(endpoints, service.name, incarnation, service.receives, log=log, transport=config.transport)
        return self._bus

    def watch(self, life: Life) -> None:
        self._bus.add_control(life.ctx.control, life.on_control)
        # SIGTERM only sets a state; the pipe wakes the poll.
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: life.leave("SIGTERM", self._service.term_grace_s))
        self._bus.add_fd(read_fd, lambda: os.read(read_fd, 64))
        if _is_held_by_parent(0):
            self._bus.add_fd(0, lambda: self._read_parent(life))

    def _read_parent(self, life: Life) -> None:
        if not os.read(0, 4096):
            self._bus.remove_fd(0)
            life.leave("the supervisor is gone", self._service.term_grace_s)

    async def load(self, life: Life) -> dict[str, str]:
        ctx = cast(ServiceContext[ControlBus], life.ctx)  # made with our bus
        self._service.attach(ctx)
        life.hello()
        return self._service.load(ctx)

    async def run(self, life: Life, tick_s: float) -> None:
        handle, work, poll = self._service.handle, self._service.work, self._bus.poll
        next_tick = 0.0
        is_busy = False
        while True:
            now = time.monotonic()
            if now >= next_tick:
                life.tick()
                next_tick = now + tick_s
            if life.is_ending:
                life.end_drain()
                if life.is_over:
                    return
                next_tick = min(next_tick, now + 0.02)
            wait_ms = 0.0 if is_busy else max(1.0, (next_tick - now) * 1000)
            for received in poll(wait_ms):
                handle(received.msg, received.sender)
            is_busy = work()

    async def close(self) -> None:
        self._service.close()

    def unwatch(self) -> None:
        signal.set_wakeup_fd(-1)


# -- the gateway -----------------------------------------------------------------------------------------------------


def run_service_async(service: AsyncService, argv: list[str] | None = None) -> int:
    """``run_service`` on uvloop, for the gateway."""
    import uvloop

    return int(uvloop.run(_live(service, _LoopPump(service), argv)))


class _LoopPump:
    """An event loop: tasks for messages and time, readers for the rest."""

    def __init__(self, service: AsyncService) -> None:
        self._service = service

    def open_bus(self, endpoints: Endpoints, incarnation: int, config: GroupConfig, log: Log) -> DataLinks:
        # Here, because the four other services start sooner without an event loop.
        from shared.wire.async_bus import AsyncBus

        service = self._service
        self._bus = AsyncBus(
            endpoints, service.name, incarnation, service.receives, log=log, transport=config.transport
        )
        return self._bus

    def watch(self, life: Life) -> None:
        import asyncio

        self._loop = loop = asyncio.get_running_loop()
        self._control_fd = life.ctx.control.fd
        self._has_news = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._leave, life, "SIGTERM")
        loop.add_reader(self._control_fd, self._on_control, life)
        if _is_held_by_parent(0):
            loop.add_reader(0, self._read_parent, life)

    def _read_parent(self, life: Life) -> None:
        if not os.read(0, 4096):
            self._loop.remove_reader(0)
            self._leave(life, "the supervisor is gone")

    def _leave(self, life: Life, reason: str) -> None:
        life.leave(reason, self._service.term_grace_s)
        self._has_news.set()

    def _on_control(self, life: Life) -> None:
        life.on_control()
        self._has_news.set()

    async def load(self, life: Life) -> dict[str, str]:
        life.hello()
        return await self._service.load(life.ctx)

    async def run(self, life: Life, tick_s: float) -> None:
        import asyncio

        tasks: list[asyncio.Task[None]] = [
            self._loop.create_task(self._receive()),
            self._loop.create_task(self._look_after(life, tick_s)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            received = await self._bus.receive()
            self._service.handle(received.msg, received.sender, received.incarnation)

    async def _look_after(self, life: Life, tick_s: float) -> None:
        import asyncio

        next_tick = 0.0
        while True:
            now = time.monotonic()
            if now >= next_tick:
                life.tick()
                next_tick = now + tick_s
            life.on_control()  # the socket's descriptor is edge-triggered: look again after our own sends
            if life.is_ending:
                life.end_drain()
                if life.is_over:
                    return
            self._has_news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), 0.02 if life.is_ending else min(0.1, tick_s))

    async def close(self) -> None:
        import asyncio

        await asyncio.wait_for(self._service.close(), LAST_WORDS_MS / 1000)

    def unwatch(self) -> None:
        self._loop.remove_reader(self._control_fd)
