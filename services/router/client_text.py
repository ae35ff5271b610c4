"""Strings that remember which of their characters a client wrote, through whatever a chat template does to them.

A template must see a client's text as it is (some look for ``</think>`` in it), and yet no control token may be made of
it. So what a client sends is wrapped: ``ClientText`` is a ``str`` with the ranges that are the client's, dictionaries,
lists and numbers are kinds of their own. Operations that can be followed are followed exactly; whatever else makes a new
string of a client's text gives a string that is the client's as a whole. Pure; knows no tokenizer.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, SupportsIndex

Spans = tuple[tuple[int, int], ...]
"""Ranges [start, end) of characters, ascending, neither empty nor touching each other."""


class ClientText(str):
    """A string; the characters in ``spans`` are a client's."""

    __slots__ = ("spans",)
    spans: Spans

    def __new__(cls, text: str, spans: Spans | None = None) -> ClientText:
        made = super().__new__(cls, text)
        n = len(made)
        made.spans = (((0, n),) if n else ()) if spans is None else spans
        return made

    def __str__(self) -> ClientText:
        return self

    # -- exact

    def _part(self, start: int, end: int) -> ClientText:
        spans = self.spans
        first = bisect.bisect_right(spans, start, key=lambda span: span[1])
        inside = []
        for a, b in spans[first:]:
            if a >= end:
                break
            inside.append((max(a, start) - start, min(b, end) - start))
        return ClientText(str.__getitem__(self, slice(start, end)), tuple(inside))

    def __getitem__(self, key: SupportsIndex | slice) -> ClientText:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            if step == 1:
                return self._part(start, max(start, end))
            return _whole_if(bool(self.spans), str.__getitem__(self, key))
        text = str.__getitem__(self, key)
        index = key.__index__()
        start = index + len(self) if index < 0 else index
        return ClientText(text, self._part(start, start + 1).spans)

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> str:
        return join_text((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join_text((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, n: SupportsIndex) -> str:
        return _whole_if(bool(self.spans), str.__mul__(self, n))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return format_percent(self, values)

    def __rmod__(self, template: str) -> str:
        return format_percent(template, self)

    def join(self, parts: Iterable[str]) -> str:
        return join_text(parts, self)

    def strip(self, chars: str | None = None) -> ClientText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> ClientText:
        return self._part(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> ClientText:
        return self._part(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> ClientText:
        return self._part(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str) -> ClientText:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def _located(self, pieces: Iterable[str], gap: int | None) -> list[Any]:
        out = []
        at = 0
        for piece in pieces:
            if gap is None:  # between pieces is nothing but blanks, and none begins with one unless at the very start
                at = str.find(self, piece, at)
            out.append(self._part(at, at + len(piece)))
            at += len(piece) + (gap or 0)
        return out

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._located(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._located(str.rsplit(self, sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        out = []
        at = 0
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            out.append(self._part(at, at + len(line)))
            at += len(whole)
        return out

    def partition(self, sep: str) -> tuple[Any, Any, Any]:
        a, b, c = self._located(str.partition(self, sep), 0)
        return a, b, c

    def rpartition(self, sep: str) -> tuple[Any, Any, Any]:
        a, b, c = self._located(str.rpartition(self, sep), 0)
        return a, b, c

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return _whole_if(is_client((self, new)), str.replace(self, old, new, count))
        return join_text(self.split(old, count), new)

    def _cased(self, text: str) -> ClientText:
        # A character becomes one or more, never none: of the same length means one for one.
        return ClientText(text, self.spans) if len(text) == len(self) else _whole_if(bool(self.spans), text)

    def lower(self) -> ClientText:
        return self._cased(str.lower(self))

    def upper(self) -> ClientText:
        return self._cased(str.upper(self))

    def title(self) -> ClientText:
        return self._cased(str.title(self))

    def capitalize(self) -> ClientText:
        return self._cased(str.capitalize(self))

    def swapcase(self) -> ClientText:
        return self._cased(str.swapcase(self))

    def casefold(self) -> ClientText:
        return self._cased(str.casefold(self))


def _careful(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    @functools.wraps(plain)
    def method(self: ClientText, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return mark(result) if is_client((self, *args)) else result

    return method


# Methods that nobody above follows: what comes out is the client's as a whole.
for _name in (*(name for name in dir(str) if name[0] != "_" and name != "maketrans"), "__format__"):
    if _name not in vars(ClientText):
        setattr(ClientText, _name, _careful(_name))


class ClientInt(int):
    """A client's number."""


class ClientFloat(float):
    """A client's number."""


class ClientList(list[Any]):
    """A client's array; its parts are wrapped too."""


class ClientDict(dict[Any, Any]):
    """A client's object; its keys and values are wrapped too."""


class CallArguments(ClientDict):
    """The arguments of a tool call: an object, and where a template prints them or adds them to a text, the JSON text.

    Some families' templates iterate over the arguments, others print what the model once wrote.
    """

    def __init__(self, values: ClientDict, text: str) -> None:
        super().__init__(values)
        self.text = ClientText(text)

    def __str__(self) -> str:
        return self.text


_KINDS = (ClientText, ClientInt, ClientFloat, ClientList, ClientDict, bytes)


def wrap(value: Any) -> Any:
    """A value out of a client's JSON, every part of it marked. ``True``, ``False`` and ``None`` stay what they are."""
    if isinstance(value, str):
        return ClientText(value)
    if isinstance(value, dict):
        return ClientDict({ClientText(key): wrap(part) for key, part in value.items()})
    if isinstance(value, list):
        return ClientList(map(wrap, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return ClientInt(value)
    return ClientFloat(value) if isinstance(value, float) else value


def wrap_arguments(value: dict[str, Any], text: str | None) -> CallArguments:
    """``text``: how the client wrote them, None: as an object."""
    wrapped = wrap(value)
    return CallArguments(wrapped, json.dumps(value, ensure_ascii=False) if text is None else text)


def is_client(value: Any) -> bool:
    """Whether something in ``value`` is a client's."""
    if isinstance(value, ClientText):
        return bool(value.spans)
    if isinstance(value, _KINDS) or (isinstance(value, str) and type(value) is not str):
        return True  # of other kinds of strings, as escaped ones, nobody knows what they were made of
    if isinstance(value, list | tuple | set):
        return any(map(is_client, value))
    if isinstance(value, dict):
        return any(is_client(key) or is_client(part) for key, part in value.items())
    return isinstance(value, Iterator)


def mark(value: Any) -> Any:
    """``value`` with every string in it the client's as a whole."""
    if isinstance(value, str):
        return ClientText(str.__str__(value))
    if isinstance(value, list):
        return list(map(mark, value))
    if isinstance(value, tuple):
        return tuple(map(mark, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return ClientInt(value)
    return ClientFloat(value) if isinstance(value, float) else value


def _whole_if(is_marked: bool, text: str) -> ClientText:
    return ClientText(text, None if is_marked else ())


def spans_of(text: str) -> Spans:
    return text.spans if isinstance(text, ClientText) else ()


def join_text(parts: Iterable[str], sep: str = "") -> str:
    """``sep.join(parts)`` with every range kept."""
    given = list(parts)
    if sep and len(given) > 1:
        given = [part for pair in zip(given, [sep] * len(given), strict=True) for part in pair][:-1]
    text = "".join(given)
    spans: list[tuple[int, int]] = []
    at = 0
    for part in given:
        for a, b in spans_of(part):
            if spans and spans[-1][1] == at + a:
                spans[-1] = (spans[-1][0], at + b)
            else:
                spans.append((at + a, at + b))
        at += len(part)
    return ClientText(text, tuple(spans)) if spans else text


# -- formatting: client's strings are replaced by single characters that no text has, and put back afterwards

_FIRST_STAND_IN: Final = 0xD800
_N_STAND_INS: Final = 0x400
_PLAIN_PERCENT = re.compile(r"(?:[^%]|%%|%(?:\([^()]*\))?s)*", re.DOTALL)
_PLAIN_BRACES = re.compile(r"(?:[^{}]|\{\{|\}\}|\{\w*\})*", re.DOTALL)


class _StandIns:
    def __init__(self) -> None:
        self._texts: list[str] = []

    def take(self, value: Any) -> Any:
        text = value if isinstance(value, str) else ClientText(str(value)) if is_client(value) else None
        if text is None:
            return value
        self._texts.append(text)
        return chr(_FIRST_STAND_IN + len(self._texts) - 1)

    def put_back(self, text: str) -> str:
        parts: list[str] = []
        at = 0
        for match in re.finditer(f"[{chr(_FIRST_STAND_IN)}-{chr(_FIRST_STAND_IN + _N_STAND_INS - 1)}]", text):
            parts += (text[at : match.start()], self._texts[ord(match[0]) - _FIRST_STAND_IN])
            at = match.end()
        return join_text([*parts, text[at:]])


def format_percent(template: str, values: Any) -> str:
    """``template % values``."""
    if not is_client((template, values)):
        return str.__mod__(str.__str__(template), values)
    plain = str.__str__(template)
    n_values = len(values) if isinstance(values, tuple | dict) else 1
    if is_client(template) or n_values > _N_STAND_INS or not _PLAIN_PERCENT.fullmatch(plain):
        return ClientText(str.__mod__(plain, values))
    stand_ins = _StandIns()
    if isinstance(values, tuple):
        return stand_ins.put_back(plain % tuple(map(stand_ins.take, values)))
    if isinstance(values, dict):
        return stand_ins.put_back(plain % {str(key): stand_ins.take(part) for key, part in values.items()})
    return stand_ins.put_back(plain % (stand_ins.take(values),))


def format_braces(template: str, args: tuple[Any, ...], kwargs: dict[str, Any], formatted: Callable[..., str]) -> str:
    """``template.format(*args, **kwargs)``; ``formatted(template, args, kwargs)`` does it, safely."""
    if not is_client((template, args, kwargs)):
        return formatted(template, args, kwargs)
    if is_client(template) or len(args) + len(kwargs) > _N_STAND_INS or not _PLAIN_BRACES.fullmatch(template):
        return ClientText(formatted(template, args, kwargs))
    stand_ins = _StandIns()
    given = tuple(map(stand_ins.take, args)), {key: stand_ins.take(part) for key, part in kwargs.items()}
    return stand_ins.put_back(formatted(template, *given))
