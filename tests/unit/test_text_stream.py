"""Text that may be sent: whole characters, no part of a stop string, the same whatever the cut."""

from __future__ import annotations

import random
import time

import pytest

from services.router.text_stream import StopFinder, TextStream

HOSTILE = [
    b"a\xff\xff\xff",
    b"a\x80\x80",
    b"\xf0\x9f\x99",
    b"\xf0\x9f\xf0\x9f\x99\x82",
    b"\xed\xa0\x80 surrogate",
    b"\xc0\xaf overlong",
    b"\xf4\x90\x80\x80 beyond",
    "genuine \ufffd and \ufffd\ufffd".encode(),
    b"mixed \xef\xbf\xbd\xef\xbf \xff\xef\xbf\xbd",
    "Ünïcödé – 日本語 🙂🙂 \U0010fffd end".encode(),
]


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(lambda token, is_start: pieces[token], stop)
    return [text.push(token) for token in range(len(pieces))], text


def single(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    return stream([data[i : i + 1] for i in range(len(data))], stop)


def splits(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.sample(range(len(data) + 1), rng.randint(0, min(len(data), 8))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_a_character_split_over_tokens_arrives_whole() -> None:
    pieces, text = single("a🙂b".encode())
    assert [p for p in pieces if p] == ["a", "🙂", "b"]
    assert text.finish() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end() -> None:
    pieces, text = single(b"ok" + "🙂".encode()[:2])
    assert "".join(pieces) == "ok"
    assert text.finish() == "\ufffd"


def test_each_invalid_byte_is_sent_at_once() -> None:
    pieces, text = single(b"a\xff\xff\xffb")
    assert pieces == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]
    assert text.finish() == ""


def test_a_genuine_replacement_character_is_text() -> None:
    pieces, text = stream([b"a", "\ufffd".encode(), "\ufffd".encode()])
    assert pieces == ["a", "\ufffd", "\ufffd"]
    assert text.finish() == ""


@pytest.mark.parametrize("data", HOSTILE)
def test_the_text_does_not_depend_on_the_cut_and_only_grows(data: bytes) -> None:
    rng = random.Random(0)
    for _ in range(50):
        parts = splits(data, rng)
        pieces, text = stream(parts)
        assert "".join(pieces) + text.finish() == data.decode("utf-8", "replace")
        for n in range(len(parts)):
            # Cut short after n tokens: that text begins the next one, but for the mark of an open character.
            shown, cut_short = stream(parts[:n])
            sent, tail = "".join(shown), cut_short.finish()
            assert sent == "".join(pieces[:n])
            assert tail in ("", "\ufffd")
            assert b"".join(parts[:n]).decode("utf-8", "replace") == sent + tail


def test_hostile_streams_cost_the_same_per_token() -> None:
    def seconds(n: int) -> float:
        text = TextStream(lambda token, is_start: b"\xff", ("\ufffd" * 1000 + "!",))
        begin = time.perf_counter()
        for token in range(n):
            text.push(token)
        return time.perf_counter() - begin

    seconds(100)
    assert min(seconds(8000) for _ in range(3)) < 40 * min(seconds(800) for _ in range(3))


def test_a_text_of_its_own_begins_without_the_blank_of_its_first_word() -> None:
    def piece(token: int, is_start: bool) -> bytes:
        return [b"", b"Hi" if is_start else b" Hi"][token]

    for is_start, expected in ((True, "Hi Hi"), (False, " Hi Hi")):
        text = TextStream(piece, is_start=is_start)
        assert "".join(map(text.push, (0, 1, 1))) == expected


# ---- stop strings


def test_stop_string_is_cut_and_nothing_behind_it_leaks() -> None:
    pieces, text = single(b"hello STOP world", ("STOP",))
    assert "".join(pieces) == "hello "
    assert text.is_stopped
    assert text.finish() == ""


def test_a_false_start_of_a_stop_string_is_released() -> None:
    pieces, text = single(b"a STO b", ("STOP",))
    assert "".join(pieces) + text.finish() == "a STO b"
    assert not text.is_stopped


def test_held_text_comes_out_at_the_end() -> None:
    pieces, text = single(b"wait ST", ("STOP",))
    assert "".join(pieces) == "wait "
    assert text.finish() == "ST"


@pytest.mark.parametrize(
    ("data", "stop", "left"),
    [
        ("one two three", ("three", "two"), "one "),
        ("xabcdef", ("bcd", "abcde"), "x"),  # completed second, begins first
        ("xabcdxx", ("bcd", "abcde"), "xa"),  # the earlier beginning came to nothing
        ("xabcd", ("bcd", "abcde"), "xa"),  # and here the answer ended first
        ("aabab", ("abab", "aa"), ""),
        ("aaab", ("aab", "b"), "a"),
    ],
)
def test_the_stop_string_that_begins_first_wins(data: str, stop: tuple[str, ...], left: str) -> None:
    for parts in ([data.encode()], [data.encode()[i : i + 1] for i in range(len(data))]):
        pieces, text = stream(parts, stop)
        assert "".join(pieces) + text.finish() == left
        assert text.is_stopped


def test_stop_strings_cut_the_same_whatever_the_split() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        letters = rng.choice(["ab", "abc", "é🙂"])
        whole = "".join(rng.choice(letters) for _ in range(rng.randint(0, 14)))
        stop = tuple("".join(rng.choice(letters) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 4)))
        at = min((whole.index(s) for s in stop if s in whole), default=-1)
        pieces, text = stream(splits(whole.encode(), rng), stop)
        left = whole[:at] if at >= 0 else whole
        assert left.startswith("".join(pieces)), "what was sent can't be taken back"
        assert "".join(pieces) + text.finish() == left, (whole, stop)
        assert text.is_stopped == (at >= 0)


def test_text_that_can_no_longer_be_a_stop_is_not_held() -> None:
    finder = StopFinder(("aab",))
    assert [finder.push(char) for char in "aaaac"] == ["", "", "a", "a", "aac"]
