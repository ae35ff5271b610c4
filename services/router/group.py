"""The group as the control plane sees it: who lives, who is ready, who must be told what. Pure: events in, instructions out.

Opens no socket and reads no clock; ``control`` does both. A peer's life, as seen from here:

    absent -> starting (Hello) -> ready (Ready) -> draining (Drain) -> absent (its process ended, or a new one said Hello)

Suspicion comes from missed heartbeats and changes nothing by itself; certainty comes from the operating system (the process
ended) or from a process that neither speaks nor works: then it is killed, and supervisor starts the next incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.awake import WAKE_GRACE_S
from shared.messages import SCHEMA_VERSION, control
from shared.messages.base import Msg
from shared.messages.control import ServiceState
from shared.wire.endpoints import ATTENTION, DRAFTER, EXPERT_IO, GATEWAY, ROUTER, SERVICES

ALIVE = frozenset({ServiceState.READY, ServiceState.DRAINING})

MISSED_BEATS = 3
IDLE_PROOF_S = 10.0
"""A silent process that used no CPU and moved no byte for so long hangs; a slow disk still moves bytes."""
DRAIN_ANSWER_S = 2.0
"""Beyond the deadline, so that services can end what is left and say so."""


@dataclass(frozen=True)
class Sample:
    """What the operating system says of a suspected process."""

    state: str
    """As in /proc/<pid>/stat: T = stopped by a signal."""
    progress: int
    """Grows whenever the process computes or reads."""


@dataclass(frozen=True)
class RingView:
    """Who serves now, as steps see it: the incarnation of each process, 0 = not there."""

    gateway: int = 0
    attention: int = 0
    expert_io: int = 0
    drafter: int = 0

    @property
    def is_ring_alive(self) -> bool:
        """Steps can be computed: attention and expert_io are there, draining or not."""
        return bool(self.attention and self.expert_io)


# -- instructions


@dataclass(frozen=True)
class Reply:
    """A control message to whoever has this socket identity."""

    identity: bytes
    msg: Msg


@dataclass(frozen=True)
class Watch:
    """Report when this process ends."""

    service: str
    incarnation: int
    pid: int


@dataclass(frozen=True)
class Replaced:
    """A peer has a new incarnation: what the old one sent is dropped from now on."""

    service: str
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """End a process that hangs."""

    service: str
    pid: int
    reason: str


@dataclass(frozen=True)
class Note:
    """A line for the log."""

    level: str
    event: str
    fields: dict[str, object]


@dataclass(frozen=True)
class Changed:
    """Readiness, a state or who serves changed: tell the router and the gateway."""


Instruction = Reply | Watch | Replaced | Kill | Note | Changed


@dataclass
class Peer:
    """One service."""

    service: str
    state: ServiceState = ServiceState.ABSENT
    incarnation: int = 0
    pid: int = 0
    identity: bytes = b""
    heard_at: float = 0.0
    stage: str = ""
    stage_s: float = 0.0
    facts: tuple[tuple[str, str], ...] = ()
    is_suspected: bool = False
    is_condemned: bool = False
    progress: int = -1
    progress_at: float = 0.0


@dataclass
class _Drain:
    deadline: float
    waiting: set[str]
    askers: list[bytes] = field(default_factory=list)
    n_cut: int = 0


class Membership:
    """Who belongs to the group and how they are. ``is_drafting``: a drafter belongs to it."""

    def __init__(self, is_drafting: bool, heartbeat_s: float, stall_s: float) -> None:
        self._is_drafting = is_drafting
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self.peers = {service: Peer(service) for service in SERVICES if service != DRAFTER or is_drafting}
        self._of_identity: dict[bytes, str] = {}
        self._drain: _Drain | None = None
        self._was_ready = False
        self._n_asked = 0
        self._ram_askers: dict[int, bytes] = {}
        self._judges_from = float("-inf")

    # -- questions

    @property
    def is_ready(self) -> bool:
        """The whole group can serve. The drafter is waited for at first; later it may fail without harm."""
        needed = [peer for peer in self.peers.values() if peer.service != DRAFTER or not self._was_ready]
        return self._drain is None and all(peer.state == ServiceState.READY for peer in needed)

    @property
    def view(self) -> RingView:
        """Who serves now. A gateway counts from its hello on: requests of the one before have nobody to answer to."""
        return RingView(
            gateway=self._incarnation_of(GATEWAY, ALIVE | {ServiceState.STARTING}),
            attention=self._incarnation_of(ATTENTION, ALIVE),
            expert_io=self._incarnation_of(EXPERT_IO, ALIVE),
            drafter=self._incarnation_of(DRAFTER, ALIVE) if self._is_drafting else 0,
        )

    def _incarnation_of(self, service: str, states: frozenset[ServiceState]) -> int:
        peer = self.peers[service]
        return peer.incarnation if peer.state in states else 0

    @property
    def detail(self) -> str:
        """One sentence about what is missing."""
        if self._drain is not None:
            return "the group is stopping"
        words = []
        for peer in self.peers.values():
            if peer.state == ServiceState.STARTING:
                words.append(f"{peer.service} is starting" + (f" ({peer.stage})" if peer.stage else ""))
            elif peer.state != ServiceState.READY:
                words.append(f"{peer.service} is {peer.state}")
            elif peer.is_suspected:
                words.append(
                    f"{peer.service} has not been heard of for a while" + (f" ({peer.stage})" if peer.stage else "")
                )
        return "; ".join(words) or "ready"

    def status(self, now: float, n_running: int, n_waiting: int) -> control.Status:
        """What tools are told."""
        services = tuple(
            control.ServiceStatus(
                peer.service,
                peer.state,
                peer.pid,
                peer.incarnation,
                round(now - peer.heard_at, 3) if peer.heard_at else 0.0,
                peer.stage,
                peer.facts,
            )
            for peer in self.peers.values()
        )
        return control.Status(self.is_ready, self.detail, n_running, n_waiting, services)

    # -- events

    def heard(self, now: float, identity: bytes, msg: Msg) -> list[Instruction]:
        """One control message from a service."""
        if isinstance(msg, control.Hello):
            return self._hello(now, identity, msg)
        peer = self._peer_of(identity, msg)
        if peer is None:
            is_sign_of_life = isinstance(msg, (control.Heartbeat, control.Ready))
            return [Reply(identity, control.HelloWanted(self.peers[ROUTER].incarnation))] if is_sign_of_life else []
        peer.heard_at = now
        out: list[Instruction] = []
        if peer.is_suspected:
            peer.is_suspected = False
            out.append(Note("info", "peer_heard_again", {"peer": peer.service}))
        if isinstance(msg, control.Ready):
            out += self._ready(peer, msg)
        elif isinstance(msg, control.Heartbeat):
            peer.stage, peer.stage_s = msg.stage, msg.stage_s
        elif isinstance(msg, control.Drained):
            out += self._drained(peer.service, msg.n_cut)
        elif isinstance(msg, control.Ram):
            out += self._ram_changed(msg)
        elif isinstance(msg, control.Dead):
            note = {"peer": peer.service, "peer_incarnation": peer.incarnation, "reason": msg.reason}
            out += [Note("error", "peer_dead", note), *self._gone(peer, ServiceState.FAILED)]
        else:
            out += [Note("error", "message_unknown", {"peer": peer.service, "message": type(msg).__name__})]
        return out

    def exited(self, service: str, incarnation: int) -> list[Instruction]:
        """The operating system says that a process has ended."""
        peer = self.peers[service]
        if incarnation != peer.incarnation or peer.state == ServiceState.ABSENT:
            return []
        note = {"peer": service, "peer_incarnation": incarnation, "pid": peer.pid, "state": peer.state}
        return [Note("warning", "peer_exited", note), *self._gone(peer, ServiceState.ABSENT)]

    def drain(self, now: float, asker: bytes, reason: str, deadline_s: float) -> list[Instruction]:
        """A tool wants the group to finish and refuse new work; ``asker`` gets Drained when that is done."""
        if self._drain is None:
            self._drain = _Drain(now + deadline_s, set())
        self._drain.askers.append(asker)
        self._drain.deadline = min(self._drain.deadline, now + deadline_s)
        out: list[Instruction] = [Note("info", "group_draining", {"reason": reason, "deadline_s": deadline_s})]
        for peer in self.peers.values():
            if peer.state in ALIVE:
                peer.state = ServiceState.DRAINING
                self._drain.waiting.add(peer.service)
                out.append(Reply(peer.identity, control.Drain(reason, deadline_s)))
        return [*out, Changed(), *self._finish_drain(is_late=False)]

    def change_ram(self, identity: bytes, msg: control.RamWanted) -> list[Instruction]:
        """A tool wants another memory budget, or to know it: expert_io decides, for the slots are its own."""
        store = self.peers[EXPERT_IO]
        if store.state not in ALIVE:
            return [Reply(identity, control.Ram(0, 0, 0, 0, 0, f"expert_io is {store.state}: try again in a moment."))]
        self._n_asked += 1
        self._ram_askers[self._n_asked] = identity
        return [Reply(store.identity, control.RamWanted(msg.budget_bytes, self._n_asked, msg.slots))]

    def _ram_changed(self, msg: control.Ram) -> list[Instruction]:
        asker = self._ram_askers.pop(msg.asker, None)
        return [Reply(asker, msg)] if asker is not None else []

    def woke(self, now: float) -> None:
        """This process itself stood still: nothing that was not heard meanwhile counts, and others may still be waking."""
        self._judges_from = now + WAKE_GRACE_S
        for peer in self.peers.values():
            peer.heard_at = now if peer.heard_at else 0.0
            peer.is_suspected = False

    def tick(self, now: float, samples: dict[str, Sample]) -> list[Instruction]:
        """Looks for silence. ``samples``: of the services that ``suspects`` names."""
        out: list[Instruction] = []
        if self._drain is not None and now > self._drain.deadline + DRAIN_ANSWER_S:
            out += self._finish_drain(is_late=True)
        for peer in self.peers.values():
            silence = now - max(peer.heard_at, self._judges_from)
            if peer.service == ROUTER or peer.state not in ALIVE or silence <= MISSED_BEATS * self._heartbeat_s:
                continue
            if not peer.is_suspected:
                peer.is_suspected = True
                peer.progress = -1
                out += [
                    Note("warning", "peer_silent", {"peer": peer.service, "silence_s": silence, "stage": peer.stage})
                ]
                out += [Changed()]
            out += self._judge(now, peer, silence, samples.get(peer.service))
        return out

    @property
    def suspects(self) -> dict[str, int]:
        """service -> pid of the processes to look at before the next tick."""
        return {peer.service: peer.pid for peer in self.peers.values() if peer.is_suspected and peer.state in ALIVE}

    # -- inside

    def _peer_of(self, identity: bytes, msg: Msg) -> Peer | None:
        service = self._of_identity.get(identity)
        if service is None:
            return None
        peer = self.peers[service]
        if peer.identity != identity or getattr(msg, "incarnation", peer.incarnation) != peer.incarnation:
            return None
        return peer

    def _hello(self, now: float, identity: bytes, msg: control.Hello) -> list[Instruction]:
        if msg.schema_version != SCHEMA_VERSION:
            reason = f"{msg.service} speaks schema {msg.schema_version}, the router {SCHEMA_VERSION}: start both from one tree"
            return [Note("error", "schema_differs", {"reason": reason}), Reply(identity, control.Stop(reason))]
        peer = self.peers.get(msg.service)
        if peer is None or msg.incarnation < peer.incarnation:
            return [Note("warning", "hello_ignored", {"peer": msg.service, "peer_incarnation": msg.incarnation})]
        out: list[Instruction] = []
        is_new = msg.incarnation != peer.incarnation
        if is_new and peer.state in ALIVE | {ServiceState.STARTING}:
            out += self._gone(peer, ServiceState.ABSENT)
        self._of_identity.pop(peer.identity, None)
        self._of_identity[identity] = msg.service
        peer.identity, peer.pid, peer.heard_at = identity, msg.pid, now
        if is_new or peer.state in (ServiceState.ABSENT, ServiceState.FAILED):
            peer.incarnation, peer.state, peer.stage, peer.facts = msg.incarnation, ServiceState.STARTING, "", ()
            peer.is_suspected = peer.is_condemned = False
            note = {"peer": peer.service, "peer_incarnation": peer.incarnation, "pid": peer.pid}
            out += [Note("info", "peer_hello", note), Watch(peer.service, peer.incarnation, peer.pid)]
            if peer.service != ROUTER:
                out += [Replaced(peer.service, peer.incarnation)]
        out += self._introduce(peer)
        return [*out, Changed()]

    def _introduce(self, new: Peer) -> list[Instruction]:
        """Everybody learns the incarnation of the new one, and the new one that of everybody."""
        out: list[Instruction] = []
        for peer in self.peers.values():
            if peer is new or not peer.incarnation:
                continue
            out.append(Reply(new.identity, control.PeerChanged(peer.service, peer.incarnation)))
            if peer.service != ROUTER and peer.state in ALIVE | {ServiceState.STARTING}:
                out.append(Reply(peer.identity, control.PeerChanged(new.service, new.incarnation)))
        if self._drain is not None:
            out.append(Reply(new.identity, control.Drain("the group is stopping", 0.0)))
        return out if new.service != ROUTER else [r for r in out if isinstance(r, Reply) and r.identity != new.identity]

    def _ready(self, peer: Peer, msg: control.Ready) -> list[Instruction]:
        if peer.state != ServiceState.STARTING:
            return []  # said twice, or by a process that has ended since
        peer.state = ServiceState.READY if self._drain is None else ServiceState.DRAINING
        peer.facts = msg.facts
        peer.stage = ""
        self._was_ready = self._was_ready or self.is_ready
        return [Note("info", "peer_ready", {"peer": peer.service, "peer_incarnation": peer.incarnation}), Changed()]

    def _gone(self, peer: Peer, state: ServiceState) -> list[Instruction]:
        was_there = peer.state in ALIVE | {ServiceState.STARTING}
        peer.state = state
        peer.stage = ""
        peer.is_suspected = False
        if not was_there:
            return []
        out: list[Instruction] = [Changed(), *self._drained(peer.service, 0)]
        if peer.service == EXPERT_IO:
            words = "expert_io ended before it could answer: try again in a moment."
            out += [Reply(asker, control.Ram(0, 0, 0, 0, 0, words)) for asker in self._ram_askers.values()]
            self._ram_askers.clear()
        return out

    def _judge(self, now: float, peer: Peer, silence: float, sample: Sample | None) -> list[Instruction]:
        reason = ""
        if sample is not None:
            if sample.progress != peer.progress:
                peer.progress, peer.progress_at = sample.progress, now
            if sample.state == "T":
                reason = "its process is stopped by a signal"
            elif now - peer.progress_at > IDLE_PROOF_S and sample.state != "D":
                reason = f"it says nothing and does nothing since {now - peer.progress_at:.0f} s"
        if silence > self._stall_s:
            reason = f"it has been silent for {silence:.0f} s, more than stall_s allows"
        if not reason or peer.is_condemned:
            return []
        peer.is_condemned = True
        stage = f" in {peer.stage}" if peer.stage else ""
        return [Kill(peer.service, peer.pid, f"{reason}{stage}"), *self._gone(peer, ServiceState.FAILED)]

    def _drained(self, service: str, n_cut: int) -> list[Instruction]:
        if self._drain is None or service not in self._drain.waiting:
            return []
        self._drain.waiting.discard(service)
        self._drain.n_cut += n_cut
        return self._finish_drain(is_late=False)

    def _finish_drain(self, *, is_late: bool) -> list[Instruction]:
        drain = self._drain
        if drain is None or not drain.askers or (drain.waiting and not is_late):
            return []
        out: list[Instruction] = [Reply(asker, control.Drained("group", drain.n_cut)) for asker in drain.askers]
        drain.askers = []
        still = ",".join(sorted(drain.waiting))
        return [Note("info", "group_drained", {"n_cut": drain.n_cut, "still_busy": still or "none"}), *out]


assert set(SERVICES) >= {GATEWAY, ROUTER}
