"""A checkpoint's ``tokenizer.json``, for splitting texts and nothing else. Used by the router's prompt process and by tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.errors import ContainerError
from shared.files import TOKENIZER_LIMIT_BYTES, read_file


def load_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer``. Raises ContainerError naming the file.

    What else a file may ask for belongs to training: to cut long texts, to fill up short ones, to drop merges at random.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(read_file(path, TOKENIZER_LIMIT_BYTES))
    except Exception as error:  # noqa: BLE001  (the library raises plain Exception)
        reason = getattr(error, "strerror", None) or error
        raise ContainerError(f"{path} can't be used: {reason}. Copy the file again from the checkpoint.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer
