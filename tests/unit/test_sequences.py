"""Text that may be sent: whole characters, no part of a stop string, the same whatever the cut."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.router.sequences import SamplingParams, Sequence, TextStream


def decode_bytes(ids: SequenceOf[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def stream(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(decode_bytes, stop)
    return [text.push(byte) for byte in data], text


def test_a_character_split_over_tokens_arrives_whole() -> None:
    pieces, text = stream("a🙂b".encode())
    assert [p for p in pieces if p] == ["a", "🙂", "b"]
    assert text.finish() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end() -> None:
    pieces, text = stream(b"ok" + "🙂".encode()[:2])
    assert "".join(pieces) == "ok"
    assert text.finish() == "\ufffd"


def test_pieces_join_to_the_whole_text() -> None:
    data = "Ünïcödé – 日本語 🙂🙂 end".encode()
    pieces, text = stream(data)
    assert "".join(pieces) + text.finish() == data.decode()


def test_stop_string_is_cut_and_nothing_behind_it_leaks() -> None:
    pieces, text = stream(b"hello STOP world", ("STOP",))
    assert "".join(pieces) == "hello "
    assert text.is_stopped
    assert text.finish() == ""


def test_a_false_start_of_a_stop_string_is_released() -> None:
    pieces, text = stream(b"a STO b", ("STOP",))
    assert "".join(pieces) + text.finish() == "a STO b"
    assert not text.is_stopped


def test_held_text_comes_out_at_the_end() -> None:
    pieces, text = stream(b"wait ST", ("STOP",))
    assert "".join(pieces) == "wait "
    assert text.finish() == "ST"


def test_the_earliest_of_several_stops_wins() -> None:
    pieces, _ = stream(b"one two three", ("three", "two"))
    assert "".join(pieces) == "one "


def make(max_tokens: int, eos: frozenset[int] = frozenset(), stop: tuple[str, ...] = ()) -> Sequence:
    return Sequence("r", 1, [0], max_tokens, SamplingParams(), TextStream(decode_bytes, stop), eos)


def test_length_and_end_token_give_their_reasons() -> None:
    sequence = make(3)
    assert "".join(sequence.append(b) for b in b"abc") == "abc"
    assert sequence.finish_reason == "length"
    sequence = make(3, frozenset({98}))
    assert "".join(sequence.append(b) for b in b"ab") == "a"
    assert sequence.finish_reason == "stop"


def test_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    sequence = make(5, stop=("de",))
    text = "".join(sequence.append(b) for b in b"abcde")
    assert (text, sequence.finish_reason) == ("abc", "stop")
