"""The prompt process as the router sees it: answers, refusals, what its death and its limits cost."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.router import prompt_queue
from services.router.prompt_desk import Outcome, PromptDesk
from services.router.tokenizer import ModelTokenizer
from shared.errors import ContainerError, Refused
from shared.log import Log
from shared.machine.processes import process_start
from shared.memory.prompt_room import prompt_room_bytes
from shared.messages.router import Sampling, Submit
from tests.support import inside
from tests.support.waiting import wait_for

EMBEDDED = Path(__file__).parents[2] / "models" / "fledgling"
AT_MOST = 2047
ENDLESS = "{% if endless %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
GROWS = (
    "{% if grows %}{% set ns = namespace(x=messages[0].content) %}"
    "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}"
)
TEMPLATE = "<|user|>" + ENDLESS + GROWS + "{{ messages[0].content }}<|assistant|>"


class Loop:
    """The router's poll loop."""

    def __init__(self, model: Path) -> None:
        self.fds: dict[int, Callable[[], object]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.log: list[str] = []
        self.longest_s = 0.0
        room = prompt_room_bytes(AT_MOST + 1)
        self.desk = PromptDesk(model, room, AT_MOST, self, Log("router"), self._done)

    def add_fd(self, fd: int, callback: Callable[[], object]) -> None:
        self.fds[fd] = callback

    def remove_fd(self, fd: int) -> None:
        del self.fds[fd]

    def _done(self, msg: Submit, outcome: Outcome) -> None:
        assert msg.request not in self.outcomes
        self.outcomes[msg.request] = outcome

    def once(self) -> None:
        ready = select.select(list(self.fds), [], [], 0.05)[0]
        begin = time.monotonic()
        for fd in ready:
            self.fds[fd]()
        self.desk.tick()
        self.longest_s = max(self.longest_s, time.monotonic() - begin)

    def until(self, *requests: str, timeout_s: float = 60.0) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while not all(request in self.outcomes for request in requests):
            assert time.monotonic() < deadline, f"{self.outcomes.keys()} of {requests}"
            self.once()
        return [self.outcomes.pop(request) for request in requests]

    def ask(self, request: str, prompt: str | None = None, content: str | None = None, **kwargs: Any) -> None:
        messages = None if content is None else msgspec.json.encode([{"role": "user", "content": content}])
        begin = time.monotonic()
        self.desk.submit(
            Submit(
                request,
                Sampling(),
                prompt=prompt,
                messages_json=messages,
                template_kwargs_json=msgspec.json.encode(kwargs) if kwargs else None,
            )
        )
        self.longest_s = max(self.longest_s, time.monotonic() - begin)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def loop(model: Path) -> Iterator[Loop]:
    made = Loop(model)
    made.desk.wait_loaded()
    yield made
    made.desk.close()
    assert not made.fds


def test_answers_are_those_of_the_tokenizer(loop: Loop, model: Path) -> None:
    own = ModelTokenizer(model)
    assert loop.desk.turn_ends == own.turn_ends
    loop.ask("a", prompt="Once upon <|user|>")
    loop.ask("b", content="hi <|user|>")
    assert loop.until("a", "b") == [
        own.encode("Once upon <|user|>"),
        own.encode_chat([{"role": "user", "content": "hi <|user|>"}], {}),
    ]


def test_a_refusal_keeps_its_status_code_and_field(loop: Loop) -> None:
    loop.ask("a", content="Once upon a time. " * 5000)
    (refused,) = loop.until("a")
    assert (refused.status, refused.code, refused.param) == (400, "context_length_exceeded", "messages")


def test_a_text_beyond_any_context_is_not_even_handed_over(loop: Loop) -> None:
    with pytest.raises(Refused, match="Shorten the prompt") as caught:
        loop.ask("a", prompt="x" * (8 << 20))
    assert caught.value.code == "context_length_exceeded"


def test_a_short_prompt_does_not_wait_for_long_ones_nor_does_the_loop(loop: Loop) -> None:
    loop.longest_s = 0.0
    for idx in range(40):
        loop.ask(f"long{idx}", prompt="Once upon a time. " * 14_400)
    loop.ask("short", prompt="hello")
    loop.until("short")
    assert len(loop.outcomes) < 30
    loop.until(*(f"long{idx}" for idx in range(40)))
    assert loop.longest_s < 0.5


def test_no_request_is_lost_when_the_process_dies(loop: Loop) -> None:
    pid = loop.desk.pid
    loop.ask("a", prompt="hello")
    loop.ask("b", prompt="Once upon a time. " * 5_000)
    os.kill(pid, signal.SIGKILL)
    ids, refused = loop.until("a", "b")
    assert ids == ModelTokenizer(EMBEDDED).encode("hello")
    assert isinstance(refused, Refused) and loop.desk.pid != pid


def test_a_stopped_process_is_replaced(loop: Loop) -> None:
    os.kill(loop.desk.pid, signal.SIGSTOP)
    loop.ask("a", prompt="hello")
    assert loop.until("a")[0] == ModelTokenizer(EMBEDDED).encode("hello")


def test_a_template_without_end_is_given_up_and_others_go_on(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_queue, "MAX_CPU_S", 2.0)
    loop.ask("endless", content="hi", endless=True)
    loop.ask("other", content="hi")
    (ids,) = loop.until("other")
    assert ids and "endless" not in loop.outcomes
    (refused,) = loop.until("endless")
    assert refused.status == 400 and "processor time" in str(refused)
    loop.ask("after", prompt="hello")
    assert loop.until("after")[0] == ModelTokenizer(EMBEDDED).encode("hello")


def test_a_template_that_doubles_its_text_is_refused(loop: Loop) -> None:
    loop.ask("a", content="hello", grows=True)
    (refused,) = loop.until("a")
    assert refused.code == "template_error" and "MemoryError" in str(refused)
    loop.ask("b", prompt="hello")
    assert loop.until("b")[0]


def test_who_leaves_hears_nothing(loop: Loop) -> None:
    loop.ask("a", prompt="hello")
    assert loop.desk.has("a") and loop.desk.drop("a")
    assert loop.desk.drop("a") is None and not loop.desk.has("a")
    loop.ask("b", prompt="hello")
    loop.until("b")
    assert "a" not in loop.outcomes


def test_the_process_ends_with_its_parent(model: Path) -> None:
    loop = Loop(model)
    loop.desk.wait_loaded()
    pid = loop.desk.pid
    inside.end_input(loop.desk)
    wait_for(lambda: process_start(pid) is None, "its end", 10)
    loop.desk.close()


def test_damaged_files_are_said_before_the_first_request(tmp_path: Path) -> None:
    shutil.copy(EMBEDDED / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    loop = Loop(tmp_path)
    with pytest.raises(ContainerError, match=r"chat_template\.jinja can't be used"):
        loop.desk.wait_loaded()
    loop.desk.close()
