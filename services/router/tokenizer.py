"""Text to ids and back, and the checkpoint's chat template. The one place that knows ``tokenizers`` and ``jinja2``.

Text of users never becomes a control token: the literal spelling of one inside a message is cut in two before the
template runs and the pieces are encoded apart.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.router.pieces import Pieces, bytes_of_letters
from shared.errors import ContainerError, Refused
from shared.files import TOKENIZER_LIMIT_BYTES, is_file, read_file

# A private-use character that marks the cut; removed again before encoding.
_CUT = "\U0010fffd"

MANY_CHARS = 1 << 18
"""Splitting more takes seconds in which nobody is served, so what can't fit anyway is refused without it."""


class ModelTokenizer:
    """The checkpoint's tokenizer and template.

    Raises ``Refused`` (HTTP status, code, parameter) for what a request may get wrong, ContainerError for damaged files.
    """

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        with _naming(path):
            self._tokenizer = Tokenizer.from_buffer(read_file(path, TOKENIZER_LIMIT_BYTES))
        added = self._tokenizer.get_added_tokens_decoder()
        self._pieces = Pieces(self._tokenizer)
        self._controls = sorted((t.content for t in added.values() if t.content), key=len, reverse=True)
        self._special_tokens, source, path = _read_tokenizer_config(model_dir)
        with _naming(path):
            self._template = _compile_template(source) if source else None

    @staticmethod
    def exists(model_dir: Path) -> bool:
        path = model_dir / "tokenizer.json"
        with _naming(path):
            return is_file(path)

    def encode(self, text: str, at_most: int | None = None) -> list[int]:
        """Ids of a raw prompt; control tokens spelt in it are meant. ``at_most``: how many can be of use."""
        return self._encode_parts([text], at_most, "prompt")

    def _encode_parts(self, parts: list[str], at_most: int | None, param: str) -> list[int]:
        n_chars = sum(map(len, parts))
        n_least = n_chars // self._longest_piece if n_chars > MANY_CHARS else 0
        if at_most is not None and n_least > at_most:
            raise Refused(
                f"The prompt has {n_least} tokens or more, at most {at_most} fit the context. Shorten the prompt or start "
                "with a larger --max-context.",
                code="context_length_exceeded",
                param=param,
            )
        try:
            return [i for part in parts for i in self._tokenizer.encode(part, add_special_tokens=False).ids]
        except BaseException as error:
            # A panic of the library is no Exception; megabytes of blanks are too much for its regular expressions, say.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise Refused(
                f"The model's tokenizer can't split this text ({error}).", code="invalid_value", param=param
            ) from None

    @functools.cached_property
    def _longest_piece(self) -> int:
        """No token stands for more characters than this."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        vocab = self._tokenizer.get_vocab()
        is_plain = (
            self._pieces.is_byte_level and bytes_of_letters().keys() <= vocab.keys() and not self._tokenizer.normalizer
        )
        if not is_plain or any(token.lstrip or token.rstrip for token in added):
            return 1 << 62  # characters may vanish, or one token swallow any number of them
        return max(map(len, vocab))

    def piece(self, token: int, is_start: bool = False) -> bytes:
        """The token's own bytes, so that those of an answer join to its text; none for a control token."""
        return self._pieces.of(token, is_start)

    def encode_chat(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any], at_most: int | None = None
    ) -> list[int]:
        """Ids of a conversation rendered by the checkpoint's own template, with a generation prompt."""
        if self._template is None:
            raise Refused(
                "This model has no chat template, so chat requests can't be rendered; use /v1/completions.",
                status=400,
                code="no_chat_template",
                param="messages",
            )
        import jinja2

        safe = [{key: self._disarm(value) for key, value in message.items()} for message in messages]
        try:
            text = self._template.render(
                messages=safe, add_generation_prompt=True, **{**self._special_tokens, **self._disarm(kwargs)}
            )
        except jinja2.TemplateError as error:
            raise Refused(
                f"The model's chat template refused the messages: {error}.",
                status=400,
                code="template_error",
                param="messages",
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise Refused(
                f"The model's chat template can't render these messages ({type(error).__name__}: {error}).",
                status=400,
                code="template_error",
                param="messages",
            ) from error
        return self._encode_parts(text.split(_CUT), at_most, "messages")

    def _disarm(self, value: Any) -> Any:
        if isinstance(value, str):
            for control in self._controls:
                if control in value:
                    value = value.replace(control, control[:1] + _CUT + control[1:])
            return value
        if isinstance(value, list):
            return [self._disarm(v) for v in value]
        if isinstance(value, dict):
            return {k: self._disarm(v) for k, v in value.items()}
        return value


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever a library says of a file becomes a sentence with the file's name."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (libraries raise what they like)
        reason = getattr(error, "strerror", None) or error
        raise ContainerError(f"{path} can't be used: {reason}. Copy the file again from the checkpoint.") from None


def _read_tokenizer_config(model_dir: Path) -> tuple[dict[str, str], str | None, Path]:
    """(bos_token, eos_token, ... as text; the template's source, if any; the file it is from)."""
    special: dict[str, str] = {}
    source = None
    config_path = model_dir / "tokenizer_config.json"
    if os.path.lexists(config_path):
        with _naming(config_path):
            config = dict(json.loads(read_file(config_path, TOKENIZER_LIMIT_BYTES)))
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                special[key] = value
        template = config.get("chat_template")
        if isinstance(template, list):  # named templates
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        if isinstance(template, str):
            source = template
    template_path = model_dir / "chat_template.jinja"
    if os.path.lexists(template_path):
        with _naming(template_path):
            return special, read_file(template_path, TOKENIZER_LIMIT_BYTES).decode("utf-8"), template_path
    return special, source, config_path


def _compile_template(source: str) -> Any:
    """The environment that checkpoints' templates are written for (specs of the ``transformers`` library)."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks training targets; it changes nothing here."""

        tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **kwargs)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
    return environment.from_string(source)
