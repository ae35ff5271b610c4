"""The HTTP surface: routes, admission, errors in OpenAI's shape. docs/api.md describes it for users.

Health and model list are answered from what the router last said, without asking anybody, so they answer in milliseconds
however busy the engine is. Runs in the gateway.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any, Final, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway import stream
from services.gateway.answers import shape_of
from services.gateway.bodies import PLAIN, Wanted, parse_chat, parse_completion, sampling_defaults
from services.gateway.errors import ApiError
from services.gateway.stream import ClientGone, Receive, Send, Ticket
from services.gateway.uploads import MAX_HELD_BYTES, BodyBudget, read_body
from shared.errors import ErrorCode
from shared.log import Log
from shared.messages.gateway import GroupState, RequestDone
from shared.messages.router import Submit
from shared.run.config import RequestDefaults

THREAD_BYTES: Final = 64 << 10
"""Larger bodies are parsed beside the event loop, so that streams of others go on."""
ALIASES: Final = ("colibri", "default")
"""Names that mean "the model that is served here"."""


class Engine(Protocol):
    """What the routes need of the bus side (``service.GatewayEngine``)."""

    def begin(self, submit: Submit) -> Ticket: ...
    def leave(self, ticket: Ticket, reason: str) -> None: ...
    @property
    def group(self) -> GroupState | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def detail(self) -> str: ...
    @property
    def n_open(self) -> int: ...


def make_app(
    engine: Engine, log: Log, keep_alive_s: float = stream.KEEP_ALIVE_S, defaults: RequestDefaults = PLAIN
) -> Starlette:
    """The ASGI application; ``engine`` is used from the event loop that runs it. ``defaults``: for requests, the model's."""
    born = int(time.time())
    budget = BodyBudget(MAX_HELD_BYTES)

    async def health(request: Request) -> Response:
        return _json(200, _health(engine))

    async def ready(request: Request) -> Response:
        is_ready = engine.is_ready and not engine.is_draining
        return _json(200 if is_ready else 503, _health(engine))

    async def models(request: Request) -> Response:
        group = engine.group
        data = [_model(group, born, defaults)] if group is not None and group.model else []
        return _json(200, {"object": "list", "data": data})

    async def model(request: Request) -> Response:
        group = engine.group
        name = request.path_params["name"]
        if group is None or not group.model or name not in (group.model, *ALIASES):
            raise _model_error(name, group)
        return _json(200, _model(group, born, defaults))

    return Starlette(
        routes=[
            Route(
                "/v1/chat/completions",
                Generate(engine, log, budget, is_chat=True, keep_alive_s=keep_alive_s, defaults=defaults),
                methods=["POST"],
            ),
            Route(
                "/v1/completions",
                Generate(engine, log, budget, is_chat=False, keep_alive_s=keep_alive_s, defaults=defaults),
                methods=["POST"],
            ),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/health/ready", ready),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _fault},
    )


class Generate:
    """POST /v1/chat/completions and /v1/completions, as one ASGI callable so that the request is always let go of."""

    def __init__(
        self,
        engine: Engine,
        log: Log,
        budget: BodyBudget,
        *,
        is_chat: bool,
        keep_alive_s: float,
        defaults: RequestDefaults,
    ) -> None:
        self._engine = engine
        self._log = log
        self._budget = budget
        self._is_chat = is_chat
        self._keep_alive_s = keep_alive_s
        self._defaults = defaults

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        request = ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12)
        headers = [(b"x-request-id", request.encode())]
        began = time.monotonic()
        try:
            try:
                body = await read_body(scope, receive, self._budget)
            except ApiError as error:
                # The rest of the body is not read, so the connection can't carry another request.
                await stream.send_error(send, error, [*headers, (b"connection", b"close")])
                return
            try:
                try:
                    wanted = await self._parse(body, request)
                finally:
                    self._budget.give(len(body))
                    del body
                model = self._admit(wanted)
                if wanted.ignored:
                    headers.append((b"x-ignored-fields", _header_list(wanted.ignored)))
                done = await self._answer(wanted, model, receive, send, headers)
            except ApiError as error:
                self._log.info(
                    "request_error", request=request, status=error.status, code=error.code, param=error.param or "-",
                    total_s=time.monotonic() - began,
                )  # fmt: skip
                await stream.send_error(send, error, headers)
                return
            self._log.info(
                "request_end", request=request, reason=done.reason, code=done.error_code or "-", n_prompt=done.n_prompt,
                n_generated=done.n_generated, total_s=time.monotonic() - began,
            )  # fmt: skip
        except ClientGone:
            self._log.info("request_gone", request=request, total_s=time.monotonic() - began)

    async def _parse(self, body: bytes, request: str) -> Wanted:
        parse = parse_chat if self._is_chat else parse_completion
        if len(body) <= THREAD_BYTES:
            return parse(body, request, self._defaults)
        async with self._budget.parsing:
            return await asyncio.to_thread(parse, body, request, self._defaults)

    def _admit(self, wanted: Wanted) -> str:
        """The name of the model that will answer. Raises ApiError when nobody can."""
        engine = self._engine
        if engine.is_draining:
            raise ApiError(503, "the server is shutting down", code=ErrorCode.SHUTTING_DOWN, retry_after_s=5)
        group = engine.group
        if group is None or not engine.is_ready:
            raise ApiError(
                503,
                f"the server can't answer yet: {engine.detail}",
                code=ErrorCode.NOT_READY,
                retry_after_s=1,
                detail=_health(engine),
            )
        if wanted.model is not None and wanted.model not in (group.model, *ALIASES):
            raise _model_error(wanted.model, group)
        return group.model

    async def _answer(
        self, wanted: Wanted, model: str, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]
    ) -> RequestDone:
        ticket = self._engine.begin(wanted.submit)
        watcher = asyncio.create_task(stream.watch_client(receive, ticket))
        try:
            accepted = await stream.await_accepted(ticket)
            shape = shape_of(wanted, model, int(time.time()))
            if wanted.stream:
                return await stream.send_stream(send, ticket, shape, accepted, headers, self._keep_alive_s)
            return await stream.send_whole(send, ticket, shape, accepted, headers)
        finally:
            watcher.cancel()
            self._engine.leave(ticket, "client_gone")


