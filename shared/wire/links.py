"""One interface for every way in which frames travel between processes, and the choice among them.

A receiver has an ``Inbox`` per kind of link that its senders use, a sender an ``Outbox`` per receiver. Kinds:

    datagram   Unix datagrams (``datagrams``): one wake-up a hop; processes of one host, frames of at most 64 KiB
    zmq        ZeroMQ PUSH -> PULL (``zeromq``): three wake-ups a hop; any size, and what will cross hosts

``TRANSPORTS`` are the values of the setting. ``auto`` and ``datagram`` give the engine's services datagrams among
themselves; the gateway, whose requests are long texts, always has ZeroMQ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from shared.wire.datagrams import DatagramInbox, DatagramOutbox
from shared.wire.endpoints import GATEWAY, SENDS_TO, Endpoints
from shared.wire.zeromq import Context, ZmqInbox, ZmqOutbox

AUTO, DATAGRAM, ZMQ = "auto", "datagram", "zmq"
TRANSPORTS = (AUTO, ZMQ, DATAGRAM)
Frame = bytes | memoryview


class Outbox(Protocol):
    """The sending end towards one receiver, which may come, go and come again."""

    def send(self, frame: bytes | bytearray) -> bool:
        """Without waiting. False: the receiver is absent or its queue is full."""

    def close(self, linger_ms: int) -> None:
        """What is still queued gets ``linger_ms``."""


class Inbox(Protocol):
    """The receiving end, bound before anybody sends."""

    @property
    def fd(self) -> int:
        """Readable when ``frames`` may have something that was not there before."""

    @property
    def has_more(self) -> bool:
        """Whether ``frames`` has to be asked again before anybody waits for ``fd``."""

    def frames(self, limit: int) -> Iterator[Frame]:
        """What has arrived, at most ``limit``; each is valid until the next is asked for."""

    def close(self) -> None: ...


def kind_of(transport: str, sender: str, receiver: str) -> str:
    """``DATAGRAM`` or ``ZMQ``: how data messages of this pair travel under a transport."""
    return ZMQ if transport == ZMQ or GATEWAY in (sender, receiver) else DATAGRAM


def open_inboxes(transport: str, endpoints: Endpoints, service: str, context: Context) -> list[Inbox]:
    """Binds what the senders to ``service`` use."""
    kinds = {kind_of(transport, sender, service) for sender, peers in SENDS_TO.items() if service in peers}
    inboxes: list[Inbox] = []
    if DATAGRAM in kinds:
        inboxes.append(DatagramInbox(endpoints.direct(service)))
    if ZMQ in kinds:
        inboxes.append(ZmqInbox(context, endpoints.data(service)))
    return inboxes


def open_outboxes(
    transport: str, endpoints: Endpoints, service: str, peers: Iterable[str], context: Context
) -> dict[str, Outbox]:
    """{receiver: outbox} for each of ``peers``."""
    outboxes: dict[str, Outbox] = {}
    for peer in peers:
        if kind_of(transport, service, peer) == DATAGRAM:
            outboxes[peer] = DatagramOutbox(endpoints.direct(peer))
        else:
            outboxes[peer] = ZmqOutbox(context, endpoints.data(peer))
    return outboxes
