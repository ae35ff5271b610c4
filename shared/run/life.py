"""The states, signals and control messages of one process: what happens to it, whichever loop it runs."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from shared.errors import EXIT_CONFIG, EXIT_FAULT, ChecksumMismatch, ColibriError, ShortRead, unknown_message
from shared.messages import SCHEMA_VERSION, control
from shared.messages.control import ServiceState
from shared.run.last_words import write_last_words
from shared.run.service import BaseService, ServiceContext
from shared.steering import shown
from shared.wire.protocols import Links

CONNECT_S = 0.5
"""How long a failing service looks for a router to tell: it may fail before its socket is connected."""


class Life:
    """The states, signals and control messages of one process; what both kinds of main loop share."""

    def __init__(self, ctx: ServiceContext[Links], service: BaseService) -> None:
        self.ctx = ctx
        self.service = service
        self.stop_reason = ""
        self._facts: tuple[tuple[str, str], ...] = ()
        self._peers: dict[str, int] = {}
        self._drain_deadline = 0.0
        self._drain_reason = ""
        self._has_drained = False
        self._is_leaving = False
        self._is_connected = False

    def hello(self) -> None:
        ctx = self.ctx
        self._is_connected = ctx.control.send(
            control.Hello(self.service.name, ctx.incarnation, os.getpid(), SCHEMA_VERSION)
        )

    def look_for_router(self) -> None:
        """A router that appeared (again) hears at once who we are, before it has to ask."""
        was_connected, self._is_connected = self._is_connected, self.ctx.control.can_send()
        if self._is_connected and not was_connected:
            self.hello()
            if self.ctx.state in (ServiceState.READY, ServiceState.DRAINING):
                self._say_ready()

    def ready(self, facts: dict[str, str]) -> None:
        ctx = self.ctx
        ctx.awake.skip()  # loading may have taken minutes
        self._facts = tuple(facts.items())
        gc.collect()
        gc.freeze()  # what was loaded stays; a collection in the middle of a step need not walk through it
        ctx.state = ServiceState.READY if ctx.state == ServiceState.STARTING else ctx.state
        ctx.set_stage("")
        ctx.log.info("service_ready", **facts)
        self._say_ready()

    def _say_ready(self) -> None:
        self.ctx.control.send(control.Ready(self.service.name, self.ctx.incarnation, os.getpid(), self._facts))

    def on_control(self) -> None:
        """There is news on the control socket: messages, or a router that has appeared."""
        self.look_for_router()
        for msg in self.ctx.control.receive_all():
            self._hear(msg)

    def _hear(self, msg: Any) -> None:
        ctx = self.ctx
        if isinstance(msg, control.HelloWanted):
            self.hello()
            if ctx.state in (ServiceState.READY, ServiceState.DRAINING):
                self._say_ready()
        elif isinstance(msg, control.PeerChanged):
            self.peer(msg.service, msg.incarnation)
        elif isinstance(msg, control.Drain):
            self.drain(msg.reason, msg.deadline_s)
        elif isinstance(msg, control.Stop):
            self.stop(msg.reason)
        elif isinstance(msg, control.RamWanted):
            if ctx.state in (ServiceState.READY, ServiceState.DRAINING):
                ctx.control.send(self.service.change_ram(msg))
        else:
            raise unknown_message(self.service.name, msg, "the control plane")

    def peer(self, service: str, incarnation: int) -> None:
        """A peer's incarnation became known."""
        known = self._peers.get(service, 0)
        if incarnation <= known:
            return
        self._peers[service] = incarnation
        self.ctx.bus.peer_changed(service, incarnation)
        if known:
            self.ctx.log.info("peer_changed", peer=service, peer_incarnation=incarnation, before=known)
            self.service.peer_changed(service, incarnation)

    def drain(self, reason: str, deadline_s: float) -> None:
        deadline = self.ctx.awake.now() + deadline_s
        if self.ctx.state == ServiceState.DRAINING:
            self._drain_deadline = min(self._drain_deadline, deadline)
            return
        self.ctx.state = ServiceState.DRAINING
        self._drain_reason = reason
        self._drain_deadline = deadline
        self.ctx.log.info("service_draining", reason=reason, deadline_s=deadline_s)
        self.service.begin_drain(reason)

    def stop(self, reason: str) -> None:
        self._is_leaving = True
        self.stop_reason = self.stop_reason or reason

    def leave(self, reason: str, grace_s: float) -> None:
        """Drain briefly, then end this process."""
        if not self._has_drained:
            self.drain(reason, grace_s)
            self._drain_deadline = min(self._drain_deadline, self.ctx.awake.now() + grace_s)
        self._is_leaving = True
        self.stop_reason = self.stop_reason or reason

    @property
    def is_ending(self) -> bool:
        """A drain or a stop has begun: ``end_drain`` is to be called often."""
        return self.ctx.state == ServiceState.DRAINING or self._is_leaving

    @property
    def is_over(self) -> bool:
        """Whether the process may end now."""
        return self._is_leaving and (self._has_drained or self.ctx.state != ServiceState.DRAINING)

    def end_drain(self) -> None:
        """Ends a drain that has nothing left to wait for, or whose deadline has passed."""
        if self.ctx.state == ServiceState.DRAINING and not self._has_drained:
            is_idle = self.service.is_idle()
            is_late = self.ctx.awake.now() >= self._drain_deadline
            if is_idle or is_late:
                n_cut = 0 if is_idle else self.service.cut(self._drain_reason)
                self._has_drained = True
                self.ctx.log.info("service_drained", n_cut=n_cut)
                self.ctx.control.send(control.Drained(self.service.name, n_cut))

    def tick(self) -> None:
        self.ctx.awake.now()
        self.look_for_router()
        for callback in self.ctx.ticks:
            callback()
        self.service.tick()
        self.ctx.beat()

    def failed(self, error: BaseException) -> int:
        """Last words to the router, the log and colibri-up; returns the exit code."""
        exit_code = error.exit_code if isinstance(error, ColibriError) else EXIT_FAULT
        if self.ctx.state == ServiceState.STARTING and isinstance(error, (ChecksumMismatch, ShortRead)):
            exit_code = EXIT_CONFIG  # what is damaged on disk is damaged at the next try too
        reason = str(error) or type(error).__name__
        if not isinstance(error, ColibriError):
            reason = f"{type(error).__name__}: {reason}"
        text = "" if exit_code == EXIT_CONFIG else "".join(traceback.format_exception(error))
        self.ctx.state = ServiceState.FAILED
        write_last_words(Path(self.ctx.config.run_dir), self.service.name, exit_code, reason)
        self.ctx.log.error("service_failed", exit_code=exit_code, reason=reason)
        if text:
            sys.stderr.write(shown(text))
        dead = control.Dead(self.service.name, self.ctx.incarnation, reason, text)
        deadline = time.monotonic() + CONNECT_S
        if not self._is_connected:
            self.hello()  # without it the router would not know whose last words these are
        while not self.ctx.control.send(dead) and time.monotonic() < deadline:
            time.sleep(0.01)
            if not self._is_connected:
                self.hello()
        return exit_code
