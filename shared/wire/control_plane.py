"""The control plane's two ends: every service and tool a DEALER, the router the one ROUTER socket.

Messages are those of ``shared.messages.control``. A send never waits; bad frames are dropped.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Union

import msgspec

from shared.awake import Countdown
from shared.messages import control
from shared.messages.base import Msg
from shared.wire.endpoints import Endpoints
from shared.wire.zeromq import LINGER_MS, Context

_TO_SERVICE = (
    control.HelloWanted,
    control.PeerChanged,
    control.Drain,
    control.Stop,
    control.Drained,
    control.Status,
    control.RamWanted,
    control.Ram,
)
_TO_ROUTER = (
    control.Hello,
    control.Ready,
    control.Heartbeat,
    control.Drain,
    control.Drained,
    control.Dead,
    control.StatusWanted,
    control.RamWanted,
    control.Ram,
)


class ControlClient:
    """A service's (or tool's) end of the control plane."""

    def __init__(self, endpoints: Endpoints, context: Context | None = None) -> None:
        self._own_context = Context() if context is None else None
        self.socket = (context or self._own_context or Context()).dealer(endpoints.control)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Union[_TO_SERVICE])  # noqa: UP007

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor for asyncio: after it fires, and after every send, call ``receive_all``."""
        return self.socket.fd

    def can_send(self) -> bool:
        """Whether a router is connected."""
        return self.socket.can_send()

    def send(self, msg: Msg) -> bool:
        """False when the router is not there."""
        return self.socket.send(self._encoder.encode(msg))

    def receive_all(self) -> list[Any]:
        """Everything that has arrived; bad frames are dropped."""
        out: list[Any] = []
        while (frame := self.socket.receive()) is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                out.append(self._decoder.decode(frame))
        return out

    def ask(self, msg: Msg, answer: type[Msg], timeout_s: float) -> Any | None:
        """For tools: sends ``msg`` until it is accepted and waits for a message of type ``answer``; None on timeout."""
        limit = Countdown(timeout_s)
        while not self.send(msg):
            if limit.is_over:
                return None
            time.sleep(0.01)
        while not limit.is_over:
            if self.socket.wait(limit.step_s * 1000):
                for received in self.receive_all():
                    if isinstance(received, answer):
                        return received
        return None

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self.socket.close(linger_ms)
        if self._own_context:
            self._own_context.end(linger_ms)


class ControlServer:
    """The router's end. Peers are known by their socket identity (bytes)."""

    def __init__(self, endpoints: Endpoints, context: Context) -> None:
        self.socket = context.router(endpoints.control)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Union[_TO_ROUTER])  # noqa: UP007

    def receive_all(self) -> list[tuple[bytes, Any]]:
        """[(identity, message)] of everything that has arrived; bad frames are dropped."""
        out: list[tuple[bytes, Any]] = []
        while (parts := self.socket.receive_parts()) is not None:
            try:
                out.append((parts[0], self._decoder.decode(parts[-1])))
            except msgspec.MsgspecError:
                continue
        return out

    def send(self, identity: bytes, msg: Msg) -> bool:
        """False when the peer's queue is full; a peer that is gone is dropped by ZeroMQ in silence."""
        return self.socket.send(identity, self._encoder.encode(msg))

    def close(self) -> None:
        self.socket.close()
