"""Talking to a group: find the one that runs in a directory, send it a request, read the stream. Standard library HTTP.

Used by the command line and by programs that measure a running group. Imports no service and no numpy.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.awake import Countdown
from shared.errors import ColibriError, ConfigError
from shared.messages.control import Status, StatusWanted
from shared.run.address import url_of
from shared.run.config import FROZEN_NAME, GroupConfig, load_frozen
from shared.wire.control_plane import ControlClient
from shared.wire.endpoints import GATEWAY, Endpoints

CONNECT_TIMEOUT_S = 10.0
SEND_BYTES = 1 << 16
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
            if parts.scheme not in ("http", "https") or not parts.hostname or not parts.netloc.isprintable():
                raise ValueError
            if " " in parts.netloc or not parts.hostname.encode("idna"):
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
        """Sends a streaming request; yields text as it comes ("" for a token without), fills ``answer``. Raises ServerError."""
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
        connection = _connection_to(self._host, self._port, timeout_s, is_https=self._is_https)
        try:
            yield connection
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> ServerError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ServerError(f"no answer from the server at {self.url}: {reason}")


class _Patient:
    """A socket whose time limit is one of silence while this program runs: a suspended machine is no silent server."""

    def recv_into(self: Any, *arguments: Any) -> int:
        pending = getattr(self, "pending", None)  # TLS may hold what the descriptor no longer shows
        if not (pending and pending()):
            _wait_for(self, select.POLLIN)
        return int(super().recv_into(*arguments))  # type: ignore[misc]

    def sendall(self: Any, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            _wait_for(self, select.POLLOUT)
            view = view[self.send(view[:SEND_BYTES], flags) :]


class _PatientSocket(_Patient, socket.socket):
    pass


def _wait_for(patient: socket.socket, event: int) -> None:
    poller = select.poll()
    poller.register(patient, event)
    limit = Countdown(patient.gettimeout() or SILENCE_TIMEOUT_S)
    while not poller.poll(limit.step_s * 1000):
        if limit.is_over:
            raise TimeoutError("timed out")


def _connection_to(host: str, port: int | None, timeout_s: float, *, is_https: bool) -> http.client.HTTPConnection:
    if is_https:
        import ssl

        context = ssl.create_default_context()
        context.sslsocket_class = type("_PatientTls", (_Patient, ssl.SSLSocket), {})
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    return _Connection(host, port, timeout=timeout_s)


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        timeout_s = self.sock.gettimeout()
        self.sock = _PatientSocket(fileno=self.sock.detach())
        self.sock.settimeout(timeout_s)


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


# ---- finding a group --------------------------------------------------------------------------------------------------


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
    return config, url_of(config.host, config.port)


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
