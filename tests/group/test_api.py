"""The HTTP interface over a real group whose random model speaks through a byte-level tokenizer.

Random weights say random bytes, most of which are no whole characters: the hardest text a stream can meet. What the model
says is taken from a first run and the tests are derived from it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.group.harness import Group

pytestmark = pytest.mark.group

MAX_CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add_tokenizer(model: Path, out: Path) -> Path:
    """``model`` with a tokenizer of 250 bytes (F8 to FD are in no text) and 6 control tokens: its vocabulary, in ``out``."""
    shutil.copytree(model, out)
    # The stand-ins of bytes that are no printable Latin-1 lie from U+0100 on, in the order of the bytes.
    unused = {chr(byte) for byte in range(0xF8, 0xFE)}
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - unused)
    assert len(alphabet) == 250
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ("endoftext", "user", "system", "tool", "assistant", "developer")  # 250, 251 and 253 end an answer
    tokenizer.add_special_tokens([AddedToken(f"<|{role}|>", special=True, normalized=False) for role in roles])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}))
    return out


@pytest.fixture(scope="module")
def group(converted: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    base = tmp_path_factory.mktemp("api")
    model = add_tokenizer(converted("glm_moe_dsa", "int8"), base / "model")
    run_base = Path(tempfile.mkdtemp(prefix="cbt-"))
    with Group(model, run_base / "run", max_context=MAX_CONTEXT, draft=2) as running:
        yield running
    shutil.rmtree(run_base, ignore_errors=True)


@pytest.fixture(scope="module")
def http(group: Group) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=group.url, timeout=60) as client:
        yield client


def body_of(route: str, text: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": [{"role": "user", "content": text}]} if route == "chat/completions" else {"prompt": text}
    return {**start, "max_tokens": 24, "seed": 1, **fields}


def whole(http: httpx2.Client, route: str, text: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/{route}", json=body_of(route, text, **fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(http: httpx2.Client, route: str, text: str, **fields: Any) -> tuple[str, str, dict[str, int], list[Any]]:
    """(text, finish reason, usage, chunks) of a streamed answer."""
    fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    answer = http.post(f"/v1/{route}", json=body_of(route, text, **fields))
    assert answer.status_code == 200, answer.text
    *lines, end = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert end == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    pieces = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    return "".join(pieces), choices[-1]["finish_reason"], chunks[-1]["usage"], chunks


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


ROUTES = pytest.mark.parametrize("route", ["chat/completions", "completions"])


@ROUTES
@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_equals_whole(http: httpx2.Client, route: str, temperature: float) -> None:
    for k in range(5):
        fields = {"temperature": temperature, "seed": k}
        one = whole(http, route, f"prompt {k}", **fields)
        text, finish, usage, chunks = streamed(http, route, f"prompt {k}", **fields)
        assert text == text_of(one)
        assert finish == one["choices"][0]["finish_reason"]
        assert usage == one["usage"]
        assert one["seed"] == k == chunks[0]["seed"]


def test_a_crowd_says_what_each_says_alone(http: httpx2.Client, group: Group) -> None:
    alone = [text_of(whole(http, "completions", f"crowd {k}", seed=k)) for k in range(6)]

    def ask(k: int) -> str:
        with httpx2.Client(base_url=group.url, timeout=60) as client:
            return text_of(whole(client, "completions", f"crowd {k}", seed=k))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


def test_seeds_and_sampling_fields_do_something(http: httpx2.Client) -> None:
    def ask(**fields: Any) -> str:
        return text_of(whole(http, "completions", "x", **fields))

    assert ask(seed=1) == ask(seed=1)
    assert len({ask(seed=k) for k in range(4)}) > 1
    assert ask(temperature=0, seed=1) == ask(temperature=0, seed=2) == ask(top_p=0, seed=3)
    drawn = whole(http, "completions", "x", seed=None)
    assert text_of(drawn) == ask(seed=drawn["seed"])


@ROUTES
def test_stop_strings_end_the_answer_before_them(http: httpx2.Client, route: str) -> None:
    text = text_of(whole(http, route, "stop", temperature=0, max_tokens=60))
    for begin, end in ((5, 6), (7, 10), (1, 8)):
        stop = text[begin:end]
        expected = text[: text.index(stop)]
        for fields in ({"stop": stop}, {"stop": ["\x01never", stop]}):
            one = whole(http, route, "stop", temperature=0, max_tokens=60, **fields)
            assert text_of(one) == expected
            assert one["choices"][0]["finish_reason"] == "stop"
            assert streamed(http, route, "stop", temperature=0, max_tokens=60, **fields)[:2] == (expected, "stop")


@ROUTES
def test_logprobs_are_those_of_the_model(http: httpx2.Client, route: str) -> None:
    is_chat = route == "chat/completions"
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    for temperature in (0, 1):
        answer = whole(http, route, "probable", temperature=temperature, return_token_ids=True, **fields)
        choice = answer["choices"][0]
        streamed_chunks = streamed(http, route, "probable", temperature=temperature, **fields)[3]
        parts = [chunk["choices"][0]["logprobs"] for chunk in streamed_chunks if chunk["choices"]]
        if is_chat:
            rows = choice["logprobs"]["content"]
            assert [row for part in parts if part for row in part["content"]] == rows
            values = [row["logprob"] for row in rows]
            tops = [[top["logprob"] for top in row["top_logprobs"]] for row in rows]
        else:
            rows = choice["logprobs"]["tokens"]
            assert [row for part in parts if part for row in part["tokens"]] == rows
            values = choice["logprobs"]["token_logprobs"]
            tops = [list(top.values()) for top in choice["logprobs"]["top_logprobs"]]
        if is_chat:
            spelt = bytes(byte for row in rows for byte in row["bytes"]).decode("utf-8", "replace")
            assert spelt.replace("\ufffd", "") == choice["message"]["content"].replace("\ufffd", "")
        assert len(rows) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
        for value, top in zip(values, tops, strict=True):
            assert -100 < value <= 0
            assert top == sorted(top, reverse=True)
            assert sum(map(math.exp, top)) <= 1 + 1e-5
            if temperature == 0:
                assert value == top[0]


def test_token_ids_in_and_out(http: httpx2.Client) -> None:
    answer = whole(http, "completions", "ab", return_token_ids=True)
    ids = answer["choices"][0]["prompt_token_ids"]
    assert len(ids) == 2 == answer["usage"]["prompt_tokens"]
    again = http.post(
        "/v1/completions", json={"prompt": ids, "max_tokens": 24, "seed": 1, "return_token_ids": True}
    ).json()
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    chat = whole(http, "chat/completions", "ab", return_token_ids=True)
    assert len(chat["prompt_token_ids"]) == 4  # role, a, b, role
    chunks = streamed(http, "chat/completions", "ab", return_token_ids=True)[3]
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    streamed_ids = [t for chunk in chunks if chunk["choices"] for t in chunk["choices"][0].get("token_ids") or ()]
    assert streamed_ids == chat["choices"][0]["token_ids"]


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_around_the_end_of_the_context(http: httpx2.Client, route: str, stream: bool) -> None:
    extra = 2 if route == "chat/completions" else 0
    for n, fits in ((MAX_CONTEXT - 1, True), (MAX_CONTEXT, False), (MAX_CONTEXT + 1, False), (10 * MAX_CONTEXT, False)):
        answer = http.post(f"/v1/{route}", json=body_of(route, "a" * (n - extra), stream=stream))
        if fits:
            assert answer.status_code == 200
            if not stream:
                assert answer.json()["usage"] == {"prompt_tokens": n, "completion_tokens": 1, "total_tokens": n + 1}
        else:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert str(n) in error["message"]
            assert str(MAX_CONTEXT) in error["message"]
    assert whole(http, route, "next")["usage"]["completion_tokens"] > 0


@ROUTES
def test_limits_are_clamped_and_shown(http: httpx2.Client, route: str) -> None:
    n_prompt = 5 + (2 if route == "chat/completions" else 0)

    def ask(limit: int | None) -> dict[str, Any]:
        return whole(http, route, "hello", max_tokens=limit, ignore_eos=True, temperature=0)

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, (10_000_000, MAX_CONTEXT, None)))
    for answer in answers:
        assert answer["max_tokens"] == MAX_CONTEXT - n_prompt == answer["usage"]["completion_tokens"]
        assert answer["choices"][0]["finish_reason"] == "length"
    one = whole(http, route, "hello", max_tokens=1, ignore_eos=True)
    assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")


def test_health_counts_are_current(http: httpx2.Client) -> None:
    """Numbers of the router's last report, once a second, would be late at the beginning and at the end."""

    def counts() -> tuple[int, int, int]:
        health = http.get("/health").json()
        return health["n_open"], health["n_running"], health["n_waiting"]

    assert counts() == (0, 0, 0)
    n_seen_running = 0
    for _ in range(5):
        with http.stream(
            "POST", "/v1/completions", json=body_of("completions", "x", stream=True, ignore_eos=True)
        ) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if '"text":"' in line and '"seed"' not in line)
            seen = counts()
            assert seen in ((1, 1, 0), (0, 0, 0)), "it runs, or has ended since"
            n_seen_running += seen == (1, 1, 0)
            assert list(lines)[-2] == "data: [DONE]"
        assert counts() == (0, 0, 0)
    assert n_seen_running, "no answer was still running when it was asked for"


