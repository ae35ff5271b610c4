"""ZeroMQ: a process's context, the options of every socket, and the links of the data plane that use it.

The only module that imports zmq. A socket's descriptor (``fd``) becomes readable when ZeroMQ has news for the process, not
for each message; any call on the socket takes the news. So whoever was woken, or has sent, reads the socket empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import zmq

DATA_HWM = 4096
"""Messages queued per peer before a send is refused: hints of a few steps, never a backlog of work."""
LINGER_MS = 500
RECONNECT_MS = 10
"""A peer is back within a second or two; looking every 10 ms costs nothing beside the ring's wait for it."""


class Context:
    """ZeroMQ's threads and sockets of one process; nothing is started before the first socket."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] | None = None

    def socket(self, kind: int) -> zmq.Socket[Any]:
        if self._context is None:
            self._context = zmq.Context()
        return self._context.socket(kind)

    def dealer(self, address: str) -> Socket:
        """Connected to ``address``; for the control plane's many ends."""
        return Socket(self, zmq.DEALER, connects=address)

    def router(self, address: str) -> Socket:
        """Bound to ``address``; for the control plane's one end."""
        return Socket(self, zmq.ROUTER, binds=address)

    def end(self, linger_ms: int) -> None:
        """The one exit path: every socket goes, messages that ZeroMQ still holds get ``linger_ms``."""
        if self._context is not None:
            self._context.destroy(linger=linger_ms)
            self._context = None


class Socket:
    """A ZeroMQ socket that never waits."""

    def __init__(self, context: Context, kind: int, *, binds: str = "", connects: str = "") -> None:
        self._socket = socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, DATA_HWM)
        socket.setsockopt(zmq.RCVHWM, DATA_HWM)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if kind in (zmq.PUSH, zmq.DEALER):
            # Without it a PUSH that found no peer accepts a thousand messages in silence.
            socket.setsockopt(zmq.IMMEDIATE, 1)
        if binds:
            socket.bind(binds)
        if connects:
            socket.connect(connects)
        self.fd = int(socket.getsockopt(zmq.FD))
        self.has_news = True
        """A call on the socket may have taken news that nobody has read yet: look before you wait."""

    def send(self, *parts: bytes | bytearray) -> bool:
        """One message of one or more parts. False when nobody is connected or the queue is full."""
        self.has_news = True
        try:
            if len(parts) == 1:
                self._socket.send(parts[0], zmq.NOBLOCK)
            else:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """A message of one part, None when there is none."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self.has_news = False
            return None

    def receive_parts(self) -> list[bytes] | None:
        """A message of several parts, None when there is none."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self.has_news = False
            return None

    def can_send(self) -> bool:
        """Whether a peer is connected and has room."""
        self.has_news = True
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def wait(self, timeout_ms: float) -> bool:
        """Waits for a message."""
        return bool(self._socket.poll(int(timeout_ms)))

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._socket.close(linger=linger_ms)


class ZmqInbox:
    """PULL, bound to ``address``."""

    def __init__(self, context: Context, address: str) -> None:
        self._socket = Socket(context, zmq.PULL, binds=address)
        self.fd = self._socket.fd

    @property
    def has_more(self) -> bool:
        return self._socket.has_news

    def frames(self, limit: int) -> Iterator[bytes]:
        for _ in range(limit):
            frame = self._socket.receive()
            if frame is None:
                return
            yield frame

    def close(self) -> None:
        self._socket.close()


class ZmqOutbox:
    """PUSH, connected to ``address``."""

    def __init__(self, context: Context, address: str) -> None:
        self._socket = Socket(context, zmq.PUSH, connects=address)

    def send(self, frame: bytes | bytearray) -> bool:
        return self._socket.send(frame)

    def close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)
