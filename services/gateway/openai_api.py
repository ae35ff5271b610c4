"""The OpenAI shapes: what a request body may say, what the answer looks like. Pure: no sockets, no clock of its own.

Owns validation (``parse_chat``, ``parse_completion``: bytes in, a ``Wanted`` or an ``ApiError`` out) and the form of every
answer (``ChatShape``, ``CompletionShape``). Knows nothing of tokenizers and templates: those are the router's. docs/api.md
is the table of all fields for users. Runs in the gateway.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.messages.gateway import RequestAccepted, RequestDone, TokenLogprob, TokenOut
from shared.messages.router import Sampling, Submit

MAX_DEPTH: Final = 64
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_PIECES: Final = 1_000_000
"""Upper bound for messages and for prompt ids of one request."""

INT31: Final = (1 << 31) - 1
SEED_BITS: Final = 53
"""A seed the gateway draws survives a JavaScript client that sends it back."""


class ApiError(Exception):
    """An answer that is an error: HTTP status, OpenAI's body, and ``retry_after_s`` where trying again makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
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


def _invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


# ---- the request ------------------------------------------------------------------------------------------------------


class StreamOptions(Struct):
    include_usage: bool | None = None


class Common(Struct, kw_only=True):
    """Fields both routes honour. ``null`` is the same as absent everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Any = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


class ChatBody(Common, kw_only=True):
    messages: Any = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Common, kw_only=True):
    prompt: Any = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def _is(*values: Any) -> Callable[[Any], bool]:
    # True == 1 in Python; a boolean for a number is the type error it looks like.
    return lambda v: any(v == w and isinstance(v, bool) == isinstance(w, bool) for w in values)


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


# Fields that would change the answer and that we can't honour: only the value that changes nothing is accepted.
NEUTRAL_ONLY: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "n": (_is(1), "1"),
    "best_of": (_is(1), "1"),
    "presence_penalty": (_is(0), "0"),
    "frequency_penalty": (_is(0), "0"),
    "repetition_penalty": (_is(1), "1"),
    "length_penalty": (_is(1), "1"),
    "logit_bias": (_is_empty, "empty"),
    "top_k": (_is(0, -1), "0 or -1"),
    "min_p": (_is(0), "0"),
    "typical_p": (_is(1), "1"),
    "min_tokens": (_is(0), "0"),
    "stop_token_ids": (_is_empty, "empty"),
    "bad_words": (_is_empty, "empty"),
    "allowed_token_ids": (_is_empty, "empty"),
    "use_beam_search": (_is(False), "false"),
    "echo": (_is(False), "false"),
    "suffix": (_is(""), "empty"),
    "prompt_logprobs": (_is(0), "null"),
    "truncate_prompt_tokens": (lambda _: False, "null"),
    "tools": (_is_empty, "empty"),
    "tool_choice": (_is("none", "auto"), '"none" or "auto"'),
    "functions": (_is_empty, "empty"),
    "function_call": (_is("none", "auto"), '"none" or "auto"'),
    "response_format": (lambda v: isinstance(v, dict) and v.get("type") == "text", '{"type": "text"}'),
    "structured_outputs": (_is_empty, "empty"),
    "guided_json": (lambda _: False, "null"),
    "guided_regex": (lambda _: False, "null"),
    "guided_choice": (lambda _: False, "null"),
    "guided_grammar": (lambda _: False, "null"),
    "grammar": (lambda _: False, "null"),
    "modalities": (lambda v: v == ["text"], '["text"]'),
    "audio": (lambda _: False, "null"),
    "web_search_options": (lambda _: False, "null"),
    "reasoning_effort": (lambda _: False, "null (chat_template_kwargs reaches the model's template)"),
    "verbosity": (_is("medium"), '"medium"'),
    "chat_template": (lambda _: False, "null (the template of the checkpoint is used)"),
    "documents": (_is_empty, "empty"),
    "add_generation_prompt": (_is(True), "true"),
    "continue_final_message": (_is(False), "false"),
    "skip_special_tokens": (_is(True), "true"),
    "include_stop_str_in_output": (_is(False), "false"),
    "return_tokens_as_token_ids": (_is(False), "false"),
}

# Fields that can't change the text. Accepted and not used.
WITHOUT_EFFECT: Final = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


# What the server itself passes to the template.
RESERVED_KWARGS: Final = frozenset(
    {"self", "messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, understood: what the router is told and how the answer shall look."""

    submit: Submit
    is_chat: bool
    model: str | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    ignored: tuple[str, ...] = ()
    """Names of fields nobody here knows; reported in a response header."""


