"""Frames between processes of one host, one Unix datagram each: a system call to send, a wake-up to receive.

ZeroMQ hands every message to a thread of its own at both ends, which costs a hop two more wake-ups; with three hops a layer
that is what a small model spends its time on (``python -m bench.hops``). Datagrams keep what the bus promises: frames are
whole and in order, a send never waits, and a receiver that is absent or full refuses. Knows nothing of messages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

MAX_FRAME_BYTES = 64 << 10
"""The engine's messages are a few numbers, or a sentence; what is longer arrives cut off and is refused as such."""

_ABSENT = {errno.ECONNREFUSED, errno.ENOENT, errno.ENOTCONN, errno.EDESTADDRREQ, errno.ECONNRESET, errno.EPIPE}
_FULL = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}


class DatagramInbox:
    """The receiving end, bound to ``path``; takes the place of a predecessor that died there."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket.bind(path)
        self._buffer = bytearray(MAX_FRAME_BYTES)
        self._view = memoryview(self._buffer)
        self.fd = self._socket.fileno()
        self.has_more = False  # the descriptor stays readable as long as something is there

    def frames(self, limit: int) -> Iterator[memoryview]:
        """What has arrived, at most ``limit``; each is valid until the next is asked for."""
        receive = self._socket.recv_into
        for _ in range(limit):
            try:
                n_bytes = receive(self._buffer)
            except BlockingIOError:
                return
            yield self._view[:n_bytes]

    def close(self) -> None:
        self._socket.close()


class DatagramOutbox:
    """The sending end. The receiver may come, go and come again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def send(self, frame: bytes | bytearray) -> bool:
        """False: nobody is bound there, or ten frames (the system's limit) wait already. Raises OSError for a frame that
        is too large to send."""
        try:
            self._socket.send(frame)
            return True
        except OSError as error:
            if error.errno in _FULL:
                return False
            if error.errno not in _ABSENT:
                raise
        try:  # connected to nobody yet, or to one who is gone: somebody else may be there now
            self._socket.connect(self._path)
            self._socket.send(frame)
            return True
        except OSError as error:
            if error.errno in _FULL or error.errno in _ABSENT:
                return False
            raise

    def close(self, linger_ms: int = 0) -> None:
        """What was sent lies with the receiver already."""
        self._socket.close()
