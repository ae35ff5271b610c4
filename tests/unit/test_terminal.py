"""Text on its way to a terminal: what steers one is written out, everything else stays."""

from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import steering
from shared.log import format_value
from shared.run import terminal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b2J\x9d0;t\x9c", "\\x9b2J\\x9d0;t\\x9c"),
        ("a\rb\x08\x7f\x00", "a\\x0db\\x08\\x7f\\x00"),
        ("one\r\ntwo\n\tthree", "one\ntwo\n\tthree"),
        ("\u202eevil\u202c \u2066x\u2069", "\\u202eevil\\u202c \\u2066x\\u2069"),
        ("né 你好 👩‍👩‍👧 ‏עב‎ \u00a0 \\x1b", "né 你好 👩‍👩‍👧 ‏עב‎ \u00a0 \\x1b"),
    ],
)
def test_what_steers_is_written_out_and_the_rest_stays(text: str, expected: str) -> None:
    assert steering.shown(text) == expected
    assert steering.shown(expected) == expected


@given(st.text())
def test_no_control_character_gets_through(text: str) -> None:
    left = steering.shown(text)
    assert not any((ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in left)
    assert "\n" not in steering.shown_line(text)


def test_every_way_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    terminal.say("a\x1b")
    terminal.write("b\x9b\ud800")
    terminal.complain("c\x07")
    assert (out.getvalue(), err.getvalue()) == ("a\\x1b\nb\\x9b?", "c\\x07\n")
    document = {"text": "\x1b\x7f\x9b\u202e"}
    out.truncate(0)
    out.seek(0)
    terminal.say_json(document)
    assert json.loads(out.getvalue()) == document
    assert "\x1b" not in out.getvalue() and "\x9b" not in out.getvalue()


def test_a_stream_that_is_closed_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    terminal.say("x")
    assert not terminal.is_terminal(None)
    assert not terminal.can_show("›")


def test_a_log_line_can_not_steer_whoever_looks_at_it() -> None:
    text = 'a"\x1b[2J\x9b2J\x7f\u202e\nb'
    value = format_value(text)
    assert not steering.STEERING.search(value) and "\n" not in value
    assert json.loads(value) == text
