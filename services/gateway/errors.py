"""An answer that is an error, in OpenAI's shape. Runs in the gateway."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import ErrorCode


class ApiError(Exception):
    """An answer that is an error: HTTP status, OpenAI's body, and ``retry_after_s`` where trying again makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        detail: Any = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.detail = detail

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        if self.status >= 500:
            return "server_error"
        return "invalid_request_error"

    def body(self) -> bytes:
        """The JSON body of the answer; also the payload of an error event in a stream."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.detail is not None:
            error["detail"] = self.detail
        return msgspec.json.encode({"error": error})


def invalid(param: str | None, message: str, code: ErrorCode = ErrorCode.INVALID_VALUE) -> ApiError:
    """A 400 that names ``param``."""
    return ApiError(400, message, code=code, param=param)


def short(value: Any) -> str:
    """``value`` as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
