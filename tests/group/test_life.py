"""The group's life as the user sees it: start, status, stop, a busy port, a second start, the death of any process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.machine.processes import process_start
from tests.group.harness import UP, Group, completion_body, event_tokens, run_up, wait_clean

pytestmark = pytest.mark.group

PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture
def model(converted: Callable[[str, str], Path]) -> Path:
    return converted("glm_moe_dsa", "int8")


def test_status_names_every_service_and_ctrl_c_leaves_nothing(model: Path, start_group: Callable[..., Group]) -> None:
    group = start_group(model, draft=1)
    status = group.status()
    assert status["ready"] is True
    services = {service["name"]: service for service in status["services"]}
    assert set(services) == {"gateway", "router", "attention", "expert_io", "drafter"}
    for name, service in services.items():
        assert service["state"] == "ready"
        assert service["incarnation"] == 1
        assert f"services.{name}".encode() in Path(f"/proc/{service['pid']}/cmdline").read_bytes()
    table = run_up("--run-dir", str(group.run_dir), "--status")
    assert re.search(rf"expert_io +{services['expert_io']['pid']} +ready +1", table.stdout), table.stdout
    assert len(group.tokens(PROMPT, 5)) == 5
    assert group.stop(signal.SIGINT) == 0
    wait_clean(group)
    after = run_up("--run-dir", str(group.run_dir), "--status")
    assert after.returncode == 78
    assert "no group runs in" in after.stderr


def daemon(model: Path, run_dir: Path, *flags: str, redirect: str = "") -> Group:
    """A group in the background."""
    argv = [*UP, str(model), "--run-dir", str(run_dir), "--port", "0", "--daemon", *flags]
    started = subprocess.run(["sh", "-c", f'exec "$@" {redirect}', "sh", *argv], stderr=subprocess.PIPE, timeout=90)
    assert started.returncode == 0, started.stderr
    group = Group(model, run_dir)
    group.note_pids()
    status = group.status()
    group.url, group.run_id = status["url"], status["run_id"]
    return group


def test_daemon_survives_its_starter_and_stops_from_another_shell(model: Path, run_dir: Path) -> None:
    """Started without standard descriptors: none of its files may become one of them, least of all the lock."""
    group = daemon(model, run_dir, redirect="<&- >&- 2>&-")
    second = run_up(str(model), "--run-dir", str(run_dir), "--port", "0")
    assert second.returncode == 78
    assert "a group already runs in" in second.stderr
    assert len(group.tokens(PROMPT, 3)) == 3
    stopped = run_up("--run-dir", str(run_dir), "--stop")
    assert stopped.returncode == 0, stopped.stderr
    wait_clean(group, 0.5)


def kill_keeper_and_freeze_gateway(group: Group) -> None:
    """In this order: the kernel wakes and ends who is already stopped when its process group loses its parent. A gateway with
    a request to answer does not leave at once."""
    stream = group.stream(PROMPT, 1000)
    next(stream)
    pid, keeper = group.pid("gateway"), group.keeper_pid
    os.kill(keeper, signal.SIGKILL)
    while process_start(keeper) is not None:
        pass
    os.kill(pid, signal.SIGSTOP)


def test_start_after_the_death_of_the_keeper_ends_what_it_left_even_a_frozen_service(
    model: Path, run_dir: Path
) -> None:
    """The same command at once, on the same port."""
    group = daemon(model, run_dir)
    port = group.url.rpartition(":")[2]
    kill_keeper_and_freeze_gateway(group)
    again = daemon(model, run_dir, "--port", port, "--host", "localhost")
    try:
        assert not {pid for pid in group.seen_pids if process_start(pid)}  # some may be waiting to be reaped
        assert again.url == f"http://localhost:{port}"
        assert len(again.tokens(PROMPT, 3)) == 3
    finally:
        kill_keeper_and_freeze_gateway(again)
    ended = run_up("--run-dir", str(run_dir), "--stop")
    assert (ended.returncode, ended.stdout) == (0, "stopped what was left of a group that had died.\n"), ended.stderr
    wait_clean(again, 0.5)


def test_second_start_on_a_run_directory_fails_at_once(model: Path, start_group: Callable[..., Group]) -> None:
    group = start_group(model)
    begin = time.monotonic()
    second = run_up(str(model), "--run-dir", str(group.run_dir), "--port", "0")
    assert time.monotonic() - begin < 3.0  # one second of work, on a busy machine
    assert second.returncode == 78
    assert "a group already runs in" in second.stderr
    assert "--stop" in second.stderr
    assert second.stderr.count("\n") == 1
    assert group.status()["ready"] is True


def test_busy_port_fails_at_once_and_leaves_nothing(model: Path, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        begin = time.monotonic()
        done = run_up(str(model), "--run-dir", str(run_dir), "--port", str(port))
        assert time.monotonic() - begin < 3.0
    assert done.returncode == 78
    assert done.stderr.strip() == (
        f"colibri-up: port {port} of 127.0.0.1 is in use by another program; choose another with --port"
    )
    assert {path.name for path in run_dir.iterdir()} <= {"lock"}


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_colibri_up_takes_the_group_along(model: Path, run_dir: Path, sig: int) -> None:
    group = Group(model, run_dir).start()
    assert group.process is not None
    os.kill(group.process.pid, sig)
    group.process.wait(20)
    wait_clean(group)


def test_death_of_the_keeper_takes_the_group_along(model: Path, run_dir: Path) -> None:
    group = Group(model, run_dir).start()
    assert group.process is not None
    os.kill(group.keeper_pid, signal.SIGKILL)
    assert group.process.wait(20) == 70
    assert "supervisor ended unexpectedly" in group.said
    wait_clean(group)


def test_death_of_everything_at_once_is_swept_by_the_next_start(model: Path, run_dir: Path) -> None:
    group = Group(model, run_dir).start()
    group.kill_all()
    assert list(Path("/dev/shm").glob(f"colibri-{os.getuid()}-{group.run_id}*"))
    old_run = group.run_id
    with Group(model, run_dir) as again:
        assert again.run_id != old_run
        assert not list(Path("/dev/shm").glob(f"colibri-{os.getuid()}-{old_run}*"))
        assert len(again.tokens(PROMPT, 2)) == 2


def test_start_ends_services_of_a_dead_group_first(model: Path, run_dir: Path) -> None:
    """One that ended later would take its successor's socket away: both have the same path."""
    run_dir.mkdir(mode=0o700)
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "-m", "services.expert_io", "--config", "group.json"]
    late = subprocess.Popen(argv, cwd=run_dir)
    with Group(model, run_dir):
        assert late.wait(0) == -signal.SIGKILL


