"""Typed sockets, their options and the poll loop; the only module that imports zmq. Carries no business logic.

Data plane: messages as in ``codec``, as datagrams between the engine's services (``datagrams``), PUSH -> PULL to and from
the gateway. A send never blocks: it says False when the receiver is absent or its queue is full, and that is an event for
the sender to handle. Control plane: DEALER to the router's ROUTER socket, messages of ``shared.messages.control``. One
thread owns a bus and everything it polls.

Who uses what: the four engine services ``Bus`` and ``ControlClient`` (through ``lifecycle.run_service``); the router
``ControlServer`` besides; the gateway ``AsyncBus`` and ``ControlClient`` (through ``lifecycle.run_service_async``); tools
``ControlClient``.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Union

import msgspec
import zmq

from shared.log import Log
from shared.messages import control
from shared.messages.base import Msg
from shared.wire.codec import BadMessage, Decoder, Encoder, Received
from shared.wire.datagrams import DatagramInbox, DatagramOutbox
from shared.wire.endpoints import SENDS_TO, SERVICES, Endpoints, is_direct, senders_to

__all__ = ["AsyncBus", "Bus", "BusCounters", "ControlClient", "ControlServer", "Received"]

DATA_HWM = 4096
"""Messages queued per peer before a send is refused: hints of a few steps, never a backlog of work."""
LINGER_MS = 500
RECONNECT_MS = (
    10  # a peer is back within a second or two; looking every 10 ms costs nothing beside the ring's wait for it
)
MAX_UNSENT = 4096
MAX_BATCH = 256  # data messages taken per poll, so that control is looked at again

_CONTROL_TO_SERVICE = (
    control.HelloWanted,
    control.PeerChanged,
    control.Drain,
    control.Stop,
    control.Drained,
    control.Status,
    control.RamWanted,
    control.Ram,
)
_CONTROL_TO_ROUTER = (
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


def _set_options(socket: zmq.Socket[Any]) -> None:
    """The one place where socket options are set."""
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, DATA_HWM)
    socket.setsockopt(zmq.RCVHWM, DATA_HWM)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    if socket.type in (zmq.PUSH, zmq.DEALER):
        # Without it a PUSH that found no peer accepts a thousand messages in silence.
        socket.setsockopt(zmq.IMMEDIATE, 1)


def _plain_context(context: zmq.Context[Any]) -> zmq.Context[Any]:
    return context if type(context) is zmq.Context else zmq.Context(context)


class BusCounters(msgspec.Struct):
    """What happened at the sockets of one process; monotonic."""

    sent: int = 0
    received: int = 0
    refused: int = 0
    bad: int = 0
    stale: int = 0
    gaps: int = 0


class _DataSockets:
    """What the synchronous and the asyncio bus have in common: sockets, encoding, checks."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoints: Endpoints,
        service: str,
        incarnation: int,
        receives: tuple[type[Msg], ...],
        peers: Iterable[str] | None,
        log: Log | None,
    ) -> None:
        self.service = service
        self.incarnation = incarnation
        self.counters = BusCounters()
        self.log = log or Log(service, incarnation)
        self._context = context
        self._decoder = Decoder(receives)
        self._encoder = Encoder(service, incarnation)
        self._known: dict[str, int] = {}
        self._warned_at = -1.0
        self._last_sequence: dict[str, int] = {}
        self._sequence: dict[str, int] = {}
        self._push: dict[str, Any] = {}
        self._direct: dict[str, DatagramOutbox] = {}
        self._inbox: DatagramInbox | None = None
        if any(is_direct(sender, service) for sender in senders_to(service)):
            self._inbox = DatagramInbox(endpoints.direct(service))
        self._pull: Any = None
        if not all(is_direct(sender, service) for sender in senders_to(service)):
            self._pull = context.socket(zmq.PULL)
            _set_options(self._pull)
            self._pull.bind(endpoints.data(service))
        # Plain sockets even under asyncio: sends never wait, so they need no event loop.
        self._plain = _plain_context(context)
        for peer in SENDS_TO.get(service, ()) if peers is None else peers:
            self._sequence[peer] = 0
            if is_direct(service, peer):
                self._direct[peer] = DatagramOutbox(endpoints.direct(peer))
                continue
            socket = self._plain.socket(zmq.PUSH)
            _set_options(socket)
            socket.connect(endpoints.data(peer))
            self._push[peer] = socket

    def send(self, receiver: str, msg: Msg) -> bool:
        """Sends without waiting. False: refused, because the receiver is absent or its queue is full."""
        sequence = self._sequence[receiver]
        frame = self._encoder.encode(msg, sequence)
        outbox = self._direct.get(receiver)
        if outbox is None:
            try:
                self._push[receiver].send(frame, zmq.NOBLOCK)
                is_sent = True
            except zmq.Again:
                is_sent = False
        else:
            is_sent = outbox.send(frame)
        if not is_sent:
            self.counters.refused += 1
            return False
        self._sequence[receiver] = sequence + 1
        self.counters.sent += 1
        return True

    def peer_changed(self, service: str, incarnation: int) -> None:
        """From now on, messages of older incarnations of ``service`` are dropped."""
        self._known[service] = max(incarnation, self._known.get(service, 0))

    def _warn(self, event: str, **fields: object) -> None:
        """At most one line a second: a flood of bad messages must not become a flood of lines. The counters have all."""
        now = time.monotonic()
        if now - self._warned_at >= 1.0:
            self._warned_at = now
            self.log.warning(event, **fields)

    def accept(self, frame: bytes | memoryview) -> Received | None:
        """Decodes and checks one frame; None when it was dropped (and counted)."""
        try:
            received, sequence = self._decoder.decode(frame)
        except BadMessage as error:
            self.counters.bad += 1
            self._warn("message_bad", reason=error)
            return None
        sender, incarnation, _ = received
        known = self._known.get(sender, 0)
        if incarnation != known:
            if incarnation < known:
                self.counters.stale += 1
                return None
            self._known[sender] = incarnation
            self._last_sequence[sender] = sequence
        elif sequence != self._last_sequence.get(sender, sequence - 1) + 1:
            self.counters.gaps += 1
            self._warn("message_gap", sender=sender, sequence=sequence)
        self._last_sequence[sender] = sequence
        self.counters.received += 1
        return received

    @property
    def context(self) -> zmq.Context[Any]:
        """The process's one ZeroMQ context, without event loop."""
        return self._plain

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """The one exit path: every socket goes, messages that ZeroMQ still holds get ``linger_ms``."""
        if self._inbox:
            self._inbox.close()
        for outbox in self._direct.values():
            outbox.close()
        if self._plain is self._context:
            self._context.destroy(linger=linger_ms)
        else:
            self._destroy_shadowed(linger_ms)

    def _destroy_shadowed(self, linger_ms: int) -> None:
        # A context knows only the sockets made through it, and term() would wait for the others.
        for socket in self._push.values():
            socket.close(linger=linger_ms)
        self._context.destroy(linger=linger_ms)


