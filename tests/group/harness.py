"""A real process group under test: started through ``colibri-up`` in a private run directory, driven over HTTP.

``Group`` starts, asks, kills and stops; ``leftovers`` says what a group left behind (processes, segments, sockets, files).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from shared.machine.processes import children_of

UP = (sys.executable, "-m", "deploy.up")
START_TIMEOUT_S = 90.0
KEPT = {"lock", "log"}
"""What may stay in a run directory: the lock file (not the lock) and the logs."""


class Group:
    """One group. ``options`` are settings of colibri-up by their flag's name: ``slots=9, draft="off"``.

    ``history``: whether it learns from earlier groups; most tests want a store that starts empty.
    """

    def __init__(self, model: Path, run_dir: Path, *, history: bool = False, **options: Any) -> None:
        self.run_dir = run_dir
        flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        if "port" not in options:
            flags += ["--port", "0"]
        if not history:
            flags.append("--no-usage-history")
        self.argv = [*UP, str(model), "--run-dir", str(run_dir), *flags]
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.run_id = ""
        self.output = run_dir.with_name(run_dir.name + ".out")
        self.seen_pids: set[int] = set()

    # -- life

    def start(self) -> Group:
        """Starts in the foreground and waits until it is ready. Fails with colibri-up's own output."""
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                text=True,
                env=os.environ | self.environment,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready after" not in self.said:
            if self.process.poll() is not None:
                raise AssertionError(f"colibri-up ended with {self.process.returncode}:\n{self.said}\n{self.logs()}")
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"not ready after {START_TIMEOUT_S:.0f} s:\n{self.said}\n{self.logs()}")
            time.sleep(0.02)
        config = json.loads((self.run_dir / "group.json").read_text())
        self.url = f"http://{config['host']}:{config['port']}"
        self.run_id = config["run_id"]
        self.note_pids()
        return self

    @property
    def said(self) -> str:
        """What colibri-up printed so far."""
        with contextlib.suppress(OSError):
            return self.output.read_text()
        return ""

    def stop(self, sig: int = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Asks colibri-up to end, waits; returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.note_pids()
            self.process.send_signal(sig)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(
                f"still running {timeout_s:.0f} s after the signal:\n{self.said}\n{self.logs()}"
            ) from None

    def kill_all(self) -> None:
        """For a test that failed: nothing may go on running."""
        self.note_pids()
        for pid in (self.process.pid if self.process else 0, *self.seen_pids):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.wait()

    def __enter__(self) -> Group:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.kill_all()
            return
        code = self.stop()
        assert code == 0, f"exit {code}:\n{self.said}\n{self.logs()}"
        wait_clean(self)

    # -- processes

    def processes(self) -> dict[str, Any]:
        """The keeper's record."""
        try:
            return json.loads((self.run_dir / "processes.json").read_text())
        except (OSError, ValueError):
            return {}

    def note_pids(self) -> None:
        found = self.processes()
        pids = {int(entry["pid"]) for entry in found.get("services", {}).values() if entry.get("pid")}
        self.seen_pids |= pids.union(*map(children_of, pids))
        if found.get("keeper"):
            self.seen_pids.add(int(found["keeper"][0]))

    def pid(self, service: str) -> int:
        """The service's current process."""
        return int(self.processes()["services"][service]["pid"])

    @property
    def keeper_pid(self) -> int:
        return int(self.processes()["keeper"][0])

    def kill(self, service: str, sig: int = signal.SIGKILL) -> int:
        """Sends a signal to the service; returns the pid it had."""
        self.note_pids()
        pid = self.pid(service)
        os.kill(pid, sig)
        return pid

    def status(self) -> dict[str, Any]:
        """``colibri-up --status --json``."""
        command = [*UP, "--run-dir", str(self.run_dir), "--status", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def wait_ready(self, timeout_s: float = 20.0) -> float:
        """Waits until HTTP says ready; returns the seconds."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/health/ready", timeout=2).status_code == 200:
                    self.note_pids()
                    return time.monotonic() - begin
            time.sleep(0.05)
        raise AssertionError(f"not ready again after {timeout_s:.0f} s:\n{self.said}\n{self.logs()}")

    def wait_replaced(self, service: str, old_pid: int, timeout_s: float = 20.0) -> dict[str, Any]:
        """Waits until another process than ``old_pid`` is ready as this service; returns its entry of the status."""
        deadline = time.monotonic() + timeout_s
        while True:
            found: dict[str, Any] = {entry["name"]: entry for entry in self.status()["services"]}[service]
            if found["state"] == "ready" and found["pid"] != old_pid:
                return found
            assert time.monotonic() < deadline, f"{found}\n{self.logs()}"
            time.sleep(0.05)

    def logs(self, n_lines: int = 25) -> str:
        """The ends of all logs, for messages of failing tests."""
        parts = []
        for path in sorted((self.run_dir / "log").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-n_lines:]
            parts.append(f"--- {path.name}\n" + "\n".join(lines))
        return "\n".join(parts)

    # -- requests

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=timeout_s)

    def complete(
        self, prompt: list[int] | str, max_tokens: int, timeout_s: float = 60.0, **more: Any
    ) -> dict[str, Any]:
        """One completion by token ids; returns the choice (``token_ids``, ``finish_reason``, ``text``)."""
        answer = self.post("/v1/completions", completion_body(prompt, max_tokens, **more), timeout_s)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}\n{self.logs()}"
        return dict(answer.json()["choices"][0])

    def tokens(self, prompt: list[int] | str, max_tokens: int, **more: Any) -> list[int]:
        """The generated ids."""
        return list(self.complete(prompt, max_tokens, **more)["token_ids"])

    def stream(
        self, prompt: list[int] | str, max_tokens: int, timeout_s: float = 60.0, **more: Any
    ) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion as they come (``[DONE]`` left out)."""
        body = completion_body(prompt, max_tokens, stream=True, **more)
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=body, timeout=timeout_s) as answer:
            assert answer.status_code == 200, answer.read().decode()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])


def completion_body(prompt: list[int] | str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Greedy, with ids, to the full length, unless ``more`` says otherwise."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | more


def event_tokens(event: dict[str, Any]) -> list[int]:
    """The token ids in one streamed event."""
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]


def leftovers(group: Group) -> list[str]:
    """What is still there of a group that should be gone; empty is clean."""
    found = [f"process {pid}" for pid in sorted(group.seen_pids) if _is_ours(pid)]
    found += [str(path) for path in Path("/dev/shm").glob(f"colibri-{os.getuid()}-{group.run_id}*")]
    found += [str(path) for path in group.run_dir.iterdir() if path.name not in KEPT]
    found += [str(path) for path in Path("/tmp").glob(f"colibri-{os.getuid()}-{group.run_id}")]
    return found


def wait_clean(group: Group, timeout_s: float = 5.0) -> None:
    """Asserts that within the time nothing of the group is left."""
    deadline = time.monotonic() + timeout_s
    while found := leftovers(group):
        assert time.monotonic() < deadline, f"left behind: {found}\n{group.said}\n{group.logs()}"
        time.sleep(0.05)


def _is_ours(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"services." in command or b"deploy." in command


def run_up(*argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``colibri-up`` to its end."""
    return subprocess.run([*UP, *argv], capture_output=True, text=True, timeout=timeout_s, check=False)
