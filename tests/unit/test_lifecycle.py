"""A real process with a dummy service, seen from a router's end of the control plane."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.messages import SCHEMA_VERSION, control
from shared.messages.layer import HiddenReady, Mixed
from shared.run.config import GroupConfig, freeze
from shared.run.last_words import next_incarnation, read_last_words
from shared.wire.bus import Bus
from shared.wire.control_plane import ControlServer
from shared.wire.endpoints import Endpoints

START_S = 30.0


class Router:
    """The other end: control server and data socket, and the child."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config = GroupConfig(
            run_id=os.urandom(4).hex(), run_dir=str(run_dir), model_dir="/m", host="127.0.0.1", port=1, ram_bytes=1, n_slots=2,
            slot_bytes=3, n_threads=1, kv_dtype="f32", prefill_chunk=4, pilot="on", n_drafts=0, max_sequences=1, max_context=64,
            n_kv_blocks=1, n_frames=2, logit_rows=1, heartbeat_s=0.2, drain_s=5.0,
        )  # fmt: skip
        self.endpoints = Endpoints(run_dir, self.config.run_id)
        self.endpoints.socket_dir.mkdir(parents=True)
        freeze(self.config, run_dir / "group.json")
        self.child: subprocess.Popen[str] | None = None
        self.open()

    def open(self) -> None:
        self.bus = Bus(self.endpoints, "router", 1, (HiddenReady,), peers=("attention",))
        self.server = ControlServer(self.endpoints, self.bus.context)
        self.heard: list[Any] = []
        self.identity = b""
        self.data: list[Any] = []
        self.bus.add_control(self.server, self._on_control)

    def _on_control(self) -> None:
        for identity, msg in self.server.receive_all():
            self.identity = identity
            self.heard.append(msg)

    def start(self, mode: str = "") -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.dummy_service", "--config", str(self.run_dir / "group.json")],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"DUMMY": mode},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def wait_for(self, kind: type[Any], timeout_s: float = START_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for msg in self.heard:
                if isinstance(msg, kind):
                    self.heard.remove(msg)
                    return msg
            self.data += [received.msg for received in self.bus.poll(20)]
        raise AssertionError(f"no {kind.__name__}; heard {self.heard}")

    def wait_data(self, timeout_s: float = 5.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self.data and time.monotonic() < deadline:
            self.data += [received.msg for received in self.bus.poll(20)]
        return self.data.pop(0)

    def tell(self, msg: Any) -> None:
        assert self.server.send(self.identity, msg)

    def wait_exit(self, timeout_s: float = 10.0) -> tuple[int, str]:
        assert self.child is not None
        deadline = time.monotonic() + timeout_s
        while self.child.poll() is None and time.monotonic() < deadline:
            self.data += [received.msg for received in self.bus.poll(20)]
        assert self.child.poll() is not None, "still running"
        assert self.child.stderr is not None
        return self.child.returncode, self.child.stderr.read()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    yield made
    if made.child is not None:
        made.child.kill()
        made.child.wait()
        for pipe in (made.child.stdin, made.child.stderr):
            if pipe is not None:
                pipe.close()
    made.bus.close(0)


def test_hello_then_ready_then_heartbeats_then_stop(router: Router) -> None:
    router.start()
    hello = router.wait_for(control.Hello)
    assert router.child is not None
    assert hello == control.Hello("attention", 1, router.child.pid, SCHEMA_VERSION)
    ready = router.wait_for(control.Ready)
    assert dict(ready.facts) == {"kernels": "none"}
    for _ in range(3):
        assert router.wait_for(control.Heartbeat, 2.0).state in ("ready", "starting")
    router.tell(control.Stop("test"))
    code, log = router.wait_exit()
    assert code == 0
    assert "service_stopped reason=test" in log


def test_data_is_handled_and_bad_data_does_no_harm(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    router.bus.post("attention", HiddenReady(1, 2, 3, 4))  # nothing that attention is told
    router.bus.post("attention", Mixed(1, 2, 3))
    assert router.wait_data() == HiddenReady(1, 2, 3, 0)


def test_configuration_error_ends_with_78_and_a_sentence_without_traceback(router: Router) -> None:
    router.start("bad_container")
    dead = router.wait_for(control.Dead)
    assert dead.reason == "dense-00000.safetensors is missing: convert the checkpoint again"
    code, log = router.wait_exit()
    assert code == 78
    assert "Traceback" not in log
    assert read_last_words(router.run_dir, "attention") == (78, dead.reason)


def test_bug_while_loading_ends_with_70_and_its_traceback(router: Router) -> None:
    router.start("bug")
    dead = router.wait_for(control.Dead)
    assert dead.reason == "ZeroDivisionError: division by zero"
    assert "Traceback" in dead.traceback
    assert router.wait_exit()[0] == 70


def test_fault_while_serving_sends_dead(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    router.bus.post("attention", Mixed(1, 13, 0))
    assert "layer 13 is unlucky" in router.wait_for(control.Dead).reason
    assert router.wait_exit()[0] == 70


def test_parents_death_ends_the_service(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    assert router.child is not None
    assert router.child.stdin is not None
    begin = time.monotonic()
    router.child.stdin.close()
    assert router.wait_exit()[0] == 0
    assert time.monotonic() - begin < 5


def test_ctrl_c_is_ignored_and_sigterm_ends(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    assert router.child is not None
    router.child.send_signal(signal.SIGINT)
    router.wait_for(control.Heartbeat)
    router.heard.clear()
    router.wait_for(control.Heartbeat)
    router.child.send_signal(signal.SIGTERM)
    code, log = router.wait_exit(5)
    assert code == 0
    assert "reason=SIGTERM" in log


def test_drain_waits_for_work_and_leaves_the_process_alive(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    router.bus.post("attention", Mixed(1, 14, 0))
    router.wait_data()
    router.tell(control.Drain("test", 20.0))
    with pytest.raises(AssertionError, match="no Drained"):
        router.wait_for(control.Drained, 0.6)
    router.bus.post("attention", Mixed(1, 14, 0))
    assert router.wait_for(control.Drained, 5.0) == control.Drained("attention", 0)
    router.data.clear()
    router.bus.post("attention", Mixed(2, 1, 0))
    assert router.wait_data().step == 2, "others may still need it"
    assert router.child is not None
    router.child.send_signal(signal.SIGTERM)
    assert router.wait_exit(5)[0] == 0


def test_drain_cuts_at_its_deadline(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    router.bus.post("attention", Mixed(1, 14, 0))
    router.wait_data()
    router.tell(control.Drain("test", 0.5))
    assert router.wait_for(control.Drained, 5.0) == control.Drained("attention", 1)


def test_peer_changed_is_passed_on_only_when_a_known_peer_was_replaced(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    for incarnation in (1, 1, 2, 1):
        router.tell(control.PeerChanged("expert_io", incarnation))
    time.sleep(0.2)
    router.bus.post("attention", Mixed(1, 2, 3))
    assert router.wait_data() == HiddenReady(1, 2, 3, 1)


def test_new_router_gets_hello_and_ready_again(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    router.bus.close(0)
    time.sleep(0.5)
    router.open()
    assert router.wait_for(control.Hello, 3.0).incarnation == 1
    assert router.wait_for(control.Ready, 3.0).incarnation == 1


def test_incarnation_grows_with_each_start(router: Router) -> None:
    for incarnation in (1, 2):
        router.heard.clear()
        router.start()
        assert router.wait_for(control.Hello).incarnation == incarnation
        assert router.child is not None
        router.child.kill()
        router.child.wait()
        for pipe in (router.child.stdin, router.child.stderr):
            assert pipe is not None
            pipe.close()
        router.child = None
    assert next_incarnation(router.run_dir, "attention") == 3
    (router.run_dir / "incarnation" / "attention").write_text("garbage")
    assert next_incarnation(router.run_dir, "attention") == 1


def test_long_call_is_silence_not_death(router: Router) -> None:
    router.start()
    router.wait_for(control.Ready)
    router.bus.post("attention", Mixed(1, 15, 0))
    time.sleep(0.3)
    router.bus.poll(0)
    router.heard.clear()
    with pytest.raises(AssertionError, match="no Heartbeat"):
        router.wait_for(control.Heartbeat, 0.8)
