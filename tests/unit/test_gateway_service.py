"""The gateway as a real process, with a made-up router on the other end of the real bus."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared.messages import control
from tests.support.fake_router import HTTP, FakeRouter, GatewayProcess, await_ready
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gw") / "run")
    process.wait_url()
    yield process
    process.close()
    assert "Traceback" not in process.log_path.read_text()


@pytest.fixture
def router(gateway: GatewayProcess) -> Iterator[FakeRouter]:
    fake = FakeRouter(gateway.endpoints)
    await_ready(gateway, fake)
    yield fake
    fake.close()


@pytest.fixture
def client(gateway: GatewayProcess, router: FakeRouter) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.url, timeout=20) as http:
        yield http


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def events_of(text: str) -> list[Any]:
    """The data of an event stream: parsed JSON, or the string [DONE]."""
    out = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                out.append(data if data == "[DONE]" else json.loads(data))
            else:
                assert line.startswith(":")
    return out


def stream_chat(client: httpx2.Client, text: str, **fields: Any) -> list[Any]:
    response = client.post("/v1/chat/completions", json=chat(text, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


# ---- answers


def test_chat_whole_and_streamed_are_equal(client: httpx2.Client, router: FakeRouter) -> None:
    whole = client.post("/v1/chat/completions", json=chat("say héllo 🙂", seed=5)).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "héllo 🙂", "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert (whole["model"], whole["seed"], whole["max_tokens"]) == ("fake", 5, 97)
    assert whole["drafts"] == {"proposed": 4, "accepted": 3}

    *chunks, end = stream_chat(client, "say héllo 🙂", seed=5)
    assert end == "[DONE]"
    assert len({(chunk["id"], chunk["model"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "héllo 🙂"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert not router.aborts


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_usage_chunk(client: httpx2.Client, route: str) -> None:
    body = chat("say abc") if "chat" in route else {"prompt": "say abc"}
    whole = client.post(route, json=body).json()
    text = client.post(route, json=body | {"stream": True, "stream_options": {"include_usage": True}}).text
    *chunks, usage, end = events_of(text)
    assert end == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_completion_with_ids_in_and_out(client: httpx2.Client, router: FakeRouter) -> None:
    body = {"prompt": [7, 8, 9, 10], "return_token_ids": True, "ignore_eos": True, "max_tokens": 2, "temperature": 0}
    whole = client.post("/v1/completions", json=body).json()
    choice = whole["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("id", [105, 100], [7, 8, 9, 10])
    assert (choice["finish_reason"], whole["object"]) == ("length", "text_completion")
    submit = router.submits[-1]
    assert (submit.prompt_ids, submit.ignore_eos, submit.max_tokens) == ((7, 8, 9, 10), True, 2)
    assert submit.sampling.temperature == 0
    *chunks, _ = events_of(client.post("/v1/completions", json=body | {"stream": True}).text)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [7, 8, 9, 10]
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == [105, 100]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "id"


def test_logprobs_streamed_and_whole(client: httpx2.Client) -> None:
    for alternatives in (0, 2):
        fields = {"logprobs": True} | ({"top_logprobs": alternatives} if alternatives else {})
        whole = client.post("/v1/chat/completions", json=chat("say né", **fields)).json()
        rows = whole["choices"][0]["logprobs"]["content"]
        assert bytes(byte for row in rows for byte in row["bytes"]).decode() == "né"
        assert all(len(row["top_logprobs"]) == alternatives for row in rows)
        *chunks, _ = stream_chat(client, "say né", **fields)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [row for part in parts if part for row in part["content"]] == rows


def test_seeds_are_drawn_and_reported(client: httpx2.Client, router: FakeRouter) -> None:
    seeds = [client.post("/v1/chat/completions", json=chat("say x")).json()["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3
    assert [submit.sampling.seed for submit in router.submits] == seeds
    (first, *_) = stream_chat(client, "say x", seed=seeds[0])
    assert first["seed"] == seeds[0] == router.submits[-1].sampling.seed


def test_many_at_once(gateway: GatewayProcess, router: FakeRouter) -> None:
    def one(k: int) -> bool:
        answer = HTTP.post(gateway.url + "/v1/chat/completions", json=chat(f"slow number {k}"), timeout=20).json()
        return answer["choices"][0]["message"]["content"] == f"number {k}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(16)))


# ---- refusals


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_any_stream_header(client: httpx2.Client, stream: bool) -> None:
    response = client.post("/v1/chat/completions", json=chat("long", stream=stream))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "200" in error["message"]
    assert "100" in error["message"]
    response = client.post("/v1/chat/completions", json=chat("full", stream=stream))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert client.post("/v1/chat/completions", json=chat("say ok", stream=stream)).status_code == 200


def test_refused_fields_never_reach_the_router(client: httpx2.Client, router: FakeRouter) -> None:
    for field, value in {"n": 3, "stop": "", "max_tokens": 0, "logit_bias": {"1": 5}, "temperature": "hot"}.items():
        response = client.post("/v1/chat/completions", json=chat("say x", **{field: value}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    response = client.post("/v1/chat/completions", json=chat("say x", model="gpt-17"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert not router.submits
    response = client.post("/v1/chat/completions", json=chat("say x", model="fake", tempo=3))
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "tempo"
    response = client.post("/v1/chat/completions", json=chat("say x", **{"a\r\nset-cookie: b=c": 1, "é" * 5000: 2}))
    assert response.headers["x-ignored-fields"] == "a??set-cookie??b?c," + "?" * 40
    assert "set-cookie" not in response.headers


def test_hostile_bodies(client: httpx2.Client, router: FakeRouter) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"", b"[" * 100_000, b'{"messages":[{"role":"user","content":"\\ud800"}]}', b"\xff" * 1000, b"[1]"):
        response = client.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert not router.submits
    assert client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    big = client.post("/v1/chat/completions", content=b" " * (17 << 20), headers=headers)
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    assert client.post("/v1/chat/completions", json=chat("say \x00" + "y" * 1_000_000)).status_code == 200


def test_wrong_content_length_hurts_nobody(gateway: GatewayProcess, client: httpx2.Client) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %s\r\n\r\n{}"
    for length in (b"1000", b"-5", b"x", b"99999999999999999999"):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(head % length)
            if length != b"1000":
                assert raw.recv(64).startswith(b"HTTP/1.1 4")
    assert client.post("/v1/chat/completions", json=chat("say ok")).status_code == 200


def test_unknown_paths_and_methods_answer_in_the_same_shape(client: httpx2.Client) -> None:
    for response, status in (
        (client.get("/v2"), 404),
        (client.get("/v1/chat/completions"), 405),
        (client.post("/health"), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# ---- clients that leave


def leave_after_submission(gateway: GatewayProcess, router: FakeRouter, body: dict[str, Any]) -> None:
    """A client that goes once the router has its request, however slow the gateway is at that moment."""
    host, port = gateway.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(head.encode() + data)
        wait_for(lambda: router.submits, "the submission")
        time.sleep(0.05)
        assert not router.aborts


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted_at_once(gateway: GatewayProcess, router: FakeRouter, stream: bool) -> None:
    leave_after_submission(gateway, router, chat("hang", stream=stream))
    began = time.monotonic()
    abort = wait_for(lambda: router.aborts, "the abort")[0]
    assert time.monotonic() - began < 2
    assert (abort.request, abort.reason) == (router.submits[0].request, "client_gone")
    assert HTTP.get(gateway.url + "/health").json()["n_open"] == 0


def test_a_client_that_leaves_before_the_verdict(gateway: GatewayProcess, router: FakeRouter) -> None:
    leave_after_submission(gateway, router, chat("wait"))
    wait_for(lambda: router.aborts, "the abort")


def test_a_hundred_clients_that_leave_during_decode(gateway: GatewayProcess, router: FakeRouter) -> None:
    for _ in range(100):
        with HTTP.stream(
            "POST", gateway.url + "/v1/chat/completions", json=chat("slow " + "x" * 90, stream=True)
        ) as response:
            next(response.iter_raw())
    wait_for(lambda: len({abort.request for abort in router.aborts}) == 100, "all aborts")
    assert HTTP.get(gateway.url + "/health").json()["n_open"] == 0


# ---- failures


def test_an_error_in_the_middle_has_no_end_marker(client: httpx2.Client) -> None:
    events = stream_chat(client, "fail")
    assert events[-1]["error"]["code"] == "non_finite"
    assert "[DONE]" not in events
    response = client.post("/v1/chat/completions", json=chat("fail"))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "layer 3, expert 17: NaN"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("die_after", [0, 4])
def test_an_answer_survives_its_router(gateway: GatewayProcess, stream: bool, die_after: int) -> None:
    text = "the quick brown fox"
    first = FakeRouter(gateway.endpoints)
    first.die_after = die_after
    second = None
    try:
        await_ready(gateway, first)
        with ThreadPoolExecutor(1) as pool:
            body = chat("say " + text, stream=stream, seed=3)
            future = pool.submit(HTTP.post, gateway.url + "/v1/chat/completions", json=body, timeout=20)
            wait_for(lambda: first.submits, "the submission")
            time.sleep(0.1)
            first.close()
            time.sleep(0.2)
            assert not future.done()
            second = FakeRouter(gateway.endpoints)
            response = future.result(20)
        if stream:
            *chunks, end = events_of(response.text)
            assert end == "[DONE]"
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
            assert sum(chunk["choices"][0]["delta"].get("role") is not None for chunk in chunks) == 1
        else:
            assert response.json()["choices"][0]["message"]["content"] == text
        (submit,) = second.submits
        assert submit.resume_ids == tuple(map(ord, text[:die_after]))
        assert submit.sampling.seed == 3
        assert submit.request == first.submits[0].request
    finally:
        first.close()
        if second is not None:
            second.close()


def test_readiness_follows_the_group(gateway: GatewayProcess) -> None:
    router = FakeRouter(gateway.endpoints, is_ready=False)
    try:

        def incarnation_seen() -> bool:
            services = HTTP.get(gateway.url + "/health").json()["services"]
            return bool(services) and services[0]["incarnation"] == router.incarnation

        wait_for(incarnation_seen, "the new router")
        response = HTTP.get(gateway.url + "/health/ready")
        assert response.status_code == 503
        assert response.json()["detail"] == "attention is loading layer 3"
        assert HTTP.get(gateway.url + "/health").status_code == 200
        refused = HTTP.post(gateway.url + "/v1/chat/completions", json=chat("say x"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["detail"]["detail"] == "attention is loading layer 3"
        router.is_ready = True
        wait_for(lambda: HTTP.get(gateway.url + "/health/ready").status_code == 200, "readiness")
        router.is_mute = True
        wait_for(lambda: HTTP.get(gateway.url + "/health/ready").status_code == 503, "silence to be noticed")
        assert "no word from the router" in HTTP.get(gateway.url + "/health").json()["detail"]
    finally:
        router.close()


def test_health_is_fast_while_answers_run(gateway: GatewayProcess, router: FakeRouter) -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(HTTP.post, gateway.url + "/v1/chat/completions", json=chat("slow " + "x" * 40), timeout=20)
            for _ in range(4)
        ]
        wait_for(lambda: len(router.submits) == 4, "the submissions")
        with httpx2.Client(base_url=gateway.url) as http:
            times = []
            for _ in range(20):
                began = time.monotonic()
                assert http.get("/health").json()["n_open"] > 0
                times.append(time.monotonic() - began)
        assert sorted(times)[10] < 0.1
        assert all(future.result().status_code == 200 for future in futures)


def test_models(client: httpx2.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 100)
    assert client.get("/v1/models/fake").json()["id"] == "fake"
    assert client.get("/v1/models/other").status_code == 404


def test_the_openai_client_works_unchanged(gateway: GatewayProcess, router: FakeRouter) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "say hello"}], logprobs=True
    )
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.total_tokens == 8
    assert [row.token for row in answer.choices[0].logprobs.content] == list("hello")
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "say hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage.completion_tokens == 5
    assert client.completions.create(model="fake", prompt="say hi", logprobs=1).choices[0].text == "hi"
    assert [model.id for model in client.models.list()] == ["fake"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "say x"}], n=2)
    assert caught.value.param == "n"
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "fail"}], stream=True))


# ---- life


def test_a_busy_port_is_a_sentence_and_exit_78(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = GatewayProcess(tmp_path / "run", port=taken.getsockname()[1])
        assert process.process.wait(15) == 78
    assert "in use" in process.log_path.read_text()
    process.close()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path / "run")
    process.wait_url()
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert process.process.wait(10) == 0


def test_drain_finishes_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path / "run")
    process.wait_url()
    router = FakeRouter(process.endpoints)
    try:
        await_ready(process, router)
        with ThreadPoolExecutor(2) as pool:
            body = chat("slow " + "y" * 40, stream=True)
            future = pool.submit(HTTP.post, process.url + "/v1/chat/completions", json=body, timeout=20)
            wait_for(lambda: router.submits, "the submission")
            wait_for(lambda: any(isinstance(msg, control.Ready) for msg in router.said) or hello_again(router), "hello")
            router.drain_gateway(10.0)
            wait_for(lambda: HTTP.get(process.url + "/health/ready").status_code == 503, "draining")
            refused = HTTP.post(process.url + "/v1/chat/completions", json=chat("say x"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            *chunks, end = events_of(future.result(20).text)
            assert end == "[DONE]"
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "y" * 40
        drained = wait_for(lambda: [m for m in router.said if isinstance(m, control.Drained)], "Drained")
        assert drained[0].n_cut == 0
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(10) == 0
    finally:
        router.close()
        process.close()


def hello_again(router: FakeRouter) -> bool:
    """A heartbeat came: the control plane knows the gateway."""
    return any(isinstance(msg, control.Heartbeat) for msg in router.said)


def test_the_deadline_of_a_drain_ends_streams_with_an_error(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path / "run")
    process.wait_url()
    router = FakeRouter(process.endpoints)
    try:
        await_ready(process, router)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(
                HTTP.post, process.url + "/v1/chat/completions", json=chat("hang", stream=True), timeout=20
            )
            wait_for(lambda: router.submits, "the submission")
            wait_for(lambda: hello_again(router), "hello")
            router.drain_gateway(0.2)
            events = events_of(future.result(20).text)
        assert events[-1]["error"]["code"] == "shutting_down"
        wait_for(lambda: [m.n_cut for m in router.said if isinstance(m, control.Drained)] == [1], "Drained")
        assert router.aborts[0].reason == "shutting_down"
    finally:
        router.close()
        process.close()


def test_sigterm_ends_streams_quickly(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path / "run")
    process.wait_url()
    router = FakeRouter(process.endpoints)
    try:
        await_ready(process, router)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(
                HTTP.post, process.url + "/v1/chat/completions", json=chat("hang", stream=True), timeout=20
            )
            wait_for(lambda: router.submits, "the submission")
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(10) == 0
            assert events_of(future.result(20).text)[-1]["error"]["code"] == "shutting_down"
    finally:
        router.close()
        process.close()
