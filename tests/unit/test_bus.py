"""The bus over real sockets: delivery, refusal, dropping of what is bad, stale or too much."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared.messages import SCHEMA_VERSION, control
from shared.messages.attention import StepAbandoned, StepPlan
from shared.messages.layer import HiddenReady, Mixed
from shared.wire.async_bus import AsyncBus
from shared.wire.bus import Bus, Received
from shared.wire.codec import HEADER, BadMessage, Decoder, Encoder
from shared.wire.control_plane import ControlClient, ControlServer
from shared.wire.datagrams import MAX_FRAME_BYTES, DatagramOutbox
from shared.wire.endpoints import Endpoints

MakeBus = Callable[..., Bus]


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    found = Endpoints(tmp_path, os.urandom(4).hex())
    found.socket_dir.mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture(params=["datagram", "zmq"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_bus(endpoints: Endpoints, transport: str) -> Iterator[MakeBus]:
    made: list[Bus] = []

    def make(service: str, incarnation: int = 1, receives: tuple[type, ...] = (), **more: Any) -> Bus:
        made.append(Bus(endpoints, service, incarnation, receives, **{"transport": transport} | more))
        return made[-1]

    yield make
    for bus in made:
        bus.close(0)


def wait_for(bus: Bus, n: int = 1, timeout_s: float = 5.0) -> list[Received]:
    found: list[Received] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < n and time.monotonic() < deadline:
        found += bus.poll(50)
    return found


def send_when_connected(bus: Bus, receiver: str, msg: Any) -> None:
    deadline = time.monotonic() + 5
    while not bus.send(receiver, msg):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_message_arrives_with_its_origin(make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    attention = make_bus("attention", 7)
    send_when_connected(attention, "router", HiddenReady(1, 2, 0, 5))
    assert wait_for(router) == [Received("attention", 7, HiddenReady(1, 2, 0, 5))]


def test_send_to_nobody_is_refused_at_once(make_bus: MakeBus) -> None:
    attention = make_bus("attention")
    begin = time.monotonic()
    assert attention.send("router", HiddenReady(1, 2, 0, 5)) is False
    assert time.monotonic() - begin < 0.1
    assert attention.counters.refused == 1


def test_posted_message_waits_for_a_peer_that_starts_later(make_bus: MakeBus) -> None:
    attention = make_bus("attention")
    attention.post("router", HiddenReady(1, 2, 0, 5))
    attention.post("router", HiddenReady(1, 3, 0, 5))
    router = make_bus("router", 1, (HiddenReady,))
    deadline = time.monotonic() + 5
    found: list[Received] = []
    while len(found) < 2 and time.monotonic() < deadline:
        attention.poll(5)
        found += router.poll(5)
    assert [received.msg.layer for received in found] == [2, 3]


@pytest.mark.parametrize("sender", ["attention", "gateway"])
def test_full_queue_is_refused_not_waited_for(make_bus: MakeBus, sender: str) -> None:
    make_bus("router", 1, (HiddenReady,))  # never reads
    bus = make_bus(sender)
    send_when_connected(bus, "router", HiddenReady(0, 0, 0, 1))
    begin = time.monotonic()
    n_sent = 0
    while n_sent < 1_000_000 and bus.send("router", HiddenReady(n_sent, 0, 0, 1)):
        n_sent += 1
    assert bus.counters.refused >= 1
    assert n_sent < 1_000_000
    assert time.monotonic() - begin < 30


def test_posted_messages_survive_a_full_queue_in_order(make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    attention = make_bus("attention")
    for layer in range(100):  # far more than the system queues
        attention.post("router", HiddenReady(1, layer, 0, 5))
    found: list[Received] = []
    deadline = time.monotonic() + 5
    while len(found) < 100 and time.monotonic() < deadline:
        found += router.poll(5)
        attention.poll(1)
    assert [received.msg.layer for received in found] == list(range(100))
    assert router.counters.gaps == 0


def test_engine_reaches_a_receiver_that_died_and_came_back(make_bus: MakeBus) -> None:
    first = make_bus("router", 1, (HiddenReady,))
    attention = make_bus("attention")
    send_when_connected(attention, "router", HiddenReady(1, 0, 0, 1))
    assert len(wait_for(first)) == 1
    first.close(0)
    deadline = time.monotonic() + 5
    while attention.send("router", HiddenReady(2, 0, 0, 1)):  # ZeroMQ needs a moment to see that nobody is there
        assert time.monotonic() < deadline
        time.sleep(0.005)
    second = make_bus("router", 2, (HiddenReady,))
    send_when_connected(attention, "router", HiddenReady(3, 0, 0, 1))
    assert [received.msg.step for received in wait_for(second)] == [3]


@pytest.mark.parametrize("transport", ["datagram"])
def test_datagram_longer_than_any_message_is_dropped_alone(endpoints: Endpoints, make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    outbox = DatagramOutbox(endpoints.direct("router"))
    body = b"\0" * (MAX_FRAME_BYTES + 1000)
    assert outbox.send(HEADER.pack(SCHEMA_VERSION, 2, 0, len(body), 1, 0) + body)
    assert outbox.send(b"")
    assert outbox.send(bytes(Encoder("attention", 1).encode(HiddenReady(7, 2, 0, 5), 0)))
    assert [received.msg.step for received in wait_for(router)] == [7]
    assert router.counters.bad == 2
    outbox.close()


def test_older_incarnations_are_dropped_once_a_newer_one_is_known(endpoints: Endpoints, make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    old = make_bus("attention", 1)
    send_when_connected(old, "router", HiddenReady(1, 0, 0, 1))
    assert len(wait_for(router)) == 1
    router.peer_changed("attention", 2)
    assert old.send("router", HiddenReady(2, 0, 0, 1))
    assert wait_for(router, timeout_s=0.3) == []
    assert router.counters.stale == 1
    old.close(0)
    new = make_bus("attention", 2)
    send_when_connected(new, "router", HiddenReady(3, 0, 0, 1))
    assert [received.msg.step for received in wait_for(router)] == [3]


def test_newer_incarnation_is_believed_before_the_control_plane_says_so(make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    frames = {n: bytes(Encoder("attention", n).encode(HiddenReady(n, 0, 0, 1), 0)) for n in (1, 2)}
    assert router.accept(frames[2]) is not None
    assert router.accept(frames[1]) is None
    assert router.counters.stale == 1


def test_garbage_is_dropped_and_counted_never_raised(endpoints: Endpoints, make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady, Mixed))
    good = bytes(Encoder("attention", 1).encode(HiddenReady(1, 2, 0, 5), 0))
    other = bytes(Encoder("attention", 1).encode(StepAbandoned(5), 0))  # nothing the router is told
    out_of_bounds = bytes(Encoder("attention", 1).encode(HiddenReady(1, 99_999, 0, 5), 0))
    wrong_version = HEADER.pack(SCHEMA_VERSION + 1, *HEADER.unpack_from(good)[1:]) + good[HEADER.size :]
    wrong_sender = HEADER.pack(SCHEMA_VERSION, 200, *HEADER.unpack_from(good)[2:]) + good[HEADER.size :]
    bad = [b"", b"x", good[:-1], good + b"\0", other, out_of_bounds, wrong_version, wrong_sender, os.urandom(100)]
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(endpoints.data("router"))
    for frame in (*bad, good):
        socket.send(frame)
    found = wait_for(router)
    assert [received.msg for received in found] == [HiddenReady(1, 2, 0, 5)]
    assert router.counters.bad == len(bad)
    context.destroy(linger=0)


def test_gap_in_the_sequence_is_counted(make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    encoder = Encoder("attention", 1)
    for sequence in (0, 1, 3, 4):
        assert router.accept(bytes(encoder.encode(HiddenReady(1, 2, 0, 5), sequence)))
    assert router.counters.gaps == 1


def test_deeply_nested_body_is_bad_not_a_crash() -> None:
    body = b"\x91" * 200_000 + b"\x90"
    frame = HEADER.pack(SCHEMA_VERSION, 1, 0, len(body), 1, 0) + body
    with pytest.raises(BadMessage):
        Decoder((HiddenReady, StepPlan)).decode(frame)


def test_control_is_served_before_data_and_fds_are_seen(endpoints: Endpoints, make_bus: MakeBus) -> None:
    router = make_bus("router", 1, (HiddenReady,))
    server = ControlServer(endpoints, router.context)
    order: list[str] = []
    router.add_control(server, lambda: order.extend(type(m).__name__ for _, m in server.receive_all() if m))
    read_fd, write_fd = os.pipe()
    router.add_fd(read_fd, lambda: order.append(os.read(read_fd, 10).decode()))
    attention = make_bus("attention")
    client = ControlClient(endpoints, attention.context)
    for layer in range(8):
        send_when_connected(attention, "router", HiddenReady(1, layer, 0, 5))
    while not client.send(control.Drain("test", 1.0)):
        time.sleep(0.01)
    os.write(write_fd, b"fd")
    assert server.socket.wait(5000), "the control message has arrived"
    data = router.poll(1000)
    assert "Drain" in order
    assert "fd" in order
    assert len(data + wait_for(router, 8 - len(data))) == 8
    os.close(read_fd)
    os.close(write_fd)
    client.close(0)


def test_tool_asks_the_router_and_gives_up_without_one(endpoints: Endpoints, make_bus: MakeBus) -> None:
    client = ControlClient(endpoints)
    try:
        assert client.can_send() is False
        assert client.ask(control.StatusWanted(), control.Status, 0.2) is None
        router = make_bus("router")
        server = ControlServer(endpoints, router.context)
        status = control.Status(True, "ready", 0, 0, ())
        router.add_control(server, lambda: [server.send(identity, status) for identity, _ in server.receive_all()])
        deadline = time.monotonic() + 5
        while not client.send(control.StatusWanted()) and time.monotonic() < deadline:
            time.sleep(0.01)
        answers: list[Any] = []
        while not answers and time.monotonic() < deadline:
            router.poll(20)
            answers = client.receive_all()
        assert answers == [status]
    finally:
        client.close(0)


def test_close_returns_with_unsent_messages(make_bus: MakeBus) -> None:
    make_bus("router", 1, (HiddenReady,))
    gateway = make_bus("gateway")
    for _ in range(100):
        send_when_connected(gateway, "router", HiddenReady(1, 2, 0, 5))
    begin = time.monotonic()
    gateway.close(100)
    assert time.monotonic() - begin < 2


def test_async_bus_receives_and_sends(endpoints: Endpoints, make_bus: MakeBus) -> None:
    uvloop = pytest.importorskip("uvloop")
    router = make_bus("router", 3, (HiddenReady,))

    async def talk() -> Received:
        bus = AsyncBus(endpoints, "gateway", 1, (Mixed,))
        try:
            while not bus.send("router", HiddenReady(9, 0, 0, 1)):
                await asyncio.sleep(0.01)
            while not router.send("gateway", Mixed(9, 1, 0)):
                await asyncio.sleep(0.01)
            return await asyncio.wait_for(bus.receive(), 5)
        finally:
            bus.close(0)

    assert uvloop.run(talk()) == Received("router", 3, Mixed(9, 1, 0))
    assert [received.msg.step for received in wait_for(router)] == [9]


def test_socket_paths_stay_short_under_a_deep_run_directory(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    endpoints = Endpoints(deep, "ab12cd34")
    for service in ("gateway", "router", "attention", "expert_io", "drafter"):
        assert len(endpoints.data(service).removeprefix("ipc://")) <= 107
    assert str(endpoints.socket_dir).endswith("ab12cd34")
    assert Endpoints("/tmp/r", "x").socket_dir == Path("/tmp/r/sock")
