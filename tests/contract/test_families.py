"""A family costs its own file, its oracle and a line in the README: nothing else in the engine knows a family's name."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from shared.model import family
from tests.contract.test_imports import ROOT, sources
from tests.oracle import DIRECTORY

PRESETS = {"conversion/presets.py", "conversion/gguf/architectures.py"}
"""They make a config.json, which names its family: whole examples, and from what llama.cpp's files say."""


def strings(path: Path) -> set[str]:
    """String constants that are no docstrings."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    }


def test_nothing_else_names_a_family() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(known)
        for path in sources()
        if (known := strings(path) & set(family.names())) and path.parent != ROOT / "shared/model/families"
    }
    assert set(found) == PRESETS, found


@pytest.mark.parametrize("name", family.names())
def test_each_family_names_itself_and_stands_in_the_readme(name: str) -> None:
    assert name in strings(ROOT / "shared/model/families" / f"{name}.py")
    assert f"`{name}`" in (ROOT / "README.md").read_text()


def test_each_family_with_a_structure_of_its_own_has_an_oracle() -> None:
    """kimi_k2 is deepseek_v3 with other sizes."""
    known = {json.loads((path / "config.json").read_text())["model_type"] for path in DIRECTORY.iterdir()}
    assert set(family.names()) - known == {"kimi_k2"}
