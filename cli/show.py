"""Tables and progress: by rich for a person at a terminal, as plain lines for a file or a pipe.

A report is a list of lines and ``Table``s. Its plain form does not depend on the terminal, so scripts may rely on it; rich is
loaded for terminals only, and heeds their width and ``NO_COLOR``. Cells and lines pass ``shown``: nothing in them steers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

from shared.run.terminal import is_terminal, say
from shared.steering import shown_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class Column(NamedTuple):
    """``width`` and ``gap`` (what stands before it) are those of the plain form."""

    title: str
    width: int
    is_right: bool = True
    gap: str = ""


@dataclass(frozen=True)
class Table:
    """Cells are text already. The last ``n_sums`` rows add up the others or are compared with them."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    n_sums: int = 0
    has_head: bool = True

    def lines(self) -> list[str]:
        """The plain form."""
        head = [[column.title for column in self.columns]] if self.has_head else []
        return [self._line(row) for row in (*head, *self.rows)]

    def _line(self, row: Sequence[str]) -> str:
        cells = (
            f"{column.gap}{cell:>{column.width}}" if column.is_right else f"{column.gap}{cell:<{column.width}}"
            for column, cell in zip(self.columns, row)
        )
        return "".join(cells).rstrip()


def ledger(rows: Sequence[Sequence[str]], n_sums: int) -> Table:
    """The rows of a memory ledger."""
    columns = (Column("process", 10, False), Column("for", 58, False, " "), Column("bytes", 18, True, " "))
    return Table(columns, rows, n_sums, has_head=False)


Shown = Sequence["str | Table"]


def plain_lines(report: Shown) -> list[str]:
    """The report as it goes to a file or a pipe."""
    return [line for part in report for line in (part.lines() if isinstance(part, Table) else [part])]


def show(report: Shown) -> None:
    """Writes a report to standard output."""
    if not is_terminal(sys.stdout):
        say("\n".join(plain_lines(report)))
        return
    console = _console(sys.stdout)
    for part in report:
        if isinstance(part, Table):
            console.print(_rich_table(part))
        else:
            say(part)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # None: nor bold text
    return Console(file=stream, color_system=colours, highlight=False, markup=False, emoji=False)


def _rich_table(table: Table) -> object:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=box.SIMPLE, show_header=table.has_head, header_style="bold", pad_edge=False)
    for column in table.columns:
        made.add_column(
            Text(shown_line(column.title.strip())), justify="right" if column.is_right else "left", overflow="fold"
        )
    n_rows = len(table.rows) - table.n_sums
    for i, row in enumerate(table.rows):
        cells = (Text(shown_line(cell.strip())) for cell in row)
        made.add_row(*cells, style="bold" if i >= n_rows else "", end_section=i == n_rows - 1 and table.n_sums > 0)
    return made


@contextmanager
def progress(label: str, total: int, *, is_quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; elsewhere the label as a line, or with ``is_quiet`` nothing.

    Yields what is called with each amount done. Any thread may call it.
    """
    if not is_terminal(sys.stderr):
        if not is_quiet:
            say(label)
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(sys.stderr)) as bar:
        task = bar.add_task(shown_line(label), total=max(total, 1))
        yield lambda amount: bar.advance(task, amount)


class Bars:
    """Bars of bytes with rate and time left, one below the other, on a terminal's standard error; elsewhere nothing.

    A context manager. Any thread may call what ``add`` gives.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        if is_terminal(sys.stderr):
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress

            self._progress = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=_console(sys.stderr),
                speed_estimate_period=120.0,
            )

    def add(self, label: str, total: int, done: int = 0) -> Callable[[int], None]:
        """A bar of which ``done`` bytes were there before; what is called with each amount more."""
        if self._progress is None:
            return lambda _: None
        shown = self._progress
        task = shown.add_task(shown_line(label), total=max(total, 1), completed=done)
        return lambda amount: shown.advance(task, amount)

    def say(self, line: str) -> None:
        """A line above the bars; where there are none, a line."""
        if self._progress is None:
            say(line)
        else:
            self._progress.console.print(shown_line(line))

    def __enter__(self) -> Bars:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
