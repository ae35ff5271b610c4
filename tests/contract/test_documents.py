"""The tables of ARCHITECTURE.md and the lists of other documents match the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from deploy.up import make_parser
from shared.errors import ErrorCode
from shared.run.config import Settings, settings_template
from shared.wire.endpoints import SERVICES
from tests.contract import golden

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def table(head: str) -> list[list[str]]:
    """The rows of the table whose head starts with ``head``."""
    lines = TEXT.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_process_table_names_the_services_and_their_folders() -> None:
    rows = table("process")
    assert [row[0].strip("`") for row in rows] == list(SERVICES)
    for row in rows:
        name = row[0].strip("`")
        assert f"`services/{name}`" in row[1]
        assert (ROOT / "services" / name / "__main__.py").exists()


def test_message_table_is_complete_and_gives_the_routes_of_the_docstrings() -> None:
    expected = {}
    for name, struct in golden.all_messages().items():
        expected[name.split(".")[1]] = (struct.__doc__ or "").split(":")[0].replace("\n", " ").strip()
    assert {row[0].strip("`"): row[1] for row in table("message")} == expected


def test_the_error_codes_of_the_api_are_those_of_the_code() -> None:
    lines = (ROOT / "docs" / "api.md").read_text().partition("\n## Errors\n")[2].splitlines()
    codes = [line.split("|")[2] for line in lines if re.match(r"\| \d", line)]
    assert sorted(re.findall(r"`(\w+)`", " ".join(codes))) == sorted(ErrorCode)


def test_paths_in_the_documents_exist() -> None:
    for document in ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md", "docs/dependencies.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(r"`((?:shared|native|services|deploy|cli|models|tests|docs)/[\w./-]*\w)`", text):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_extras_are_explained_too() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in (d for extra in project["optional-dependencies"].values() for d in extra):
        name = re.split(r"[><=;\[ ]", requirement)[0]
        assert re.search(rf"\b{re.escape(name)}\b", text), f"{name} is not in docs/dependencies.md"


def test_flags_are_the_settings() -> None:
    flags = set(vars(make_parser().parse_args([]))) - {
        *("config", "daemon", "status", "json", "stop", "keep_warm", "drop_warm")
    }
    settings = {name.replace("ram_bytes", "ram") for name in Settings.__struct_fields__}
    only_in_file = {"direct_io", "embedding", "heartbeat_s", "drain_s", "stall_s"}
    assert flags == settings - only_in_file


def test_the_template_is_what_the_declarations_say() -> None:
    assert (ROOT / "deploy" / "colibri.toml").read_text() == settings_template(), "run `make template`"


@pytest.mark.parametrize("target", ["run", "test", "check", "bench", "template", "schema", "clean", "help", "venv"])
def test_makefile_has_its_targets(target: str) -> None:
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
