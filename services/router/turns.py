"""Which control tokens begin a turn of a conversation, found by rendering small ones. Pure: the template is a function.

A model that has answered may go on with the marker of the next turn instead of its end token; a chat answer ends there. The
first control token that a template writes for a further message is such a marker, whoever speaks. One that a template writes
*within* what the assistant says is none: some families begin each part of one turn with the same token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

Message = dict[str, Any]
Render = Callable[[list[Message], dict[str, Any], bool], "str | None"]
"""(messages, template variables, with a generation prompt) -> text; None when the template refuses them."""

_WORDS: Final = ("alphaone", "betatwo", "gammathree", "deltafour")
_CALL: Final = {
    "id": "callid007",
    "type": "function",
    "function": {"name": "epsilonfive", "arguments": {"zeta": "six"}},
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "epsilonfive",
        "description": "none",
        "parameters": {"type": "object", "properties": {"zeta": {"type": "string"}}, "required": []},
    },
}
_USER: Final[Message] = {"role": "user", "content": _WORDS[0]}
_ASSISTANT: Final[Message] = {"role": "assistant", "content": _WORDS[1]}
_CALLING: Final[tuple[Message, ...]] = (
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "assistant", "tool_calls": [_CALL]},
)
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")


def turn_markers(render: Render, controls: Iterable[str], bos: str | None = None) -> frozenset[str]:
    """Spellings of the control tokens that begin turns. ``controls``: all of the vocabulary's; ``bos``: begins every text."""
    spellings = sorted({c for c in controls if c}, key=len, reverse=True)
    if not spellings:
        return frozenset()
    probe = _Probe(render, re.compile("|".join(map(re.escape, spellings))), bos)
    found: set[str] = set()
    within: set[str] = set()
    for variables in ({}, {"tools": [_TOOL]}):
        of_others, of_assistant = probe.begins(variables)
        if bos in of_others and bos not in of_assistant:
            of_others.discard(bos)  # it begins texts, of which some templates make one of each round
        found |= of_others | of_assistant
        within |= probe.within(variables)
    return frozenset(found - within)


class _Probe:
    def __init__(self, render: Render, control: re.Pattern[str], bos: str | None) -> None:
        self._plain_render = render
        self._control = control
        self._bos = bos
        self._rendered: dict[str, str | None] = {}

    def _render(self, messages: list[Message], variables: dict[str, Any], with_prompt: bool) -> str | None:
        key = json.dumps([messages, variables, with_prompt])
        if key not in self._rendered:
            self._rendered[key] = self._plain_render(messages, variables, with_prompt)
        return self._rendered[key]

    def begins(self, variables: dict[str, Any]) -> tuple[set[str], set[str]]:
        """First control tokens of messages: (of everybody else, of the assistant)."""
        others: set[str] = set()
        for role in ("user", "system"):
            message = {"role": role, "content": _WORDS[2]}
            others |= self._first([_USER, _ASSISTANT], message, _WORDS[2], variables)
        others |= self._leading({"role": "system", "content": _WORDS[2]}, variables)
        for call in _CALLING:
            result = {"role": "tool", "content": _WORDS[3], "tool_call_id": _CALL["id"], "name": "epsilonfive"}
            others |= self._first([_USER, call], result, _WORDS[3], variables)
        # What the generation prompt begins with is the assistant's marker if finished answers begin so too.
        asked = self._added([_USER], None, variables)
        prompt = {text for text, _, _ in itertools.islice(self._controls(asked), 1)}
        return others, prompt & self._first([_USER], _ASSISTANT, _WORDS[1], variables)

    def within(self, variables: dict[str, Any]) -> set[str]:
        """Control tokens behind the first one of anything that the assistant says."""
        said = [_ASSISTANT, *_CALLING]
        said += [{**message, **dict.fromkeys(_REASONING, _WORDS[3])} for message in said]
        out: set[str] = set()
        for thinks in ({}, {"enable_thinking": True}):
            for message in said:
                out |= self._behind_first(self._added([_USER], message, variables | thinks))
            out |= self._behind_first(self._added([_USER], None, variables | thinks))
        return out

    def _behind_first(self, text: str) -> set[str]:
        return {control for control, _, _ in itertools.islice(self._controls(text), 1, None)}

    def _controls(self, text: str) -> Iterator[tuple[str, int, int]]:
        for match in self._control.finditer(text):
            yield match[0], match.start(), match.end()

    def _first(self, before: list[Message], message: Message, word: str, variables: dict[str, Any]) -> set[str]:
        """The first control token that ``message`` adds before its text ``word``."""
        return self._before(self._added(before, message, variables), word)

    def _leading(self, message: Message, variables: dict[str, Any]) -> set[str]:
        """As ``_first``, for one that stands before all others."""
        whole = self._render([message, _USER], variables, False)
        base = self._render([_USER], variables, False)
        if whole is None or base is None:
            return set()
        return self._before(self._behind_common(base, whole), _WORDS[2])

    def _before(self, text: str, word: str) -> set[str]:
        """The first control token, if it stands before ``word``; where that begins texts, the next one as well."""
        found: set[str] = set()
        for control, _, end in self._controls(text):
            if end <= text.find(word):
                found.add(control)
            if control != self._bos:
                break
        return found

    def _added(self, before: list[Message], message: Message | None, variables: dict[str, Any]) -> str:
        """What a further message, or the generation prompt, adds to a conversation."""
        base = self._render(before, variables, False)
        whole = self._render(before if message is None else [*before, message], variables, message is None)
        return "" if base is None or whole is None else self._behind_common(base, whole)

    def _behind_common(self, base: str, whole: str) -> str:
        """``whole`` without the beginning it shares with ``base``; no control token is cut in two."""
        n = next((k for k, (a, b) in enumerate(zip(base, whole, strict=False)) if a != b), min(len(base), len(whole)))
        for _, start, end in self._controls(whole):
            if start < n < end:
                n = start
        return whole[n:]
