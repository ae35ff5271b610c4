"""Types of the commands' arguments: what is refused where it is given, before anything is started."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shared.errors import ConfigError
from shared.messages.router import MAX_TEMPERATURE, SEED_RANGE
from shared.run.config import Settings
from shared.run.settings import Declared, declared
from shared.run.sizes import parse_bytes

NAME_MAX, PATH_MAX = 255, 4095
"""Bytes. Where a file system allows less, it says so itself."""


class FiniteRange(click.FloatRange):
    """A float range without the numbers that are none: nan lies between any two for click, and inf sleeps for ever."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class GivenPath(click.Path):
    """A path that is not empty: an unset variable of a script would otherwise name the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("it is empty; give a path.", param, ctx)
        parts = os.fsencode(str(value)).split(b"/")
        if max(map(len, parts)) > NAME_MAX or sum(map(len, parts)) + len(parts) > PATH_MAX:
            self.fail(f"it is longer than a path may be ({NAME_MAX} bytes a name, {PATH_MAX} in all).", param, ctx)
        return super().convert(value, param, ctx)


class GivenSize(click.ParamType):  # type: ignore[type-arg]
    """A size that is not 0, checked where it is given and kept as it was written. Raises ConfigError (exit code 78)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        key = str(param.name) if param is not None and param.name else "size"
        if parse_bytes(value, key) <= 0:
            raise ConfigError(f"{key} = {value}: more than 0 bytes are needed, for example 12G")
        return str(value)


class GivenSlot(click.ParamType):  # type: ignore[type-arg]
    """A slot of the expert store: its number, as (-1, number), or LAYER:EXPERT."""

    name = "N|LAYER:EXPERT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        found = re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", str(value))
        if not found:
            self.fail(
                f"{value!r}: the number of a slot or LAYER:EXPERT is expected, for example 17 or 3:42.", param, ctx
            )
        return (-1 if found[1] is None else int(found[1])), int(found[2])


TEMPERATURE = FiniteRange(0, MAX_TEMPERATURE)
TOP_P = FiniteRange(0, 1)
SEED = click.IntRange(*SEED_RANGE)
ABOVE_ZERO = FiniteRange(min=0, min_open=True)
SIZE = GivenSize()
SLOT = GivenSlot()
PATH = GivenPath(path_type=Path)
PATH_TEXT = GivenPath()
"""The same as text, for what is handed on."""


def declaration(name: str) -> Declared:
    """Of the setting with this name."""
    return next(each for each in declared(Settings) if each.name == name)


def setting(name: str, flag: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that is a setting of a group, as it is declared; ``load_settings`` checks its text."""
    each = declaration(name)
    sentence = f"{each.setting.sentence[0].upper()}{each.setting.sentence[1:]}."
    return click.option(flag or each.flag, name, metavar=each.metavar, help=sentence)


MODEL = click.option(
    "--model", metavar="DIR", type=PATH_TEXT, help="Model to start when no group is running; default the embedded one."
)
URL = click.option("--url", metavar="URL", help="Use the server at this address.")
RUN_DIR = click.option("--run-dir", metavar="DIR", type=PATH_TEXT, help="Use the group of this run directory.")


def check_writable(path: Path, flag: str) -> None:
    """UsageError where a file could not be made, before the work whose result it is to hold."""
    if path.is_dir():
        raise click.UsageError(f"{flag} {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"{flag} {path}: the directory {path.absolute().parent} does not exist")


def write_result(path: Path, text: str) -> None:
    """A file the user named; a device, or a pipe that somebody reads, will do. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, 0o666)
        os.set_blocking(fd, True)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise ConfigError(f"{path} can't be written: nobody reads from this pipe") from None
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
