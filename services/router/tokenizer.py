"""A model's tokenizer and chat template together: texts and conversations to ids. Runs in the router's prompt process.

Text of clients never becomes a control token: where the tokenizer makes one of characters that ``ClientText`` says are a
client's (all of them or some), these characters are split without control tokens.
"""

from __future__ import annotations

import bisect
import functools
from pathlib import Path
from typing import Any, Final

from services.router.chat_template import ChatTemplate
from services.router.client_text import Spans, spans_of
from services.router.template_files import read_template_files
from services.router.turns import turn_markers
from shared.errors import ErrorCode, Refused
from shared.model.tokenizer_file import load_tokenizer

MANY_CHARS: Final = 1 << 15
"""Longer texts are counted in pieces before they are split as a whole, so that what can't fit anyway costs little."""
_PIECE_CHARS: Final = 1 << 13
_BORDER_TOKENS: Final = 16
"""As many tokens a piece's borders may have added."""
_LEAST_ROOM_CHARS: Final = 4 << 20
"""A template may make so much of nothing, and four times what it is given."""


class ModelTokenizer:
    """The checkpoint's tokenizer and template.

    Raises ``Refused`` (HTTP status, code, parameter) for what a request may get wrong, ContainerError for damaged files.
    """

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = load_tokenizer(model_dir / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = {token: t for token, t in added.items() if t.special or not _is_blank(t.content)}
        self._swallows = any(t.lstrip or t.rstrip for t in added.values())
        self._template = ChatTemplate(read_template_files(model_dir))

    def encode(self, text: str, at_most: int | None = None) -> list[int]:
        """Ids of a raw prompt; control tokens spelt in it are meant. ``at_most``: how many can be of use."""
        self._check_length(text, at_most, "prompt")
        return list(self._split(self._tokenizer, text, "prompt").ids)

    def encode_chat(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any], at_most: int | None = None
    ) -> list[int]:
        """Ids of a conversation rendered by the checkpoint's own template, with a generation prompt."""
        text = self._template.render(messages, kwargs, _LEAST_ROOM_CHARS + 4 * _count_chars([messages, kwargs]))
        self._check_length(text, at_most, "messages")
        return self._encode_guarded(text)

    @functools.cached_property
    def turn_ends(self) -> frozenset[int]:
        """Control tokens with which the template begins turns: one in an answer of chat ends it. Renders a few probes."""
        ids = {control.content: token for token, control in self._controls.items()}
        markers = turn_markers(
            lambda messages, kwargs, with_prompt: self._template.probe(
                messages, kwargs, with_prompt, _LEAST_ROOM_CHARS
            ),
            ids,
            self._template.bos,
        )
        return frozenset(ids[marker] for marker in markers)

    # -- inside

    def _split(self, tokenizer: Any, text: str, param: str) -> Any:
        try:
            return tokenizer.encode(str.__str__(text), add_special_tokens=False)
        except BaseException as error:
            # A panic of the library is no Exception; megabytes of blanks are too much for its regular expressions, say.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise Refused(
                f"The model's tokenizer can't split this text ({error}).", code=ErrorCode.INVALID_VALUE, param=param
            ) from None

    def _check_length(self, text: str, at_most: int | None, param: str) -> None:
        """Refuses a text that has more tokens than can be of use, without splitting much more of it than fits.

        Pieces are counted one by one. At their borders words are cut: that adds tokens, and so few are not counted; a
        tenth stands for merges that reach across. Below ``2 * at_most`` characters there is little to save.
        """
        if at_most is None or len(text) <= max(MANY_CHARS, 2 * at_most):
            return
        n_least = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = str.__getitem__(text, slice(start, start + _PIECE_CHARS))
            if self._swallows:
                piece = piece.strip()  # a token of the next piece may take these blanks along
            n_tokens = len(self._split(self._tokenizer, piece, param).ids)
            n_least += max(0, n_tokens * 9 // 10 - _BORDER_TOKENS)
            if n_least > at_most:
                raise Refused(
                    f"The prompt has {n_least} tokens or more, at most {at_most} fit the context. Shorten the prompt or "
                    "start with a larger --max-context.",
                    code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                    param=param,
                )

    def _encode_guarded(self, text: str) -> list[int]:
        """Ids of a rendered conversation, no control token among them that has a character of a client."""
        out: list[int] = []
        pending: list[tuple[str, bool]] = [(text, False)]
        while pending:
            part, is_plain = pending.pop()
            encoding = self._split(self._plain if is_plain else self._tokenizer, part, "messages")
            forged = self._forged(encoding, part)
            if not forged:
                out += encoding.ids
                continue
            if (
                is_plain
            ):  # an entry of the vocabulary itself that is a control token too: apart, its characters are none
                for char in str.__str__(part):
                    out += self._split(self._plain, char, "messages").ids
                continue
            pieces: list[tuple[str, bool]] = []
            at = 0
            for start, end in forged:
                pieces += ((part[at:start], False), (part[start:end], True))
                at = end
            pieces.append((part[at:], False))
            pending += [piece for piece in reversed(pieces) if piece[0]]
        return out

    def _forged(self, encoding: Any, text: str) -> list[tuple[int, int]]:
        """Characters of a client in ``text`` that are part of a control token. The template's beside them keep their right."""
        spans = spans_of(text)
        if not spans:
            return []
        controls = self._controls
        found = []
        for idx, token in enumerate(encoding.ids):
            if token not in controls:
                continue
            start, end = encoding.token_to_chars(idx) or (0, 0)
            if controls[token].lstrip or controls[token].rstrip:  # blanks that it only swallowed are nobody's forgery
                while start < end and text[start].isspace():
                    start += 1
                while start < end and text[end - 1].isspace():
                    end -= 1
            found += _common(spans, start, end)
        return found

    @functools.cached_property
    def _plain(self) -> Any:
        """The same tokenizer without its added tokens; the vocabulary is shared."""
        from tokenizers import Tokenizer

        plain = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            plain.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        return plain


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_count_chars, value))
    return sum(len(key) + _count_chars(part) for key, part in value.items()) if isinstance(value, dict) else 8


def _common(spans: Spans, start: int, end: int) -> list[tuple[int, int]]:
    """What of ``spans`` lies in [start, end)."""
    common = []
    for idx in range(bisect.bisect_right(spans, start, key=lambda span: span[1]), len(spans)):
        a, b = spans[idx]
        if a >= end:
            break
        common.append((max(a, start), min(b, end)))
    return common


def _is_blank(spelling: str) -> bool:
    """Runs of blanks are words of some vocabularies: added tokens, but nothing that controls."""
    return not spelling.strip(" \t\r\n\N{LOWER ONE EIGHTH BLOCK}")
