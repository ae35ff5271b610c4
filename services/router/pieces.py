"""The bytes that each token of a vocabulary stands for. Knows the kinds of decoders of the ``tokenizers`` library."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared.errors import ContainerError
from shared.files import TOKENIZER_LIMIT_BYTES, is_file, read_file
from shared.model.tokenizer_file import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    decoder: dict[str, Any]
    added_tokens: list[_Added] = msgspec.field(default_factory=list)


class _Decoder:
    def __init__(self, state: bytes) -> None:
        self._state = state

    def __getstate__(self) -> bytes:
        return self._state


_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_KNOWN_STEPS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    _STRIP,
]


class _Spellings:
    """What ``Pieces`` asks of a tokenizer, read from its file: a tenth of the library's time and memory.

    For vocabularies whose spellings are bytes, or characters with bytes beside them and a mark for the blank.
    """

    def __init__(self, file: _TokenizerFile) -> None:
        self.decoder = _Decoder(json.dumps(file.decoder).encode())
        self._steps = file.decoder.get("decoders", [file.decoder])
        self._added = {token.id: token for token in file.added_tokens}
        self._spellings = dict(zip(file.model.vocab.values(), file.model.vocab, strict=True))

    def get_added_tokens_decoder(self) -> dict[int, _Added]:
        return self._added

    @property
    def is_enough(self) -> bool:
        """Whether every step of the decoder is known here."""
        return all(step in _KNOWN_STEPS or step.get("type") == "ByteLevel" for step in self._steps)

    @property
    def drops_first_blank(self) -> bool:
        return _STRIP in self._steps

    def text_of(self, token: int) -> str:
        """As the decoder makes it inside a text; not for bytes."""
        return (self.id_to_token(token) or "").replace(_BLANK, " ")

    def id_to_token(self, token: int) -> str | None:
        added = self._added.get(token)
        return added.content if added else self._spellings.get(token)


def has_tokenizer(model_dir: Path) -> bool:
    """Raises ContainerError when something that is no file stands in its place."""
    path = model_dir / "tokenizer.json"
    try:
        return is_file(path)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: BaseException) -> ContainerError:
    reason = getattr(error, "strerror", None) or error
    return ContainerError(f"{path} can't be used: {reason}. Copy the file again from the checkpoint.")


def read_pieces(model_dir: Path) -> Pieces:
    """The pieces of a model's vocabulary. Raises ContainerError for a file that can't be used."""
    path = model_dir / "tokenizer.json"
    try:
        data = read_file(path, TOKENIZER_LIMIT_BYTES)
        with contextlib.suppress(msgspec.ValidationError):  # of another kind
            file = msgspec.json.decode(data, type=_TokenizerFile)
            spellings = _Spellings(file)
            if spellings.is_enough:
                return Pieces(spellings)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from None
    return Pieces(load_tokenizer(path))


class Pieces:
    """Bytes by token, looked up once each. Those of an answer's tokens join to its text."""

    def __init__(self, tokenizer: Tokenizer | _Spellings) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._specials = frozenset(token.content for token in added.values() if token.special)
        kinds = _kinds_of(tokenizer.decoder)
        self._byte_of = bytes_of_letters() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._inside: dict[int, bytes] = {}
        self._anchor = self._find_anchor()

    def of(self, token: int, is_start: bool = False) -> bytes:
        """Bytes of ``token``, none for a control token. ``is_start``: it begins a text, where some decoders drop a blank."""
        piece = self._inside.get(token)
        if piece is None:
            piece = self._inside[token] = self._piece(token)
        if is_start and piece[:1] == b" " and not self._byte_of:
            if isinstance(self._tokenizer, _Spellings):
                return piece[1:] if self._tokenizer.drops_first_blank else piece
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
        if isinstance(self._tokenizer, _Spellings):
            return self._tokenizer.text_of(token).encode()
        # What it adds to another token: alone it would be the start of a text.
        anchor, text = self._anchor
        both = self._decode([*anchor, token])
        return (both[len(text) :] if both.startswith(text) else self._decode([token])).encode()

    def _find_anchor(self) -> tuple[list[int], str]:
        """A token, and its text, to which others can be appended."""
        if isinstance(self._tokenizer, _Spellings):
            return [], ""
        with contextlib.suppress(Exception):  # a vocabulary that can't spell it (libraries raise what they like)
            ids = self._tokenizer.encode("a", add_special_tokens=False).ids
            if ids:
                return ids, self._decode(ids)
        return [], ""

    def _decode(self, ids: list[int]) -> str:
        assert not isinstance(self._tokenizer, _Spellings)  # whose pieces need no decoding
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
