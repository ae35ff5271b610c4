"""Experts one by one or stacked in one tensor, stacked either way round: where a checkpoint has those of a family. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from shared.model.tensors import Source

_ONE = re.compile(r"(?P<prefix>.*\.)experts\.\d+\.[^.]+\.(?P<kind>weight|bias)")
_ALL = re.compile(r"(?P<prefix>.*\.experts\.)(?:gate_up|down)_proj(?:_bias)?")

Shape = tuple[int, ...]
ShapeOf = Callable[[str], Shape | None]
"""The shape of a tensor of the checkpoint; None when there is none of this name."""


def arranged(own: Source, expert: int, n_experts: int, part: str, shape: Shape, shape_of: ShapeOf) -> Source:
    """What the checkpoint has of an expert's ``part`` ("gate_proj.weight", ... of this shape), wherever it has it.

    ``own``: where the family's checkpoints have it; given back where it is there, and where nothing else is.
    """
    if own.index is None:
        match = _ONE.fullmatch(own.name)
        if shape_of(own.name) is not None or match is None or match["kind"] != "weight":
            return own
        stacked = (
            _stacked(prefix, expert, n_experts, part, shape, shape_of)
            for prefix in _prefixes(f"{match['prefix']}experts.", own.name)
        )
        return next(filter(None, stacked), own)
    match = _ALL.fullmatch(own.name)
    if match is None:  # of a GGUF file, which has them in one arrangement
        return own
    found = shape_of(own.name)
    if found is None:
        singles = (f"{prefix}{expert}.{part}" for prefix in _prefixes(match["prefix"], own.name))
        return next((Source(single, shape) for single in singles if shape_of(single) is not None), own)
    if part.endswith(".bias") or not _is_turned(match["prefix"], n_experts, shape, part, shape_of):
        return own
    whole = own.shape
    return msgspec.structs.replace(own, shape=(whole[0], whole[2], whole[1]), is_transposed=True)


def _prefixes(prefix: str, name: str) -> list[str]:
    """What ends in "experts.": of the family, and as nearly all families have it."""
    layer = re.match(r"(.*layers\.\d+\.)", name)
    usual = f"{layer[1]}mlp.experts." if layer else ""
    return list(dict.fromkeys([prefix, usual]))


def _stacked(prefix: str, expert: int, n_experts: int, part: str, shape: Shape, shape_of: ShapeOf) -> Source | None:
    """Rows of gate, then rows of up, in one tensor; down in another."""
    projection = part.removesuffix("_proj.weight")
    is_down = projection == "down"
    name = next(
        (
            n
            for n in (f"{prefix}{'down' if is_down else 'gate_up'}_proj{end}" for end in ("", ".weight"))
            if shape_of(n)
        ),
        "",
    )
    if not name or shape_of(f"{name}_blocks"):  # in MXFP4: only gpt_oss says which of its rows are whose
        return None
    n_rows = 0 if is_down else shape[0]
    whole = (n_experts, shape[0] * (1 if is_down else 2), shape[1])
    is_turned = _is_turned(prefix, n_experts, shape, part, shape_of)
    if is_turned:
        whole = (whole[0], whole[2], whole[1])
    return Source(
        name, whole, start=n_rows if projection == "up" else 0, n_rows=n_rows, index=expert, is_transposed=is_turned
    )


def _is_turned(prefix: str, n_experts: int, shape: Shape, part: str, shape_of: ShapeOf) -> bool:
    """Whether stacked matrices are [in, out]. Where one of the two tensors is square the other one tells."""
    inner, hidden = shape[::-1] if part.startswith("down") else shape
    for name, out, in_ in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        for found in filter(None, (shape_of(prefix + name), shape_of(f"{prefix}{name}.weight"))):
            if out != in_ and found in ((n_experts, out, in_), (n_experts, in_, out)):
                return found == (n_experts, in_, out)
    return False
