"""The four engine services in one process, joined by queues instead of sockets: for fast, deterministic checks.

The services are the real ones with real kernels, segments and files; only bus and lifecycle are replaced. Delivery order
is that of the queues, or shuffled by a seed (messages of one sender to one receiver keep their order, as on a socket).
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from services.attention.service import AttentionService
from services.drafter.service import DrafterService
from services.expert_io.service import ExpertIoService
from services.router.group import RingView
from services.router.service import RouterService
from shared.container.reader import Container
from shared.log import Log
from shared.memory.segments import Segment, add_owner, unlink_run
from shared.messages.gateway import RequestDone, RequestRefused, TokenOut
from shared.messages.router import DraftReady, Sampling, Submit
from shared.model.kv_layout import KV_BLOCK, blocks_for, group_kv
from shared.run.config import GroupConfig
from shared.step.counters import SEGMENT_BYTES, read_all
from shared.step.frame import Frame, frame_bytes, frame_dims
from shared.wire.codec import Decoder, Encoder

SERVICES = {
    "router": RouterService,
    "attention": AttentionService,
    "expert_io": ExpertIoService,
    "drafter": DrafterService,
}


class QueueBus:
    """What a service sees of the bus. Every message is encoded and decoded, as on the wire."""

    def __init__(self, ring: Ring, service: str) -> None:
        self._ring = ring
        self.service = service
        self._encoder = Encoder(service, 1)
        self.fds: dict[int, Callable[[], object]] = {}
        self._sequence = 0

    def post(self, receiver: str, msg: Any) -> None:
        self._sequence += 1
        self._ring.deliver(self.service, receiver, bytes(self._encoder.encode(msg, self._sequence)))

    def send(self, receiver: str, msg: Any) -> bool:
        self.post(receiver, msg)
        return True

    def add_fd(self, fd: int, callback: Callable[[], object]) -> None:
        self.fds[fd] = callback

    def remove_fd(self, fd: int) -> None:
        self.fds.pop(fd, None)


@dataclass
class QueueContext:
    """What a service sees of its life."""

    config: GroupConfig
    bus: QueueBus
    log: Log
    incarnation: int = 1
    stage: str = ""

    def set_stage(self, name: str) -> None:
        self.stage = name


@dataclass
class Answer:
    """What the gateway would have got for one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    done: RequestDone | None = None
    refused: RequestRefused | None = None


