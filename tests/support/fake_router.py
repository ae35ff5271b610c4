"""A made-up router on the real bus, and the gateway as a real process: for tests of everything in front of the engine."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from shared.messages import control
from shared.messages.gateway import GroupState, RequestAccepted, RequestDone, RequestRefused, TokenLogprob, TokenOut
from shared.messages.router import Abort, Submit
from shared.run.config import GroupConfig, freeze
from shared.wire.bus import Bus
from shared.wire.control_plane import ControlServer
from shared.wire.endpoints import Endpoints
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
HTTP = httpx2.Client(timeout=20, limits=httpx2.Limits(max_connections=None))
"""Shared, because making a client reads certificates, which takes longer than most tests."""
_incarnations = itertools.count(1)


class FakeRouter:
    """Answers like a router. The text of the prompt says what to do: ``say X`` (one token a character), ``slow X`` (one every
    20 ms), ``hang``, ``wait`` (accepted by ``release``), ``fail``, ``long``, ``full``."""

    def __init__(self, endpoints: Endpoints, *, is_ready: bool = True, url: str = "") -> None:
        self.incarnation = next(_incarnations)
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.said: list[Any] = []
        self.is_ready = is_ready
        self.is_mute = False
        self.die_after: int | None = None
        self.on_submit: Callable[[], None] = lambda: None
        self._url = url
        self._endpoints = endpoints
        self._waiting: list[Submit] = []
        self._later: list[tuple[float, str, Callable[[], None]]] = []
        self._stop = threading.Event()
        self._drain: control.Drain | None = None
        self._born = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._born.wait(5)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def release(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._later.extend(
            (0.0, submit.request, functools.partial(self._answer, submit, "released", 0.0)) for submit in waiting
        )

    def drain_gateway(self, deadline_s: float) -> None:
        self._drain = control.Drain("test", deadline_s)

    def _run(self) -> None:
        bus = self._bus = Bus(self._endpoints, "router", self.incarnation, (Submit, Abort), peers=("gateway",))
        server = ControlServer(self._endpoints, bus.context)
        self._born.set()
        gateway: bytes | None = None
        next_state = 0.0
        try:
            while not self._stop.is_set():
                now = time.monotonic()
                if now >= next_state and not self.is_mute:
                    services = (("router", "ready", os.getpid(), self.incarnation),)
                    detail = "serving" if self.is_ready else "attention is loading layer 3"
                    bus.send(
                        "gateway", GroupState(self.is_ready, detail, "fake", 100, 0, 0, self.incarnation, services)
                    )
                    next_state = now + 0.05
                for identity, msg in server.receive_all():
                    if isinstance(msg, control.StatusWanted):
                        facts = (("url", self._url),)
                        services = (control.ServiceStatus("gateway", "ready", 0, 1, 0.0, "", facts),)
                        server.send(identity, control.Status(self.is_ready, "serving", 0, 0, services))
                        continue
                    self.said.append(msg)
                    gateway = identity
                if self._drain is not None and gateway is not None:
                    server.send(gateway, self._drain)
                    self._drain = None
                due = [later for later in self._later if later[0] <= now]
                self._later = [later for later in self._later if later[0] > now]
                for _, _, action in due:
                    action()
                for received in bus.poll(2):
                    self._handle(received.msg)
        finally:
            bus.close(50)

    def _handle(self, msg: Any) -> None:
        if isinstance(msg, Abort):
            self.aborts.append(msg)
            self._later = [later for later in self._later if later[1] != msg.request]
            return
        self.submits.append(msg)
        self.on_submit()
        if msg.messages_json is not None:
            prompt = json.loads(msg.messages_json)[-1]["content"]
        else:
            prompt = msg.prompt if msg.prompt is not None else "say ids"
        verb, _, text = prompt.partition(" ")
        if verb == "long":
            message = "the prompt has 200 tokens but the context holds 100"
            self._send(RequestRefused(msg.request, 400, "context_length_exceeded", message, "messages"))
        elif verb == "full":
            self._send(RequestRefused(msg.request, 429, "queue_full", "2 requests wait already"))
        elif verb == "wait":
            self._waiting.append(msg)
        elif verb == "hang":
            self._send(RequestAccepted(msg.request, 3, 50))
        elif verb == "fail":
            self._send(RequestAccepted(msg.request, 3, 50))
            self._send(TokenOut(msg.request, 0, (1,), "half "))
            self._send(
                RequestDone(msg.request, "error", 3, 1, error_code="non_finite", error="layer 3, expert 17: NaN")
            )
        else:
            self._answer(msg, text, 0.02 if verb == "slow" else 0.0)

    def _answer(self, submit: Submit, text: str, delay_s: float) -> None:
        limit = min(submit.max_tokens or 97, 97)
        ids = submit.prompt_ids or tuple(range(3))
        self._send(RequestAccepted(submit.request, len(ids), limit, ids if submit.want_prompt_ids else ()))
        n = len(submit.resume_ids)
        assert submit.resume_ids == tuple(map(ord, text[:n]))
        steps: list[Any] = []
        for index, char in enumerate(text[:limit]):
            if index < n:
                continue
            logprobs: tuple[TokenLogprob, ...] = ()
            if submit.n_logprobs is not None:
                piece = char.encode()
                top = tuple((ord(char) + k, -0.1 - k, piece if not k else b"?") for k in range(submit.n_logprobs))
                logprobs = (TokenLogprob(ord(char), -0.1, piece, top),)
            steps.append(TokenOut(submit.request, index, (ord(char),), char, logprobs))
        reason = "length" if len(text) > limit else "stop"
        steps.append(RequestDone(submit.request, reason, len(ids), min(len(text), limit), n_draft=4, n_accepted=3))
        for k, step in enumerate(steps):
            if self.die_after is not None and k >= self.die_after:
                return
            if not delay_s:
                self._send(step)
                continue

            at = time.monotonic() + delay_s * (k + 1)
            self._later.append((at, submit.request, functools.partial(self._send, step)))

    def _send(self, msg: Any) -> None:
        deadline = time.monotonic() + 5
        while not self._bus.send("gateway", msg):
            assert time.monotonic() < deadline
            time.sleep(0.005)


class GatewayProcess:
    """``python -m services.gateway`` with its run directory. ``n_files``: its limit of open descriptors."""

    def __init__(self, run_dir: Path, port: int = 0, n_files: int | None = None, **fields: Any) -> None:
        run_dir.mkdir(mode=0o700, exist_ok=True)
        self.run_dir = run_dir
        run_id = fields.pop("run_id", "gwtest")
        self.endpoints = Endpoints(run_dir, run_id)
        self.endpoints.socket_dir.mkdir(mode=0o700, exist_ok=True)
        values: dict[str, Any] = {
            "run_id": run_id, "run_dir": str(run_dir), "model_dir": "", "host": "127.0.0.1", "port": port, "ram_bytes": 0,
            "n_slots": 0, "slot_bytes": 0, "n_threads": 1, "kv_dtype": "f32", "prefill_chunk": 1, "pilot": "off", "n_drafts": 0,
            "max_sequences": 1, "max_context": 100, "n_kv_blocks": 1, "n_frames": 1, "logit_rows": 1, "heartbeat_s": 0.1,
        }  # fmt: skip
        config = msgspec.convert(values | fields, GroupConfig)
        freeze(config, run_dir / "group.json")
        self.log_path = run_dir / "gateway.log"
        limit = [] if n_files is None else ["prlimit", f"--nofile={n_files}:{n_files}"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*limit, sys.executable, "-m", "services.gateway", "--config", str(run_dir / "group.json")],
                cwd=ROOT, stdin=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.url = ""

    def wait_url(self) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for line in self.log_path.read_text().splitlines():
                if " service_ready " in line:
                    self.url = line.partition("url=")[2].split()[0]
                    return self.url
            assert self.process.poll() is None, self.log_path.read_text()
            time.sleep(0.02)
        raise AssertionError("the gateway did not start: " + self.log_path.read_text())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)
        assert self.process.stdin is not None
        self.process.stdin.close()


def await_ready(gateway: GatewayProcess, router: FakeRouter) -> None:
    def is_there() -> bool:
        body = HTTP.get(gateway.url + "/health/ready").json()
        return body["is_ready"] and body["services"][0]["incarnation"] == router.incarnation

    wait_for(is_there, "the gateway to see the router")
