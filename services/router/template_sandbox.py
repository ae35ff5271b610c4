"""The environment that checkpoints' templates are written for: jinja2's sandbox as ``transformers`` sets it up.

Every way in which a template can make a string is followed, so that the text that comes out says which of its characters are
a client's (``ClientText``), and none makes a very long one.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from services.router.client_text import (
    CallArguments,
    ClientText,
    format_braces,
    format_percent,
    is_client,
    join_text,
    mark,
)

MAX_REPEATED: Final = 4 << 20
_SELECTING: Final = frozenset(
    {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map", "max", "min", "random",
     "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "unique"}
)  # fmt: skip
"""Filters that hand on what they were given."""
_EXACT: Final = frozenset({"capitalize", "lower", "trim", "upper"})
_MAX_POWER: Final = 4096


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a training counts; here it only has to be a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Code(jinja2.compiler.CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.join_printed((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


_HOLDERS: Final = (dict, list, tuple, jinja2.runtime.LoopContext, jinja2.utils.Cycler, jinja2.utils.Joiner)
_MARKUP: Final = type(jinja2.filters.do_mark_safe(""))


def printed(value: Any) -> str:
    """The text a template prints for a value."""
    if isinstance(value, CallArguments):
        return value.text
    if isinstance(value, ClientText) or type(value) is str:
        return value
    if value is None or isinstance(value, jinja2.Undefined) or type(value) in (bool, int, float):
        return str(value)
    if isinstance(value, str) and not isinstance(value, _MARKUP):
        return value
    return ClientText(str(value))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    given = printed(text)
    if not isinstance(given, ClientText):
        given = ClientText(given, ())
    return given.replace(str(printed(old)), printed(new), -1 if count is None else count)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, values: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    return join_text(map(printed, values), printed(d))


def _format(template: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.TemplateError("format takes positional or named values, not both")
    return format_percent(printed(template), kwargs or args)


def _careful(plain: Callable[..., Any], *, is_exact: bool) -> Callable[..., Any]:
    """``is_exact``: it calls one method of its text, which knows whose the result is. Others may put texts together."""

    @functools.wraps(plain)
    def careful(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if is_exact and isinstance(result, ClientText):
            return result
        if not isinstance(result, str | list | tuple | int | float):
            return result
        return mark(result) if is_client([*args, *kwargs.values()]) else result

    return careful


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > _MAX_POWER:
        raise jinja2.TemplateError(f"a power of {exponent} is too large")
    return base**exponent


def _counted(result: Any, *operands: Any) -> Any:
    """A number made of numbers: a client's if one of these is."""
    return mark(result) if type(result) in (int, float) and is_client(operands) else result


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2 as transformers sets it up, with every way to make a string followed."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    intercepted_unops = frozenset({"-", "+"})
    concat = staticmethod(lambda parts: join_text(map(printed, parts)))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=printed,
            cache_size=0,
        )
        self.filters["tojson"] = _tojson
        for name, plain in self.filters.items():
            if name not in _SELECTING:
                self.filters[name] = _careful(plain, is_exact=name in _EXACT)
        self.filters.update(join=_join, replace=_replace, format=_format, string=printed)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.binop_table["**"] = _power

    @staticmethod
    def join_printed(values: Iterable[Any]) -> str:
        """The operator ``~``."""
        return join_text(map(printed, values))

    def call_binop(self, context: Any, operator_name: str, left: Any, right: Any) -> Any:
        if operator_name == "+":
            if isinstance(left, CallArguments) and isinstance(right, str):
                left = left.text
            elif isinstance(right, CallArguments) and isinstance(left, str):
                right = right.text
        elif operator_name == "%" and isinstance(left, str):
            return format_percent(left, right)
        elif operator_name == "*":
            for many, n in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(n, int) and len(many) * n > MAX_REPEATED:
                    raise jinja2.TemplateError(f"{len(many):,} x {n:,} is too long")
        return _counted(self.binop_table[operator_name](left, right), left, right)

    def call_unop(self, context: Any, operator_name: str, arg: Any) -> Any:
        return _counted(self.unop_table[operator_name](arg), arg)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = value.__self__
        is_map = value.__name__ == "format_map"

        def formatted(_template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            return "".join(wrapped(kwargs) if is_map else wrapped(*args, **kwargs))

        def careful(*args: Any, **kwargs: Any) -> str:
            return format_braces(template, () if is_map else args, args[0] if is_map else kwargs, formatted)

        return careful

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and is_client([*args, *kwargs.values()]):
            # A method of the template's own text that is given a client's: ours know what becomes of it.
            __obj = getattr(ClientText(owner, ()), __obj.__name__)
        result = super().call(__context, __obj, *args, **kwargs)
        if type(result) is not str or isinstance(__obj, jinja2.runtime.Macro) or isinstance(owner, _HOLDERS):
            return result
        return ClientText(result) if is_client([owner, *args, *kwargs.values()]) else result
