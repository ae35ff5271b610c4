"""Streams on the wire, with the ASGI application called directly: keep-alive, order of events, clients that vanish."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from services.gateway.app import make_app
from services.gateway.engine import GatewayEngine
from services.gateway.errors import ApiError
from services.gateway.requests import Limits
from services.gateway.stream import ClientGone
from services.gateway.uploads import BodyBudget, read_body
from shared.log import Log
from shared.messages.base import Msg
from shared.messages.gateway import GroupState, RequestAccepted, RequestDone, RequestRefused, TokenOut
from shared.messages.router import Abort, Submit

READY = GroupState(True, "serving", "m", 100)


class Exchange:
    """One request to the application, event by event; the test plays client and router."""

    def __init__(self, body: dict[str, Any], *, keep_alive_s: float = 10.0, limits: Limits | None = None) -> None:
        self.told: list[Msg] = []
        self.sent: list[dict[str, Any]] = []
        self.accepts_sends = True
        self.engine = GatewayEngine(self._tell, limits)
        self.engine.hear(READY, 1)
        self._gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._app = make_app(self.engine, Log("test"), keep_alive_s)
        self.task = asyncio.create_task(self._run())

    def _tell(self, msg: Msg) -> bool:
        self.told.append(msg)
        return self.accepts_sends

    async def _run(self) -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        }  # fmt: skip
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": self._body, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            self.sent.append(event)

        await self._app(scope, receive, send)

    def leave(self) -> None:
        self._gone.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.002)

    async def submitted(self) -> str:
        await self.until(lambda: any(isinstance(msg, Submit) for msg in self.told))
        return next(msg.request for msg in self.told if isinstance(msg, Submit))

    @property
    def wire(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.sent)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}]} | fields


def test_nothing_is_sent_before_the_verdict_then_headers_and_role_at_once() -> None:
    async def main() -> None:
        exchange = Exchange(chat(stream=True))
        request = await exchange.submitted()
        await asyncio.sleep(0.02)
        assert exchange.sent == []
        exchange.engine.hear(RequestAccepted(request, 3, 50), 1)
        await exchange.until(lambda: len(exchange.sent) == 2)
        assert exchange.status == 200
        assert b'"role":"assistant"' in exchange.wire
        exchange.engine.hear(RequestDone(request, "stop", 3, 0), 1)
        await exchange.task
        assert exchange.wire.endswith(b"data: [DONE]\n\n")
        assert exchange.sent[-1].get("more_body") is False

    asyncio.run(main())


def test_keep_alive_follows_the_clock_also_while_text_is_withheld() -> None:
    async def main() -> None:
        exchange = Exchange(chat(stream=True), keep_alive_s=0.05)
        request = await exchange.submitted()
        exchange.engine.hear(RequestAccepted(request, 3, 50), 1)
        began = time.monotonic()
        index = 0
        while time.monotonic() - began < 0.4:  # tokens come all the time but none shows text
            exchange.engine.hear(TokenOut(request, index, (5,), ""), 1)
            index += 1
            await asyncio.sleep(0.01)
        n_comments = exchange.wire.count(b": keep-alive\n\n")
        assert 2 <= n_comments <= 8
        exchange.engine.hear(TokenOut(request, index, (5,), "text"), 1)
        exchange.engine.hear(RequestDone(request, "length", 3, index + 1), 1)
        await exchange.task
        events = [block for block in exchange.wire.decode().split("\n\n") if block and not block.startswith(":")]
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        assert len(events) == 4

    asyncio.run(main())


def test_a_refusal_is_a_plain_answer() -> None:
    async def main() -> None:
        exchange = Exchange(chat(stream=True))
        request = await exchange.submitted()
        exchange.engine.hear(RequestRefused(request, 400, "context_length_exceeded", "200 > 100", "messages"), 1)
        await exchange.task
        assert exchange.status == 400
        assert json.loads(exchange.wire)["error"]["param"] == "messages"
        assert not [msg for msg in exchange.told if isinstance(msg, Abort)]

    asyncio.run(main())


def test_a_client_that_vanishes_is_aborted_in_both_modes() -> None:
    async def main(stream: bool) -> None:
        exchange = Exchange(chat(stream=stream))
        request = await exchange.submitted()
        exchange.engine.hear(RequestAccepted(request, 3, 50), 1)
        exchange.leave()
        await exchange.task
        assert exchange.told[-1] == Abort(request, "client_gone")
        assert exchange.engine.is_idle
        assert exchange.engine.n_open == 0

    asyncio.run(main(True))
    asyncio.run(main(False))


def test_a_router_that_never_comes_back_ends_with_a_named_error() -> None:
    async def main(stream: bool) -> None:
        exchange = Exchange(chat(stream=stream), limits=Limits(grace_s=0.05))
        request = await exchange.submitted()
        exchange.engine.hear(RequestAccepted(request, 3, 50), 1)
        await asyncio.sleep(0.1)
        exchange.engine.tick()
        await exchange.task
        assert b'"code":"router_lost"' in exchange.wire
        assert b"[DONE]" not in exchange.wire
        assert exchange.status == (200 if stream else 503)

    asyncio.run(main(True))
    asyncio.run(main(False))


def test_a_full_bus_delays_the_submission_and_loses_nothing() -> None:
    async def main() -> None:
        exchange = Exchange(chat(), limits=Limits(retry_s=0.01))
        exchange.accepts_sends = False
        request = await exchange.submitted()
        exchange.accepts_sends = True
        await asyncio.sleep(0.03)
        exchange.engine.tick()
        assert len([msg for msg in exchange.told if isinstance(msg, Submit)]) == 2
        exchange.engine.hear(RequestAccepted(request, 3, 50), 1)
        exchange.engine.hear(TokenOut(request, 0, (5,), "a"), 1)
        exchange.engine.hear(RequestDone(request, "stop", 3, 1), 1)
        await exchange.task
        assert json.loads(exchange.wire)["choices"][0]["message"]["content"] == "a"

    asyncio.run(main())


def test_bodies_share_a_bounded_memory_and_give_it_back() -> None:
    async def read(budget: BodyBudget, *events: dict[str, Any]) -> bytes:
        feed = iter(events)

        async def receive() -> dict[str, Any]:
            return next(feed)

        return await read_body({"headers": []}, receive, budget)

    def part(n: int, more: bool) -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * n, "more_body": more}

    async def main() -> None:
        budget = BodyBudget(100)
        assert await read(budget, part(40, True), part(30, False)) == b"x" * 70
        assert budget.held_bytes == 70  # until the caller has parsed it
        with pytest.raises(ApiError) as caught:
            await read(budget, part(20, True), part(20, False))
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        with pytest.raises(ClientGone):
            await read(budget, part(20, True), {"type": "http.disconnect"})
        assert budget.held_bytes == 70

    asyncio.run(main())


def test_a_body_that_comes_slowly_makes_room_for_others() -> None:
    async def main() -> None:
        now = 0.0
        budget = BodyBudget(100, lambda: now)
        stalled = asyncio.Event()

        async def slow() -> dict[str, Any]:
            if budget.held_bytes:
                stalled.set()
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"x" * 80, "more_body": True}

        async def quick() -> dict[str, Any]:
            return {"type": "http.request", "body": b"y" * 50, "more_body": False}

        uploading = asyncio.create_task(read_body({"headers": []}, slow, budget))
        await stalled.wait()
        with pytest.raises(ApiError) as caught:
            await read_body({"headers": []}, quick, budget)
        assert caught.value.status == 429  # it has only just begun
        now = 3.0
        assert await read_body({"headers": []}, quick, budget) == b"y" * 50
        with pytest.raises(ApiError) as caught:
            await uploading
        assert (caught.value.status, caught.value.code) == (408, "body_timeout")
        assert budget.held_bytes == 50

    asyncio.run(main())


def test_a_large_body_is_parsed_beside_the_loop() -> None:
    async def main() -> None:
        exchange = Exchange(chat(messages=[{"role": "user", "content": "y" * 200_000}]))
        request = await exchange.submitted()
        exchange.engine.hear(RequestRefused(request, 400, "x", "no"), 1)
        await exchange.task
        assert exchange.status == 400
        bad = Exchange(chat(messages=[{"role": "robot", "content": "y" * 200_000}]))
        await bad.task
        assert json.loads(bad.wire)["error"]["param"] == "messages[0].role"

    asyncio.run(main())
