"""The embedded model through the whole group: words, the same words over every knob, drafts that pay, kills in between."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.memory.segments import COUNTERS, Segment
from shared.step.counters import read_all
from tests.group.harness import Group, event_tokens

MODEL = Path(__file__).parents[2] / "models" / "fledgling"
QUESTION = "Tell me a story about a small bird."
StartGroup = Callable[..., Group]


def chat(group: Group, max_tokens: int = 80, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": max_tokens, "temperature": 0} | more
    answer = group.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def counters(group: Group) -> dict[str, dict[str, int]]:
    segment = Segment.attach(group.run_id, COUNTERS, is_readonly=True)
    try:
        return read_all(segment.buf)
    finally:
        segment.close()


def test_it_writes_sentences_and_its_drafts_are_accepted(start_group: StartGroup) -> None:
    group = start_group(MODEL, draft=1)
    text = chat(group, 120, ignore_eos=True)
    words = re.findall(r"[a-z]{2,}", text.lower())
    assert len(words) > 30 and len(set(words)) > 15, text
    common = {"the", "a", "and", "was", "to", "he", "she", "it", "said", "in", "of", "little", "small", "bird"}
    assert sum(word in common for word in words) > len(words) / 5, text
    assert "." in text
    router = counters(group)["router"]
    # Guessing among thousands of entries would be accepted about never.
    assert router["accepted"] > 0.3 * router["drafts"] > 0, router


@pytest.mark.parametrize(("temperature", "transport"), [(0, "datagram"), (1, "zmq")])
def test_a_story_survives_the_death_of_every_service(temperature: int, transport: str, start_group: StartGroup) -> None:
    """The promise of the design: the stream is delayed, it neither ends nor changes. One after the other in one answer:
    attention, expert_io, router, drafter. The tokens are those of a calm run, and so are those of the next."""
    group = start_group(MODEL, draft=1, slots=40, transport=transport)
    calm = group.tokens(QUESTION, 400, temperature=temperature, seed=3)
    doomed = ["attention", "expert_io", "router", "drafter"]  # without the first three no token comes
    got: list[int] = []
    n_at_death = -20
    for event in group.stream(QUESTION, 400, temperature=temperature, seed=3):
        assert "error" not in event, f"{event}\n{group.logs()}"
        got += event_tokens(event)
        if doomed and len(got) >= n_at_death + 40:
            n_at_death = len(got)
            group.kill(doomed.pop(0))
            group.wait_ready()
    assert not doomed and n_at_death < 300, "all died while the answer was made"
    assert got == calm
    group.wait_ready()
    assert group.tokens(QUESTION, 12, temperature=temperature, seed=3) == calm[:12]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(start_group: StartGroup) -> None:
    group = start_group(MODEL, max_context=128)
    for stream in (False, True):
        for n in (128, 1000):
            answer = group.post("/v1/completions", {"prompt": [5] * n, "max_tokens": 4, "stream": stream})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(n) in error["message"] and "128" in error["message"]
        assert group.tokens([5] * 127, 4), "context - 1 tokens fit"