class Bus(_DataSockets):
    """The sockets of one engine service. Binds at once, so that peers are connected before the service is ready.

    ``receives``: the message types this service understands. ``peers``: to whom it sends, default by ``SENDS_TO``.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        service: str,
        incarnation: int,
        receives: tuple[type[Msg], ...] = (),
        *,
        peers: Iterable[str] | None = None,
        log: Log | None = None,
    ) -> None:
        context: zmq.Context[Any] = zmq.Context()
        super().__init__(context, endpoints, service, incarnation, receives, peers, log)
        self._poller = zmq.Poller()
        if self._inbox:
            self._poller.register(self._inbox.fd, zmq.POLLIN)
        if self._pull:
            self._poller.register(self._pull, zmq.POLLIN)
        self._callbacks: dict[Any, Callable[[], object]] = {}
        self._unsent: dict[str, deque[Msg]] = {}

    def post(self, receiver: str, msg: Msg) -> None:
        """Sends, or keeps the message until the receiver is connected and has room (it is starting again, say).

        For messages without which a step would hang. Receivers drop what belongs to a step that is over, so a late
        delivery does no harm. At most ``MAX_UNSENT`` are kept per receiver, the newest.
        """
        if receiver not in self._unsent and self.send(receiver, msg):
            return
        self._unsent.setdefault(receiver, deque(maxlen=MAX_UNSENT)).append(msg)

    def _send_unsent(self) -> None:
        for receiver, waiting in list(self._unsent.items()):
            while waiting and self.send(receiver, waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._unsent[receiver]

    def add_fd(self, fd: int, callback: Callable[[], object]) -> None:
        """Calls ``callback`` inside ``poll`` whenever ``fd`` is readable (level-triggered: it must read it empty)."""
        self._poller.register(fd, zmq.POLLIN)
        self._callbacks[fd] = callback

    def remove_fd(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._callbacks.pop(fd, None)

    def add_control(self, control_socket: ControlClient | ControlServer, callback: Callable[[], object]) -> None:
        """Calls ``callback`` inside ``poll`` when the control socket has messages: before any data is returned."""
        self._poller.register(control_socket.socket, zmq.POLLIN)
        self._callbacks[control_socket.socket] = callback

    def poll(self, timeout_ms: float) -> list[Received]:
        """Waits for the first event, calls the callbacks of control sockets and fds, returns the data messages."""
        if self._unsent:
            self._send_unsent()
            timeout_ms = min(timeout_ms, RECONNECT_MS) if self._unsent else timeout_ms
        ready = self._poller.poll(int(timeout_ms))
        out: list[Received] = []
        data_from: list[Callable[[], list[Received]]] = []
        for socket, _ in ready:
            callback = self._callbacks.get(socket)
            if callback:
                callback()
            else:
                data_from.append(self._pulled if socket is self._pull else self._direct_ones)
        for receive in data_from:
            out += receive()
        return out

    def _direct_ones(self) -> list[Received]:
        assert self._inbox
        out: list[Received] = []
        for frame in self._inbox.frames(MAX_BATCH):
            received = self.accept(frame)
            if received is not None:
                out.append(received)
        return out

    def _pulled(self) -> list[Received]:
        out: list[Received] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_BATCH):
                received = self.accept(self._pull.recv(zmq.NOBLOCK))
                if received is not None:
                    out.append(received)
        return out


class AsyncBus(_DataSockets):
    """The gateway's bus: ``receive`` is awaited, ``send`` never waits. Works on asyncio and uvloop."""

    def __init__(
        self,
        endpoints: Endpoints,
        service: str,
        incarnation: int,
        receives: tuple[type[Msg], ...] = (),
        *,
        peers: Iterable[str] | None = None,
        log: Log | None = None,
    ) -> None:
        import zmq.asyncio

        super().__init__(zmq.asyncio.Context(), endpoints, service, incarnation, receives, peers, log)

    async def receive(self) -> Received:
        """The next message; bad and stale ones are dropped and counted."""
        while True:
            received = self.accept(await self._pull.recv())
            if received is not None:
                return received