class Ring:
    """Opens a container and serves requests. Use as a context manager."""

    def __init__(
        self,
        model_dir: Path,
        tmp: Path,
        shuffle: int | None = None,
        before: Callable[[str], None] | None = None,
        **overrides: Any,
    ) -> None:
        """``before`` is told which service is about to run; ``overrides`` are settings of the group."""
        self._before = before or (lambda service: None)
        container = Container.open(model_dir, overrides.get("mirrors", ()))
        self.spec = spec = container.spec
        run_id = uuid.uuid4().hex[:12]
        add_owner(run_id, os.getpid())  # otherwise a group that starts meanwhile may sweep our segments
        records = [
            f.record_bytes
            for layer, f in container.experts.items()
            if layer < spec.n_layers or overrides.get("n_drafts")
        ]
        settings: dict[str, Any] = dict(
            run_id=run_id,
            run_dir=str(tmp),
            model_dir=str(model_dir),
            host="127.0.0.1",
            port=0,
            ram_bytes=0,
            n_slots=len(spec.moe_layers) * spec.n_experts,
            slot_bytes=max(records, default=4096),
            n_threads=1,
            kv_dtype="f32",
            prefill_chunk=64,
            pilot="off",
            n_drafts=0,
            max_sequences=4,
            max_context=256,
            n_frames=2,
            logit_rows=64,
        )
        settings.update(overrides)
        settings["n_kv_blocks"] = settings["max_sequences"] * blocks_for(settings["max_context"])
        self.config = config = GroupConfig(**settings)
        dims = frame_dims(config, spec)
        sizes = {
            "frames": frame_bytes(dims) * config.n_frames,
            "kv": group_kv(spec.main_attention, config).total_bytes,
            "trace": 1 << 20,
            "counters": SEGMENT_BYTES,
        }
        if config.n_drafts:
            sizes["mtp_kv"] = group_kv(spec.mtp_attention, config, is_mtp=True).total_bytes
        for name, n_bytes in sizes.items():
            Segment.create(run_id, name, n_bytes).close()
        self._rng = random.Random(shuffle) if shuffle is not None else None
        self._queues: dict[tuple[str, str], deque[bytes]] = {}
        self._order: deque[tuple[str, str]] = deque()
        self.services: dict[str, Any] = {}
        self._decoders: dict[str, Decoder] = {}
        self.answers: dict[str, Answer] = {}
        self._gateway = Decoder((TokenOut, RequestDone, RequestRefused, *_other_gateway_messages()))
        self.on_deliver: Callable[[str, str, Any], bool] | None = None
        self.guess: Callable[[str, int], Iterable[int]] | None = None
        """(request, tokens it has) -> guesses: takes the place of what the drafter found."""
        self._incarnation = dict.fromkeys(SERVICES, 0)
        try:
            for name in SERVICES:
                self.start(name)
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> None:
        """(Re)start one service; the router learns of it, as from the control plane."""
        service = SERVICES[name]()
        service.load(QueueContext(self.config, QueueBus(self, name), Log(name)))
        self.services[name] = service
        self._decoders[name] = Decoder(service.receives)
        self._incarnation[name] += 1
        self._tell_router()

    def _tell_router(self) -> None:
        if "router" in self.services:
            there = {name: n for name, n in self._incarnation.items() if name in self.services}
            drafter = there.get("drafter", 0) if self.config.n_drafts else 0
            view = RingView(1, there.get("attention", 0), there.get("expert_io", 0), drafter)
            self.services["router"].ring_changed(view)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for service in self.services.values():
            service.close()
        unlink_run(self.config.run_id)

    # -- what tests look at or spoil: the one place that knows where the services keep it ---

    def frame(self, idx: int, service: str = "router") -> Frame:
        """A step frame as ``service`` has it: the same bytes for all."""
        frame: Frame = self.services[service]._place.frame(idx)
        return frame

    @property
    def store(self) -> Any:
        """The service expert_io: ``state``, ``engines``, ``history``, ``counters``, ``tick()``."""
        return self.services["expert_io"]

    @property
    def engine(self) -> Any:
        """The store's first expert engine."""
        return self.store.engines[0]

    @property
    def is_idle(self) -> bool:
        """No request is open in the router."""
        return bool(self.services["router"].is_idle())

    @property
    def next_step(self) -> int:
        """The number that the router will give to the next step."""
        return int(self.services["router"]._flights._next_step)

    def tell(self, service: str, msg: Any, sender: str = "gateway") -> None:
        """Hands a message to a service at once, past what is queued."""
        self.services[service].handle(msg, sender)

    def wrap(self, part: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """``wrapper(plain)`` takes the place of a part of attention: "embed", "head", "advance" or "help_drafter"."""
        attention = self.services["attention"]
        owner, name = (attention._weights, "embed") if part == "embed" else (attention, f"_{part}")
        setattr(owner, name, wrapper(getattr(owner, name)))

    def embedding_place(self, token: int) -> tuple[int, int]:
        """(descriptor, offset) at which attention reads a token's embedding; with ``embedding_on_disk``."""
        table = self.services["attention"]._weights._table
        return table._fd, table._offset + token * table._row_bytes

    def spoil_mtp_projection(self) -> None:
        """The MTP layer makes no numbers from now on."""
        self.services["drafter"]._mtp._enorm[:] = np.nan

    def end_rests(self) -> None:
        """Places whose reads failed may be read again at once."""
        for place in self.engine.reads.sources._chooser._places:
            place.rests_until_ns = 0

    def store_counters(self) -> dict[str, int]:
        """The store's counters as they are now."""
        self.store.publish()
        return dict(self.store.counters.read())

    def counters(self, service: str) -> dict[str, int]:
        with contextlib.closing(Segment.attach(self.config.run_id, "counters")) as segment:
            return read_all(segment.buf)[service]

    def fill_segment(self, name: str, byte: int) -> None:
        """Every byte of a segment."""
        with contextlib.closing(Segment.attach(self.config.run_id, name)) as segment:
            segment.buf[:] = bytes([byte]) * len(segment.buf)

    # -- messages --------------------------------------------------------------------------------------------

    def deliver(self, sender: str, receiver: str, frame: bytes) -> None:
        self._queues.setdefault((sender, receiver), deque()).append(frame)
        self._order.append((sender, receiver))

    def kill(self, service: str) -> None:
        """The service ends; what it had sent or not yet received is gone. The router learns of it."""
        self.services.pop(service).close()
        for pair in list(self._queues):
            if service in pair:
                del self._queues[pair]
        self._order = deque(pair for pair in self._order if service not in pair)
        self._tell_router()

    def _next(self) -> tuple[str, str, bytes] | None:
        while self._order:
            if self._rng is None:
                pair = self._order.popleft()
            else:
                at = self._rng.randrange(len(self._order))
                pair = self._order[at]
                del self._order[at]
            queue = self._queues.get(pair)
            if queue:
                return (*pair, queue.popleft())
        return None

    def step(self) -> bool:
        """Deliver one message, or let one service work, or wait for reads. False when everything rests."""
        taken = self._next()
        if taken:
            sender, receiver, frame = taken
            if receiver == "gateway":
                self._on_gateway(self._gateway.decode(frame)[0].msg)
            elif receiver in self.services:
                msg = self._decoders[receiver].decode(frame)[0].msg
                if self.guess and isinstance(msg, DraftReady):
                    msg = self._guessed(msg, self.guess)
                if self.on_deliver is None or self.on_deliver(sender, receiver, msg):
                    self._before(receiver)
                    self.services[receiver].handle(msg, sender)
        busy = bool(taken)
        for name, service in self.services.items():
            self._before(name)
            busy |= bool(service.work())
        fds = {fd: (name, call) for name, s in self.services.items() for fd, call in s._ctx.bus.fds.items()}
        ready, _, _ = select.select(list(fds), [], [], 0 if busy or self._order else 0.05)
        for fd in ready:
            name, call = fds[fd]
            self._before(name)
            call()
        return busy or bool(ready) or bool(self._order)

    def _guessed(self, msg: DraftReady, guess: Callable[[str, int], Iterable[int]]) -> DraftReady:
        flight = self.services["router"]._flights.covering(msg.step)
        drafting = [span.sequence for span in flight.plan.drafting] if flight else []
        return DraftReady(msg.step, tuple(tuple(guess(s.request, s.n_generated)) for s in drafting))

    def _on_gateway(self, msg: Any) -> None:
        answer = self.answers.setdefault(getattr(msg, "request", ""), Answer())
        if isinstance(msg, TokenOut):
            assert msg.index == len(answer.tokens), "a token came twice or was lost"
            answer.tokens += msg.tokens
            answer.text += msg.text
        elif isinstance(msg, RequestDone):
            assert answer.done is None, "two final answers"
            answer.done = msg
        elif isinstance(msg, RequestRefused):
            answer.refused = msg

    def submit(self, request: str, prompt: list[int] | None = None, **fields: Any) -> None:
        sampling = Sampling(fields.pop("temperature", 0.0), fields.pop("top_p", 1.0), fields.pop("seed", 0))
        msg = Submit(request, sampling, prompt_ids=tuple(prompt) if prompt is not None else None, **fields)
        self.services["router"].handle(msg, "gateway")

    def run(self, n_idle: int = 400) -> None:
        """Until every submitted request has its final answer."""
        idle = 0
        while not self.is_idle or self._order:
            idle = 0 if self.step() else idle + 1
            assert idle < n_idle, "the ring rests although requests wait"

    def generate(self, prompt: list[int], n: int, **fields: Any) -> Answer:
        name = uuid.uuid4().hex
        self.submit(name, prompt, max_tokens=n, ignore_eos=fields.pop("ignore_eos", True), **fields)
        self.run()
        return self.answers[name]


def _other_gateway_messages() -> tuple[type[Any], ...]:
    from shared.messages import gateway

    return tuple(
        cls
        for cls in vars(gateway).values()
        if isinstance(cls, type)
        and issubclass(cls, msgspec.Struct)
        and cls.__struct_config__.tag
        and cls not in (TokenOut, RequestDone, RequestRefused)
    )


def read_record(path: Path) -> list[dict[str, Any]]:
    """Rows of a logit record, ``logits`` as f32 arrays."""
    with path.open("rb") as file:
        rows = list(msgpack.Unpacker(file))
    for row in rows:
        row["logits"] = np.frombuffer(row["logits"], np.float32)
    return rows


__all__ = ["KV_BLOCK", "Answer", "Ring", "read_record"]
