"""The table of open requests: what the router was told, what the client has got, and what follows from an event. Pure.

Events in (a client began or left, a message came, time passed), instructions out (``Tell`` the router, ``Give`` the
client). Nothing here sends, waits or reads a clock. What the table promises: each request that ``begin`` took is given
exactly one last event (``RequestDone`` or ``RequestRefused``) unless its client left first.

A router is known by its incarnation. When another one speaks, the requests of the old one are submitted again with the
tokens already delivered (``resume_ids``); random numbers belong to (seed, position), so the answer goes on with the same
bytes. Runs in the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from shared.errors import ErrorCode, unknown_message
from shared.messages.base import Msg
from shared.messages.gateway import FinishReason, GroupState, RequestAccepted, RequestDone, RequestRefused, TokenOut
from shared.messages.router import Abort, Submit

RequestEvent = RequestAccepted | TokenOut | RequestDone | RequestRefused


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``msg`` to the router."""

    msg: Msg


@dataclass(frozen=True, slots=True)
class Give:
    """Hand ``event`` to the client of ``request``."""

    request: str
    event: RequestEvent


Instruction = Tell | Give


class EntryState(Enum):
    WAITING = "waiting"
    """To be submitted as soon as a router is ready."""
    SENT = "sent"
    RUNNING = "running"