def test_end_of_the_terminal_is_nothing_to_a_group_under_nohup(model: Path, run_dir: Path) -> None:
    group = Group(model, run_dir)
    group.argv = ["nohup", *group.argv]
    with group:
        assert group.process is not None
        group.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert len(group.tokens(PROMPT, 2)) == 2


@pytest.fixture(scope="module")
def survivor(converted: Callable[[str, str], Path]) -> Iterator[Group]:
    """One group that loses its services again and again; checked for leftovers after all that."""
    base = Path(tempfile.mkdtemp(prefix="cbt-"))
    with Group(converted("glm_moe_dsa", "int8"), base / "run", draft=1) as group:
        yield group
    shutil.rmtree(base)


@pytest.mark.parametrize("service", ["router", "attention", "expert_io", "drafter", "gateway"])
def test_killed_service_comes_back(survivor: Group, service: str) -> None:
    group = survivor
    before = group.tokens(PROMPT, 12)
    incarnation = service_of(group, service)["incarnation"]
    old_pid = group.kill(service)
    assert group.wait_replaced(service, old_pid)["incarnation"] == incarnation + 1
    group.wait_ready()
    assert group.tokens(PROMPT, 12) == before


def test_requests_that_come_while_the_router_starts_again_are_answered(survivor: Group) -> None:
    """The gateway may learn of its death only after it has sent them: into the socket of the next one."""
    group = survivor
    group.wait_ready()
    before = group.tokens(PROMPT, 80)
    group.kill("router")
    group.kill("attention")  # so that what the new router takes meanwhile is still waiting when the gateway meets it
    with ThreadPoolExecutor(24) as pool:
        sent = []
        for _ in range(24):
            sent.append(pool.submit(group.post, "/v1/completions", completion_body(PROMPT, 80)))
            time.sleep(0.06)
        answers = [future.result() for future in sent]
    assert any(answer.status_code == 200 for answer in answers), "none of them was taken"
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "not_ready"
        else:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == before
    group.wait_ready()


