"""The gateway process: one event loop with the HTTP server on one side and the bus on the other.

Owns the listening socket and the life of the server; what requests are and become is decided in ``requests``, carried out
in ``engine``. The port is bound first of all, so that a busy port shows at once and clients get an honest 503 while the
model loads. Holds nothing of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import uvicorn

from services.gateway.app import make_app
from services.gateway.engine import GatewayEngine
from services.gateway.http_connection import Connections
from services.gateway.lobby import Lobby, LobbyLimits
from services.gateway.requests import Limits
from shared.errors import ErrorCode
from shared.log import Log
from shared.messages.base import Msg
from shared.messages.gateway import GroupState, RequestAccepted, RequestDone, RequestRefused, TokenOut
from shared.run.address import listen, url_of
from shared.run.descriptors import free_descriptors
from shared.run.service import AsyncService, ServiceContext
from shared.wire.endpoints import GATEWAY, ROUTER
from shared.wire.protocols import Links

KEEP_ALIVE_IDLE_S = 75
"""How long an idle HTTP connection is kept open for the next request."""
SPARE_DESCRIPTORS = 32
"""Left for the bus, files and what libraries open."""
CLOSE_S = 1.0
"""How long last events of cut streams get to reach their clients."""


class GatewayService(AsyncService):
    name: ClassVar[str] = GATEWAY
    receives: ClassVar[tuple[type[Msg], ...]] = (RequestAccepted, TokenOut, RequestDone, RequestRefused, GroupState)

    def __init__(self) -> None:
        self._engine: GatewayEngine | None = None
        self._connections: Connections | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._log: Log | None = None

    async def load(self, ctx: ServiceContext[Links]) -> dict[str, str]:
        """Binds the port and serves; answers 503 until the router reports the group ready. Raises ConfigError."""
        self._log = ctx.log
        listeners = listen(ctx.config.host, ctx.config.port)
        port = int(listeners[0].getsockname()[1])
        room = LobbyLimits.of_descriptors(free_descriptors() - SPARE_DESCRIPTORS)
        connections = self._connections = Connections(Lobby(room), ctx.awake.now)
        engine = self._engine = GatewayEngine(
            lambda msg: bool(ctx.bus.send(ROUTER, msg)),
            Limits(max_open=min(Limits().max_open, room.max_busy), silent_s=max(2.0, 5 * ctx.config.heartbeat_s)),
            ctx.awake.now,
        )
        self._server = _Server(
            uvicorn.Config(
                make_app(engine, ctx.log, defaults=ctx.config.defaults),
                loop="none",
                http=cast(Any, connections.make),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_IDLE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=listeners))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while starting")
            await asyncio.sleep(0.005)
        return {"url": url_of(ctx.config.host, port), "port": str(port), "connections": str(room.max_open)}

    def handle(self, msg: Any, sender: str, incarnation: int) -> None:
        if self._engine is not None and sender == ROUTER:
            before = self._engine.table.n_resumed
            self._engine.hear(msg, incarnation)
            if self._engine.table.n_resumed > before and self._log is not None:
                self._log.info("requests_wait", n=self._engine.table.n_resumed - before, router=incarnation)

    def tick(self) -> None:
        assert self._engine is not None
        assert self._serving is not None
        assert self._connections is not None
        if self._serving.done():
            self._serving.result()
            raise RuntimeError("the HTTP server ended by itself")
        self._connections.sweep()
        self._engine.tick()

    def peer_changed(self, service: str, incarnation: int) -> None:
        if self._engine is not None and service == ROUTER:
            self._engine.router_changed(incarnation)

    def is_idle(self) -> bool:
        return self._engine is None or self._engine.is_idle

    def begin_drain(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.is_draining = True

    def cut(self, reason: str) -> int:
        if self._engine is None:
            return 0
        return self._engine.cut_all(
            ErrorCode.SHUTTING_DOWN, f"the server stops ({reason}) and this answer took too long"
        )

    async def close(self) -> None:
        """Lets last events out, then closes all connections and the port."""
        assert self._engine is not None
        assert self._server is not None
        assert self._serving is not None
        self._engine.is_draining = True
        self._engine.cut_all(ErrorCode.SHUTTING_DOWN, "the server stops")
        deadline = time.monotonic() + CLOSE_S
        while not self._engine.is_idle and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._server.leave()
        await self._serving


class _Server(uvicorn.Server):
    """uvicorn that ends at once when it is told to and nobody is connected; signals belong to the lifecycle."""

    TICK_S = 0.1
    """As uvicorn's own main loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._is_told.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_told.wait(), self.TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
