"""What a service is to the lifecycle, and what the lifecycle gives it to work with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from shared.awake import AwakeClock
from shared.log import Log
from shared.messages import control
from shared.messages.base import Msg
from shared.messages.control import Ram, RamWanted, ServiceState
from shared.run.config import GroupConfig
from shared.wire.control_plane import ControlClient
from shared.wire.endpoints import Endpoints
from shared.wire.protocols import ControlBus, Links

AnyBus = TypeVar("AnyBus", bound=Links, covariant=True)


class ServiceContext(Generic[AnyBus]):
    """What a service gets to work with, and its state as heartbeats tell it."""

    def __init__(
        self,
        config: GroupConfig,
        endpoints: Endpoints,
        bus: AnyBus,
        log: Log,
        incarnation: int,
        control_client: ControlClient,
    ) -> None:
        self.config = config
        self.endpoints = endpoints
        self.bus = bus
        self.log = log
        self.incarnation = incarnation
        self.control = control_client
        self.ticks: list[Callable[[], None]] = []
        self.state = ServiceState.STARTING
        self.stage = ""
        self.stage_since = 0.0
        self.awake = AwakeClock(config.heartbeat_s)
        """What limits of this process are measured by; read with every ``tick``."""
        self._beat_at = 0.0

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
                control.Heartbeat(self.bus.service, self.incarnation, self.state, self.stage, round(stage_s, 3))
            )


class BaseService:
    """What every service can be asked, whatever its main loop."""

    name: ClassVar[str]
    receives: ClassVar[tuple[type[Msg], ...]]
    term_grace_s: ClassVar[float] = 0.0
    """After SIGTERM without a drain before it: how long work may go on before ``cut``."""

    def prepare(self, config: GroupConfig) -> None:
        """First of all, before there is a socket or a thread: the time to fork a process of one's own. Raises ColibriError."""

    def tick(self) -> None:
        """At least every quarter of a heartbeat, unless another call lasts longer."""

    def peer_changed(self, service: str, incarnation: int) -> None:
        """A peer that was known before has been replaced. Its old messages are dropped from now on."""

    def is_idle(self) -> bool:
        """Nothing in progress: a drain is complete."""
        return True

    def begin_drain(self, reason: str) -> None:
        """Refuse new work from now on."""

    def cut(self, reason: str) -> int:
        """The drain's deadline passed: end what is left, with a reply. Returns how much that was."""
        return 0

    def change_ram(self, msg: RamWanted) -> Ram:
        """Another memory budget; only the service that holds what can shrink is asked."""
        return Ram(msg.asker, 0, 0, 0, 0, f"{self.name} has no part of the budget that could change.")


class Service(BaseService, ABC):
    """An engine service. Subclasses set ``name`` and ``receives`` and fill the methods; all run on one thread."""

    def attach(self, ctx: ServiceContext[ControlBus]) -> None:
        """Before ``load``, sockets are bound: add further sockets of this process to the loop."""

    @abstractmethod
    def load(self, ctx: ServiceContext[ControlBus]) -> dict[str, str]:
        """Attach segments, load weights; returns the facts for ``Ready``. May add fds with ``ctx.bus.add_fd``."""

    @abstractmethod
    def handle(self, msg: Any, sender: str) -> None:
        """One data message. Raises ``unknown_message`` for one that it has no use for."""

    def work(self) -> bool:
        """One piece of work after the messages of a poll; True: call again without waiting for an event."""
        return False

    def close(self) -> None:
        """Give back threads and memory; called once, after a successful ``load``."""


class AsyncService(BaseService, ABC):
    """The gateway's kind: ``load`` and ``close`` are coroutines, the rest is called on the event loop and never blocks."""

    term_grace_s: ClassVar[float] = 2.0

    @abstractmethod
    async def load(self, ctx: ServiceContext[Links]) -> dict[str, str]:
        """Start serving; returns the facts for ``Ready``."""

    @abstractmethod
    def handle(self, msg: Any, sender: str, incarnation: int) -> None:
        """One data message and the incarnation of its sender."""

    async def close(self) -> None:
        """Stop serving; called once, after a successful ``load``."""
