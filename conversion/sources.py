"""Opens what ``colibri convert`` is given: a Hugging Face checkpoint's directory, or a GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from conversion.checkpoint import Checkpoint
from conversion.names import HubNames, Names
from shared.container.recognise import is_gguf
from shared.errors import ConfigError, ContainerError
from shared.files import read_file
from shared.model.config_reader import quantization_of, read_json, without_mtp
from shared.model.family import load_spec, spec_of
from shared.model.spec import ModelSpec

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "README.md",
)
"""Copied when present. Nothing that could be executed is."""
TEMPLATES_DIR = "additional_chat_templates"
"""Its ``*.jinja`` are copied too: templates that are chosen by name."""

COPY_LIMIT_BYTES = 256 << 20
_FOR_PEOPLE = ("LICENSE", "README.md")


class OpenedSource(msgspec.Struct, frozen=True):
    """What is converted. ``copied``: the small files that go into the container as they are, by name."""

    spec: ModelSpec
    names: Names
    checkpoint: Checkpoint
    copied: dict[str, bytes]


def open_source(source: Path, *, has_mtp: bool = True, checkpoint: Checkpoint | None = None) -> OpenedSource:
    """ContainerError or ConfigError when it can't be read. ``has_mtp``: False for the model without its MTP layer.

    ``checkpoint``: of shards that are not in the directory.
    """
    if checkpoint is None and is_gguf(source):
        return _open_gguf(source, has_mtp)
    return _open_directory(source, has_mtp, checkpoint)


def _open_directory(source: Path, has_mtp: bool, checkpoint: Checkpoint | None) -> OpenedSource:
    spec = load_spec(source, has_mtp=has_mtp)
    names = [*COPIED_FILES, *_template_names(source)]
    copied = {name: data for name in names if (data := _read_small(source, name)) is not None}
    if not has_mtp:
        copied["config.json"] = _dumped(without_mtp(read_json(source / "config.json")))
    found = checkpoint or Checkpoint.open(source)
    found.quantization = quantization_of(read_json(source / "config.json"))
    return OpenedSource(spec, HubNames(spec.family, spec.mtp_layer), found, copied)


def _open_gguf(source: Path, has_mtp: bool) -> OpenedSource:
    from conversion.gguf.checkpoint import GgufCheckpoint

    checkpoint, names, copied = GgufCheckpoint.open_file(source)
    try:
        config = json.loads(copied["config.json"])
        if not has_mtp:
            config = without_mtp(config)
            copied["config.json"] = _dumped(config)
        spec = spec_of(config)
    except ConfigError as error:
        checkpoint.close()
        raise ConfigError(f"{source}: its keys, read as a config.json, make no model: {error}") from None
    return OpenedSource(spec, names, checkpoint, copied)


def _dumped(config: dict[str, object]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"


def _read_small(source: Path, name: str) -> bytes | None:
    """A file that is copied unchanged; None when there is none."""
    try:
        return read_file(source / name, COPY_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if name in _FOR_PEOPLE:
            return None
        raise ContainerError(f"{source / name} can't be read: {error.strerror}.") from None


def _template_names(source: Path) -> list[str]:
    try:
        names = os.listdir(source / TEMPLATES_DIR)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ContainerError(f"{source / TEMPLATES_DIR} can't be read: {error.strerror}.") from None
    return [f"{TEMPLATES_DIR}/{name}" for name in sorted(names) if name.endswith(".jinja") and name[0] != "."]
