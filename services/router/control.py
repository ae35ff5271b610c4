"""The shell around ``group``: the ROUTER socket, process watching, and the two who must know (router, gateway).

Runs in the router's own loop. ``RouterService.attach`` makes one; from then on it calls the service's ``ring_changed``
whenever somebody else serves, and tells the gateway the group's state each second and at each change.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from typing import Protocol

from services.router.group import Changed, Instruction, Kill, Membership, Note, Replaced, Reply, RingView, Sample, Watch
from shared.machine.processes import process_line, read_counts
from shared.messages import control
from shared.messages.control import ServiceState
from shared.messages.gateway import GroupState
from shared.run.service import ServiceContext
from shared.wire.control_plane import ControlServer
from shared.wire.endpoints import GATEWAY, ROUTER
from shared.wire.protocols import ControlBus


class RouterSide(Protocol):
    """What the control plane needs of the router service."""

    @property
    def load_counts(self) -> tuple[int, int]: ...

    def ring_changed(self, view: RingView) -> None: ...


class ControlPlane:
    """Binds the control socket at once. Calls the router service only after it was told ``serve``."""

    def __init__(self, ctx: ServiceContext[ControlBus], router: RouterSide) -> None:
        config = ctx.config
        self._ctx = ctx
        self._router = router
        self._group = Membership(config.n_drafts > 0, config.heartbeat_s, config.stall_s)
        self._bus: ControlBus = ctx.bus
        self._server = ControlServer(ctx.endpoints, self._bus.context)
        self._told = RingView()
        self._must_publish = True
        self._published_at = 0.0
        self._published_load = (0, 0)
        self._awake = ctx.awake
        self._n_pauses = 0
        self._bus.add_control(self._server, self._on_messages)
        ctx.add_tick(self._tick)

    # -- events in

    def _on_messages(self) -> None:
        now = self._now()
        for identity, msg in self._server.receive_all():
            if isinstance(msg, control.StatusWanted):
                self._server.send(identity, self._group.status(now, *self._load_counts()))
            elif isinstance(msg, control.Drain):
                self._carry_out(self._group.drain(now, identity, msg.reason, msg.deadline_s))
            elif isinstance(msg, control.RamWanted):
                self._carry_out(self._group.change_ram(identity, msg))
            else:
                self._carry_out(self._group.heard(now, identity, msg))

    def _tick(self) -> None:
        now = self._now()
        samples = {service: sample for service, pid in self._group.suspects.items() if (sample := read_sample(pid))}
        self._carry_out(self._group.tick(now, samples))
        self._tell_router()
        if self._must_publish or now - self._published_at >= self._ctx.config.heartbeat_s:
            self._publish(now)

    def _now(self) -> float:
        now = self._awake.now()
        if self._awake.n_pauses != self._n_pauses:
            self._n_pauses = self._awake.n_pauses
            self._ctx.log.warning("paused", slept_s=self._awake.slept_s)
            self._group.woke(now)
        return now

    # -- instructions out

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        is_changed = False
        for do in instructions:
            if isinstance(do, Reply):
                self._server.send(do.identity, do.msg)
            elif isinstance(do, Note):
                getattr(self._ctx.log, do.level)(do.event, **do.fields)
            elif isinstance(do, Watch):
                self._watch(do)
            elif isinstance(do, Replaced):
                self._bus.peer_changed(do.service, do.incarnation)
            elif isinstance(do, Kill):
                self._ctx.log.error("peer_killed", peer=do.service, pid=do.pid, reason=do.reason)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(do.pid, signal.SIGKILL)
            elif isinstance(do, Changed):
                is_changed = True
        if is_changed:
            self._tell_router()
            self._must_publish = True
            self._publish(self._now())

    def load_changed(self) -> None:
        """The router has taken a request, begun with it or ended it: the gateway's numbers are never late."""
        if self._load_counts() != self._published_load:
            self._publish(self._now())

    @property
    def _is_serving(self) -> bool:
        """The router service is loaded: before that it can't be called."""
        return self._ctx.state in (ServiceState.READY, ServiceState.DRAINING)

    def _load_counts(self) -> tuple[int, int]:
        return self._router.load_counts if self._is_serving else (0, 0)

    def _tell_router(self) -> None:
        view = self._group.view
        if self._is_serving and view != self._told:
            self._told = view
            self._router.ring_changed(view)

    def _publish(self, now: float) -> None:
        config = self._ctx.config
        self._published_load = n_running, n_waiting = self._load_counts()
        group = self._group
        state = GroupState(
            is_ready=group.is_ready,
            detail=group.detail,
            model=config.model_name,
            max_context=config.max_context,
            n_running=n_running,
            n_waiting=n_waiting,
            incarnation=self._ctx.incarnation,
            services=tuple((p.service, p.state, p.pid, p.incarnation) for p in group.peers.values()),
        )
        self._published_at = now
        self._must_publish = not self._bus.send(GATEWAY, state)

    def _watch(self, watch: Watch) -> None:
        """The end of a process is an event of the operating system: its pidfd becomes readable."""
        if watch.service == ROUTER:
            return
        try:
            fd = os.pidfd_open(watch.pid)
        except ProcessLookupError:
            self._carry_out(self._group.exited(watch.service, watch.incarnation))
            return
        except OSError as error:  # a kernel without it: heartbeats must do
            self._ctx.log.warning("peer_unwatched", peer=watch.service, reason=error)
            return
        self._bus.add_fd(fd, self._on_exit(watch, fd))

    def _on_exit(self, watch: Watch, fd: int) -> Callable[[], None]:
        def exited() -> None:
            self._bus.remove_fd(fd)
            os.close(fd)
            self._carry_out(self._group.exited(watch.service, watch.incarnation))

        return exited


def read_sample(pid: int) -> Sample | None:
    """State and progress (CPU ticks and bytes moved) of a process; None when it is gone."""
    line, counts = process_line(pid), read_counts(pid)
    return Sample(line.state, line.cpu_ticks + sum(counts)) if line and counts else None