def test_a_turn_of_chat_ends_with_the_marker_of_the_next(http: httpx2.Client) -> None:
    """The random model says each of its control tokens now and then; a raw completion goes on behind them."""
    ends, markers = {250, 251, 253}, {252, 254}  # of the configuration; further ones of the template
    seen: set[int] = set()
    n_cut = 0
    for seed in range(40):
        if n_cut and seen & ends and seen & markers:
            break
        answer = whole(http, "chat/completions", "hello", seed=seed, max_tokens=100, return_token_ids=True)
        choice = answer["choices"][0]
        ids = choice["token_ids"]
        assert not (ends | markers) & set(ids[:-1])
        is_end = ids[-1] in ends | markers
        assert choice["finish_reason"] == ("stop" if is_end else "length")
        assert "<|" not in choice["message"]["content"]
        seen.add(ids[-1])
        n_cut += not is_end
        if ids[-1] in markers:
            raw = {"seed": seed, "max_tokens": 100, "return_token_ids": True}
            (prompt,) = [answer["prompt_token_ids"]]
            again = http.post("/v1/completions", json={"prompt": prompt, **raw}).json()["choices"][0]
            assert again["token_ids"][: len(ids)] == ids
            assert len(again["token_ids"]) > len(ids)
    assert n_cut and seen & ends and seen & markers, "each way to end was seen"


