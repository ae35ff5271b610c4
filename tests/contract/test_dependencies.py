"""What is imported is declared, what is declared is imported, and docs/dependencies.md names it all."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from scikit_build_core.build import build_editable

ROOT = Path(__file__).parents[2]
OURS = {"shared", "native", "conversion", "services", "deploy", "cli", "bench", "models"}
MODULE_OF = {"pyzmq": "zmq", "huggingface-hub": "huggingface_hub"}
PROGRAMS = {"bench/peers": {"llama_cpp"}, "bench/routing.py": {"talk"}}
"""Programs of this repository that need more than users have: the extra "peers", and models/train."""
NOT_IMPORTED_BY_US = {"httptools"}  # uvicorn takes it when it is there


def imported() -> dict[str, Path]:
    """Third-party top-level modules of the packages that are installed, each with a file that imports it."""
    found: dict[str, Path] = {}
    for package in sorted(OURS - {"models"}):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                for name in names:
                    top = name.split(".")[0]
                    if any(top in own and path.is_relative_to(ROOT / place) for place, own in PROGRAMS.items()):
                        continue
                    if top not in OURS and top not in sys.stdlib_module_names:
                        found[top] = path
    return found


def declared() -> set[str]:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[<>=!;\[ ]", line)[0] for line in lines}


def test_every_import_is_a_declared_dependency() -> None:
    known = {MODULE_OF.get(name, name) for name in declared()}
    missing = {name: str(path) for name, path in imported().items() if name not in known}
    assert not missing, f"imported but not in [project.dependencies]: {missing}"


def test_every_dependency_is_imported() -> None:
    used = set(imported())
    idle = {name for name in declared() if MODULE_OF.get(name, name) not in used} - NOT_IMPORTED_BY_US
    assert not idle, f"in [project.dependencies] but imported nowhere: {idle}"


def test_every_dependency_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    silent = {name for name in declared() if not re.search(rf"\b{re.escape(name)}\b", text)}
    assert not silent, f"docs/dependencies.md says nothing about {silent}"


def test_a_development_install_adds_the_checkout_to_the_path_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were its parent there too, every directory beside the checkout would be a package to import."""
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_editable(str(tmp_path))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        lines = wheel.read(name).decode().split("\n")
    assert [line for line in lines if line and not line.startswith("import ")] == [str(ROOT)]
