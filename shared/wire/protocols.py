"""What services need of their bus (``bus.Bus``, ``async_bus.AsyncBus``; queues in tests)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shared.messages.base import Msg
from shared.wire.control_plane import ControlServer
from shared.wire.zeromq import Context


class Posts(Protocol):
    """For messages that must arrive."""

    def post(self, receiver: str, msg: Msg) -> None:
        """Sends, or keeps the message until the receiver is there and has room."""


class Sends(Posts, Protocol):
    """For droppable ones too."""

    def send(self, receiver: str, msg: Msg) -> bool:
        """Sends without waiting; False: refused."""


class Polls(Protocol):
    """Descriptors of one's own in the poll loop."""

    def add_fd(self, fd: int, callback: Callable[[], object]) -> None:
        """``callback`` is called whenever ``fd`` is readable."""

    def remove_fd(self, fd: int) -> None:
        """No longer."""


class Links(Protocol):
    """What every bus has."""

    service: str

    def send(self, receiver: str, msg: Msg) -> bool:
        """Sends without waiting; False: refused."""

    def peer_changed(self, service: str, incarnation: int) -> None:
        """From now on, messages of older incarnations are dropped."""


class EngineBus(Sends, Polls, Links, Protocol):
    """An engine service's."""


class ControlBus(EngineBus, Protocol):
    """What the control plane works with."""

    context: Context

    def add_control(self, control: ControlServer, callback: Callable[[], object]) -> None:
        """``callback`` is called when the control socket has messages, before any data is returned."""