def parse_chat(body: bytes, request: str) -> Wanted:
    """The body of /v1/chat/completions. Raises ApiError (400) naming the field."""
    raw = decode_body(body)
    _check_neutral(raw)
    chat: ChatBody = _convert(raw, ChatBody)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise _invalid("top_logprobs", "top_logprobs needs logprobs: true")
    messages = _messages(chat.messages)
    for name in RESERVED_KWARGS & (chat.chat_template_kwargs or {}).keys():
        raise _invalid(
            f"chat_template_kwargs.{name}", f"chat_template_kwargs.{name}: this variable is set by the server"
        )
    submit = Submit(
        request=request,
        sampling=_sampling(chat),
        max_tokens=_max_tokens(
            chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
        ),
        messages_json=msgspec.json.encode(messages),
        stop=_stops(chat.stop),
        ignore_eos=bool(chat.ignore_eos),
        n_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        template_kwargs_json=msgspec.json.encode(chat.chat_template_kwargs) if chat.chat_template_kwargs else None,
        want_prompt_ids=bool(chat.return_token_ids),
    )
    return _wanted(chat, raw, submit, is_chat=True)


def parse_completion(body: bytes, request: str) -> Wanted:
    """The body of /v1/completions. Raises ApiError (400) naming the field."""
    raw = decode_body(body)
    _check_neutral(raw)
    completion: CompletionBody = _convert(raw, CompletionBody)
    prompt, prompt_ids = _prompt(completion.prompt)
    submit = Submit(
        request=request,
        sampling=_sampling(completion),
        max_tokens=_max_tokens(completion.max_tokens),
        prompt=prompt,
        prompt_ids=prompt_ids,
        stop=_stops(completion.stop),
        ignore_eos=bool(completion.ignore_eos),
        n_logprobs=completion.logprobs,
        want_prompt_ids=bool(completion.return_token_ids),
    )
    return _wanted(completion, raw, submit, is_chat=False)


_TOKENS_OF_DEPTH = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


def decode_body(body: bytes) -> dict[str, Any]:
    """JSON object in ``body``; nesting beyond MAX_DEPTH is refused before any recursive decoder sees it."""
    depth = 0
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return _decode(body)
    for match in _TOKENS_OF_DEPTH.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _invalid(None, f"the JSON body nests deeper than {MAX_DEPTH} levels", "invalid_json")
        elif first in b"]}":
            depth -= 1
    return _decode(body)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(raw, dict):
        raise _invalid(None, "the body must be a JSON object", "invalid_json")
    return raw


