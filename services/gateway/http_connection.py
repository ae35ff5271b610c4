"""One HTTP connection, as uvicorn speaks it, with what a server among strangers needs on top.

Here: a place in the lobby, limits in time and size for requests that come slowly, clients that close their sending side and
wait, plain bodies for HTTP/1.0, errors in OpenAI's shape. Who has to go is decided in ``lobby``, whether a client still
listens in ``peers``. Runs in the gateway.
"""

from __future__ import annotations

import asyncio
import http
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway import peers
from services.gateway.errors import ApiError
from services.gateway.lobby import Lobby
from services.gateway.patience import LATE_S
from services.gateway.peers import Pair, Peer
from shared.errors import ErrorCode

HEAD_S: Final = 15.0
"""From the first byte of a request, or from the connection, until its headers must be there."""
REQUEST_S: Final = 60.0
"""Until all of it must be there, whoever reads it."""
MAX_HEAD_BYTES: Final = 64 << 10
SEND_S: Final = 60.0
"""A client that takes nothing of its answer for so long is gone."""
CLOSING_S: Final = 10.0
"""How long what was written last may take to leave."""
LOOK_S: Final = 0.5
"""Between two looks at clients that closed their sending side."""
LOOK_SOON_S: Final = 0.02
PROBE_S: Final = 1.0


