"""The gateway's view of the engine: carries out what the request table decides. One event loop owns it.

Between ``app`` (tickets of clients) and ``service`` (the bus): messages of the router go in by ``hear``, messages for it
leave through ``tell``. Runs in the gateway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.gateway.requests import Give, Instruction, Limits, RequestTable
from services.gateway.stream import Ticket
from shared.errors import ErrorCode
from shared.messages.base import Msg
from shared.messages.gateway import GroupState
from shared.messages.router import Submit


class GatewayEngine:
    """``tell`` sends one message to the router and says whether the bus took it."""

    def __init__(
        self, tell: Callable[[Msg], bool], limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self.table = RequestTable(limits)
        self.is_draining = False
        self._tickets: dict[str, Ticket] = {}

    # ---- for the routes

    @property
    def group(self) -> GroupState | None:
        return self.table.group

    @property
    def is_ready(self) -> bool:
        return self.table.is_ready(self._clock())

    @property
    def detail(self) -> str:
        return self.table.detail(self._clock())

    @property
    def n_open(self) -> int:
        return len(self.table.entries)

    def begin(self, submit: Submit) -> Ticket:
        """Takes a request over; its events come to the ticket. Must be paired with ``leave``."""
        ticket = self._tickets[submit.request] = Ticket(submit.request)
        self._apply(self.table.begin(submit, self._clock()))
        return ticket

    def leave(self, ticket: Ticket, reason: str) -> None:
        """The client has its answer or is gone; the router is told when it still works for it."""
        self._tickets.pop(ticket.request, None)
        self._apply(self.table.leave(ticket.request, reason))

    # ---- for the bus

    def hear(self, msg: Msg, incarnation: int) -> None:
        self._apply(self.table.hear(msg, incarnation, self._clock()))

    def router_changed(self, incarnation: int) -> None:
        self._apply(self.table.router_changed(incarnation, self._clock()))

    def tick(self) -> None:
        self._apply(self.table.tick(self._clock()))

    def cut_all(self, code: ErrorCode, message: str) -> int:
        """Ends all requests with an error; returns how many there were."""
        n_cut = len(self.table.entries)
        self._apply(self.table.cut_all(code, message))
        return n_cut

    @property
    def is_idle(self) -> bool:
        """No client waits for anything (answers may still be on their way out)."""
        return not self._tickets

    def _apply(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Give):
                ticket = self._tickets.get(instruction.request)
                if ticket is not None:
                    ticket.give(instruction.event)
            elif not self._tell(instruction.msg) and isinstance(instruction.msg, Submit):
                self.table.send_failed(instruction.msg, self._clock())