def _convert(raw: Any, kind: type[Any], prefix: str = "") -> Any:
    """``raw`` as ``kind``; an error names the field by its path."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`").removeprefix("$").removeprefix(".")
        param = ".".join(part for part in (prefix, path) if part).replace(".[", "[")
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing:
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise _invalid(param or None, f"{param}: {message}" if param else message, "invalid_type") from None


def _check_neutral(raw: dict[str, Any]) -> None:
    for name, (is_neutral, neutral) in NEUTRAL_ONLY.items():
        value = raw.get(name)
        if value is not None and not is_neutral(value):
            raise _invalid(
                name, f"{name} is not supported here; leave it out or set it to {neutral}", "unsupported_parameter"
            )


def _wanted(body: Common, raw: dict[str, Any], submit: Submit, *, is_chat: bool) -> Wanted:
    known = set(type(body).__struct_fields__) | NEUTRAL_ONLY.keys() | WITHOUT_EFFECT
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise _invalid("stream_options", "stream_options needs stream: true")
    return Wanted(
        submit=submit,
        is_chat=is_chat,
        model=body.model,
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        ignored=tuple(sorted(name for name in raw if name not in known)),
    )


def _sampling(body: Common) -> Sampling:
    seed = body.seed
    if seed is None:
        seed = secrets.randbits(SEED_BITS)
    elif not -(1 << 63) <= seed < (1 << 64):
        raise _invalid("seed", f"seed must fit into 64 bits, got {_short(seed)}")
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed & ((1 << 64) - 1),
    )


def _max_tokens(value: int | None) -> int | None:
    # The router clamps to the context; this keeps the number inside the wire type.
    return None if value is None else min(value, INT31)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _invalid("stop", "stop must be a string or a list of strings", "invalid_type")
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"stop takes at most {MAX_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise _invalid("stop", "stop must not contain an empty string")
        if len(stop) > MAX_STOP_CHARS:
            raise _invalid("stop", f"a stop string may have at most {MAX_STOP_CHARS} characters, got {len(stop)}")
    return tuple(dict.fromkeys(stops))


def _prompt(value: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, ids). One prompt per request; a list of one prompt counts as that prompt."""
    if value is None:
        raise _invalid("prompt", "prompt is missing: a string or a list of token ids", "missing_field")
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise _invalid(
                "prompt", f"one prompt per request, got {len(value)}; send them one by one", "unsupported_parameter"
            )
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise _invalid("prompt", "prompt must not be empty")
        return value, None
    if not isinstance(value, list):
        raise _invalid("prompt", "prompt must be a string or a list of token ids", "invalid_type")
    if not value:
        raise _invalid("prompt", "prompt must not be empty")
    if len(value) > MAX_PIECES:
        raise ApiError(
            400,
            f"the prompt has {len(value)} tokens, more than any context here",
            code="context_length_exceeded",
            param="prompt",
        )
    for idx, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise _invalid(
                f"prompt[{idx}]", f"prompt[{idx}] must be a token id, got {type(token).__name__}", "invalid_type"
            )
        if not 0 <= token <= INT31:
            raise _invalid(f"prompt[{idx}]", f"prompt[{idx}] is no token id: {_short(token)}")
    return None, tuple(value)


# ---- messages ---------------------------------------------------------------------------------------------------------


class Function(Struct):
    name: str
    arguments: Any = None


class ToolCall(Struct):
    function: Function
    id: str | None = None
    type: str | None = None


