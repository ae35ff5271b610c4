"""Bodies that are coming in: limits of size, time and memory, and who makes room for others. Runs in the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from services.gateway.errors import ApiError
from services.gateway.patience import PatientTimeout
from services.gateway.stream import ClientGone, Receive
from shared.errors import ErrorCode

MAX_BODY_BYTES: Final = 16 << 20
MAX_HELD_BYTES: Final = 64 << 20
"""All bodies that are being read or parsed together: the gateway's memory is bounded whatever clients send."""
BODY_TIMEOUT_S: Final = 30.0
SLOW_UPLOAD_S: Final = 2.0
"""A body that has been coming in for longer may be cut when the memory for bodies runs out."""


class Upload:
    """One body that is coming in. ``cut`` is called when its memory is needed for others."""

    def __init__(self, began: float, cut: Callable[[], None]) -> None:
        self.began = began
        self.cut = cut
        self.n_bytes = 0
        self.is_cut = False


class BodyBudget:
    """Bytes of request bodies in memory, and how many there may be. Those that come slowly make room for others."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.parsing = asyncio.Semaphore(1)
        """One large body at a time: one thread of Python runs at once, and many would leave the event loop few turns."""
        self._clock = clock
        self._uploads: dict[Upload, None] = {}

    def begin(self, cut: Callable[[], None]) -> Upload:
        """Must be followed by ``complete`` or ``end``."""
        upload = Upload(self._clock(), cut)
        self._uploads[upload] = None
        return upload

    def take(self, upload: Upload, n_bytes: int) -> None:
        """Raises ApiError (429) when it is too much at once, TimeoutError when ``upload`` was cut."""
        if upload.is_cut:
            raise TimeoutError
        late = self._clock() - SLOW_UPLOAD_S
        for other in list(self._uploads):
            if self.held_bytes + n_bytes <= self.limit_bytes or other.began > late:
                break
            if other is not upload:
                self.end(other)
                other.is_cut = True
                other.cut()
        if self.held_bytes + n_bytes > self.limit_bytes:
            raise ApiError(
                429,
                "the server is taking in too many large requests at once; try again",
                code=ErrorCode.BUSY,
                retry_after_s=1,
            )
        upload.n_bytes += n_bytes
        self.held_bytes += n_bytes

    def complete(self, upload: Upload) -> None:
        """Its bytes stay in memory until they are given back."""
        self._uploads.pop(upload, None)

    def end(self, upload: Upload) -> None:
        """It came to nothing."""
        if self._uploads.pop(upload, upload) is None:
            self.give(upload.n_bytes)

    def give(self, n_bytes: int) -> None:
        self.held_bytes -= n_bytes


async def read_body(scope: Any, receive: Receive, budget: BodyBudget) -> bytes:
    """The body, taken from ``budget`` (the caller gives it back). Raises ApiError (408, 413, 415, 429) and ClientGone."""
    content_type, length = b"", None
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value.split(b";")[0].strip().lower()
        elif name == b"content-length":
            length = value
    if content_type and content_type != b"application/json" and not content_type.endswith(b"+json"):
        # Also keeps web pages out: a browser sends JSON to a foreign origin only after asking.
        raise ApiError(415, "send the body as content-type: application/json", code=ErrorCode.UNSUPPORTED_MEDIA_TYPE)
    if length is not None and length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large(int(length))
    parts: list[bytes] = []
    limit = PatientTimeout(BODY_TIMEOUT_S)
    upload = budget.begin(lambda: limit.cut())
    try:
        async with limit:
            is_complete = False
            while not is_complete:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientGone
                part = event.get("body", b"")
                if upload.n_bytes + len(part) > MAX_BODY_BYTES:
                    raise _too_large(upload.n_bytes + len(part))
                budget.take(upload, len(part))
                parts.append(part)
                is_complete = not event.get("more_body", False)
                if not is_complete and scope.get("state", {}).get("is_body_cut"):
                    message = f"the body ended after {upload.n_bytes} bytes, before it was complete"
                    raise ApiError(400, message, code=ErrorCode.BODY_INCOMPLETE)
        budget.complete(upload)
    except TimeoutError:
        parts.clear()
        if upload.is_cut:
            message = "the body came slowly and the server needed its memory for others; try again"
            raise ApiError(408, message, code=ErrorCode.BODY_TIMEOUT, retry_after_s=1) from None
        raise ApiError(
            408,
            f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s ({upload.n_bytes} bytes came)",
            code=ErrorCode.BODY_TIMEOUT,
        ) from None
    finally:
        budget.end(upload)
    return b"".join(parts)


def _too_large(n_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body may have {MAX_BODY_BYTES} bytes; got {n_bytes} or more", code=ErrorCode.BODY_TOO_LARGE
    )
