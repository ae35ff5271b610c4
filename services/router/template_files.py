"""Which chat templates and special tokens a model directory has, and in which files. Knows nothing of what they mean."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shared.errors import ContainerError
from shared.files import TOKENIZER_LIMIT_BYTES, read_file

TEMPLATE_LIMIT_BYTES: Final = 4 << 20
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LOOKED_FOR: Final = (
    "chat_template.jinja, additional_chat_templates/*.jinja, chat_template in tokenizer_config.json, chat_template.json"
)


@dataclass(frozen=True)
class TemplateFiles:
    """What a model directory says about conversations. ``named``: source and file of each template, by name."""

    named: dict[str, tuple[str, Path]] = field(default_factory=dict)
    special_tokens: dict[str, Any] = field(default_factory=dict)


def read_template_files(model_dir: Path) -> TemplateFiles:
    """Every template of the directory and the special tokens it may print. Raises ContainerError naming the file.

    Where several files have a template of the same name, the first of ``LOOKED_FOR`` counts.
    """
    config_path = model_dir / "tokenizer_config.json"
    config = _read_object(config_path)
    named: dict[str, tuple[str, Path]] = {}
    legacy_path = model_dir / "chat_template.json"
    legacy = _read_object(legacy_path)
    for path, given in ((legacy_path, legacy.get("chat_template")), (config_path, config.get("chat_template"))):
        named |= {name: (source, path) for name, source in _named(given, path).items()}
    folder = model_dir / "additional_chat_templates"
    if folder.is_dir():
        for path in sorted(folder.glob("[!.]*.jinja")):
            named[path.stem] = (_read_text(path, TEMPLATE_LIMIT_BYTES), path)
    path = model_dir / "chat_template.jinja"
    if os.path.lexists(path):
        named["default"] = (_read_text(path, TEMPLATE_LIMIT_BYTES), path)
    return TemplateFiles(named, _special_tokens(config, _read_object(model_dir / "special_tokens_map.json")))


def _named(given: Any, path: Path) -> dict[str, str]:
    """A template, or a list (or object) of named ones."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, dict):
        given = [{"name": name, "template": source} for name, source in given.items()]
    if not isinstance(given, list):
        raise unusable(path, f"chat_template is {type(given).__name__}, not a text or a list of named ones")
    named = {}
    for entry in given:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise unusable(path, "an entry of chat_template is not {name, template}")
        named[name] = source
    return named


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source in (older, config):
        extra = source.get("extra_special_tokens")
        values = {name: source.get(name) for name in _SPECIAL_NAMES} | (extra if isinstance(extra, dict) else {})
        for name, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
        more = source.get("additional_special_tokens")
        if isinstance(more, list):
            texts = [part.get("content") if isinstance(part, dict) else part for part in more]
            found["additional_special_tokens"] = [text for text in texts if isinstance(text, str)]
    return found


def unusable(path: Path, reason: object) -> ContainerError:
    """The error about a file of the checkpoint."""
    return ContainerError(f"{path} can't be used: {reason}. Copy the file again from the checkpoint.")


def _read_text(path: Path, limit_bytes: int) -> str:
    try:
        return read_file(path, limit_bytes).decode("utf-8")
    except OSError as error:
        raise unusable(path, error.strerror) from None
    except UnicodeDecodeError as error:
        raise unusable(path, error) from None


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; nothing when it is not there."""
    if not os.path.lexists(path):
        return {}
    try:
        found = json.loads(_read_text(path, TOKENIZER_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise unusable(path, error) from None
    if not isinstance(found, dict):
        raise unusable(path, f"it holds {type(found).__name__}, not an object")
    return found
