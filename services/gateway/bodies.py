"""What a request body may say (``parse_chat``, ``parse_completion``): bytes in, a ``Wanted`` or an ``ApiError`` out. Pure.

Knows nothing of tokenizers and templates: those are the router's. docs/api.md is the table of all fields for users. Runs in
the gateway.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from services.gateway.chat_messages import plain_messages
from services.gateway.errors import ApiError, invalid, short
from services.gateway.json_body import convert, decode_body
from shared.errors import ErrorCode
from shared.messages.router import MAX_TEMPERATURE, SEED_RANGE, Sampling, Submit
from shared.run.config import RequestDefaults

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_PROMPT_IDS: Final = 1_000_000

PLAIN: Final = RequestDefaults()
INT31: Final = (1 << 31) - 1
SEED_BITS: Final = 53
"""A seed the gateway draws survives a JavaScript client that sends it back."""
SAMPLING_DEFAULTS: Final = {"temperature": 1.0, "top_p": 1.0}
"""OpenAI's, where the model has none; ``Sampling``'s own take the likeliest token."""


class StreamOptions(Struct):
    include_usage: bool | None = None


class Common(Struct, kw_only=True):
    """Fields both routes honour. ``null`` is the same as absent everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
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


def parse_chat(body: bytes, request: str, defaults: RequestDefaults = PLAIN) -> Wanted:
    """The body of /v1/chat/completions; ``defaults`` are the model's. Raises ApiError (400) naming the field."""
    raw = decode_body(body)
    _check_neutral(raw)
    chat: ChatBody = convert(raw, ChatBody)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    messages = plain_messages(chat.messages)
    for name in RESERVED_KWARGS & (chat.chat_template_kwargs or {}).keys():
        raise invalid(
            f"chat_template_kwargs.{name}", f"chat_template_kwargs.{name}: this variable is set by the server"
        )
    submit = Submit(
        request=request,
        sampling=_sampling(chat, defaults),
        max_tokens=_max_tokens(defaults, chat.max_completion_tokens, chat.max_tokens),
        messages_json=msgspec.json.encode(messages),
        stop=_stops(chat.stop),
        ignore_eos=bool(chat.ignore_eos),
        n_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        template_kwargs_json=msgspec.json.encode(chat.chat_template_kwargs) if chat.chat_template_kwargs else None,
        want_prompt_ids=bool(chat.return_token_ids),
    )
    return _wanted(chat, raw, submit, is_chat=True)


def parse_completion(body: bytes, request: str, defaults: RequestDefaults = PLAIN) -> Wanted:
    """The body of /v1/completions; ``defaults`` are the model's. Raises ApiError (400) naming the field."""
    raw = decode_body(body)
    _check_neutral(raw)
    completion: CompletionBody = convert(raw, CompletionBody)
    prompt, prompt_ids = _prompt(completion.prompt)
    submit = Submit(
        request=request,
        sampling=_sampling(completion, defaults),
        max_tokens=_max_tokens(defaults, completion.max_tokens),
        prompt=prompt,
        prompt_ids=prompt_ids,
        stop=_stops(completion.stop),
        ignore_eos=bool(completion.ignore_eos),
        n_logprobs=completion.logprobs,
        want_prompt_ids=bool(completion.return_token_ids),
    )
    return _wanted(completion, raw, submit, is_chat=False)


def _check_neutral(raw: dict[str, Any]) -> None:
    for name, (is_neutral, neutral) in NEUTRAL_ONLY.items():
        value = raw.get(name)
        if value is not None and not is_neutral(value):
            raise invalid(
                name,
                f"{name} is not supported here; leave it out or set it to {neutral}",
                ErrorCode.UNSUPPORTED_PARAMETER,
            )


def _wanted(body: Common, raw: dict[str, Any], submit: Submit, *, is_chat: bool) -> Wanted:
    known = set(type(body).__struct_fields__) | NEUTRAL_ONLY.keys() | WITHOUT_EFFECT
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    return Wanted(
        submit=submit,
        is_chat=is_chat,
        model=body.model,
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        ignored=tuple(sorted(name for name in raw if name not in known)),
    )


def _sampling(body: Common, defaults: RequestDefaults) -> Sampling:
    """What the client named, else the defaults; each field of ``Sampling`` has its namesake in ``Common``."""
    named = {name: value for name in Sampling.__struct_fields__ if (value := getattr(body, name)) is not None}
    seed = named.setdefault("seed", secrets.randbits(SEED_BITS))
    if not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
        raise invalid("seed", f"seed must fit into 64 bits, got {short(seed)}")
    return Sampling(**{**sampling_defaults(defaults), **named, "seed": seed & ((1 << 64) - 1)})


def sampling_defaults(defaults: RequestDefaults) -> dict[str, float]:
    """How an answer is sampled whose client names nothing, but for the seed."""
    return {**SAMPLING_DEFAULTS, **defaults.sampling}


def _max_tokens(defaults: RequestDefaults, *named: int | None) -> int | None:
    """The first that was named."""
    value = next((n for n in named if n is not None), defaults.max_tokens)
    # The router clamps to the context; this keeps the number inside the wire type.
    return None if value is None else min(value, INT31)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", "stop must be a string or a list of strings", ErrorCode.INVALID_TYPE)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop takes at most {MAX_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise invalid("stop", "stop must not contain an empty string")
        if len(stop) > MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string may have at most {MAX_STOP_CHARS} characters, got {len(stop)}")
    return tuple(dict.fromkeys(stops))


def _prompt(value: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, ids). One prompt per request; a list of one prompt counts as that prompt."""
    if value is None:
        raise invalid("prompt", "prompt is missing: a string or a list of token ids", ErrorCode.MISSING_FIELD)
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise invalid(
                "prompt",
                f"one prompt per request, got {len(value)}; send them one by one",
                ErrorCode.UNSUPPORTED_PARAMETER,
            )
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise invalid("prompt", "prompt must not be empty")
        return value, None
    if not isinstance(value, list):
        raise invalid("prompt", "prompt must be a string or a list of token ids", ErrorCode.INVALID_TYPE)
    if not value:
        raise invalid("prompt", "prompt must not be empty")
    if len(value) > MAX_PROMPT_IDS:
        raise ApiError(
            400,
            f"the prompt has {len(value)} tokens, more than any context here",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            param="prompt",
        )
    for idx, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise invalid(
                f"prompt[{idx}]",
                f"prompt[{idx}] must be a token id, got {type(token).__name__}",
                ErrorCode.INVALID_TYPE,
            )
        if not 0 <= token <= INT31:
            raise invalid(f"prompt[{idx}]", f"prompt[{idx}] is no token id: {short(token)}")
    return None, tuple(value)
