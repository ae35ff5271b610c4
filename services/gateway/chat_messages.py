"""A conversation as clients send it, checked; the checkpoint's template gets it as it is. Pure. Runs in the gateway."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from services.gateway.errors import invalid, short
from services.gateway.json_body import convert, decode_text
from shared.errors import ErrorCode

MAX_MESSAGES: Final = 1 << 16


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


def plain_messages(value: Any) -> list[dict[str, Any]]:
    """The messages as they are, but for what is ``null``, which is gone (``content`` stays: templates ask whether it is none).

    Fields that nobody here knows are kept: some families' templates print them.
    """
    if value is None:
        raise invalid("messages", "messages is missing: a list of {role, content}", ErrorCode.MISSING_FIELD)
    if not isinstance(value, list):
        raise invalid("messages", "messages must be a list", ErrorCode.INVALID_TYPE)
    if not value:
        raise invalid("messages", "messages must not be empty")
    if len(value) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} messages, got {len(value)}")
    open_calls: set[str] = set()
    has_calls = False
    plain = []
    for idx, item in enumerate(value):
        at = f"messages[{idx}]"
        message: Message = convert(item, Message, at)
        if message.role not in ROLES:
            raise invalid(f"{at}.role", f"{at}.role: {short(message.role)} is none of {', '.join(ROLES)}")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"{at}.tool_calls", f"{at}.tool_calls: only the assistant calls tools")
        out: dict[str, Any] = {key: part for key, part in item.items() if part is not None or key == "content"}
        content = _content(message.content, f"{at}.content")
        if message.role == "assistant":
            if content is None and not message.tool_calls:
                raise invalid(at, f"{at}: an assistant message needs content or tool_calls")
        elif content is None:
            raise invalid(
                f"{at}.content", f"{at}.content is missing: a string or a list of text parts", ErrorCode.MISSING_FIELD
            )
        out["content"] = content
        if message.role == "tool":
            if not has_calls:
                raise invalid(at, f"{at}: a tool result without a tool call before it")
            if message.tool_call_id is not None and message.tool_call_id not in open_calls:
                raise invalid(f"{at}.tool_call_id", f"{at}.tool_call_id: no tool call before it has this id")
        if message.tool_calls:
            has_calls = True
            open_calls.update(call.id for call in message.tool_calls if call.id is not None)
            out["tool_calls"] = [
                _call(item["tool_calls"][k], f"{at}.tool_calls[{k}]") for k in range(len(message.tool_calls))
            ]
        plain.append(out)
    return plain


def _content(value: Any, at: str) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(at, f"{at} must be a string or a list of text parts", ErrorCode.INVALID_TYPE)
    parts = []
    for idx, part in enumerate(value):
        if not isinstance(part, dict):
            raise invalid(f"{at}[{idx}]", f"{at}[{idx}] must be an object with a type", ErrorCode.INVALID_TYPE)
        if part.get("type") not in ("text", "input_text"):
            raise invalid(
                f"{at}[{idx}].type",
                f"{at}[{idx}].type: only text parts are supported, got {short(part.get('type'))}",
                ErrorCode.UNSUPPORTED_CONTENT,
            )
        if not isinstance(part.get("text"), str):
            raise invalid(f"{at}[{idx}].text", f"{at}[{idx}].text must be a string", ErrorCode.INVALID_TYPE)
        parts.append({**part, "type": "text"})
    return parts


def _call(call: dict[str, Any], at: str) -> dict[str, Any]:
    """A call whose arguments are an object or the JSON text of one, as the client has them; none are an empty object."""
    function = {key: part for key, part in call["function"].items() if part is not None}
    arguments = function.setdefault("arguments", {})
    if isinstance(arguments, str) and arguments.strip():
        arguments = decode_text(arguments, f"{at}.function.arguments")
    elif isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        raise invalid(f"{at}.function.arguments", f"{at}.function.arguments must be a JSON object")
    return {**{key: part for key, part in call.items() if part is not None}, "function": function}