class Connections:
    """All connections of the server; gives uvicorn its protocol (``make``). One event loop."""

    def __init__(self, lobby: Lobby[Connection], clock: Callable[[], float] = time.monotonic) -> None:
        self.lobby = lobby
        self.now = clock
        """What limits are measured by."""
        self._look: asyncio.TimerHandle | None = None
        self._looked_at = 0.0

    def make(self, **of_uvicorn: Any) -> Connection:
        return Connection(self, **of_uvicorn)

    def sweep(self) -> None:
        """Ends what has taken too long; to be called several times a second."""
        now = self.now()
        for connection in self.lobby:
            connection.check(now)
        if now - self._looked_at >= LOOK_S:
            self._look_at_peers()

    def look_soon(self) -> None:
        """A client closed its sending side. Those that come together are looked at together."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SOON_S, self._look_at_peers)

    def _look_at_peers(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._looked_at = now = self.now()
        waiting = {pair: c for c in self.lobby if c.may_be_gone() and (pair := c.pair) is not None}
        if not waiting:
            return
        for pair, peer in peers.look(waiting).items():
            waiting[pair].hear_of_peer(peer, now)


class UntilClose(RequestResponseCycle):
    """An answer to HTTP/1.0: no chunk sizes; a body without content-length ends with the connection."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    def __init__(self, house: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._house = house
        self._born_at = self._house.now()
        self._begun_at: float | None = None
        """First byte of a request that is not complete."""
        self._has_head = False
        self._head_bytes = 0
        self._is_used = False
        self._is_half_closed = False
        self._paused_at: float | None = None
        self._closing_at: float | None = None
        self._probed_at = 0.0
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; ``cycle`` is the one that came last."""

    # ---- life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        for connection in self._house.lobby.enter(self, self._house.now()):
            connection.send_away(is_new=connection is self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._house.lobby.leave(self)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def send_away(self, *, is_new: bool) -> None:
        """Its place is needed."""
        if is_new:
            self._end_with(
                ApiError(
                    503, "all connections of the server are taken; try again", code=ErrorCode.BUSY, retry_after_s=1
                )
            )
        elif self._begun_at is not None:
            message = "the request was not complete when its place was needed; try again"
            self._end_with(ApiError(408, message, code=ErrorCode.REQUEST_TIMEOUT, retry_after_s=1))
        else:
            self.transport.close()

    def check(self, now: float) -> None:
        """Has something taken too long?"""
        if self.transport.is_closing():
            self._closing_at = self._closing_at or now
            if now - self._closing_at > CLOSING_S:
                self.transport.abort()
        elif self._paused_at is not None and now - self._paused_at > SEND_S:
            self.transport.abort()
        elif self._is_busy:
            pass
        elif self._begun_at is not None:
            limit = REQUEST_S if self._has_head else HEAD_S
            if now - self._begun_at > limit:
                what = "request" if self._has_head else "headers"
                words = f"the {what} did not arrive within {limit:.0f} s"
                self._end_with(ApiError(408, words, code=ErrorCode.REQUEST_TIMEOUT))
        elif not self._is_used and now - self._born_at > HEAD_S:
            self.transport.close()

    @property
    def _is_busy(self) -> bool:
        """A complete request waits for its answer."""
        return self.cycle is not None and bool(
            self.pipeline or not (self.cycle.response_complete or self.cycle.more_body)
        )

    def _end_with(self, error: ApiError) -> None:
        """The last words on this connection, unless an answer is under way."""
        running = self._running
        if running is None or running.response_complete or not running.response_started:
            body = error.body()
            head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            if error.retry_after_s is not None:
                head += f"retry-after: {error.retry_after_s}\r\n"
            self.transport.write(f"{head}\r\n".encode() + body)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """A timer that comes late: it was this process that stood still, and the client may have sent meanwhile."""
        timer = self.timeout_keep_alive_task
        if timer is not None and self.loop.time() - timer.when() > LATE_S:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    # ---- requests come

    def data_received(self, data: bytes) -> None:
        if self._begun_at is None:
            self._begin()
        super().data_received(data)
        if self._begun_at is not None and not self._has_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                words = f"the headers may have {MAX_HEAD_BYTES} bytes"
                self._end_with(ApiError(431, words, code=ErrorCode.HEADERS_TOO_LARGE))

    def _begin(self) -> None:
        self._begun_at = self._house.now()
        self._has_head = False
        self._head_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._has_head = True
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UntilClose

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begun_at = None
        self._is_used = True
        if self._is_busy:
            self._house.lobby.begin(self)

    def send_400_response(self, msg: str) -> None:
        words = "this is not a request of HTTP/1.1 or 1.0"
        self._end_with(ApiError(400, words, code=ErrorCode.INVALID_HTTP))

    # ---- answers leave

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_busy:
            return
        now = self._house.now()
        self._house.lobby.rest(self, now)
        if self._begun_at is not None:
            self._begun_at = now
        if self._is_half_closed:
            self.transport.close()

    def pause_writing(self) -> None:
        self._paused_at = self._house.now()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused_at = None
        super().resume_writing()

    # ---- the client sends no more

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open for the answer."""
        if self.cycle is None or (self.cycle.response_complete and not self.pipeline):
            if self._begun_at is not None:
                self._end_with(
                    ApiError(400, "the request ended before its headers were complete", code=ErrorCode.INVALID_HTTP)
                )
            return False
        self._is_half_closed = True
        if self.cycle.more_body:
            self.cycle.scope["state"]["is_body_cut"] = True
            self.cycle.message_event.set()
        else:
            self._house.look_soon()
        return True

    @property
    def pair(self) -> Pair | None:
        if self.server is None or self.client is None or self.server[1] is None:
            return None
        return (self.server[0], self.server[1]), self.client

    def may_be_gone(self) -> bool:
        """It closed its sending side and waits, or left. While reading is paused nobody tells us of it."""
        if not self._is_busy or self.transport.is_closing():
            return False
        return self._is_half_closed or (self.flow.read_paused and peers.is_half_closed(self._socket))

    def hear_of_peer(self, peer: Peer, now: float) -> None:
        if peer is Peer.LISTENS:
            return
        if peer is Peer.GONE or not peers.is_half_closed(self._socket):
            self.transport.abort()
            return
        # Only what is sent to it tells. An interim answer does no harm, and one that is gone answers with a reset.
        running = self._running
        if running is not None and not running.response_started and running.scope["http_version"] == "1.1":
            if now - self._probed_at < PROBE_S:
                return
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif not self._probed_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        self._probed_at = now

    @property
    def _socket(self) -> socket.socket:
        made: socket.socket = self.transport.get_extra_info("socket")
        return made
