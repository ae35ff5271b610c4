"""Clients that are slow, silent, half-closed or old, against a real gateway with few descriptors, and limits by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from uvicorn.server import ServerState

from services.gateway.http_connection import HEAD_S, LOOK_S, MAX_HEAD_BYTES, REQUEST_S, SEND_S, Connection, Connections
from services.gateway.lobby import Lobby, LobbyLimits
from tests.support.fake_router import HTTP, FakeRouter, GatewayProcess, await_ready
from tests.support.waiting import wait_for

N_FILES = 256


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gw") / "run", n_files=N_FILES)
    process.wait_url()
    yield process
    process.close()
    log = process.log_path.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


@pytest.fixture(scope="module")
def the_router(gateway: GatewayProcess) -> Iterator[FakeRouter]:
    fake = FakeRouter(gateway.endpoints)
    await_ready(gateway, fake)
    yield fake
    fake.close()


@pytest.fixture
def router(the_router: FakeRouter) -> FakeRouter:
    the_router.submits.clear()
    the_router.aborts.clear()
    return the_router


def dial(gateway: GatewayProcess) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def request(text: str, version: str = "1.1", **fields: Any) -> bytes:
    data = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def read_all(client: socket.socket) -> bytes:
    out = b""
    while part := client.recv(1 << 16):
        out += part
    return out


def unchunk(body: bytes) -> bytes:
    out = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        n = int(size, 16)
        out, body = out + rest[:n], rest[n + 2 :]
        if not n:
            return out


def text_of(events: bytes) -> str:
    datas = [line.removeprefix(b"data: ") for line in events.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(data)["choices"][0]["delta"].get("content", "") for data in datas)


# ---- too many


def test_silent_connections_take_nobody_elses_place(gateway: GatewayProcess, router: FakeRouter) -> None:
    with contextlib.ExitStack() as open_ones:
        waiting = open_ones.enter_context(dial(gateway))
        waiting.sendall(request("wait"))
        wait_for(lambda: router.submits, "the submission")
        for k in range(360):
            silent = open_ones.enter_context(dial(gateway))
            # Some say nothing, some begin a request, some a body.
            silent.sendall([b"", b"GET /health HT", request("x" * 100)[:-50]][k % 3])
        for _ in range(3):
            begin = time.monotonic()
            with httpx2.Client(base_url=gateway.url, timeout=5) as fresh:
                assert fresh.get("/health").status_code == 200
                answer = fresh.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "say ok"}]})
                assert answer.json()["choices"][0]["message"]["content"] == "ok"
            assert time.monotonic() - begin < 3
        n_open = len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir()))
        assert n_open < N_FILES
        router.release()  # who waited for an answer all the time still gets it
        received = b""
        while b"released" not in received:  # head and body may come apart
            part = waiting.recv(1 << 16)
            assert part, received
            received += part


def test_more_waiting_answers_than_connections_are_refused_in_words(
    gateway: GatewayProcess, router: FakeRouter
) -> None:
    with contextlib.ExitStack() as open_ones:
        refused = b""
        while not refused:
            n_before = len(router.submits)
            client = open_ones.enter_context(dial(gateway))
            client.sendall(request("hang"))
            assert n_before < N_FILES
            wait_for(
                lambda n=n_before, c=client: len(router.submits) > n or select.select([c], [], [], 0)[0], "a verdict"
            )
            if len(router.submits) == n_before:
                refused = client.recv(1 << 16)
        assert refused.startswith(b"HTTP/1.1 429")
        assert HTTP.get(gateway.url + "/health", timeout=5).status_code == 200
        answer = httpx2.post(
            gateway.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hang"}]}, timeout=5
        )
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"]
    wait_for(lambda: HTTP.get(gateway.url + "/health").json()["n_open"] == 0, "all of them to be let go")


# ---- clients that close their sending side


def test_half_closed_clients_get_their_answers(gateway: GatewayProcess, router: FakeRouter) -> None:
    kinds = [(stream, version) for stream in (False, True) for version in ("1.0", "1.1")]
    with contextlib.ExitStack() as open_ones:
        clients = [open_ones.enter_context(dial(gateway)) for _ in kinds]
        for client, (stream, version) in zip(clients, kinds, strict=True):
            client.sendall(request("wait", version, stream=stream))
            client.shutdown(socket.SHUT_WR)
        wait_for(lambda: len(router.submits) == len(kinds), "the submissions")
        time.sleep(1.5 * LOOK_S)  # until it was looked whether they left
        router.release()
        answers = [read_all(client).partition(b"\r\n\r\n") for client in clients]
    for (head, _, body), (stream, version) in zip(answers, kinds, strict=True):
        assert head.startswith(b"HTTP/1.1 200")
        if not stream:
            assert json.loads(body)["choices"][0]["message"]["content"] == "released"
            continue
        assert (b"transfer-encoding: chunked" in head) == (version == "1.1")
        events = unchunk(body) if version == "1.1" else body
        assert text_of(events) == "released"
        assert events.endswith(b"data: [DONE]\n\n")
    assert not router.aborts


def test_all_requests_sent_before_the_end_are_answered(gateway: GatewayProcess, router: FakeRouter) -> None:
    with dial(gateway) as client:
        client.sendall(request("say one") + request("say two") + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.index(b'"one"') < answers.index(b'"two"') < answers.index(b'"is_ready"')


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_and_then_leaves_is_noticed(
    gateway: GatewayProcess, router: FakeRouter, stream: bool
) -> None:
    with dial(gateway) as client:
        client.sendall(request("hang", stream=stream))
        client.shutdown(socket.SHUT_WR)
        wait_for(lambda: router.submits, "the submission")
        assert not router.aborts
    begin = time.monotonic()
    wait_for(lambda: router.aborts, "the abort")
    assert time.monotonic() - begin < 2


def test_a_client_that_leaves_with_a_second_request_waiting_is_noticed(
    gateway: GatewayProcess, router: FakeRouter
) -> None:
    with dial(gateway) as client:
        client.sendall(request("hang") + request("say two"))
        wait_for(lambda: router.submits, "the submission")
    wait_for(lambda: router.aborts, "the abort", 3)


def test_a_body_that_ends_early_is_named(gateway: GatewayProcess) -> None:
    with dial(gateway) as client:
        client.sendall(request("say x")[:-5])
        client.shutdown(socket.SHUT_WR)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "body_incomplete"


@pytest.mark.parametrize(
    "data", [b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n"]
)
def test_what_is_no_request_is_named(gateway: GatewayProcess, data: bytes) -> None:
    with dial(gateway) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


# ---- HTTP/1.0


def test_http_1_0_gets_plain_bodies(gateway: GatewayProcess, router: FakeRouter) -> None:
    for stream in (True, False):
        with dial(gateway) as client:
            client.sendall(request("say héllo", "1.0", stream=stream))
            head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head
        assert b"connection: close" in head
        if stream:
            assert all(line.startswith((b"data: ", b":")) for line in body.splitlines() if line)
            assert text_of(body) == "héllo"
        else:
            assert json.loads(body)["choices"][0]["message"]["content"] == "héllo"
    with dial(gateway) as client:
        client.sendall(b"HEAD /health HTTP/1.0\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200")


# ---- limits by the clock, without waiting for it


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.wire = b""
        self.is_closed = False
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.wire += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def hang(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


def connect(connections: Connections | None = None) -> tuple[Connection, Transport]:
    made = (connections or Connections(Lobby())).make(
        config=uvicorn.Config(hang, lifespan="off", log_config=None), server_state=ServerState(), app_state={}
    )
    transport = Transport()
    made.connection_made(transport)
    return made, transport


HEAD = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "limit", "status"),
    [
        (b"", HEAD_S, b""),
        (b"\r\n", HEAD_S, b"408"),
        (b"POST /v1/comp", HEAD_S, b"408"),
        (HEAD[:-2], HEAD_S, b"408"),
        (HEAD + b"{", REQUEST_S, b"408"),
        (HEAD + b"0123456789", 10 * REQUEST_S, None),
    ],
)
def test_slow_requests_are_ended(sent: bytes, limit: float, status: bytes | None) -> None:
    async def main() -> None:
        connection, transport = connect()
        if sent:
            for byte in sent:
                connection.data_received(bytes([byte]))
        now = time.monotonic()
        connection.check(now + limit - 2)
        assert not transport.is_closed
        connection.check(now + limit + 1)
        assert transport.is_closed == (status is not None)
        if status:
            assert transport.wire.startswith(b"HTTP/1.1 " + status)
            assert json.loads(transport.wire.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        else:
            assert not transport.wire
        connection.check(now + limit + 2)
        connection.check(now + limit + 100)
        assert transport.is_aborted == (status is not None)

    asyncio.run(main())


def test_headers_without_end_are_refused() -> None:
    async def main() -> None:
        connection, transport = connect()
        connection.data_received(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(MAX_HEAD_BYTES // 4096 + 1):
            if not transport.is_closed:
                connection.data_received(b"y" * 4096)
        assert transport.is_closed
        assert transport.wire.startswith(b"HTTP/1.1 431")

    asyncio.run(main())


def test_a_client_that_takes_nothing_is_let_go() -> None:
    async def main() -> None:
        connection, transport = connect()
        connection.data_received(HEAD + b"0123456789")
        connection.pause_writing()
        connection.check(time.monotonic() + SEND_S - 1)
        assert not transport.is_aborted
        connection.check(time.monotonic() + SEND_S + 1)
        assert transport.is_aborted
        connection.connection_lost(None)

    asyncio.run(main())


def test_the_refused_and_the_evicted_hear_why() -> None:
    async def main() -> None:
        connections = Connections(Lobby(LobbyLimits(max_open=2, max_silent=2)))
        (first, first_wire), (second, _) = connect(connections), connect(connections)
        first.data_received(b"GET /hea")
        second.data_received(HEAD + b"0123456789")
        third, third_wire = connect(connections)
        assert first_wire.wire.startswith(b"HTTP/1.1 408")
        assert first_wire.is_closed
        assert not third_wire.is_closed
        first.connection_lost(None)
        third.data_received(HEAD + b"0123456789")
        _, fourth_wire = connect(connections)
        assert fourth_wire.wire.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in fourth_wire.wire
        assert fourth_wire.is_closed

    asyncio.run(main())