def _header_list(names: Iterable[str]) -> bytes:
    """Names as one header value. They come from the client, so nothing but word characters gets through."""
    return ",".join(re.sub(r"[^A-Za-z0-9_.-]", "?", name[:40]) for name in names)[:400].encode()


def _model_error(name: str, group: GroupState | None) -> ApiError:
    served = repr(group.model) if group is not None and group.model else "none yet"
    shown = name if len(name) <= 80 else name[:77] + "..."
    return ApiError(
        404, f"there is no model {shown!r} here; served: {served}", code=ErrorCode.MODEL_NOT_FOUND, param="model"
    )


def _model(group: GroupState, born: int, defaults: RequestDefaults) -> dict[str, Any]:
    return {
        "id": group.model,
        "object": "model",
        "created": born,
        "owned_by": "colibri",
        "max_model_len": group.max_context,
        "defaults": {**sampling_defaults(defaults), "max_tokens": defaults.max_tokens},
    }


def _health(engine: Engine) -> dict[str, Any]:
    group = engine.group
    return {
        "status": "draining" if engine.is_draining else "ok",
        "is_ready": engine.is_ready and not engine.is_draining,
        "detail": "shutting down" if engine.is_draining else engine.detail,
        "model": group.model if group is not None else None,
        "n_open": engine.n_open,
        "n_running": group.n_running if group is not None else 0,
        "n_waiting": group.n_waiting if group is not None else 0,
        "services": [
            {"service": service, "state": state, "pid": pid, "incarnation": incarnation}
            for service, state, pid, incarnation in (group.services if group is not None else ())
        ],
    }


def _json(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    retry = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error.body(), error.status, retry, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not possible at {request.url.path}",
    }
    code = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED}.get(error.status_code)
    body = ApiError(error.status_code, what.get(error.status_code, str(error.detail)), code=code).body()
    return Response(body, error.status_code, error.headers, "application/json")


async def _fault(request: Request, error: Exception) -> Response:
    body = ApiError(
        500, f"a fault in the gateway ({type(error).__name__}); its log has the details", code=ErrorCode.FAULT
    ).body()
    return Response(body, 500, media_type="application/json")
