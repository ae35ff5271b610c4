"""A service as a fork of the keeper is what it would be as a program of its own; where that can't be, it is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KEEPER = """
import os, signal, sys, threading
import numpy
from deploy.keeper import ForkingOptions
report, has_thread, atexit_file = sys.argv[1], sys.argv[2] == "thread", sys.argv[3]
import atexit; atexit.register(lambda: open(atexit_file, "a").write("x"))
if has_thread:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
options = ForkingOptions()
options.setsignals()
read, write = os.pipe(); os.set_blocking(write, False)
signal.set_wakeup_fd(write)
pid = options.fork()
if pid == 0:
    env = {"ONLY": "this", "PYTHONPATH": os.environ["PYTHONPATH"]}
    try:
        options.execve(sys.executable, [sys.executable, "-P", "-m", "tests.support.report_process", report], env)
    finally:
        os._exit(99)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def child_of_keeper(tmp_path: Path, kind: str) -> tuple[int, dict[str, Any]]:
    report, ended = tmp_path / "report", tmp_path / "ended"
    room = "-" * 120  # as the keeper's own arguments
    argv = [sys.executable, "-P", "-c", KEEPER, str(report), kind, str(ended), room]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.read_text() == "x"  # the keeper's own end, once
    return int(done.stdout), json.loads(report.read_text())


@pytest.mark.parametrize(("kind", "is_fork"), [("alone", True), ("thread", False)])
def test_a_child_is_the_same_by_fork_and_as_a_program(tmp_path: Path, kind: str, is_fork: bool) -> None:
    code, found = child_of_keeper(tmp_path, kind)
    assert code == 7
    assert found.pop("is_fork") is is_fork
    environment = found.pop("environment")
    assert {key for key in environment if key != "LC_CTYPE"} == {"ONLY", "PYTHONPATH"}
    report = str(tmp_path / "report")
    assert found == {
        "argv": [report],
        "cmdline": [sys.executable, "-P", "-m", "tests.support.report_process", report],
        "n_threads": 1,
        "term": True,
        "int": True,
    }
