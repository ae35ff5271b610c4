"""The control plane: every service (DEALER) talks to the router's ROUTER socket; tools may ask for the status."""

from __future__ import annotations

from enum import StrEnum

from shared.messages.base import Msg


class ServiceState(StrEnum):
    """Of one service. ``shared/run/lifecycle.py`` says how it moves through them."""

    ABSENT = "absent"
    """Of others alone: no process is known."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Hello(Msg, tag="hello", frozen=True, array_like=True, gc=False):
    """Service -> Router: I am starting. A schema version that differs from the router's is fatal."""

    service: str
    incarnation: int
    pid: int
    schema_version: int


class Ready(Msg, tag="ready", frozen=True, array_like=True, gc=False):
    """Service -> Router: I can serve. ``facts``: what was learnt while starting (kernels, capacity), for log and status."""

    service: str
    incarnation: int
    pid: int
    facts: tuple[tuple[str, str], ...] = ()


class Heartbeat(Msg, tag="heartbeat", frozen=True, array_like=True, gc=False):
    """Service -> Router: each second from the main loop, with the stage in progress."""

    service: str
    incarnation: int
    state: ServiceState
    stage: str = ""
    stage_s: float = 0.0


class HelloWanted(Msg, tag="hello_wanted", frozen=True, array_like=True, gc=False):
    """Router -> Service: I do not know you (I am new): say Hello and Ready again."""

    incarnation: int


class PeerChanged(Msg, tag="peer_changed", frozen=True, array_like=True, gc=False):
    """Router -> Service: a peer has a new incarnation; drop what the old one sent."""

    service: str
    incarnation: int


class Drain(Msg, tag="drain", frozen=True, array_like=True, gc=False):
    """Tool -> Router, Router -> Service: refuse new work, finish the rest until the deadline, then say Drained."""

    reason: str
    deadline_s: float


class Drained(Msg, tag="drained", frozen=True, array_like=True, gc=False):
    """Router -> Tool, Service -> Router: nothing is in progress any more."""

    service: str
    n_cut: int = 0


class Stop(Msg, tag="stop", frozen=True, array_like=True, gc=False):
    """Router -> Service: close and exit 0."""

    reason: str


class Dead(Msg, tag="dead", frozen=True, array_like=True, gc=False):
    """Service -> Router: I failed; this is my last message."""

    service: str
    incarnation: int
    reason: str
    traceback: str


class RamWanted(Msg, tag="ram_wanted", frozen=True, array_like=True, gc=False):
    """Tool -> Router, Router -> Service: have this memory budget from now on; 0: only tell the present one.

    ``asker``: the router's number for the tool that waits. ``slots``: whose stories to tell, as (layer, expert), or as
    (-1, number of a slot).
    """

    budget_bytes: int
    asker: int = 0
    slots: tuple[tuple[int, int], ...] = ()


class Ram(Msg, tag="ram", frozen=True, array_like=True, gc=False):
    """Service -> Router, Router -> Tool: the budget and the slots it allows; ``refusal``: why it was not changed.

    ``states``: how many slots are in which state. ``stories``: what led to the state of each slot that was asked for.
    """

    asker: int
    budget_bytes: int
    n_slots: int
    n_used: int
    n_leaving: int
    refusal: str = ""
    states: tuple[tuple[str, int], ...] = ()
    stories: tuple[str, ...] = ()


class StatusWanted(Msg, tag="status_wanted", frozen=True, array_like=True, gc=False):
    """Tool -> Router: answer with Status."""


class ServiceStatus(Msg, frozen=True, array_like=True, gc=False):
    """One service as the control plane sees it."""

    service: str
    state: ServiceState
    pid: int
    incarnation: int
    heartbeat_age_s: float
    stage: str
    facts: tuple[tuple[str, str], ...] = ()


class Status(Msg, tag="status", frozen=True, array_like=True, gc=False):
    """Router -> Tool: the group as the control plane sees it."""

    is_ready: bool
    detail: str
    n_running: int
    n_waiting: int
    services: tuple[ServiceStatus, ...]
