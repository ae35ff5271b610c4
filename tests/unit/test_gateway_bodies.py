"""What a request body may say; no sockets."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from services.gateway.bodies import NEUTRAL_ONLY, parse_chat, parse_completion
from services.gateway.errors import ApiError
from services.gateway.json_body import MAX_DEPTH
from shared.run.config import RequestDefaults

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any):
    return parse_chat(json.dumps({"messages": HELLO, **fields}).encode(), "id")


def completion(**fields: Any):
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode(), "id")


def refused(parse, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    body = json.loads(caught.value.body())
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return caught.value


def test_defaults() -> None:
    wanted = chat()
    submit = wanted.submit
    assert (submit.sampling.temperature, submit.sampling.top_p, submit.max_tokens) == (1.0, 1.0, None)
    assert (submit.stop, submit.n_logprobs, submit.ignore_eos, wanted.stream) == ((), None, False, False)
    assert json.loads(submit.messages_json or b"") == HELLO
    assert submit.prompt is None
    assert submit.prompt_ids is None


def test_the_models_defaults_are_those_of_a_request_that_names_none() -> None:
    defaults = RequestDefaults({"temperature": 0.7, "top_p": 0.95}, max_tokens=20)
    for parse, rest in ((parse_chat, {"messages": HELLO}), (parse_completion, {"prompt": "x"})):
        for fields in ({}, {"temperature": None, "top_p": None, "max_tokens": None}):
            submit = parse(json.dumps({**rest, **fields}).encode(), "id", defaults).submit
            assert (submit.sampling.temperature, submit.sampling.top_p, submit.max_tokens) == (0.7, 0.95, 20)
        named = {"temperature": 0, "top_p": 1, "max_tokens": 30}
        submit = parse(json.dumps({**rest, **named}).encode(), "id", defaults).submit
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.max_tokens) == (0, 1, 30)
    both = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 8}
    assert parse_chat(json.dumps(both).encode(), "id", defaults).submit.max_tokens == 8


def test_null_is_the_same_as_absent() -> None:
    fields = ["stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"]
    fields += [
        "logprobs",
        "top_logprobs",
        "ignore_eos",
        "return_token_ids",
        "chat_template_kwargs",
        "model",
        "tools",
        "n",
    ]
    nulls = dict.fromkeys(fields)
    assert chat(**nulls | {"seed": 1}) == chat(seed=1)
    assert 0 <= chat(**nulls).submit.sampling.seed < 1 << 53


def test_a_seed_is_drawn_and_differs() -> None:
    seeds = {chat().submit.sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 1 << 53 for seed in seeds)


@pytest.mark.parametrize(("given", "used"), [(0, 0), (7, 7), (-1, (1 << 64) - 1), ((1 << 64) - 1, (1 << 64) - 1)])
def test_seeds(given: int, used: int) -> None:
    assert chat(seed=given).submit.sampling.seed == used


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, "7", 1.5, True])
def test_seeds_refused(seed: Any) -> None:
    assert refused(chat, seed=seed).param == "seed"


@pytest.mark.parametrize(
    ("stop", "used"),
    [(None, ()), ([], ()), ("a", ("a",)), (["a", "b", "c", "d"], ("a", "b", "c", "d")), (["a", "a"], ("a",))],
)
def test_stop_values(stop: Any, used: tuple[str, ...]) -> None:
    assert chat(stop=stop).submit.stop == used
    assert completion(stop=stop).submit.stop == used


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["a", "b", "c", "d", "e"], 7, [7], {"a": 1}, True, ["x" * 2000]])
def test_stop_values_refused(stop: Any) -> None:
    assert refused(chat, stop=stop).param == "stop"
    assert refused(completion, stop=stop).param == "stop"


@pytest.mark.parametrize("value", [0, -1, "1", 1.5, True, [1]])
def test_max_tokens_refused(value: Any) -> None:
    assert refused(chat, max_tokens=value).param == "max_tokens"
    assert refused(completion, max_tokens=value).param == "max_tokens"
    assert refused(chat, max_completion_tokens=value).param == "max_completion_tokens"


def test_max_tokens() -> None:
    assert chat(max_tokens=1).submit.max_tokens == 1
    assert chat(max_tokens=5, max_completion_tokens=3).submit.max_tokens == 3
    assert chat(max_tokens=10**30).submit.max_tokens == (1 << 31) - 1, "huge limits are clamped, not refused"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -1),
    ]
    + [("stream", 1), ("stream", "true"), ("ignore_eos", "yes"), ("model", 3), ("return_token_ids", 1)],
)
def test_common_types_and_ranges(name: str, value: Any) -> None:
    assert refused(chat, **{name: value}).param == name
    assert refused(completion, **{name: value}).param == name


NOT_NEUTRAL: dict[str, list[Any]] = {
    "n": [3, 0, "1", True], "presence_penalty": [0.5, False], "frequency_penalty": [-1], "logit_bias": [{"5": 1}, 3],
    "tools": [[{"type": "function", "function": {"name": "f"}}]], "tool_choice": ["required", {"type": "function"}],
    "response_format": [{"type": "json_object"}, "json", {}], "echo": [True], "top_k": [40], "min_p": [0.1], "best_of": [2],
    "suffix": ["x"], "reasoning_effort": ["high"], "stop_token_ids": [[1]], "repetition_penalty": [1.1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NOT_NEUTRAL.items() for value in values])
def test_what_can_not_be_honoured_is_refused_by_name(name: str, value: Any) -> None:
    for parse in (chat, completion):
        error = refused(parse, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 1), ("presence_penalty", 0), ("frequency_penalty", 0.0), ("logit_bias", {}), ("tools", []), ("echo", False)]
    + [
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("top_k", -1),
    ],
)
def test_values_that_change_nothing_are_accepted(name: str, value: Any) -> None:
    assert chat(**{name: value}).ignored == ()
    assert completion(**{name: value}).ignored == ()


def test_every_refusable_field_accepts_null() -> None:
    assert chat(**dict.fromkeys(NEUTRAL_ONLY)).ignored == ()


def test_unknown_fields_are_reported_not_refused() -> None:
    assert chat(temprature=0, zzz=1).ignored == ("temprature", "zzz")


def test_template_variables() -> None:
    kwargs = {"enable_thinking": False, "budget": [1, {"a": "b"}]}
    assert json.loads(chat(chat_template_kwargs=kwargs).submit.template_kwargs_json or b"") == kwargs
    for name in ("messages", "add_generation_prompt", "self", "eos_token"):
        assert refused(chat, chat_template_kwargs={name: "x"}).param == f"chat_template_kwargs.{name}"
    assert refused(chat, chat_template_kwargs=[1]).param == "chat_template_kwargs"


def test_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": False}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(chat, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"


def test_logprobs() -> None:
    assert chat(logprobs=True).submit.n_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).submit.n_logprobs == 5
    assert chat(logprobs=False).submit.n_logprobs is None
    assert completion(logprobs=0).submit.n_logprobs == 0
    assert completion(logprobs=3).submit.n_logprobs == 3
    assert refused(chat, top_logprobs=5).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(chat, logprobs=3).param == "logprobs"
    assert refused(completion, logprobs=True).param == "logprobs"


# ---- messages


def render(messages: list[Any]) -> list[dict[str, Any]]:
    return json.loads(parse_chat(json.dumps({"messages": messages}).encode(), "id").submit.messages_json or b"")


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
BAD_CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

CALLS = {"role": "assistant", "tool_calls": [CALL]}


def test_a_history_reaches_the_template_as_it_is() -> None:
    def history(**assistant: Any) -> list[Any]:
        return [
            {"role": "developer", "content": "be good"},
            {"role": "user", "content": "1+1", "custom": {"n": 1}},
            {"role": "assistant", "tool_calls": [CALL], **assistant},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "user", "content": [{"type": "text", "text": "tha"}, {"type": "text", "text": "nks"}]},
        ]

    assert render(history(content=None)) == history(content=None)
    assert render(history(content="", name=None, function_call=None)) == history(content="")
    assert render(history()) == history(content=None)
    # Templates that print a whole message print its keys as they came.
    given = {"role": "assistant", "content": None, "tool_calls": [CALL], "custom": 1}
    assert list(render([*history()[:2], given])[2]) == list(given)


def test_arguments_of_calls_are_an_object_or_its_json_text() -> None:
    def arguments(**function: Any) -> Any:
        calls = [{"id": "c1", "function": {"name": "f", **function}}]
        return render([{"role": "assistant", "tool_calls": calls}])[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments(arguments='{"a":  1}') == '{"a":  1}'
    assert arguments(arguments={"a": 1}) == {"a": 1}
    assert arguments(arguments="") == ""
    assert arguments(arguments=None) == arguments() == {}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        ([7], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        (HELLO + [{"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        (HELLO + [{"role": "tool", "content": "2"}], "messages[1]"),
        (HELLO + [{"role": "assistant"}], "messages[1]"),
        (HELLO + [{"role": "assistant", "content": None}], "messages[1]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [IMAGE]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        (HELLO + [CALLS, {"role": "tool", "tool_call_id": "c9", "content": "2"}], "messages[2].tool_call_id"),
        ([BAD_CALLS], "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_malformed_histories_name_the_message(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(json.dumps({"messages": messages}).encode(), "id")
    assert (caught.value.status, caught.value.param) == (400, param)


# ---- prompts


def test_prompts() -> None:
    assert completion(prompt="abc").submit.prompt == "abc"
    assert completion(prompt=[1, 2, 3]).submit.prompt_ids == (1, 2, 3)
    assert completion(prompt=["abc"]).submit.prompt == "abc"
    assert completion(prompt=[[1, 2]]).submit.prompt_ids == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (7, "prompt"),
        (["a", "b"], "prompt"),
        ([""], "prompt"),
        ({}, "prompt"),
    ]
    + [
        ([1, -1], "prompt[1]"),
        ([1, 1 << 31], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
    ],
)
def test_prompts_refused(prompt: Any, param: str) -> None:
    assert refused(completion, prompt=prompt).param == param


# ---- hostile bytes


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b'{"messages": [{"role":"user","content":"\\ud800"}]}',
        b"NaN",
    ]
    + [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x00",
        b'{"a": 1e999}',
    ],
)
def test_hostile_json_is_a_400(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body, "id")
        assert caught.value.status == 400
        json.loads(caught.value.body())


def test_depth_counts_brackets_outside_strings_only() -> None:
    assert render([{"role": "user", "content": "[" * 10_000 + '\\"' + "{" * 10_000}])[0]["content"].startswith("[[")
    deep: Any = "x"
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert "deeper" in refused(chat, metadata=deep).message


@pytest.mark.parametrize(
    ("field", "param", "words"),
    [
        ('"temperature": 1e309', "temperature", "1e309 is beyond"),
        ('"top_p": -1e309', "top_p", "-1e309 is beyond"),
        ('"seed": 1e400', "seed", "1e400 is beyond"),
        ('"seed": 99999999999999999999', "seed", "does not fit into 64 bits"),
        ('"metadata": [0, {"a": 1' + "0" * 5000 + "}]", "metadata[1].a", "does not fit into 64 bits"),
        ('"top_p": 1' + "0" * 400 + ".0", "top_p", "is beyond"),
        ('"temperature": NaN', "temperature", "NaN is not JSON"),
        ('"chat_template_kwargs": {"x": [-Infinity]}', "chat_template_kwargs.x[0]", "-Infinity is not JSON"),
        ('"logit_bias": {"7": Infinity}', "logit_bias.7", "Infinity is not JSON"),
        ('"stop": ["a", "\\udc00"]', "stop[1]", "half of a surrogate pair"),
        ('"chat_template_kwargs": {"\\ud83d": 1}', "chat_template_kwargs.\\ud83d", "half of a surrogate pair"),
        ('"temperature": 1, "temperature": 0', "temperature", "twice"),
        ('"metadata": [{"a": 1, "b": 2, "a": 1}]', "a", "twice"),
    ],
)
def test_what_readers_of_json_disagree_on_is_refused_by_name(field: str, param: str, words: str) -> None:
    for parse, rest in (
        (parse_chat, '"messages": [{"role": "user", "content": "x"}]'),
        (parse_completion, '"prompt": "x"'),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            parse(f"{{{rest}, {field}}}".encode(), "id")
        assert (caught.value.status, caught.value.param) == (400, param)
        json.loads(caught.value.body())


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1e309}', '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\ud800"}', "[" * 100_000, '{"a": 1', "[]", "7"],
)
def test_arguments_of_calls_are_json_objects_too(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    error = refused(chat, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert error.param == "messages[1].tool_calls[0].function.arguments"


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert chat(stop="\U0001f642").submit.stop == ("\U0001f642",)
    body = b'{"prompt": "x", "stop": "\\ud83d\\ude42"}'
    assert parse_completion(body, "id").submit.stop == ("\U0001f642",)


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_other_encodings_are_named(encoding: str) -> None:
    body = json.dumps({"messages": HELLO}).encode(encoding)
    words = "byte order mark" if encoding == "utf-8-sig" else encoding[:6].upper()
    with pytest.raises(ApiError, match=words) as caught:
        parse_chat(body, "id")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_an_empty_body_is_named() -> None:
    for body in (b"", b" \n"):
        with pytest.raises(ApiError, match="the body is empty"):
            parse_chat(body, "id")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"metadata": [' + b"[]," * 270_000 + b"[]]}", "more than 262,144 arrays and objects"),
        (b'{"metadata": [' + b"1," * 1_100_000 + b"1]}", "more than 1,048,576 values"),
        (b'{"messages": [' + b'{"role":"user","content":"a"},' * 70_000 + b"1]}", "at most 65536 messages"),
        (b'{"metadata": [{' + b",".join(b'"%d":1' % k for k in range(70_000)) + b"}]}", "more than 65,536 keys"),
    ],
    ids=["arrays", "values", "messages", "keys"],
)
def test_bodies_of_very_many_parts_are_refused_before_they_cost_much(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse_chat(body, "id")
    assert caught.value.status == 400


def test_commas_and_brackets_in_strings_are_no_parts() -> None:
    text = ",[{:" * 700_000
    assert completion(prompt=text).submit.prompt == text


def test_other_threads_get_their_turns_while_a_large_body_is_parsed() -> None:
    """Streams of others live in the event loop's thread."""
    body = b'{"messages": [' + b",".join([b'{"role":"user","content":"a"}'] * 400_000) + b"]}"
    longest, is_over = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.monotonic()
        while not is_over.is_set():
            time.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(ApiError):
        parse_chat(body, "id")
    is_over.set()
    watcher.join()
    assert longest < 0.5


def test_nul_and_long_lines_are_text() -> None:
    text = "\x00" + "x" * 1_000_000
    assert render([{"role": "user", "content": text}])[0]["content"] == text