class ControlClient:
    """A service's (or tool's) end of the control plane: a DEALER connected to the router's ROUTER socket."""

    def __init__(self, endpoints: Endpoints, context: zmq.Context[Any] | None = None) -> None:
        self._own_context = context is None
        self._context: zmq.Context[Any] = zmq.Context() if context is None else context
        self.socket: Any = self._context.socket(zmq.DEALER)
        _set_options(self.socket)
        self.socket.connect(endpoints.control)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Union[_CONTROL_TO_SERVICE])  # noqa: UP007

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor for asyncio: after it fires, and after every send, call ``receive_all``."""
        return int(self.socket.getsockopt(zmq.FD))

    def can_send(self) -> bool:
        """Whether a router is connected."""
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT)

    def send(self, msg: Msg) -> bool:
        """False when the router is not there."""
        try:
            self.socket.send(self._encoder.encode(msg), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive_all(self) -> list[Any]:
        """Everything that has arrived; bad frames are dropped."""
        out: list[Any] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return out
            try:
                out.append(self._decoder.decode(frame))
            except msgspec.MsgspecError:
                continue

    def ask(self, msg: Msg, answer: type[Msg], timeout_s: float) -> Any | None:
        """For tools: sends ``msg`` until it is accepted and waits for a message of type ``answer``; None on timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.send(msg):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(left * 1000):
                for received in self.receive_all():
                    if isinstance(received, answer):
                        return received
        return None

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self.socket.close(linger=linger_ms)
        if self._own_context:
            self._context.destroy(linger=linger_ms)


class ControlServer:
    """The router's end of the control plane. Peers are known by their socket identity (bytes)."""

    def __init__(self, endpoints: Endpoints, context: zmq.Context[Any]) -> None:
        self.socket: Any = context.socket(zmq.ROUTER)
        _set_options(self.socket)
        self.socket.bind(endpoints.control)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Union[_CONTROL_TO_ROUTER])  # noqa: UP007
        self.n_bad = 0

    def receive_all(self) -> list[tuple[bytes, Any]]:
        """[(identity, message)] of everything that has arrived; bad frames are dropped and counted."""
        out: list[tuple[bytes, Any]] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return out
            try:
                out.append((frames[0], self._decoder.decode(frames[-1])))
            except msgspec.MsgspecError:
                self.n_bad += 1

    def send(self, identity: bytes, msg: Msg) -> bool:
        """False when the peer's queue is full; a peer that is gone is dropped by ZeroMQ in silence."""
        try:
            self.socket.send_multipart((identity, self._encoder.encode(msg)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=LINGER_MS)


assert tuple(SENDS_TO) == SERVICES
