"""A conversation rendered by the checkpoint's chat template, as ``transformers`` would.

A template is a program from a file: it runs in jinja2's sandbox, and what it makes is bounded in size and time (a loop that
prints nothing is ended by whoever runs this, see ``prompt_desk``). Strings of clients go through it as ``ClientText``, so
that the rendered text says which of its characters are theirs. ``template_sandbox`` and this know ``jinja2``, nobody else.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Final

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from services.router.client_text import (
    ClientText,
    join_text,
    wrap,
    wrap_arguments,
)
from services.router.template_files import LOOKED_FOR, TemplateFiles, unusable
from services.router.template_sandbox import Sandbox, printed
from shared.awake import Countdown
from shared.errors import ErrorCode, Refused

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Words of the protocol, not of a client: some templates make control tokens of them."""

MAX_RENDER_S: Final = 10.0
MAX_WORDS: Final = 1000
"""Characters of an error of a template that are told on."""
_INSTRUCTING: Final = ("developer",)


class ChatTemplate:
    """The templates of one checkpoint. Raises ContainerError for one that is no template."""

    def __init__(self, files: TemplateFiles) -> None:
        self._special_tokens = files.special_tokens
        environment = Sandbox()
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
