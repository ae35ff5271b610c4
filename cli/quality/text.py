"""The tokens over which logits are compared: from a text, given ids, or made up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from shared.errors import ConfigError
from shared.files import read_file
from shared.model.tokenizer_file import load_tokenizer

DEFAULT_TEXT = "heldout.jsonl"
"""In the package ``models``: conversations that the embedded model was not trained on."""
_TEXT_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Tokens:
    """``sequences`` of ids, each starting at position 0; ``what`` says where they come from."""

    sequences: list[list[int]]
    what: str

    @property
    def n(self) -> int:
        return sum(map(len, self.sequences))


def default_text() -> Path:
    return Path(str(resources.files("models"))) / DEFAULT_TEXT


def read_documents(path: Path) -> list[str]:
    """Documents of a text file: the lines' ``"text"`` of a .jsonl, else the whole file. ConfigError."""
    try:
        content = read_file(path, _TEXT_LIMIT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--text {path} can't be read: {reason}.") from None
    if path.suffix != ".jsonl":
        return [content]
    documents = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f'{path}, line {number}: expected a JSON object with a "text", found {line[:60]!r}.')
        documents.append(text)
    return documents


def tokens_of_text(path: Path, model: Path, n_tokens: int, window: int) -> Tokens:
    """The first ``n_tokens`` tokens, every document in pieces of at most ``window``. Control tokens spelt in it are meant."""
    tokenizer_path = model / "tokenizer.json"
    if not os.path.lexists(tokenizer_path):
        raise ConfigError(f"{model} has no tokenizer.json, so a text can't be used; give --ids or --random.")
    documents = read_documents(path)
    tokenizer = load_tokenizer(tokenizer_path)
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in documents)
    sequences = cut(encoded, n_tokens, window)
    if not sequences:
        raise ConfigError(f"--text {path} holds fewer than two tokens.")
    return Tokens(sequences, str(path))


def tokens_of_ids(ids: list[int], vocab: int, n_tokens: int, window: int) -> Tokens:
    """Given ids, in pieces of at most ``window``. ConfigError for an id that the model does not have."""
    wrong = next((i for i in ids if not 0 <= i < vocab), None)
    if wrong is not None:
        raise ConfigError(f"--ids: {wrong} is no token id of this model; they go from 0 to {vocab - 1}.")
    sequences = cut([ids], n_tokens, window)
    if not sequences:
        raise ConfigError("--ids: give at least two ids.")
    return Tokens(sequences, "given ids")


def random_tokens(n: int, vocab: int, window: int, seed: int) -> Tokens:
    """Ids drawn evenly from the vocabulary: for models without tokenizer. They are no language."""
    ids = np.random.default_rng(seed).integers(0, vocab, n).tolist()
    return Tokens(cut([ids], n, window), f"random ids, seed {seed}")


def cut(documents: Iterable[list[int]], n_tokens: int, window: int) -> list[list[int]]:
    """Pieces of at most ``window`` ids until there are ``n_tokens``; a piece of one token predicts nothing and is dropped."""
    left = n_tokens
    sequences: list[list[int]] = []
    for piece in _pieces(documents, window):
        piece = piece[:left]
        if len(piece) >= 2:
            sequences.append(piece)
            left -= len(piece)
        if left < 2:
            break
    return sequences


def _pieces(documents: Iterable[list[int]], window: int) -> Iterator[list[int]]:
    for ids in documents:
        for start in range(0, len(ids), window):
            yield ids[start : start + window]
