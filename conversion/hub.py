"""A model at a Hugging Face hub: its files at one commit, in pieces or whole, compared with the checksums that the hub gives.

The one place that speaks to a hub. Which one (HF_ENDPOINT) and as whom (HF_TOKEN, or a login that is kept) huggingface_hub
knows. What may pass (a broken connection, a server's fault) is tried again, until several tries in a row brought nothing.
Run by ``colibri convert`` and ``colibri estimate``.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx2
import msgspec
from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from shared.container.safetensors_file import FileHeader, header_from
from shared.errors import CapacityError, ContainerError, DownloadError
from shared.files import open_file
from shared.kept import put_in_place

DEFAULT_REVISION = "main"
_NAME = re.compile(r"hf:/*((?:[\w.-]+/)?[\w.-]+)(?:@([^\s@]+))?/?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BEGIN_BYTES = 128 << 10
"""Fetched of a shard to have its header at once, as a rule."""
_PIECE_BYTES = 1 << 20
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_LONGEST_WAIT_S = 60.0
_MAY_PASS = (408, 425, 429)

Result = TypeVar("Result")


class HubName(msgspec.Struct, frozen=True):
    """``hf:ORG/NAME[@REV]``. ``revision``: a branch, a tag or a commit."""

    repo: str
    revision: str = DEFAULT_REVISION

    @staticmethod
    def of(text: str) -> HubName:
        """ContainerError when it is no such name."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ContainerError(
                f"{text} names no model: hf:ORG/NAME or hf:ORG/NAME@REVISION is expected, for example hf:zai-org/GLM-5.2."
            )
        return HubName(match[1], match[2] or DEFAULT_REVISION)

    @property
    def is_commit(self) -> bool:
        """Whether the revision can't come to mean something else."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"hf:{self.repo}" + ("" if self.revision == DEFAULT_REVISION else f"@{self.revision}")


class HubFile(msgspec.Struct, frozen=True):
    """``digest``: "sha256:..." of a large file, "git:..." (as git names a blob) of a small one, "" when the hub gives none."""

    name: str
    n_bytes: int
    digest: str


class Hub:
    """One model at one commit. Methods may be called from several threads.

    ``waits_s``: before each further try, as long as none brings anything. ``stop``: when it is set, downloads end.
    """

    def __init__(self, name: HubName, commit: str, endpoint: str, waits_s: tuple[float, ...]) -> None:
        self.name, self.commit = name, commit
        self.endpoint = endpoint or constants.ENDPOINT
        self.files: dict[str, HubFile] = {}
        self.stop = threading.Event()
        self._waits_s = waits_s

    @staticmethod
    def open(name: HubName, commit: str = "", endpoint: str = "", waits_s: tuple[float, ...] = _WAITS_S) -> Hub:
        """Asks which files there are. ``commit``: instead of what the name's revision means now. ``endpoint``: "" for the
        usual one.

        ContainerError when the model, its revision or the right to see it is missing; DownloadError without a good answer.
        """
        hub = Hub(name, commit or name.revision, endpoint, waits_s)
        api = HfApi(hub.endpoint, library_name="colibri")
        found = hub._patiently(
            str(name), lambda: api.model_info(name.repo, revision=hub.commit, files_metadata=True, timeout=30.0)
        )
        if not found.sha or (commit and found.sha != commit):
            raise DownloadError(
                f"{hub.endpoint} does not say which commit of {name.repo} it has, or another than {commit or 'one'}: "
                f"{found.sha}. Files could not be told apart; use another HF_ENDPOINT."
            )
        hub.commit = found.sha
        for each in found.siblings or []:
            digest = f"sha256:{each.lfs['sha256']}" if each.lfs else f"git:{each.blob_id}" if each.blob_id else ""
            hub.files[each.rfilename] = HubFile(each.rfilename, -1 if each.size is None else each.size, digest)
        return hub

    def file(self, name: str) -> HubFile:
        """ContainerError when there is none of this name."""
        if name not in self.files:
            raise ContainerError(
                f"{self.name} has no file {name} at commit {self.commit[:12]}: the model is incomplete there. Choose another "
                "revision (hf:ORG/NAME@REVISION) or repository."
            )
        if self.files[name].n_bytes < 0:  # a mirror may list names alone
            headers = build_hf_headers(library_name="colibri")
            found = self._patiently(name, lambda: get_hf_file_metadata(self._url(name), headers=headers))
            if found.size is None:
                raise DownloadError(
                    f"{self._url(name)}: the hub does not say how large it is. Use another HF_ENDPOINT."
                )
            kind = {40: "git:", 64: "sha256:"}.get(len(found.etag or ""), "")
            self.files[name] = HubFile(name, found.size, f"{kind}{found.etag}" if kind else "")
        return self.files[name]

    def header(self, name: str) -> FileHeader:
        """The header of a shard, without the rest of it."""
        file = self.file(name)
        begin = self._range(file, 0, min(_BEGIN_BYTES, file.n_bytes))

        def read(at: int, n_bytes: int) -> bytes:
            known = begin[at : at + n_bytes]
            rest = min(n_bytes, file.n_bytes - at) - len(known)
            return known + (self._range(file, at + len(known), rest) if rest > 0 else b"")

        return header_from(read, file.n_bytes, Path(str(self.name)) / name)

    def download(self, name: str, directory: Path, progress: Callable[[int], None] = lambda _: None) -> Path:
        """Brings a whole file to ``directory``, where what an interrupted run left of it is used; checked when it is there.

        ``progress`` gets bytes, those that were left included, and takes them back when they have to be fetched again.
        """
        file = self.file(name)
        try:
            return self._download(file, directory / name, progress)
        except OSError as error:
            raise CapacityError(
                f"{directory / name} can't be written: {error.strerror}. What is finished is kept: make room and run the same "
                "command again, it goes on from there."
            ) from None

    def _download(self, file: HubFile, final: Path, progress: Callable[[int], None]) -> Path:
        partial = final.with_name(f"{final.name}.partial")
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # a power cut may have torn it: looked through like every leftover
            put_in_place(final, partial)
        for is_last in (False, True):
            with os.fdopen(open_file(partial, os.O_RDWR | os.O_CREAT), "r+b") as target:
                digest = self._fill(file, target, progress)
                target.flush()
                os.fsync(target.fileno())
            if file.digest in ("", digest):
                break
            partial.unlink()
            progress(-file.n_bytes)
            if is_last:
                raise DownloadError(
                    f"{self._url(file.name)}: the bytes that came have the checksum {digest}, the hub promises {file.digest}; "
                    "twice in a row, so they are not used. Run the same command later, or use another HF_ENDPOINT."
                )
        put_in_place(partial, final)
        return final

    def _fill(self, file: HubFile, target: BinaryIO, progress: Callable[[int], None]) -> str:
        """Fetches what ``target`` lacks of the file; the digest of all of it, of the kind that the hub gives."""
        if target.seek(0, os.SEEK_END) > file.n_bytes:
            target.truncate(0)
        target.seek(0)
        digest = _new_digest(file)
        done = 0
        while piece := target.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            progress(len(piece))

        def fetch() -> None:
            nonlocal digest, done
            with self._stream(file, done, file.n_bytes - done) as (is_range, pieces):
                if not is_range and done:  # this server sends whole files only
                    progress(-done)
                    digest, done = _new_digest(file), 0
                    target.seek(0)
                    target.truncate()
                for piece in pieces:
                    target.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    progress(len(piece))
            if done < file.n_bytes:
                raise httpx2.RemoteProtocolError(f"the answer ended at byte {done:,} of {file.n_bytes:,}")

        if done < file.n_bytes:
            self._patiently(file.name, fetch, lambda: done)
        kind = file.digest.partition(":")[0] or "sha256"
        return f"{kind}:{digest.hexdigest()}"

    def _range(self, file: HubFile, at: int, n_bytes: int) -> bytes:
        def fetch() -> bytes:
            with self._stream(file, at, n_bytes) as (is_range, pieces):
                if at and not is_range:
                    raise DownloadError(
                        f"{self._url(file.name)}: the server sends whole files only (it answers a request for a range with "
                        "everything), so headers can't be looked at beforehand. Use another HF_ENDPOINT."
                    )
                found = b""
                while len(found) < n_bytes and (piece := next(pieces, b"")):
                    found += piece
            if len(found) < n_bytes:
                raise httpx2.RemoteProtocolError(f"the answer ended after {len(found):,} of {n_bytes:,} bytes")
            return found[:n_bytes]

        return self._patiently(file.name, fetch)

    @contextmanager
    def _stream(self, file: HubFile, at: int, n_bytes: int) -> Iterator[tuple[bool, Iterator[bytes]]]:
        """(whether the bytes begin at ``at``, not at 0; pieces of the answer)."""
        headers = build_hf_headers(library_name="colibri")
        headers |= {"Range": f"bytes={at}-{at + n_bytes - 1}", "Accept-Encoding": "identity"}
        timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with get_session().stream("GET", self._url(file.name), headers=headers, timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            is_range = response.status_code == 206
            said = response.headers.get("Content-Range", "")
            wanted = f"bytes {at}-{at + n_bytes - 1}/"
            if is_range and not (said.startswith(wanted) and said.endswith(("/*", f"/{file.n_bytes}"))):
                raise DownloadError(
                    f"{self._url(file.name)}: bytes {at:,} to {at + n_bytes - 1:,} of {file.n_bytes:,} were asked for, the "
                    f"server sends {said or 'something'}. It has another file than the hub lists; run the same command later."
                )
            yield is_range, self._pieces(response, file.n_bytes - (at if is_range else 0))

    def _pieces(self, response: httpx2.Response, at_most: int) -> Iterator[bytes]:
        for piece in response.iter_raw():
            if self.stop.is_set():
                raise DownloadError("stopped")
            at_most -= len(piece)
            if at_most < 0:
                raise DownloadError(
                    f"{response.url}: the server sends more bytes than the hub lists. Run the command later."
                )
            yield piece

    def _url(self, name: str) -> str:
        return hf_hub_url(self.name.repo, name, revision=self.commit, endpoint=self.endpoint)

    def _patiently(self, what: str, call: Callable[[], Result], so_far: Callable[[], int] = lambda: 0) -> Result:
        """Calls until it returns, or tries in a row did not change ``so_far``. What can't pass is a sentence at once."""
        n_vain, before = 0, so_far()
        while True:
            try:
                return call()
            except (httpx2.HTTPError, HFValidationError, OfflineModeIsEnabled, EntryNotFoundError) as error:
                reason, wait_s = self._reason_to_wait(error, what)
                n_vain = 0 if so_far() != before else n_vain
                if n_vain == len(self._waits_s) or self.stop.is_set():
                    raise DownloadError(
                        f"{self.endpoint}: {what} of {self.name.repo} could not be fetched, {n_vain + 1} tries in a row "
                        f"brought nothing: {reason}. What is finished is kept: the same command goes on from there."
                    ) from None
                self.stop.wait(min(max(self._waits_s[n_vain], wait_s), _LONGEST_WAIT_S))
                n_vain, before = n_vain + 1, so_far()

    def _reason_to_wait(self, error: Exception, what: str) -> tuple[str, float]:
        """Why a call failed, and for how many seconds the server asks for patience. Raises what no patience helps against."""
        name, hub = self.name, self.endpoint
        login = "log in (hf auth login, or set HF_TOKEN)"
        if isinstance(error, OfflineModeIsEnabled):
            raise ContainerError(f"HF_HUB_OFFLINE is set, so nothing is fetched from {hub}. Unset it.") from None
        if isinstance(error, HFValidationError):
            raise ContainerError(f"{name} names no model: {error}") from None
        if isinstance(error, GatedRepoError):
            raise ContainerError(
                f"{name} is gated: its makers want its terms accepted first. Do so at {hub}/{name.repo}, then {login}."
            ) from None
        if isinstance(error, RepositoryNotFoundError):
            raise ContainerError(
                f"{hub} has no model {name.repo}, or shows it to others only. Check the name; if it is private or "
                f"gated, {login}."
            ) from None
        if isinstance(error, RevisionNotFoundError):
            raise ContainerError(
                f"{hub} has no revision {self.commit} of {name.repo}. Check what is behind the @."
            ) from None
        if isinstance(error, EntryNotFoundError):
            raise ContainerError(
                f"{hub} lists {what} in {name.repo} and does not have it. Choose another revision."
            ) from None
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            status, said = error.response.status_code, error.response.headers
            if status < 500 and status not in _MAY_PASS:
                why = f" ({message})" if (message := said.get("X-Error-Message")) else ""
                who = f" {login[0].upper()}{login[1:]}." if status in (401, 403) else ""
                raise ContainerError(f"{hub} refuses {what} of {name.repo} with status {status}{why}.{who}") from None
            after = said.get("Retry-After", "")
            return f"status {status}", float(after) if after.isdigit() else 0.0
        if isinstance(error, httpx2.TimeoutException):
            return "the server does not answer in time", 0.0
        return str(error) or type(error).__name__, 0.0


def _new_digest(file: HubFile) -> Any:
    if file.digest.startswith("git:"):
        return hashlib.sha1(b"blob %d\0" % file.n_bytes, usedforsecurity=False)
    return hashlib.sha256()
