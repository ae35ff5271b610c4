"""Reports and progress: plain lines for files, rich for a terminal, and no text that steers it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading

import pytest

from cli.show import Bars, Column, Table, plain_lines, progress, show

COLUMNS = (Column("stage", 12, False, "  "), Column("total", 8), Column("GB/s", 6))
TABLE = Table(COLUMNS, [("read \x1b[2J", "1.5", ""), ("[red]sum[/red]", "2", "3")], n_sums=1)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown_on(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": "60", **env}.items():
        monkeypatch.setenv(name, value)
    show(["head", TABLE, "", "foot \x1b]0;t\x07"])
    return stream.getvalue()


def test_the_plain_form_keeps_its_columns_and_never_steers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain_lines([TABLE])[0] == "  stage          total  GB/s"
    assert plain_lines([TABLE])[2] == "  [red]sum[/red]       2     3"
    assert plain_lines([Table(COLUMNS, [("a", "1", "")], has_head=False)]) == ["  a                  1"]
    out = shown_on(io.StringIO(), monkeypatch)
    assert out.splitlines()[0] == "head"
    assert "read \\x1b[2J" in out and "\x1b" not in out


def test_a_terminal_gets_a_table_whose_cells_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = shown_on(Terminal(), monkeypatch)
    assert "─" in out
    assert "read \\x1b[2J" in out and "[red]sum[/red]" in out and "foot \\x1b]0;t\\x07" in out
    assert "\x1b[2J" not in out and "\x07" not in out
    assert "\x1b[1m" in out  # the head is bold


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colours_gets_none(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in shown_on(Terminal(), monkeypatch, **env)


def test_a_narrow_terminal_folds_instead_of_losing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown_on(Terminal(), monkeypatch, COLUMNS="20", NO_COLOR="1")
    table = [plain for line in out.splitlines()[1:-1] if (plain := re.sub("\x1b\\[[0-9;]*m", "", line))]
    assert max(map(len, table)) <= 20
    assert "[red]sum[/red]" in "".join(line.split("  ")[0].strip() for line in table)


def test_an_ascii_terminal_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    stream.encoding = "ascii"
    shown_on(stream, monkeypatch, NO_COLOR="1").encode("ascii")


def test_progress_is_a_line_for_files_and_a_bar_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with progress("copying", 10) as advance, progress("quiet", 10, is_quiet=True):
        advance(10)
    assert (out.getvalue(), err.getvalue()) == ("copying\n", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("copying \x1b[2J", 4) as advance:
        threads = [threading.Thread(target=advance, args=(1,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "copying \\x1b[2J" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert out.getvalue() == "copying\n"


def test_progress_gives_the_cursor_back_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.suppress(KeyboardInterrupt), progress("copying", 4):
        raise KeyboardInterrupt
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")


def test_bars_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two below each other on a terminal, with rates; elsewhere lines alone."""
    for is_terminal in (False, True):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        monkeypatch.setattr("cli.show.is_terminal", lambda _, found=is_terminal: found)
        with Bars() as bars:
            fetching, converting = bars.add("fetching", 4_000_000), bars.add("converting \x1b[2J", 100, done=50)
            bars.say("fetched a\x1b[2J")
            fetching(1_000_000)
            converting(10)
        assert "\x1b[2J" not in out.getvalue() + err.getvalue()
        assert ("fetched a" in err.getvalue()) == is_terminal == ("1.0/4.0 MB" in err.getvalue())
        assert ("fetched a" in out.getvalue()) != is_terminal
