"""What every program of ours does first and last: descriptors, the search path, a standard output that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from shared.run.first import ROOT, clean_path

STDLIB = "/usr/lib/python3.11"
INSTALLED = ["/usr/lib/python311.zip", STDLIB, "/usr/lib/site-packages"]
UP_HELP = f"{sys.executable} -P -m deploy.up --help"
COLIBRI = f"{sys.executable} -P -m cli.main"
DROP_WARM = (  # of nobody's memory
    f"{sys.executable} -P -c 'from deploy import up; up.kept_sets = lambda settings: []; up.main()' --drop-warm"
)


@pytest.mark.parametrize(
    ("front", "pythonpath", "here", "kept"),
    [
        ([], "", "/home/me", []),
        (["/home/me"], "", "/home/me", []),
        (["", "/opt/mine"], "/opt/mine", "/home/me", ["/opt/mine"]),
        (["/venv/bin", "/home/me", "/opt/mine"], ".:/opt/mine", "/home/me", ["/venv/bin", "/opt/mine"]),
        (["/home/me", "/home/me/sub", "/home"], f"{os.sep}home/me:sub:..", "/home/me", []),
        ([ROOT], "", ROOT, []),
        (["/home/me", ROOT], f"{ROOT}:.", "/home/me", []),
    ],
)
def test_nothing_is_imported_from_the_current_directory(
    front: list[str], pythonpath: str, here: str, kept: list[str]
) -> None:
    assert clean_path([*front, *INSTALLED], pythonpath, here, STDLIB) == [ROOT, *kept, *INSTALLED]


def test_the_installation_is_never_given_up() -> None:
    """Even for somebody who stands in it."""
    assert clean_path(["", *INSTALLED], ".", INSTALLED[2], STDLIB) == [ROOT, *INSTALLED]


@pytest.mark.parametrize("closed", [c for n in range(4) for c in combinations((0, 1, 2), n)], ids=str)
def test_standard_descriptors_are_taken_before_anything_else(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """The lowest free descriptor must not be one of them: the next file would become somebody's output."""
    report = tmp_path / "report"
    code = (
        "import shared.run.first, json, os, sys; fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY);"
        "names = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]; os.write(fd, json.dumps([fd, names]).encode())"
    )
    redirect = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    command = ["sh", "-c", f'exec "$0" -c "$1" "$2" {redirect}', sys.executable, code, str(report)]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, timeout=60)
    fd, names = json.loads(report.read_text())
    assert fd > 2
    assert [names[n] for n in closed] == [os.devnull] * len(closed)


@pytest.mark.parametrize(
    "program",
    [UP_HELP, DROP_WARM, f"{COLIBRI} --help", f"{COLIBRI} --version", f"{COLIBRI} inspect models/fledgling"],
)
@pytest.mark.parametrize(
    ("output", "exit_code", "sentence"),
    [
        ("> /dev/full", 74, "standard output can't be written: No space left on device\n"),
        (">&-", 74, "standard output is closed: there is nowhere to write to\n"),
        ("| true", 141, ""),
    ],
)
def test_an_output_that_fails_is_one_sentence_or_none(program: str, output: str, exit_code: int, sentence: str) -> None:
    # The reader of the pipe has to be gone for sure: bash tells the code of the writer.
    command = f"( sleep 0.1; {program} ) {output}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.partition(": ")[2] == sentence
    assert done.stdout == ""


def test_every_program_and_every_child_of_ours_begins_the_same_way() -> None:
    """A new entry point without it would import from anywhere; a child without -P too."""
    sources = [path for room in ("cli", "deploy", "services", "bench") for path in Path(ROOT, room).rglob("*.py")]
    for path in sources:
        text = path.read_text()
        if 'if __name__ == "__main__":' in text and path.name != "llama.py":  # runs on an interpreter without us
            first = next(
                line for line in text.splitlines() if line.startswith(("import ", "from ")) and "__future__" not in line
            )
            assert first.startswith("import shared.run.first"), path
        for line in text.splitlines():
            is_child = "[sys.executable, " in line and "shlex.join" not in line
            assert not is_child or '"-P"' in line, f"{path}: {line}"
