"""What follows from the declaration of a setting: checks and their sentences, flags, help, and the template of the TOML file.

A setting is one annotated field of a struct (``shared.run.config.Settings``)::

    port: Annotated[int, Setting("port of the HTTP server; 0: any free one", low=0, high=65_535)] = 8484

Its type, default and ``Setting`` say everything; nothing here knows a setting by name. Standard library and msgspec alone.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shared.errors import ConfigError
from shared.run.sizes import parse_bytes


@dataclass(frozen=True)
class Setting:
    """What a field's type and default do not say."""

    sentence: str
    """What it does, in the words of the help and the template."""
    low: float | None = None
    high: float | None = None
    """Allowed range of a number, both ends included."""
    metavar: str = ""
    """What stands for its value in the help."""
    has_flag: bool = True
    """Whether it is also a flag of ``colibri-up``; all of them may stand in the file."""
    is_size: bool = False
    """Bytes, written like "12G". The field is called ``x_bytes``, the setting ``x``."""


@dataclass(frozen=True)
class Declared:
    """A setting as its struct declares it."""

    name: str
    field: str
    setting: Setting
    default: Any
    words: tuple[str, ...]
    """The texts that are allowed; empty: any, where it is a text."""
    kinds: tuple[type, ...]
    """What a value may be besides ``words``: ``str``, ``int``, ``float``, ``bool`` or ``tuple`` (of texts)."""

    @property
    def flag(self) -> str:
        """``--run-dir``; what is on by default has a flag that switches it off."""
        prefix = "--no-" if self.default is True else "--"
        return prefix + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        number = ("N",) if {int, float} & set(self.kinds) else ()
        return self.setting.metavar or ("|".join((*self.words, *number)) or "TEXT")

    def check(self, value: Any) -> Any:
        """The field's value for one from the file. Raises ConfigError that says what is allowed."""
        if self.setting.is_size:
            return parse_bytes(value, self.name)
        if isinstance(value, str):
            if value in self.words or (str in self.kinds and not self.words):
                return value
            if self.words and int in self.kinds and _is_whole(value):  # a file may quote one of several kinds
                value = int(value)
        if tuple in self.kinds and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        if bool in self.kinds and isinstance(value, bool):
            return value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (float in self.kinds or (int in self.kinds and isinstance(value, int))):
            low, high = self.setting.low, self.setting.high
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                raise ConfigError(f"{self.name} = {value}: allowed are {self.allowed}")
            return float(value) if float in self.kinds else value
        raise ConfigError(f"{self.name}: {value!r} can't be used; allowed are {self.allowed}")

    def check_text(self, text: str) -> Any:
        """The same for a flag's text."""
        if int in self.kinds and not self.setting.is_size and _is_whole(text):
            return self.check(int(text))
        if float in self.kinds and _FLOAT.fullmatch(text):
            return self.check(float(text))
        return self.check(text)

    @property
    def allowed(self) -> str:
        """In words: "on, off", "0 to 65,535", "auto, off or 0 to 8"."""
        low, high = self.setting.low, self.setting.high
        ways = [", ".join(self.words)] if self.words else []
        if {int, float} & set(self.kinds):
            whole = "whole numbers " if int in self.kinds and not self.words else ""
            ways.append(f"{whole}{low:,} to {high:,}")
        for kind, what in ((bool, "true and false"), (tuple, "lists of texts"), (str, "texts")):
            if kind in self.kinds and not self.words:
                ways.append(what)
        return " or ".join(ways)


_FLOAT = re.compile(r"\d{1,30}(\.\d{1,30})?", re.ASCII)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 30


def declared(struct: type[msgspec.Struct]) -> list[Declared]:
    """The settings of a struct, its own before those of the struct it builds upon."""
    found = [_declared(field) for field in msgspec.structs.fields(struct)]
    own = vars(struct).get("__annotations__", {})
    return sorted((each for each in found if each), key=lambda each: each.field not in own)


def _declared(field: msgspec.structs.FieldInfo) -> Declared:
    hint, *notes = typing.get_args(field.type) if typing.get_origin(field.type) is typing.Annotated else (field.type,)
    setting = next((note for note in notes if isinstance(note, Setting)), None)
    if setting is None:
        raise TypeError(f"{field.name} is declared without a Setting")
    name = field.name.removesuffix("_bytes") if setting.is_size else field.name
    words: list[str] = []
    kinds: list[type] = []
    for part in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        if typing.get_origin(part) is Literal:
            words += typing.get_args(part)
        else:
            kinds.append(typing.get_origin(part) or part)
    if {int, float} & set(kinds) and not setting.is_size and None in (setting.low, setting.high):
        raise TypeError(f"{field.name} is a number without a range")
    return Declared(name, field.name, setting, field.default, tuple(words), tuple(kinds))


def checked(struct: type[msgspec.Struct], values: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for ``values`` of a file and texts of ``flags`` (None: not given), which win. Raises ConfigError."""
    known = {each.name: each for each in declared(struct)}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in (*values, *given):
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; the settings are: {', '.join(known)}")
    fields = {}
    for name, each in known.items():
        if name in given:
            value = given[name]
            fields[each.field] = each.check_text(value) if isinstance(value, str) else each.check(value)
        elif name in values:
            fields[each.field] = each.check(values[name])
    return fields


def template(struct: type[msgspec.Struct], head: str) -> str:
    """A TOML file of all settings with their defaults, each commented out and explained."""
    lines = [f"# {line}" for line in head.splitlines()] + [""]
    rows = [(f"# {each.name} = {_toml(each.default)}", _explained(each)) for each in declared(struct)]
    width = max(len(left) for left, _ in rows)
    return "\n".join([*lines, *(f"{left:{width}}  # {right}" for left, right in rows), ""])


def _explained(each: Declared) -> str:
    choices = f" ({each.metavar})" if each.words else ""
    return f"{each.setting.sentence}{choices}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def add_flags(add: typing.Callable[..., Any], settings: Iterable[Declared]) -> None:
    """Calls ``add`` (``argparse.ArgumentParser.add_argument``) for each setting that has a flag.

    Texts are kept as they are: ``checked`` understands them, with one sentence for flags and file.
    """
    for each in settings:
        if not each.setting.has_flag:
            continue
        help_text = each.setting.sentence.replace("%", "%%")
        if bool in each.kinds:
            words = f"do not {help_text}" if each.default is True else help_text
            add(each.flag, dest=each.name, action="store_const", const=not each.default, help=words)
            continue
        default = "" if each.default in ("", ()) else f" (default {each.default})"
        action = "append" if tuple in each.kinds else "store"
        add(each.flag, dest=each.name, action=action, metavar=each.metavar, help=help_text + default)
