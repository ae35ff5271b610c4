"""Who is recognised as a process of a run directory, and who must never be."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from deploy import keeper, rundir
from deploy.supervisor_conf import render
from shared.errors import ConfigError
from shared.machine.processes import process_start
from shared.run.config import GroupConfig
from shared.run.running import kill_process, members

Start = Callable[..., subprocess.Popen[bytes]]
SLEEP = (sys.executable, "-c", "import sys, time; print(flush=True); time.sleep(60)")


@pytest.fixture
def start() -> Iterator[Start]:
    """A process with a command line like that; it sleeps."""
    started = []

    def start(*arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*SLEEP, *arguments], cwd=cwd, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_services_and_keeper_are_found_whatever_is_written_about_them(tmp_path: Path, start: Start) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other.mkdir()
    ours = {
        start("-m", "services.router", "--config", "group.json", cwd=run_dir).pid,
        start("-m", "services.expert_io", "--config", str(run_dir / "group.json"), cwd=run_dir).pid,
        start("-m", "deploy.keeper", str(run_dir), cwd=tmp_path).pid,
        start("-m", "services.router.prompt_worker", "/model", "1", cwd=run_dir).pid,
    }
    frozen = start("-m", "services.gateway", "--config", "group.json", cwd=run_dir)
    frozen.send_signal(signal.SIGSTOP)
    start("-m", "services.router", "--config", "group.json", cwd=other)
    start("-m", "deploy.keeper", str(other), cwd=run_dir)
    start("services.router", "group.json", cwd=run_dir)
    start("-m", "services.router", "--config", "other.json", cwd=run_dir)
    start("-m", "services.mail", "--config", "group.json", cwd=run_dir)
    found = dict(members(run_dir))
    assert set(found) == {*ours, frozen.pid}
    kill_process(frozen.pid, found[frozen.pid] - 1)  # what the number was given to since
    assert frozen.poll() is None
    kill_process(frozen.pid, found[frozen.pid])
    assert frozen.wait(10) == -signal.SIGKILL


def test_a_group_that_lost_its_head_is_waited_for_and_a_living_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "ENDING_S", 0.5)
    held = rundir.take_lock(tmp_path)
    with pytest.raises(ConfigError, match="a group already runs"):
        rundir.take_lock(tmp_path)
    (tmp_path / "processes.json").write_text(
        json.dumps({"keeper": [os.getpid(), (process_start(os.getpid()) or 0) - 1]})
    )
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:  # it cleans up, and leaves a moment later
            (tmp_path / "processes.json").unlink()
        else:
            os.close(held)
            monkeypatch.undo()

    monkeypatch.setattr(rundir.time, "sleep", sleep)
    os.close(rundir.take_lock(tmp_path))
    assert len(sleeps) == 2


def test_a_group_that_says_that_it_ends_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = rundir.take_lock(tmp_path)
    rundir.describe_end(held)
    monkeypatch.setattr(rundir.time, "sleep", lambda seconds: os.close(held))
    os.close(rundir.take_lock(tmp_path))


@pytest.mark.parametrize(
    "path", ["/a #b/python", "/a ;b/python", "/a%b/%(here)s/python", "/a'b\"c/python", "/a\nb/pyt hon"]
)
def test_no_path_of_an_interpreter_breaks_supervisors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    config = GroupConfig(
        run_id="abc", run_dir=str(tmp_path), model_dir="/m", host="127.0.0.1", port=1, ram_bytes=1, n_slots=2, slot_bytes=3,
        n_threads=1, kv_dtype="f32", prefill_chunk=4, pilot="on", n_drafts=0, max_sequences=1, max_context=64, n_kv_blocks=1,
        n_frames=2, logit_rows=1,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", path)
    Path("log").mkdir()
    Path("supervisord.conf").write_text(render(config))
    options = ServerOptions()
    options.realize(["-c", "supervisord.conf"], doc="")
    keeper.use_own_interpreter(options)
    (group,) = options.process_group_configs
    commands = {program.name: shlex.split(program.command) for program in group.process_configs}
    assert commands["router"] == [path, "-P", "-m", "services.router", "--config", "group.json"]
    assert {command[0] for command in commands.values()} == {path}
