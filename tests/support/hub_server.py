"""A hub for tests: the routes of huggingface.co that fetching a model uses, on a real socket, with faults on order.

``HubServer`` serves one repository from a directory. ``faults`` maps (file, n-th request of it) to what goes wrong then;
``log`` has every request for a file, and how many bytes were sent of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO = "birds/tiny"
COMMIT = "c0ffee" * 6 + "abcd"
TOKEN = "hf_test_token"


@dataclass
class Fault:
    """``status``, with ``code``: answered instead of the file. ``cut``: the connection ends after so many bytes."""

    status: int = 0
    code: str = ""
    cut: int = -1
    flip: bool = False
    """One bit of what is sent is another."""
    drop_s: float = 0.0
    """Seconds of silence before each piece of 4 KiB."""


@dataclass
class Sent:
    """A request for a file's bytes and how many of them were sent."""

    file: str
    start: int
    is_to_the_end: bool
    n_bytes: int = 0


@dataclass
class HubServer:
    """A context manager: listens while it is open. ``needs_token``: everything is 401 without the token."""

    directory: Path
    commit: str = COMMIT
    needs_token: bool = False
    knows_ranges: bool = True
    has_checksums: bool = True
    has_sizes: bool = True
    faults: dict[tuple[str, int], Fault] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    on_bytes: Callable[[int], None] = lambda _: None
    """Told of the bytes of shards that were sent so far, now and then."""
    log: list[Sent] = field(default_factory=list)
    redirect_to: str = ""
    """Where large files are really had from, as at the hub: another server."""
    authorizations: set[str] = field(default_factory=set)
    """What requests for files came with."""
    refusals: dict[str, Fault] = field(default_factory=dict)
    """Beginning of a path -> the answer to everything below it."""

    def __enter__(self) -> HubServer:
        self._lock = threading.Lock()
        self._n_requests: dict[str, int] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def move_away(self) -> None:
        """Once it has ended: its address is one where nobody listens, for sure."""
        self._server.server_address = ("127.0.0.1", 9)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fetched(self, file: str) -> int:
        """Bytes of a file that were sent, those of its beginning alone (a header) left out."""
        return sum(sent.n_bytes for sent in self.log if sent.file == file and sent.is_to_the_end)

    def fault_of(self, file: str) -> Fault:
        with self._lock:
            n = self._n_requests[file] = self._n_requests.get(file, -1) + 1
        return self.faults.get((file, n)) or self.always.get(file) or Fault()

    def sent(self, entry: Sent, n_bytes: int) -> None:
        with self._lock:
            entry.n_bytes += n_bytes
            total = sum(sent.n_bytes for sent in self.log if sent.file.endswith(".safetensors"))
        self.on_bytes(total)

    def listing(self) -> dict[str, Any]:
        files = []
        for path in sorted(self.directory.rglob("*")):
            if path.is_file():
                entry: dict[str, Any] = {"rfilename": path.relative_to(self.directory).as_posix()}
                if self.has_sizes:
                    entry["size"] = path.stat().st_size
                    entry |= self._checksums(path) if self.has_checksums else {}
                files.append(entry)
        return {"id": REPO, "sha": self.commit, "siblings": files, "private": False, "tags": [], "downloads": 0}

    def _checksums(self, path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        found: dict[str, Any] = {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
        if path.suffix == ".safetensors":
            found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return found

    def etag(self, path: Path) -> str:
        found = self._checksums(path)
        return str(found["lfs"]["sha256"] if "lfs" in found else found["blobId"])


def _handler_of(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._answer(has_body=True)

        def _answer(self, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            for begin, fault in hub.refusals.items():
                if path.startswith(begin):
                    return self._refuse(fault)
            if hub.needs_token and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._refuse(Fault(401, "RepoNotFound"))
            if match := re.fullmatch(rf"/api/models/{REPO}(?:/revision/(.+))?", path):
                if match[1] not in (None, "main", "v1", hub.commit):
                    return self._refuse(Fault(404, "RevisionNotFound"))
                return self._send_json(hub.listing())
            if match := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
                if match[1] != hub.commit:
                    return self._refuse(Fault(404, "RevisionNotFound"))
                if not (hub.directory / match[2]).is_file():
                    return self._refuse(Fault(404, "EntryNotFound"))
                return self._send_file(match[2], has_body)
            return self._refuse(Fault(404, "RepoNotFound"))

        def _refuse(self, fault: Fault) -> None:
            self.send_response(fault.status)
            if fault.code:
                self.send_header("X-Error-Code", fault.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, name: str, has_body: bool) -> None:
            path = hub.directory / name
            data = path.read_bytes()
            hub.authorizations.add(self.headers.get("Authorization", ""))
            if hub.redirect_to and path.suffix == ".safetensors":
                self.send_response(302)
                self.send_header("Location", hub.redirect_to + self.path)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            fault = hub.fault_of(name) if has_body else Fault()
            if fault.status:
                return self._refuse(fault)
            start, stop = 0, len(data)
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            is_range = bool(asked) and hub.knows_ranges
            if asked and is_range:
                start, stop = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
            self.send_response(206 if is_range else 200)
            if is_range:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{hub.etag(path)}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.end_headers()
            if has_body:
                self._send_bytes(Sent(name, start, stop == len(data)), data[start:stop], fault)

        def _send_bytes(self, entry: Sent, data: bytes, fault: Fault) -> None:
            hub.log.append(entry)
            if fault.flip:
                data = data[:-1] + bytes([data[-1] ^ 1])
            is_cut = 0 <= fault.cut < len(data)
            left = data[: fault.cut] if is_cut else data
            step = 4096 if fault.drop_s else 1 << 16
            for at in range(0, len(left), step):
                time.sleep(fault.drop_s)
                piece = left[at : at + step]
                self.wfile.write(piece)
                self.wfile.flush()
                hub.sent(entry, len(piece))
            if is_cut:
                self.close_connection = True
                self.connection.shutdown(2)

    return Handler