class Message(Struct):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def _messages(value: Any) -> list[dict[str, Any]]:
    """Checked and brought into one form: content is a string, call arguments are objects, unknown keys are gone."""
    if value is None:
        raise _invalid("messages", "messages is missing: a list of {role, content}", "missing_field")
    if not isinstance(value, list):
        raise _invalid("messages", "messages must be a list", "invalid_type")
    if not value:
        raise _invalid("messages", "messages must not be empty")
    if len(value) > MAX_PIECES:
        raise _invalid("messages", f"at most {MAX_PIECES} messages, got {len(value)}")
    open_calls: set[str] = set()
    has_calls = False
    plain = []
    for idx, item in enumerate(value):
        at = f"messages[{idx}]"
        message: Message = _convert(item, Message, at)
        if message.role not in ROLES:
            raise _invalid(f"{at}.role", f"{at}.role: {_short(message.role)} is none of {', '.join(ROLES)}")
        if message.tool_calls and message.role != "assistant":
            raise _invalid(f"{at}.tool_calls", f"{at}.tool_calls: only the assistant calls tools")
        out: dict[str, Any] = {"role": message.role}
        content = _content(message.content, f"{at}.content")
        if message.role == "assistant":
            if content is None and not message.tool_calls:
                raise _invalid(at, f"{at}: an assistant message needs content or tool_calls")
        elif content is None:
            raise _invalid(
                f"{at}.content", f"{at}.content is missing: a string or a list of text parts", "missing_field"
            )
        out["content"] = content or ""
        if message.role == "tool":
            if not has_calls:
                raise _invalid(at, f"{at}: a tool result without a tool call before it")
            if message.tool_call_id is not None:
                if message.tool_call_id not in open_calls:
                    raise _invalid(f"{at}.tool_call_id", f"{at}.tool_call_id: no tool call before it has this id")
                out["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            has_calls = True
            open_calls.update(call.id for call in message.tool_calls if call.id is not None)
            out["tool_calls"] = [_call(call, f"{at}.tool_calls[{k}]") for k, call in enumerate(message.tool_calls)]
        if message.name is not None:
            out["name"] = message.name
        if message.reasoning_content is not None:
            out["reasoning_content"] = message.reasoning_content
        plain.append(out)
    return plain


def _content(value: Any, at: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid(at, f"{at} must be a string or a list of text parts", "invalid_type")
    texts = []
    for idx, part in enumerate(value):
        if not isinstance(part, dict):
            raise _invalid(f"{at}[{idx}]", f"{at}[{idx}] must be an object with a type", "invalid_type")
        if part.get("type") not in ("text", "input_text"):
            raise _invalid(
                f"{at}[{idx}].type",
                f"{at}[{idx}].type: only text parts are supported, got {_short(part.get('type'))}",
                "unsupported_content",
            )
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{at}[{idx}].text", f"{at}[{idx}].text must be a string", "invalid_type")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: ToolCall, at: str) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates iterate over."""
    arguments = call.function.arguments
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise _invalid(f"{at}.function.arguments", f"{at}.function.arguments must be a JSON object")
    out: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        out["id"] = call.id
    return out


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the answer -------------------------------------------------------------------------------------------------------


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(done: RequestDone) -> Usage:
    return Usage(done.n_prompt, done.n_generated, done.n_prompt + done.n_generated)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float]] = msgspec.field(default_factory=list)


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Struct):
    delta: Delta
    index: int = 0
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    message: ChatMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    text: str
    index: int = 0
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct):
    """A whole answer or one chunk of a stream, of either route. ``seed``, ``max_tokens``, ``drafts`` are our own."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    drafts: dict[str, int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def token_text(piece: bytes, token: int) -> str:
    """The text of one token for a human; parts of a character show as replacement characters."""
    return piece.decode("utf-8", "replace") if piece else f"token_id:{token}"


def token_key(piece: bytes, token: int) -> str:
    """The text of one token as a dictionary key: distinct tokens must stay distinct."""
    if not piece:
        return f"token_id:{token}"
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Shape:
    """Form of one answer. ``first``, ``delta``, ``last``, ``usage`` give the chunks of a stream in order; ``add`` and
    ``whole`` collect the same for one body."""

    kind: str

    def __init__(self, wanted: Wanted, model: str, created: int) -> None:
        self.wanted = wanted
        self.model = model
        self.created = created
        self._accepted: RequestAccepted | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._offset = 0

    # stream

    def first(self, accepted: RequestAccepted) -> bytes:
        raise NotImplementedError

    def delta(self, out: TokenOut) -> bytes | None:
        """One chunk, or None when nothing of ``out`` is visible yet."""
        has_logprobs = bool(out.logprobs) and self.wanted.submit.n_logprobs is not None
        if not (out.text or has_logprobs or (self.wanted.return_token_ids and out.tokens)):
            return None
        return self._encode([self._piece(out.text, out.tokens, out.logprobs, None)])

    def last(self, done: RequestDone) -> bytes:
        chunk = self._answer([self._piece(done.text, (), (), finish_reason(done))])
        chunk.drafts = _drafts(done)
        return msgspec.json.encode(chunk)

    def usage(self, done: RequestDone) -> bytes:
        chunk = self._answer([])
        chunk.usage = usage_of(done)
        return msgspec.json.encode(chunk)

    def _piece(
        self, text: str, tokens: Iterable[int], logprobs: tuple[TokenLogprob, ...], finish: str | None
    ) -> ChatChunkChoice | CompletionChoice:
        raise NotImplementedError

    # whole

    def accept(self, accepted: RequestAccepted) -> None:
        self._accepted = accepted

    def add(self, out: TokenOut) -> None:
        self._texts.append(out.text)
        self._tokens.extend(out.tokens)
        self._logprobs.extend(out.logprobs)

    def whole(self, done: RequestDone) -> bytes:
        raise NotImplementedError

    # both

    def _answer(self, choices: list[Any], kind: str | None = None) -> Answer:
        answer = Answer(self.wanted.submit.request, kind or self.kind, self.created, self.model, choices)
        if self.wanted.stream and self.wanted.include_usage:
            answer.usage = None
        return answer

    def _encode(self, choices: list[Any]) -> bytes:
        return msgspec.json.encode(self._answer(choices))

    def _facts(self, answer: Answer, accepted: RequestAccepted) -> None:
        answer.seed = self.wanted.submit.sampling.seed
        answer.max_tokens = accepted.max_tokens

    def _prompt_ids(self, accepted: RequestAccepted) -> list[int] | UnsetType:
        if not self.wanted.return_token_ids:
            return UNSET
        return list(accepted.prompt_ids or self.wanted.submit.prompt_ids or ())

    def _ids(self, tokens: Iterable[int]) -> list[int] | UnsetType:
        return list(tokens) if self.wanted.return_token_ids else UNSET


def finish_reason(done: RequestDone) -> str:
    return "length" if done.reason == "length" else "stop"


def _drafts(done: RequestDone) -> dict[str, int] | UnsetType:
    return {"proposed": done.n_draft, "accepted": done.n_accepted} if done.n_draft else UNSET


class ChatShape(Shape):
    kind = "chat.completion.chunk"

    def first(self, accepted: RequestAccepted) -> bytes:
        chunk = self._answer([ChatChunkChoice(Delta(role="assistant", content=""))])
        self._facts(chunk, accepted)
        chunk.prompt_token_ids = self._prompt_ids(accepted)
        return msgspec.json.encode(chunk)

    def _piece(
        self, text: str, tokens: Iterable[int], logprobs: tuple[TokenLogprob, ...], finish: str | None
    ) -> ChatChunkChoice:
        delta = Delta(content=text) if text or finish is None else Delta()
        return ChatChunkChoice(delta, 0, self._chat_logprobs(logprobs) if logprobs else None, finish, self._ids(tokens))

    def _chat_logprobs(self, rows: Iterable[TokenLogprob]) -> ChatLogprobs | None:
        if self.wanted.submit.n_logprobs is None:
            return None
        return ChatLogprobs(
            [
                ChatLogprob(
                    token_text(row.piece, row.token),
                    row.logprob,
                    list(row.piece),
                    [TopLogprob(token_text(piece, token), value, list(piece)) for token, value, piece in row.top],
                )
                for row in rows
            ]
        )

    def whole(self, done: RequestDone) -> bytes:
        assert self._accepted is not None
        text = "".join(self._texts) + done.text
        choice = ChatChoice(
            ChatMessage(text), finish_reason(done), 0, self._chat_logprobs(self._logprobs), self._ids(self._tokens)
        )
        answer = self._answer([choice], "chat.completion")
        answer.usage = usage_of(done)
        answer.drafts = _drafts(done)
        self._facts(answer, self._accepted)
        answer.prompt_token_ids = self._prompt_ids(self._accepted)
        return msgspec.json.encode(answer)


class CompletionShape(Shape):
    kind = "text_completion"

    def first(self, accepted: RequestAccepted) -> bytes:
        choice = CompletionChoice("", token_ids=self._ids(()), prompt_token_ids=self._prompt_ids(accepted))
        chunk = self._answer([choice])
        self._facts(chunk, accepted)
        return msgspec.json.encode(chunk)

    def _piece(
        self, text: str, tokens: Iterable[int], logprobs: tuple[TokenLogprob, ...], finish: str | None
    ) -> CompletionChoice:
        return CompletionChoice(
            text, 0, self._completion_logprobs(logprobs) if logprobs else None, finish, self._ids(tokens)
        )

    def _completion_logprobs(self, rows: Iterable[TokenLogprob]) -> CompletionLogprobs | None:
        if self.wanted.submit.n_logprobs is None:
            return None
        out = CompletionLogprobs()
        for row in rows:
            out.text_offset.append(self._offset)
            # Characters begun by this piece: continuation bytes (10xxxxxx) begin none.
            self._offset += sum(byte & 0xC0 != 0x80 for byte in row.piece)
            out.token_logprobs.append(row.logprob)
            out.tokens.append(token_key(row.piece, row.token))
            out.top_logprobs.append({token_key(piece, token): value for token, value, piece in row.top})
        return out

    def whole(self, done: RequestDone) -> bytes:
        assert self._accepted is not None
        text = "".join(self._texts) + done.text
        choice = CompletionChoice(
            text,
            0,
            self._completion_logprobs(self._logprobs),
            finish_reason(done),
            self._ids(self._tokens),
            self._prompt_ids(self._accepted),
        )
        answer = self._answer([choice])
        answer.usage = usage_of(done)
        answer.drafts = _drafts(done)
        self._facts(answer, self._accepted)
        return msgspec.json.encode(answer)


def shape_of(wanted: Wanted, model: str, created: int) -> Shape:
    return (ChatShape if wanted.is_chat else CompletionShape)(wanted, model, created)
