"""What ends an answer, and why."""

from __future__ import annotations

from services.router.sequences import Sequence
from services.router.text_stream import TextStream
from shared.messages.router import Sampling


def piece_of(token: int, is_start: bool) -> bytes:
    return bytes([token])


def make(max_tokens: int, eos: frozenset[int] = frozenset(), stop: tuple[str, ...] = ()) -> Sequence:
    return Sequence("r", 1, [0], max_tokens, Sampling(), TextStream(piece_of, stop), eos)


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