@dataclass(slots=True)
class Entry:
    submit: Submit
    since: float
    """When it began to wait for a router."""
    state: EntryState = EntryState.WAITING
    is_accepted: bool = False
    """The client knows that its request runs; a refusal is no longer possible, only an error."""
    n_prompt: int = 0
    tokens: list[int] = field(default_factory=list)
    n_resumes: int = 0
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_open`` requests at once; a request survives ``max_resumes`` routers; nobody waits longer than ``grace_s`` for
    one; a router that has said nothing for ``silent_s`` is not ready; ``retry_s`` between two tries of a submission."""

    max_open: int = 256
    max_resumes: int = 4
    grace_s: float = 60.0
    silent_s: float = 5.0
    retry_s: float = 0.25


class RequestTable:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.entries: dict[str, Entry] = {}
        self.group: GroupState | None = None
        self.router = 0
        """Incarnation of the newest router that spoke, 0 = none yet."""
        self.heard_at = float("-inf")
        self.n_resumed = 0
        self._told_unknown: dict[str, float] = {}

    # ---- questions

    def is_silent(self, now: float) -> bool:
        return now - self.heard_at > self.limits.silent_s

    def is_ready(self, now: float) -> bool:
        """The whole group can serve, by its own word and recently."""
        return self.group is not None and self.group.is_ready and not self.is_silent(now)

    def detail(self, now: float) -> str:
        """Why not ready, in words."""
        if self.group is None:
            return "the router has not reported yet"
        if self.is_silent(now):
            return f"no word from the router for {now - self.heard_at:.0f} s"
        return self.group.detail

    # ---- events of the client

    def begin(self, submit: Submit, now: float) -> list[Instruction]:
        """A client wants an answer. ``submit.request`` must be new."""
        if len(self.entries) >= self.limits.max_open:
            refused = RequestRefused(
                submit.request,
                429,
                ErrorCode.QUEUE_FULL,
                f"{len(self.entries)} requests are open already; try again later",
            )
            return [Give(submit.request, refused)]
        assert submit.request not in self.entries, f"request id {submit.request} is used twice"
        entry = self.entries[submit.request] = Entry(submit, now)
        return self._submit(entry, now) if self.is_ready(now) else []

    def leave(self, request: str, reason: str) -> list[Instruction]:
        """The client is gone; it gets nothing any more. Nothing happens when the request has ended already."""
        entry = self.entries.pop(request, None)
        if entry is None or entry.state is EntryState.WAITING:
            return []
        return [Tell(Abort(request, reason))]

    def cut_all(self, code: ErrorCode, message: str) -> list[Instruction]:
        """End everything with an error, e.g. at the deadline of a drain."""
        out: list[Instruction] = []
        for entry in list(self.entries.values()):
            if entry.state is not EntryState.WAITING:
                out.append(Tell(Abort(entry.submit.request, code)))
            out += self._fail(entry, code, message)
        return out

    # ---- events of the router

    def hear(self, msg: Msg, incarnation: int, now: float) -> list[Instruction]:
        """A message of a router with this incarnation. Older routers than the newest known are not listened to."""
        if incarnation < self.router:
            return []
        out = self._meet(incarnation, now) if incarnation > self.router else []
        self.heard_at = now
        if isinstance(msg, GroupState):
            self.group = msg
            return out + self.tick(now)
        if isinstance(msg, RequestAccepted | TokenOut | RequestDone | RequestRefused):
            entry = self.entries.get(msg.request)
            if entry is None:
                return out + self._unknown(msg, now)
            if entry.state is not EntryState.WAITING:
                return out + self._advance(entry, msg, now)
            return out
        raise unknown_message("gateway", msg, "router")

    def router_changed(self, incarnation: int, now: float) -> list[Instruction]:
        """The control plane says that a new router is there (it may not have spoken to us yet)."""
        return self._meet(incarnation, now) if incarnation > self.router else []

    def send_failed(self, submit: Submit, now: float) -> None:
        """The bus refused this Submit: the router is absent or its queue is full. Tried again by ``tick``."""
        entry = self.entries.get(submit.request)
        if entry is not None and entry.state is EntryState.SENT:
            entry.state = EntryState.WAITING
            entry.not_before = now + self.limits.retry_s

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: submit what waits, end what has waited too long."""
        out: list[Instruction] = []
        is_ready = self.is_ready(now)
        is_gone = now - self.heard_at > self.limits.grace_s and self.router != 0
        for entry in list(self.entries.values()):
            if entry.state is not EntryState.WAITING:
                if is_gone:
                    out += self._fail(
                        entry,
                        ErrorCode.ROUTER_LOST,
                        f"the router has been silent for {now - self.heard_at:.0f} s; the answer is incomplete",
                    )
            elif is_ready and now >= entry.not_before:
                out += self._submit(entry, now)
            elif now - entry.since > self.limits.grace_s:
                out += self._fail(
                    entry,
                    ErrorCode.ROUTER_LOST if entry.n_resumes else ErrorCode.NOT_READY,
                    f"the group did not become ready within {self.limits.grace_s:.0f} s: {self.detail(now)}",
                )
        return out

    # ---- inside

    def _meet(self, incarnation: int, now: float) -> list[Instruction]:
        self.router = incarnation
        self.group = None  # what the old one said about the group is void
        out: list[Instruction] = []
        for entry in list(self.entries.values()):
            if entry.state is EntryState.WAITING:
                continue
            entry.n_resumes += 1
            self.n_resumed += 1
            if entry.n_resumes > self.limits.max_resumes:
                out += self._fail(
                    entry,
                    ErrorCode.ROUTER_LOST,
                    f"the router was lost {entry.n_resumes} times during this answer; it is incomplete",
                )
            else:
                entry.state = EntryState.WAITING
                entry.since = now
        return out

    def _submit(self, entry: Entry, now: float) -> list[Instruction]:
        entry.state = EntryState.SENT
        resume_ids = tuple(entry.tokens)
        return [Tell(msgspec.structs.replace(entry.submit, resume_ids=resume_ids, router=self.router))]

    def _advance(self, entry: Entry, msg: RequestEvent, now: float) -> list[Instruction]:
        request = entry.submit.request
        if isinstance(msg, RequestAccepted):
            entry.state = EntryState.RUNNING
            entry.n_prompt = msg.n_prompt
            if entry.is_accepted:
                return []  # a resumed request: the client knows
            entry.is_accepted = True
            return [Give(request, msg)]
        if isinstance(msg, TokenOut):
            if msg.tokens and msg.index != len(entry.tokens):
                out: list[Instruction] = [Tell(Abort(request, "gap"))]
                return out + self._fail(
                    entry,
                    ErrorCode.STREAM_BROKEN,
                    f"token {len(entry.tokens)} was expected next, {msg.index} came; the answer is incomplete",
                )
            entry.tokens.extend(msg.tokens)
            return [Give(request, msg)]
        if isinstance(msg, RequestDone):
            del self.entries[request]
            if msg.n_generated < len(entry.tokens):
                msg = msgspec.structs.replace(msg, n_generated=len(entry.tokens))
            return [Give(request, msg)]
        if entry.n_resumes and msg.status in (429, 503):
            # The new router is not quite there. ``tick`` goes on trying until the grace ends.
            entry.state = EntryState.WAITING
            entry.not_before = now + self.limits.retry_s
            return []
        if entry.is_accepted:
            return self._fail(entry, msg.code, f"the restarted router refused to go on: {msg.message}")
        del self.entries[request]
        return [Give(request, msg)]

    def _fail(self, entry: Entry, code: ErrorCode, message: str) -> list[Instruction]:
        request = entry.submit.request
        del self.entries[request]
        if not entry.is_accepted:
            return [Give(request, RequestRefused(request, 503, code, message))]
        n = len(entry.tokens)
        return [
            Give(request, RequestDone(request, FinishReason.ERROR, entry.n_prompt, n, error_code=code, error=message))
        ]

    def _unknown(self, msg: RequestEvent, now: float) -> list[Instruction]:
        """A router works for a client that is gone (our Abort got lost, or a former gateway's request): stop it."""
        if not isinstance(msg, RequestAccepted | TokenOut):
            return []
        if now - self._told_unknown.get(msg.request, float("-inf")) < 1.0:
            return []
        if len(self._told_unknown) >= 1024:
            self._told_unknown.clear()
        self._told_unknown[msg.request] = now
        return [Tell(Abort(msg.request, "unknown"))]
