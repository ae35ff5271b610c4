"""Answers on the wire: server-sent events with keep-alive comments, or one JSON body. Talks ASGI, decides nothing.

A stream is: the role chunk, text chunks, the chunk with the finish reason, the usage chunk when asked for, ``[DONE]``. An
error in the middle is one ``{"error": ...}`` event and then the end *without* ``[DONE]``, so that no client takes half an
answer for a whole one. While nothing is to be said a comment line goes out every ``KEEP_ALIVE_S`` of wall-clock time.
Runs in the gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from services.gateway.answers import Shape
from services.gateway.errors import ApiError
from services.gateway.requests import RequestEvent
from shared.errors import ErrorCode
from shared.messages.gateway import FinishReason, RequestAccepted, RequestDone, RequestRefused, TokenOut

KEEP_ALIVE_S: Final = 10.0
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client closed its connection; whatever is computed for it is for nobody."""


class Ticket:
    """A client's side of one request: the events that came for it, in order. One reader."""

    def __init__(self, request: str) -> None:
        self.request = request
        self._events: deque[RequestEvent] = deque()
        self._wake = asyncio.Event()
        self._is_gone = False

    def give(self, event: RequestEvent) -> None:
        self._events.append(event)
        self._wake.set()

    def hang_up(self) -> None:
        """The client is gone: the reader gets ClientGone at once."""
        self._is_gone = True
        self._wake.set()

    async def next(self, timeout_s: float | None = None) -> RequestEvent | None:
        """The next event; None when none came in time. Raises ClientGone."""
        if not self._events and not self._is_gone:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self._is_gone:
            raise ClientGone
        return self._events.popleft()


async def watch_client(receive: Receive, ticket: Ticket) -> None:
    """Hangs the ticket up when the connection closes. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.hang_up()


async def await_accepted(ticket: Ticket) -> RequestAccepted:
    """The router's verdict on the request, before anything is sent. Raises ApiError when it is refused."""
    event = await ticket.next()
    if isinstance(event, RequestAccepted):
        return event
    if isinstance(event, RequestRefused):
        raise api_error_of(event)
    if isinstance(event, RequestDone):
        raise done_error(event)
    raise AssertionError(f"{event!r} before RequestAccepted")


def api_error_of(refused: RequestRefused) -> ApiError:
    return ApiError(
        refused.status,
        refused.message,
        code=refused.code,
        param=refused.param or None,
        retry_after_s=1 if refused.status in (429, 503) else None,
    )


def done_error(done: RequestDone) -> ApiError:
    """The error that ended an accepted request."""
    code = done.error_code or (ErrorCode.ABORTED if done.reason == FinishReason.ABORT else ErrorCode.ENGINE_ERROR)
    is_passing = code in (ErrorCode.ROUTER_LOST, ErrorCode.SHUTTING_DOWN, ErrorCode.NOT_READY, ErrorCode.ABORTED)
    message = done.error or "the request was ended before its answer was complete"
    return ApiError(503 if is_passing else 500, message, code=code, retry_after_s=1 if is_passing else None)


def is_error(done: RequestDone) -> bool:
    return done.reason not in (FinishReason.STOP, FinishReason.LENGTH)


async def send_stream(
    send: Send, ticket: Ticket, shape: Shape, accepted: RequestAccepted, headers: Iterable[tuple[bytes, bytes]],
    keep_alive_s: float = KEEP_ALIVE_S,
) -> RequestDone:  # fmt: skip
    """The answer as server-sent events; returns how it ended. Raises ClientGone."""
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *headers,
            ],
        }
    )
    await _send_part(send, _event(shape.first(accepted)))
    last_sent = time.monotonic()
    while True:
        event = await ticket.next(max(0.0, last_sent + keep_alive_s - time.monotonic()))
        done: RequestDone | None = None
        if event is None:
            data = KEEP_ALIVE
        elif isinstance(event, TokenOut):
            chunk = shape.delta(event)
            if chunk is None:
                continue
            data = _event(chunk)
        elif isinstance(event, RequestDone):
            done = event
            data = _ending(shape, done)
        else:
            raise AssertionError(f"{event!r} in the middle of an answer")
        await _send_part(send, data, is_last=done is not None)
        if done is not None:
            return done
        last_sent = time.monotonic()


def _ending(shape: Shape, done: RequestDone) -> bytes:
    if is_error(done):
        return _event(done_error(done).body())
    data = _event(shape.last(done))
    if shape.wanted.include_usage:
        data += _event(shape.usage(done))
    return data + DONE


async def send_whole(
    send: Send, ticket: Ticket, shape: Shape, accepted: RequestAccepted, headers: Iterable[tuple[bytes, bytes]]
) -> RequestDone:
    """The answer as one JSON body; returns how it ended. Raises ClientGone, and ApiError for an answer that failed."""
    shape.accept(accepted)
    while True:
        event = await ticket.next()
        if isinstance(event, TokenOut):
            shape.add(event)
        elif isinstance(event, RequestDone):
            if is_error(event):
                raise done_error(event)
            await send_json(send, 200, shape.whole(event), headers)
            return event
        else:
            raise AssertionError(f"{event!r} in the middle of an answer")


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    retry = [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]
    await send_json(send, error.status, error.body(), [*retry, *headers])


async def _send_part(send: Send, data: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
