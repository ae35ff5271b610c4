"""Talking to a group from the command line: find it or start it, send a request, read the stream. Standard library HTTP.

Used by ``colibri run``, ``chat`` and ``profile``. Imports no service and no numpy. Text goes to the terminal as UTF-8
wherever the terminal does not clearly say otherwise, and never raises an encoding error.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO
from urllib.parse import urlsplit

from shared.bus import ControlClient
from shared.config import FROZEN_NAME, GroupConfig, is_locked, load_frozen
from shared.endpoints import GATEWAY, Endpoints, default_run_dir
from shared.errors import ColibriError, ConfigError
from shared.messages.control import Status, StatusWanted

CONNECT_TIMEOUT_S = 10.0
START_WAIT_S = 600.0
"""How long a group that somebody else starts may take; a large model takes minutes."""
SILENCE_TIMEOUT_S = 60.0
"""The server sends a comment every ten seconds while it works; longer silence means it is gone."""


class ServerError(ColibriError):
    """The server's own sentence for why there is no answer. ``status`` is 0 when the stream broke off."""

    def __init__(self, message: str, *, status: int = 0, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(slots=True)
class Answer:
    """What came back. Grows while the stream is read."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    seed: int | None = None
    drafts: dict[str, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    """Filled when the request asked for them."""
    first_token_s: float = 0.0
    n_first: int = 1
    """Tokens that came with the first event: the server joins those that are ready together."""
    total_s: float = 0.0

    @property
    def n_prompt(self) -> int:
        return self.usage.get("prompt_tokens", 0)

    @property
    def n_generated(self) -> int:
        return self.usage.get("completion_tokens", 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "seed": self.seed,
            "drafts": self.drafts,
            "token_ids": self.token_ids,
            "first_token_s": self.first_token_s,
            "total_s": self.total_s,
        }

    def summary(self) -> str:
        """One line for people."""
        if self.finish_reason is None:
            return f"stopped before its end; first text after {self.first_token_s:.2f} s, seed {self.seed}"
        after_first = self.total_s - self.first_token_s
        speed = (
            f", {(self.n_generated - self.n_first) / after_first:.1f} tokens/s"
            if self.n_generated > self.n_first and after_first > 0
            else ""
        )
        return (
            f"{self.n_prompt} prompt tokens, {self.n_generated} generated{speed}, first after {self.first_token_s:.2f} s,"
            f" ended by {self.finish_reason}, seed {self.seed}"
        )


class Client:
    """One server. A connection per request, so that leaving a stream is closing it, which stops the server's work."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            port = parts.port
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{url!r} is not the address of a server; it looks like http://127.0.0.1:8484") from None
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port

    def get(self, path: str) -> tuple[int, Any]:
        """(status, parsed body). Raises ServerError when nobody answers."""
        with self._connection(CONNECT_TIMEOUT_S) as connection:
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, _parse(response.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from None

    def stream(self, path: str, body: dict[str, Any], answer: Answer) -> Generator[str, None, None]:
        """Sends a streaming request; yields text as it comes ("" for a token without) and fills ``answer``. Raises ServerError."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began = time.monotonic()
        with self._connection(SILENCE_TIMEOUT_S) as connection:
            try:
                data = json.dumps(body).encode()
                connection.request("POST", path, data, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    raise _error_of(response.status, response.read())
                is_complete = False
                for event in _events(response):
                    if event == "[DONE]":
                        is_complete = True
                        break
                    n_before = len(answer.token_ids)
                    text = _take(_parse(event.encode()), answer)
                    if not answer.first_token_s and (text or len(answer.token_ids) > n_before):
                        answer.first_token_s = time.monotonic() - began
                        answer.n_first = max(1, len(answer.token_ids))
                    answer.text += text
                    if text or len(answer.token_ids) > n_before:
                        yield text
                answer.total_s = time.monotonic() - began
            except TimeoutError:
                raise ServerError(f"the server at {self.url} has been silent for {SILENCE_TIMEOUT_S:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                if answer.seed is None:
                    raise self._unreachable(error) from None
                raise ServerError(f"the connection to {self.url} broke; the answer is incomplete ({error})") from None
        if not is_complete:
            raise ServerError("the stream ended without its end marker; the answer is incomplete")

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            yield connection
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> ServerError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ServerError(f"no answer from the server at {self.url}: {reason}")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of server-sent events; comments and other fields are skipped."""
    data: list[str] = []
    while line := response.readline():
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data.clear()


def _take(chunk: Any, answer: Answer) -> str:
    """Notes what a chunk says; returns its text."""
    if not isinstance(chunk, dict):
        raise ServerError(f"the server sent something else than an answer: {str(chunk)[:200]}")
    if "error" in chunk:
        error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": str(chunk["error"])}
        raise ServerError(str(error.get("message")), code=error.get("code"))
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    if chunk.get("seed") is not None:
        answer.seed = chunk["seed"]
    if chunk.get("drafts"):
        answer.drafts = chunk["drafts"]
    text = ""
    for choice in chunk.get("choices", ()):
        answer.token_ids += choice.get("token_ids") or ()
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return text


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


def _error_of(status: int, body: bytes) -> ServerError:
    """The server's error body in its own words, whatever its form."""
    parsed = _parse(body)
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict):
        return ServerError(f"{error.get('message')} (HTTP {status})", status=status, code=error.get("code"))
    return ServerError(f"HTTP {status}: {str(parsed)[:1000]}", status=status)


# ---- finding and starting a group ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """A server to talk to. ``run_dir`` is known for a group of this machine only."""

    client: Client
    run_dir: Path | None
    is_ours: bool = False
    """We started it, so we stop it."""


@contextlib.contextmanager
def open_session(
    url: str | None,
    run_dir: str | None,
    model: str | None,
    *,
    may_start: bool = True,
    record_routing: str | None = None,
) -> Iterator[Session]:
    """The group at ``url``, else the one of ``run_dir``, else a new one that is stopped at the end. Raises ConfigError.

    ``record_routing``: the trace file of a group that is started here; one that runs already can't begin to record.
    """
    if record_routing is not None:
        record_routing = str(Path(record_routing).expanduser().absolute())
    if url is not None:
        if record_routing is not None:
            raise ConfigError("a server elsewhere can't be told to record; start it with colibri-up --record-routing")
        yield Session(Client(url), Path(run_dir).expanduser() if run_dir else None)
        return
    directory = Path(run_dir).expanduser().absolute() if run_dir else default_run_dir()
    found = _await_group(directory)
    if found is not None:
        if model and Path(model).resolve() != Path(found[0].model_dir).resolve():
            raise ConfigError(
                f"the group in {directory} runs {found[0].model_dir}, not {model};"
                f" stop it with colibri-up --stop, or choose another --run-dir"
            )
        if record_routing not in (None, found[0].record_routing):
            raise ConfigError(
                f"the group in {directory} runs without --record-routing {record_routing}; stop it with colibri-up --stop,"
                " or choose another --run-dir"
            )
        yield Session(Client(found[1]), directory)
        return
    if not may_start:
        raise ConfigError(f"no group is running in {directory}; start one with colibri-up")
    flags = ["--record-routing", record_routing] if record_routing else []
    with _own_group(directory, [*flags, *([model] if model else [])]) as url:
        yield Session(Client(url), directory, is_ours=True)


def _await_group(directory: Path) -> tuple[GroupConfig, str] | None:
    """``find_group``, but a group that is still starting there is waited for."""
    deadline = time.monotonic() + START_WAIT_S
    is_told = False
    while True:
        found = find_group(directory)
        if found is not None and _can_answer(found[0]):
            return found
        if not is_locked(directory) or time.monotonic() > deadline:
            return found
        if not is_told:
            sys.stderr.write(f"waiting for the group that is starting in {directory} ...\n")
            is_told = True
        time.sleep(0.2)


def _can_answer(config: GroupConfig) -> bool:
    """Whether waiting is useless: it is ready, or on its way out and will say so itself."""
    status = ask_status(config)
    return status is not None and (status.is_ready or any(s.state == "draining" for s in status.services))


@contextlib.contextmanager
def _own_group(directory: Path, arguments: list[str]) -> Iterator[str]:
    """A group that lives as long as this block, and ends too when this process is killed. Yields its address."""
    # Any free port: the group is ours alone and must not meet one of another run directory.
    up = [sys.executable, "-m", "deploy.up", "--run-dir", str(directory), "--port", "0", *arguments]
    process = subprocess.Popen(
        up,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours: it may only stop an answer
        preexec_fn=_end_with_parent(),
    )
    ready = threading.Event()
    relay = threading.Thread(target=_relay, args=(process.stdout, ready), daemon=True)
    relay.start()
    old_handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        while not ready.wait(0.05):
            if process.poll() is not None:
                relay.join(5)
                raise _StartFailed("the group could not be started (its words are above)", process.returncode or 70)
        found = find_group(directory)
        if found is None:
            raise ConfigError(f"colibri-up reported success but no group answers in {directory}")
        yield found[1]
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        _stop_process(process)


def _end_with_parent() -> Callable[[], None] | None:
    """For the child, before exec: the kernel sends it SIGTERM when this process is gone."""
    try:
        from native.memory import die_with_parent
    except (ImportError, OSError):  # kernels not built: then only an orderly end stops the group
        return None
    return functools.partial(die_with_parent, signal.SIGTERM)


def _relay(source: IO[bytes] | None, ready: threading.Event) -> None:
    """colibri-up's progress, on standard error until it is ready; what it says later is about a terminal it has not got."""
    assert source is not None
    for line in source:
        if not ready.is_set():
            with contextlib.suppress(OSError):
                sys.stderr.write(line.decode("utf-8", "replace"))
                sys.stderr.flush()
            if line.startswith(b"ready "):
                ready.set()


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    """The first SIGTERM lets it drain and stop; nothing of ours is running any more, so that is quick."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


class _StartFailed(ColibriError):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def find_group(run_dir: Path) -> tuple[GroupConfig, str] | None:
    """(its frozen configuration, its address) of the group that runs in ``run_dir``; None when none answers."""
    if not (run_dir / FROZEN_NAME).is_file():
        return None
    config = load_frozen(run_dir / FROZEN_NAME)
    status = ask_status(config)
    if status is None:
        return None
    for service in status.services:
        if service.service == GATEWAY:
            url = dict(service.facts).get("url")
            if url:
                return config, url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return config, f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def ask_status(config: GroupConfig, timeout_s: float = 2.0) -> Status | None:
    """The group as its router sees it; None when no router answers."""
    endpoints = Endpoints(config.run_dir, config.run_id)
    if not (endpoints.socket_dir / "control").exists():
        return None
    control = ControlClient(endpoints)
    try:
        status = control.ask(StatusWanted(), Status, timeout_s)
    finally:
        control.close(0)
    return status if isinstance(status, Status) else None


# ---- terminals ----------------------------------------------------------------------------------------------------------


def make_streams_safe() -> None:
    """Standard streams never raise an encoding error; a file, a pipe or a C locale gets UTF-8."""
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        name = (stream.encoding or "ascii").lower().replace("_", "-")
        is_plain = name in ("ascii", "us-ascii", "ansi-x3.4-1968", "646") or not _is_terminal(stream)
        reconfigure(encoding="utf-8" if is_plain else None, errors="replace")


def clean_text(text: str) -> str:
    """Text from the command line without the placeholders Python uses for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def can_show(text: str, stream: TextIO | None = None) -> bool:
    """Whether a decoration can be shown as it is."""
    target = stream or sys.stdout
    try:
        text.encode(target.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def write_text(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8"))
    sys.stdout.flush()