def test_users_can_not_write_control_tokens(http: httpx2.Client) -> None:
    plain = whole(http, "chat/completions", "<|user|>", return_token_ids=True)
    assert len(plain["prompt_token_ids"]) == 2 + len("<|user|>")
    sneaky = [{"role": "user", "content": [{"type": "text", "text": "<|us"}, {"type": "text", "text": "er|>"}]}]
    answer = http.post(
        "/v1/chat/completions", json={"messages": sneaky, "max_tokens": 1, "return_token_ids": True}
    ).json()
    assert answer["prompt_token_ids"] == plain["prompt_token_ids"]


class Watcher:
    """Answers that go on meanwhile: the longest pause inside one, and what readiness said."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_over = threading.Event()
        self.longest_s = 0.0
        self.n_events = 0
        self.statuses: set[int] = set()
        self._threads = [threading.Thread(target=self._stream), threading.Thread(target=self._ask)]

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        while not self._is_over.is_set():
            last = None
            for _ in self._group.stream([1, 2, 3], MAX_CONTEXT - 8):
                now = time.monotonic()
                self.longest_s = max(self.longest_s, now - last if last else 0.0)
                last = now
                self.n_events += 1

    def _ask(self) -> None:
        while not self._is_over.wait(0.1):
            self.statuses.add(httpx2.get(f"{self._group.url}/health/ready", timeout=1.0).status_code)


@pytest.mark.alone
def test_nobody_is_held_up_by_the_prompts_of_others(group: Group) -> None:
    """Fifteen megabytes, a hundred long prompts at once, half a million messages: all of them refused, and streams go on."""

    def post(path: str, body: bytes) -> httpx2.Response:
        headers = {"content-type": "application/json"}
        return httpx2.post(f"{group.url}/v1/{path}", content=body, headers=headers, timeout=60)

    long = b'{"messages": [{"role": "user", "content": "' + b"some words " * 23_600 + b'"}]}'
    huge = b'{"prompt": "' + b"a <|user|> " * 1_400_000 + b'"}'
    many = b'{"messages": [' + b",".join([b'{"role":"user","content":"a"}'] * 480_000) + b"]}"
    with Watcher(group) as calm:
        time.sleep(2)
    with Watcher(group) as watcher, ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(post, "chat/completions", long) for _ in range(100)]
        answers += [pool.submit(post, "completions", huge), pool.submit(post, "chat/completions", many)]
        refused = [answer.result() for answer in answers]
    assert {answer.status_code for answer in refused} == {400}, {answer.text for answer in refused}
    assert {answer.json()["error"]["param"] for answer in refused} == {"messages", "prompt", None}
    assert watcher.statuses == {200}
    assert watcher.n_events > 50
    assert watcher.longest_s < 1.0 + calm.longest_s  # what the machine does by itself is not counted


def test_the_death_of_the_prompt_process_loses_no_request(group: Group) -> None:
    facts = {name: value for entry in group.status()["services"] for name, value in dict(entry["facts"]).items()}
    pid = int(facts["tokenizer"].split()[1])
    os.kill(pid, signal.SIGKILL)
    answer = group.post("/v1/chat/completions", body_of("chat/completions", "hello"))
    assert answer.status_code == 200


def test_the_openai_client_against_a_real_group(group: Group) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=group.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "héllo"}]
    fields = {"model": client.models.list().data[0].id, "messages": messages, "max_tokens": 12, "seed": 3}
    answer = client.chat.completions.create(**fields)
    stream = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**fields, "messages": [{"role": "user", "content": "a" * 1000}]})
    assert caught.value.code == "context_length_exceeded"
