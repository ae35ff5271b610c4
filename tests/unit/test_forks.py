"""A process of ours as a fork of another is what it would be as a program of its own; where that can't be, it is one."""

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
report, kind, atexit_file = sys.argv[1:4]
if kind == "no name":
    import native.process
    native.process.rename_process = lambda argv: False
import atexit; atexit.register(lambda: open(atexit_file, "a").write("x"))
if kind == "thread":
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
    argv = [sys.executable, "-P", "-c", KEEPER, str(report), kind, str(ended)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.read_text() == "x"  # the keeper's own end, once
    return int(done.stdout), json.loads(report.read_text())


@pytest.mark.parametrize(("kind", "is_fork"), [("alone", True), ("thread", False), ("no name", False)])
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


STARTER = """
import os, subprocess, sys
from shared.run.forks import Forked, start_module
report, kept, other = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.stdout.write("once ")
child = start_module("tests.support.report_process", report, "a longer name " * 20, str(kept), str(other), env=os.environ,
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, new_session=True, pass_fds=(kept,), before=lambda: os.umask(0o27))
assert isinstance(child, Forked), child
child.stdin.write(b"hello")
child.stdin.close()
words = child.stdout.read()
assert child.wait(20) == child.poll() == child.returncode == 7
child.kill()
assert os.getsid(0) != int(words.split()[0]) == child.pid, words
print(words.decode(), end="")
"""


def test_a_fork_has_what_it_was_given_and_nothing_else(tmp_path: Path) -> None:
    kept, other = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    report = tmp_path / "report"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", STARTER, str(report), str(kept), str(other)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            pass_fds=(kept, other),
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(kept)
        os.close(other)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["is_fork"] and found["n_threads"] == 1 and found["term"] and not found["int"]
    assert found["cmdline"] == [sys.executable, "-P", "-m", "tests.support.report_process", *found["argv"]]
    once, session, stdin, umask, is_kept, is_other = done.stdout.split()
    assert (once, stdin, umask, is_kept, is_other) == ("once", "hello", "0o27", "True", "False") and session.isdigit()


def test_waiting_for_a_fork_has_an_end(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, signal\n"
        "from shared.run.forks import start_module\n"
        "child = start_module('http.server', '0', env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "assert child.poll() is None\n"
        "try:\n    child.wait(0.01)\n"
        "except subprocess.TimeoutExpired:\n    child.kill()\n"
        "assert child.wait() == -signal.SIGKILL\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
