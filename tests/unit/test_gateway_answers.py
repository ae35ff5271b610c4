"""How answers look, streamed and whole; no sockets."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.answers import shape_of, token_key
from services.gateway.bodies import parse_chat, parse_completion
from shared.messages.gateway import RequestAccepted, RequestDone, TokenLogprob, TokenOut

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any):
    return parse_chat(json.dumps({"messages": HELLO, **fields}).encode(), "id")


def completion(**fields: Any):
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode(), "id")


ACCEPTED = RequestAccepted("id", 3, 50, (1, 2, 3))
DONE = RequestDone("id", "length", 3, 2, text="!")
ROW = TokenLogprob(5, -0.5, b"\xc3", ((5, -0.5, b"\xc3"), (6, -1.5, b"b")))


def test_stream_and_whole_say_the_same() -> None:
    outs = [TokenOut("id", 0, (5,), "", (ROW,)), TokenOut("id", 1, (6,), "é", (TokenLogprob(6, -1.0, b"\xa9"),))]
    outs.append(TokenOut("id", 2, (7,), "x", (TokenLogprob(7, -2.0, b"x"),)))
    for wanted in (
        chat(stream=True, logprobs=True, top_logprobs=2, return_token_ids=True, seed=9),
        completion(stream=True, logprobs=2, return_token_ids=True, seed=9),
    ):
        shape = shape_of(wanted, "m", 1)
        chunks = [json.loads(shape.first(ACCEPTED)), *(json.loads(shape.delta(out) or b"") for out in outs)]
        chunks.append(json.loads(shape.last(DONE)))
        assert {(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks} == {("id", "m", 1)}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "length"]

        shape = shape_of(wanted, "m", 1)
        shape.accept(ACCEPTED)
        for out in outs:
            shape.add(out)
        whole = json.loads(shape.whole(DONE))
        choice = whole["choices"][0]
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert whole["sampling"] == chunks[0]["sampling"] == {"temperature": 1.0, "top_p": 1.0}
        assert (whole["seed"], whole["max_tokens"]) == (9, 50) == (chunks[0]["seed"], chunks[0]["max_tokens"])
        assert (
            choice["token_ids"]
            == [5, 6, 7]
            == [t for chunk in chunks for t in chunk["choices"][0].get("token_ids") or []]
        )
        if wanted.is_chat:
            assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == [
                "assistant",
                None,
                None,
                None,
                None,
            ]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == choice["message"]["content"] == "éx!"
            assert whole["object"] == "chat.completion"
            assert whole["prompt_token_ids"] == [1, 2, 3] == chunks[0]["prompt_token_ids"]
            rows = [row for chunk in chunks for row in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
            assert rows == choice["logprobs"]["content"]
            assert bytes(b for row in rows for b in row["bytes"]).decode() == "éx"
            assert [top["logprob"] for top in rows[0]["top_logprobs"]] == [-0.5, -1.5]
        else:
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"] == "éx!"
            assert choice["prompt_token_ids"] == [1, 2, 3]
            logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                assert [x for part in logprobs for x in part[name]] == choice["logprobs"][name]
            assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
            assert choice["logprobs"]["text_offset"] == [0, 1, 1]


def test_usage_chunk_has_no_choices() -> None:
    shape = shape_of(chat(stream=True, stream_options={"include_usage": True}), "m", 1)
    assert json.loads(shape.first(ACCEPTED))["usage"] is None
    chunk = json.loads(shape.usage(DONE))
    assert chunk["choices"] == []
    assert chunk["usage"]["total_tokens"] == 5


def test_without_return_token_ids_there_are_none() -> None:
    shape = shape_of(chat(stream=True), "m", 1)
    assert b"token_ids" not in shape.first(ACCEPTED) + (shape.delta(TokenOut("id", 0, (5,), "a")) or b"") + shape.last(
        DONE
    )
    assert shape.delta(TokenOut("id", 1, (5,), "")) is None


def test_tokens_without_text_keep_distinct_names() -> None:
    assert token_key(b"", 7) == "token_id:7"
    assert token_key(b"\x80", 7) != token_key(b"\x81", 8)


def offsets_both_ways(pieces: list[bytes], sent: list[str]) -> tuple[str, list[int]]:
    """(text, text_offset) of an answer whose tokens are ``pieces``, each of which let the text in ``sent`` go."""
    outs = [
        TokenOut("id", k, (k,), text, (TokenLogprob(k, -1.0, piece),))
        for k, (piece, text) in enumerate(zip(pieces, sent, strict=True))
    ]
    done = RequestDone("id", "stop", 3, len(outs))
    wanted = completion(stream=True, logprobs=0)
    shape = shape_of(wanted, "m", 1)
    chunks = [json.loads(data) for data in [*map(shape.delta, outs), shape.last(done)] if data]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    offsets = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
    shape = shape_of(wanted, "m", 1)
    shape.accept(ACCEPTED)
    for out in outs:
        shape.add(out)
    whole = json.loads(shape.whole(done))["choices"][0]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == (text, offsets)
    assert len(offsets) == len(pieces)
    return text, offsets


def test_no_offset_is_beyond_the_text() -> None:
    # "abSTOP" with the stop string STOP, whose text is held back and then cut.
    assert offsets_both_ways([b"ab", b"S", b"TO", b"P"], ["ab", "", "", ""]) == ("ab", [0, 2, 2, 2])
    # The stop string came to nothing: the places are those of the text.
    assert offsets_both_ways([b"ab", b"S", b"T", b"x"], ["ab", "", "", "STx"]) == ("abSTx", [0, 2, 3, 4])
    # One token spells the end of the text and the stop string.
    assert offsets_both_ways([b"a", b"bSTOP", b""], ["a", "b", ""]) == ("ab", [0, 1, 2])


def test_offsets_count_characters_as_the_text_has_them() -> None:
    assert offsets_both_ways([b"\xff", b"\xff", b"a"], ["\ufffd", "\ufffd", "a"]) == ("\ufffd\ufffda", [0, 1, 2])
    assert offsets_both_ways([b"\xc3", b"\xa9", b"x"], ["", "é", "x"]) == ("éx", [0, 1, 1])
    assert offsets_both_ways([b"\xc3", b"x"], ["", "\ufffdx"]) == ("\ufffdx", [0, 1])