def service_of(group: Group, name: str) -> dict[str, Any]:
    return {entry["name"]: entry for entry in group.status()["services"]}[name]


@pytest.mark.parametrize("service", ["attention", "router", "gateway"])
def test_stopped_process_is_found_and_replaced(survivor: Group, service: str) -> None:
    """SIGSTOP: no exit to notice, only silence. The router judges its peers, the keeper the router."""
    group = survivor
    group.wait_ready()
    before = group.tokens(PROMPT, 8)
    pid = group.kill(service, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while group.pid(service) in (pid, 0):
        assert time.monotonic() < deadline, group.logs()
        time.sleep(0.1)
    group.wait_ready()
    assert group.tokens(PROMPT, 8) == before


def test_a_group_that_was_frozen_as_a_whole_goes_on_as_it_was(survivor: Group) -> None:
    """Longer than any heartbeat may be missing; who wakes first finds the others still stopped."""
    group = survivor
    group.wait_ready()
    before = group.tokens(PROMPT, 200)
    group.note_pids()
    pids = {service: group.pid(service) for service in ("router", "gateway", "attention", "expert_io", "drafter")}
    everybody = [group.keeper_pid, *pids.values()]
    got: list[int] = []
    is_frozen = False
    for event in group.stream(PROMPT, 200):
        assert "error" not in event, f"{event}\n{group.logs()}"
        got += event_tokens(event)
        if len(got) >= 20 and not is_frozen:
            is_frozen = True
            for pid in everybody:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(4.5)
            for pid in everybody:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.2)
    assert is_frozen
    assert got == before
    assert group.tokens(PROMPT, 12) == before[:12]
    assert {service: group.pid(service) for service in pids} == pids, group.logs()


def test_second_signal_does_not_wait_for_requests(model: Path, start_group: Callable[..., Group]) -> None:
    group = start_group(model, max_context=1024)
    stream = group.stream(PROMPT, 1000)
    next(stream)
    assert group.process is not None
    group.note_pids()
    group.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    begin = time.monotonic()
    group.process.send_signal(signal.SIGINT)
    group.process.wait(20)
    assert time.monotonic() - begin < 8
    wait_clean(group)


def test_drain_lets_a_running_answer_finish_and_refuses_new_ones(
    model: Path, start_group: Callable[..., Group]
) -> None:
    group = start_group(model)
    events = group.stream(PROMPT, 150)
    got = event_tokens(next(events))
    assert group.process is not None
    group.note_pids()
    group.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    refused = group.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert refused.status_code == 503, refused.text
    for event in events:
        got += event_tokens(event)
    assert len(got) == 150
    assert group.process.wait(20) == 0


def test_odd_and_long_run_directory_and_an_environment_at_an_odd_place(model: Path, run_dir: Path) -> None:
    """Blanks, percent signs, quotes, comment signs, other alphabets; and longer than a socket path may be."""
    odd = run_dir / "mit Leerzeichen %d 100%" / ("колибри-" * 12)
    home = run_dir / "a #b ;c %(d)s 'e\"\nf"
    venv.create(home, with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    group = Group(model, odd)
    group.argv[0] = str(home / "bin" / "python")
    group.environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with group:
        assert os.fsencode(home) in Path(f"/proc/{group.pid('router')}/cmdline").read_bytes()
        assert len(str(group.run_dir)) > 107
        assert group.status()["ready"] is True
        assert len(group.tokens(PROMPT, 3)) == 3
