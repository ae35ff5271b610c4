"""Data messages of one process: encoding, checks, and the poll loop. Carries no business logic; opens links by ``links``.

Messages as in ``codec``. A send never blocks: it says False when the receiver is absent or its queue is full, and that is an
event for the sender to handle. One thread owns a bus and everything it polls. The four engine services use ``Bus`` (through
``lifecycle.run_service``), the gateway ``async_bus`` (``lifecycle.run_service_async``); both the ``control_plane`` besides.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from shared.log import Log
from shared.messages.base import Msg
from shared.wire.codec import BadMessage, Decoder, Encoder, Received
from shared.wire.endpoints import SENDS_TO, SERVICES, Endpoints
from shared.wire.links import AUTO, Frame, open_inboxes, open_outboxes
from shared.wire.zeromq import LINGER_MS, RECONNECT_MS, Context

if TYPE_CHECKING:
    from shared.wire.control_plane import ControlClient, ControlServer

__all__ = ["Bus", "BusCounters", "DataLinks", "Received"]

MAX_UNSENT = 4096
MAX_BATCH = 256  # data messages taken per poll, so that control is looked at again


class BusCounters(msgspec.Struct):
    """What happened at the sockets of one process; monotonic."""

    refused: int = 0
    bad: int = 0
    stale: int = 0
    gaps: int = 0


class DataLinks:
    """What the synchronous and the asyncio bus have in common: links, encoding, checks.

    ``receives``: the message types this service understands. ``peers``: to whom it sends, default by ``SENDS_TO``.
    ``transport``: one of ``links.TRANSPORTS``. Binds at once, so that peers are connected before the service is ready.
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
        transport: str = AUTO,
    ) -> None:
        self.service = service
        self.incarnation = incarnation
        self.counters = BusCounters()
        self.log = log or Log(service, incarnation)
        self.context = Context()
        """For the control plane of the same process."""
        self._decoder = Decoder(receives)
        self._encoder = Encoder(service, incarnation)
        self._known: dict[str, int] = {}
        self._warned_at = -1.0
        self._last_sequence: dict[str, int] = {}
        peers = tuple(SENDS_TO.get(service, ()) if peers is None else peers)
        self._sequence = dict.fromkeys(peers, 0)
        self._inboxes = open_inboxes(transport, endpoints, service, self.context)
        self._outboxes = open_outboxes(transport, endpoints, service, peers, self.context)
        self._opened()

    def _opened(self) -> None:
        """The links are open; what a kind of bus needs besides."""

    def send(self, receiver: str, msg: Msg) -> bool:
        """Sends without waiting. False: refused, because the receiver is absent or its queue is full."""
        sequence = self._sequence[receiver]
        frame = self._encoder.encode(msg, sequence)
        if not self._outboxes[receiver].send(frame):
            self.counters.refused += 1
            return False
        self._sequence[receiver] = sequence + 1
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

    def accept(self, frame: Frame) -> Received | None:
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
        return received

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """The one exit path: every link goes, messages that are still queued get ``linger_ms``."""
        for inbox in self._inboxes:
            inbox.close()
        for outbox in self._outboxes.values():
            outbox.close(linger_ms)
        self.context.end(linger_ms)


class Bus(DataLinks):
    """The sockets and descriptors of one engine service."""

    def _opened(self) -> None:
        self._epoll = select.epoll()
        self._inbox_of = {inbox.fd: inbox for inbox in self._inboxes}
        for fd in self._inbox_of:
            self._epoll.register(fd, select.EPOLLIN)
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._controls: list[tuple[ControlClient | ControlServer, Callable[[], object]]] = []
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
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def remove_fd(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._callbacks.pop(fd, None)

    def add_control(self, control: ControlClient | ControlServer, callback: Callable[[], object]) -> None:
        """Calls ``callback`` inside ``poll`` when the control socket has messages: before any data is returned."""
        self.add_fd(control.socket.fd, callback)
        self._controls.append((control, callback))

    def poll(self, timeout_ms: float) -> list[Received]:
        """Waits for the first event, calls the callbacks of control sockets and fds, returns the data messages."""
        if self._unsent:
            self._send_unsent()
            timeout_ms = min(timeout_ms, RECONNECT_MS) if self._unsent else timeout_ms
        for control, callback in self._controls:
            if control.socket.has_news:
                callback()
        inboxes = [inbox for inbox in self._inboxes if inbox.has_more]
        if inboxes:
            timeout_ms = 0
        for fd, _ in self._epoll.poll(timeout_ms / 1000):
            callback_of = self._callbacks.get(fd)
            if callback_of is not None:
                callback_of()
            elif (
                fd in self._inbox_of and self._inbox_of[fd] not in inboxes
            ):  # not there: a callback has just removed it
                inboxes.append(self._inbox_of[fd])
        out: list[Received] = []
        for inbox in inboxes:
            for frame in inbox.frames(MAX_BATCH):
                received = self.accept(frame)
                if received is not None:
                    out.append(received)
        return out

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._epoll.close()
        super().close(linger_ms)


assert tuple(SENDS_TO) == SERVICES
