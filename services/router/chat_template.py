"""A conversation rendered by the checkpoint's chat template, as ``transformers`` would.

A template is a program from a file: it runs in jinja2's sandbox, and what it makes is bounded in size and time (a loop that
prints nothing is ended by whoever runs this, see ``prompt_desk``). Strings of clients go through it as ``ClientText``, so
that the rendered text says which of its characters are theirs. The one place that knows ``jinja2``.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
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
    wrap,
    wrap_arguments,
)
from services.router.template_files import LOOKED_FOR, TemplateFiles, unusable
from shared.awake import Countdown
from shared.errors import ErrorCode, Refused

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Words of the protocol, not of a client: some templates make control tokens of them."""

MAX_RENDER_S: Final = 10.0
MAX_REPEATED: Final = 4 << 20
MAX_WORDS: Final = 1000
"""Characters of an error of a template that are told on."""
_INSTRUCTING: Final = ("developer",)


# ---- the environment that checkpoints' templates are written for


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


_SELECTING: Final = frozenset(
    {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map", "max", "min", "random",
     "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "unique"}
)  # fmt: skip
"""Filters that hand on what they were given."""
_EXACT: Final = frozenset({"capitalize", "lower", "trim", "upper"})
_HOLDERS: Final = (dict, list, tuple, jinja2.runtime.LoopContext, jinja2.utils.Cycler, jinja2.utils.Joiner)
_MAX_POWER: Final = 4096
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


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
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


# ---- rendering


class ChatTemplate:
    """The templates of one checkpoint. Raises ContainerError for one that is no template."""

    def __init__(self, files: TemplateFiles) -> None:
        self._special_tokens = files.special_tokens
        environment = _Environment()
        self._by_name: dict[str, Any] = {}
        self._prints_parts: dict[str, bool] = {}
        self._knows_developer: dict[str, bool] = {}
        for name, (source, path) in files.named.items():
            try:
                tree = environment.parse(source)
                self._by_name[name] = environment.from_string(source)
            except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
                raise unusable(path, error) from None
            self._prints_parts[name] = _iterates_content(tree)
            self._knows_developer[name] = any(node.value == "developer" for node in tree.find_all(jinja2.nodes.Const))

    def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], max_chars: int) -> str:
        """The conversation's text with a generation prompt; ``ClientText`` where parts of it are the client's.

        Raises Refused: for what the template refuses, and when the text gets longer than ``max_chars``.
        """
        name = self._choose(kwargs)
        given = [self._message(message, name) for message in messages]
        text = self._run(name, given, kwargs, max_chars)
        self._check_developer(name, messages, given, kwargs, max_chars)
        return text

    @property
    def bos(self) -> str | None:
        """What every text begins with."""
        bos = self._special_tokens.get("bos_token")
        return bos if isinstance(bos, str) else None

    def probe(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any], with_prompt: bool, max_chars: int
    ) -> str | None:
        """As ``render``, with or without a generation prompt, as plain text; None for what is refused."""
        try:
            name = self._choose(kwargs)
            given = [self._message(message, name) for message in messages]
            return str.__str__(self._run(name, given, kwargs, max_chars, with_prompt=with_prompt))
        except Refused:
            return None

    def _choose(self, kwargs: dict[str, Any]) -> str:
        names = self._by_name
        if kwargs.get("tools") and "tool_use" in names:
            return "tool_use"
        if "default" in names:
            return "default"
        if len(names) == 1:
            return next(iter(names))
        found = f"templates named {', '.join(sorted(names))}, none of them default" if names else "none"
        raise Refused(
            "This model has no chat template, so chat requests can't be rendered; use /v1/completions, or put the "
            f"checkpoint's template into the model directory and start again. Looked for: {LOOKED_FOR}; found: {found}.",
            code=ErrorCode.NO_CHAT_TEMPLATE,
            param="messages",
        )

    def _message(self, message: dict[str, Any], name: str) -> dict[str, Any]:
        wrapped = wrap(message)
        role = message.get("role")
        if role in ROLES:
            wrapped["role"] = "system" if role == "developer" and not self._knows_developer[name] else role
        content = message.get("content")
        if isinstance(content, list) and not self._prints_parts[name]:
            wrapped["content"] = ClientText("".join(part.get("text", "") for part in content if isinstance(part, dict)))
        for call, given in zip(wrapped.get("tool_calls") or (), message.get("tool_calls") or (), strict=True):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                function["arguments"] = _arguments(given["function"]["arguments"])
        return wrapped  # type: ignore[no-any-return]

    def _run(
        self,
        name: str,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
        max_chars: int,
        *,
        with_prompt: bool = True,
    ) -> str:
        wrapped = {key: wrap(value) for key, value in kwargs.items()}
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **wrapped}
        variables.update(messages=messages, add_generation_prompt=with_prompt)
        parts: list[str] = []
        n_chars = 0
        limit = Countdown(MAX_RENDER_S)
        try:
            for part in self._by_name[name].generate(variables):
                parts.append(part)
                n_chars += len(part)
                if n_chars > max_chars:
                    raise _too_much(f"more than {max_chars:,} characters")
                if limit.is_over:
                    raise _too_much(f"{n_chars:,} characters in {MAX_RENDER_S:.0f} s and is not done")
        except Refused:
            raise
        except jinja2.TemplateError as error:
            raise _refusal(f"The model's chat template refused the messages: {_words(error)}.") from None
        except Exception as error:  # noqa: BLE001  (a template is a program: it may fail in any way)
            # Nothing of what was made is kept: with MemoryError there is no room for it.
            parts.clear()
            what = type(error).__name__ + (f": {_words(error)}" if str(error) else "")
            raise _refusal(f"The model's chat template can't render these messages ({what}).") from None
        return join_text(map(printed, parts))

    def _check_developer(
        self, name: str, messages: list[dict[str, Any]], given: list[dict[str, Any]], kwargs: Any, max_chars: int
    ) -> None:
        """Instructions that a template skips in silence are refused: a probe in the place of each must come out."""
        asked = [k for k, m in enumerate(messages) if m.get("role") in _INSTRUCTING and m.get("content")]
        if not asked:
            return
        mark_of = f"probe-{os.urandom(8).hex()}-"
        probed = [*given]
        for idx in asked:
            probe: Any = f"{mark_of}{idx}."
            is_parts = isinstance(given[idx]["content"], list)
            probed[idx] = {**given[idx], "content": wrap([{"type": "text", "text": probe}] if is_parts else probe)}
        text = self._run(name, probed, kwargs, max_chars + len(asked) * (len(mark_of) + 8))
        came = {int(found[1]) for found in re.finditer(mark_of + r"(\d+)\.", text)}
        for idx in asked:
            if idx not in came:
                raise Refused(
                    f"messages[{idx}]: the model's chat template does not print a message of the role "
                    f"{given[idx]['role']} at this place, so it would be lost. Move its text into the first system message.",
                    code=ErrorCode.TEMPLATE_ERROR,
                    param=f"messages[{idx}]",
                )


def _arguments(given: Any) -> Any:
    if isinstance(given, dict):
        return wrap_arguments(given, None)
    if isinstance(given, str):
        try:
            parsed = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            return wrap_arguments(parsed, given)
    return wrap(given)


def _words(error: Exception) -> str:
    """What a template or jinja2 says, which may quote megabytes of a client's."""
    words = str.__str__(str(error)).replace("services.router.client_text.", "").strip().removesuffix(".")
    return words if len(words) <= MAX_WORDS else words[: MAX_WORDS - 3] + "..."


def _refusal(message: str) -> Refused:
    return Refused(message, code=ErrorCode.TEMPLATE_ERROR, param="messages")


def _too_much(what: str) -> Refused:
    return _refusal(f"The model's chat template makes too much of these messages: {what}.")


def _iterates_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template walks over the parts of a message's content (else it expects one text)."""
    names = {"content"}
    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: Any, names: set[str]) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names
