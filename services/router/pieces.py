"""The bytes that each token of a vocabulary stands for. Knows the kinds of decoders of the ``tokenizers`` library."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Pieces:
    """Bytes by token, looked up once each. Those of an answer's tokens join to its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._specials = frozenset(token.content for token in added.values() if token.special)
        kinds = _kinds_of(tokenizer.decoder)
        self._byte_of = bytes_of_letters() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._inside: dict[int, bytes] = {}
        self._anchor = self._find_anchor()

    @property
    def is_byte_level(self) -> bool:
        return bool(self._byte_of)

    def of(self, token: int, is_start: bool = False) -> bytes:
        """Bytes of ``token``, none for a control token. ``is_start``: it begins a text, where some decoders drop a blank."""
        piece = self._inside.get(token)
        if piece is None:
            piece = self._inside[token] = self._piece(token)
        if is_start and piece[:1] == b" " and not self._byte_of:
            return self._decode([token]).encode()
        return piece

    def _piece(self, token: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token)
        if spelling is None or spelling in self._specials:
            return b""
        if self._byte_of:
            try:
                return bytes([self._byte_of[char] for char in spelling])
            except KeyError:  # an added token in plain spelling
                return spelling.encode()
        if self._has_byte_tokens and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelling)):
            return bytes([int(match[1], 16)])
        # What it adds to another token: alone it would be the start of a text.
        anchor, text = self._anchor
        both = self._decode([*anchor, token])
        return (both[len(text) :] if both.startswith(text) else self._decode([token])).encode()

    def _find_anchor(self) -> tuple[list[int], str]:
        """A token, and its text, to which others can be appended."""
        with contextlib.suppress(Exception):  # a vocabulary that can't spell it (libraries raise what they like)
            ids = self._tokenizer.encode("a", add_special_tokens=False).ids
            if ids:
                return ids, self._decode(ids)
        return [], ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def bytes_of_letters() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + k): byte for k, byte in enumerate(others)}


def _kinds_of(decoder: Any) -> set[str]:
    """Names of the decoder and of those it is made of."""
    if decoder is None:
        return set()
    kinds: set[str] = set()
    found = [json.loads(decoder.__getstate__())]
    while found:
        part = found.pop()
        kinds.add(part.get("type", ""))
        found += part.get("decoders", [])
    return kinds
