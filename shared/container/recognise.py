"""What somebody gave as MODEL when it is no container, and which command is the right one for it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from shared.container.format import INDEX_NAME
from shared.errors import ColibriError
from shared.model.family import load_spec

UNFINISHED_DIR = ".unfinished"
"""In a directory that ``colibri convert`` is writing, or was when it was interrupted."""
_HUB_NAME = re.compile(
    r"(?:(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/+)?([A-Za-z0-9][\w.-]*/[\w.-]*\w)/?(?::\S*)?"
)
GGUF_MAGIC = b"GGUF"
_CONVERT = "colibri convert HF_DIR OUT"


def is_hub_name(given: str) -> bool:
    """Whether it is to be a model at a Hugging Face hub (``hf:ORG/NAME``); a directory of that name is ``./hf:...``."""
    return given.startswith("hf:")


def why_no_container(given: Path | str) -> str:
    """One sentence about a MODEL argument that has no ``colibri.json``: what it is, and which command to use."""
    path = Path(given)
    if not os.path.isdir(path):
        return _about_no_directory(
            given, path, "a container, which `colibri convert HF_DIR OUT` makes from a checkpoint"
        )
    if (path / UNFINISHED_DIR).is_dir():
        return (
            f"{path} is unfinished: the conversion was interrupted. Run the same `colibri convert` command again, it goes on "
            "from there."
        )
    return why_no_checkpoint(path) or _about_checkpoint(path)


def why_no_checkpoint(given: Path | str) -> str | None:
    """One sentence about what can't be converted, None for a directory that has a config.json and weights, or a GGUF file."""
    path = Path(given)
    if is_gguf(path):
        return None
    if not os.path.isdir(path):
        return _about_no_directory(given, path, "a downloaded checkpoint, the one with its config.json")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"{path} can't be read: {error.strerror}."
    weights = shard_names(names)
    if not weights and (gguf := [name for name in names if name.lower().endswith(".gguf")]):
        return f"{path} holds GGUF files, the format of llama.cpp. {_run_for_gguf(path / gguf[0])}"
    if not weights and (torch := [name for name in names if name.endswith((".bin", ".pt", ".pth")) and name[0] != "."]):
        return (
            f"{path} holds PyTorch files ({torch[0]}) and no *.safetensors. Use the model's safetensors repository, or save it "
            f"again with transformers' save_pretrained, then: {_CONVERT}"
        )
    if "refs" in names and os.path.isdir(path / "snapshots"):
        found = sorted(entry.name for entry in os.scandir(path / "snapshots") if entry.is_dir())
        inside = path / "snapshots" / (found[-1] if found else "REVISION")
        return f"{path} belongs to the Hugging Face cache, the checkpoint is inside. Run: colibri convert {_quoted(inside)} OUT"
    if "adapter_config.json" in names:
        return (
            f"{path} is an adapter (LoRA), not a model. Merge it into its base model (peft's merge_and_unload), save that, "
            f"then: {_CONVERT}"
        )
    if "config.json" not in names and weights:
        return (
            f"{path} holds {weights[0]} but no config.json, so nobody can tell which model it is. Download the whole "
            f"repository, then: {_CONVERT}"
        )
    if "config.json" not in names:
        return (
            f"{path} holds neither {INDEX_NAME} nor config.json: it is no container and no checkpoint. A container is what "
            f"this makes from a downloaded checkpoint: {_CONVERT}"
        )
    if not weights and "model.safetensors.index.json" not in names:
        return f"{path} has a config.json and no *.safetensors file. Download the whole repository, then: {_CONVERT}"
    return None


def is_gguf(path: Path) -> bool:
    """Whether a regular file is there that is one of GGUF's, or is named like one."""
    return os.path.isfile(path) and (path.suffix.lower() == ".gguf" or _begin(path) == GGUF_MAGIC)


def shard_names(names: list[str]) -> list[str]:
    """Those of a directory's names that are weights. Hidden ones are other programs' (``._model.safetensors`` of macOS)."""
    return sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("."))


def _about_checkpoint(path: Path) -> str:
    what = f"{path} is a checkpoint, not a container (it has no {INDEX_NAME})"
    try:
        load_spec(path)  # nobody shall convert for hours to learn that the family is unknown
    except ColibriError as error:
        return f"{what}, and it can't be converted: {error}"
    return f"{what}. Run: colibri convert {_quoted(path)} OUT"


def _about_no_directory(given: Path | str, path: Path, wanted: str) -> str:
    text = str(given)
    if os.path.isfile(path):
        return _about_file(path, wanted)
    if text.lower().endswith(".gguf"):
        return f"{text} is a file that is not there. Give the path of the GGUF file: colibri convert FILE.gguf OUT"
    match = _HUB_NAME.fullmatch(text)
    if match and not os.path.lexists(path) and not os.path.isdir(path.parent):
        name = match[1]
        return (
            f"{text} is not a directory. If it is a model on the Hugging Face hub, run: colibri convert hf:{name} OUT (it "
            "fetches what it converts), and give OUT as MODEL."
        )
    if os.path.lexists(path):
        return f"{text} is not a directory. Give the directory of {wanted}."
    return f"{text} is not a directory: it does not exist. Give the directory of {wanted}."


def _about_file(path: Path, wanted: str) -> str:
    begin = _begin(path)
    if isinstance(begin, OSError):
        return f"{path} is not a directory, and can't be read: {begin.strerror}."
    if is_gguf(path):
        return f"{path} is a GGUF file, the format of llama.cpp, not a container. {_run_for_gguf(path)}"
    if (path.parent / INDEX_NAME).exists():
        return f"{path} is not a directory, but lies in a container. Give the directory: {path.parent}"
    if path.suffix == ".safetensors":
        return (
            f"{path} is not a directory, but a file of a checkpoint. Run: colibri convert {_quoted(path.parent)} OUT, and give "
            "OUT as MODEL."
        )
    return f"{path} is not a directory, but a file. Give the directory of {wanted}."


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _begin(path: Path) -> bytes | OSError:
    try:
        with open(path, "rb") as file:
            return file.read(len(GGUF_MAGIC))
    except OSError as error:
        return error


def _run_for_gguf(path: Path) -> str:
    return f"Run: colibri convert {_quoted(path)} OUT, and give OUT as MODEL."
