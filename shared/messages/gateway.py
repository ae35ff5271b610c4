"""Told to the gateway."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.errors import ErrorCode
from shared.messages.base import Msg, TokenId
from shared.messages.control import ServiceState


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model said so, or a stop string came."""
    LENGTH = "length"
    ABORT = "abort"
    """Nobody waited for it any more."""
    ERROR = "error"


class TokenLogprob(Msg, frozen=True, array_like=True, gc=False):
    """One token's natural-log probability under the model, with the ``n_logprobs`` best alternatives, best first."""

    token: TokenId
    logprob: float
    piece: bytes
    top: tuple[tuple[TokenId, float, bytes], ...] = ()


class RequestAccepted(Msg, tag="request_accepted", frozen=True, array_like=True, gc=False):
    """Router -> Gateway: the prompt is tokenised and fits; tokens will follow. ``max_tokens`` is the effective limit.

    ``prompt_ids`` is filled when Submit said ``want_prompt_ids``.
    """

    request: str
    n_prompt: int
    max_tokens: int
    prompt_ids: tuple[TokenId, ...] = ()


class TokenOut(Msg, tag="token_out", frozen=True, array_like=True, gc=False):
    """Router -> Gateway: new tokens and the text they completed. ``index`` is the first token's place in the answer.

    ``text`` may be empty (a character is split over tokens) or belong to earlier tokens (a stop string was ruled out).
    """

    request: str
    index: int
    tokens: tuple[TokenId, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class RequestDone(Msg, tag="request_done", frozen=True, array_like=True, gc=False):
    """Router -> Gateway: the one final answer. ``error_code`` and ``error`` are there when the reason is ERROR."""

    request: str
    reason: FinishReason
    n_prompt: int
    n_generated: int
    text: str = ""
    error_code: ErrorCode | None = None
    error: str = ""
    n_draft: int = 0
    n_accepted: int = 0


class RequestRefused(Msg, tag="request_refused", frozen=True, array_like=True, gc=False):
    """Router -> Gateway: the request was not begun. ``status`` is the HTTP status that fits, ``param`` the culprit."""

    request: str
    status: int
    code: ErrorCode
    message: str
    param: str = ""


class GroupState(Msg, tag="group_state", frozen=True, array_like=True, gc=False):
    """Router -> Gateway: each second and at each change: whether the whole group can serve, and the model's facts."""

    is_ready: bool
    detail: str
    model: str = ""
    max_context: int = 0
    n_running: int = 0
    n_waiting: int = 0
    incarnation: int = 0
    services: tuple[tuple[str, ServiceState, int, int], ...] = msgspec.field(default=())
    """(service, state, pid, incarnation)"""
