"""A checkpoint's ``tokenizer.json``, for splitting texts and nothing else. Used by the router's prompt process and by tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.errors import ContainerError
from shared.files import TOKENIZER_LIMIT_BYTES, read_file


def load_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer``. Raises ContainerError naming the file."""
    try:
        data = read_file(path, TOKENIZER_LIMIT_BYTES)
    except OSError as error:
        raise ContainerError(
            f"{path} can't be used: {error.strerror}. Copy the file again from the checkpoint."
        ) from None
    return parse_tokenizer(data, path)


def parse_tokenizer(data: bytes, path: Path) -> Any:
    """As ``load_tokenizer``, from what ``path`` holds.

    What else a file may ask for belongs to training: to cut long texts, to fill up short ones, to drop merges at random.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001  (the library raises plain Exception)
        raise ContainerError(f"{path} can't be used: {error}. Copy the file again from the checkpoint.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer
