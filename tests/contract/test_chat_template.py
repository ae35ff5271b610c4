# ruff: noqa: E501  (a template is easiest to compare in one line)
"""What a chat template gets and may use: snippets of templates with the text that ``transformers`` makes of them.

The expectations were made with jinja2 set up as that library does it, given a tool call's arguments as an object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from services.router.chat_template import ChatTemplate
from services.router.template_files import TemplateFiles, read_template_files
from shared.errors import ContainerError, Refused

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": " sys "}
DEVELOPER = {"role": "developer", "content": "be brief"}
THINKS = {"role": "assistant", "content": "<think>a</think>b"}
ARGUMENTS = '{"city":  "Pâris", "n": 2}'
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"

SNIPPETS: list[tuple[str, str, list[dict[str, Any]], dict[str, Any], str]] = [
    (
        "tojson keeps letters",
        "{{ messages[0].content | tojson }}",
        [{"role": "user", "content": "é<&'\"\n"}],
        {},
        '"é<&\'\\"\\n"',
    ),
    (
        "tojson ensure_ascii",
        "{{ messages[0] | tojson(ensure_ascii=True) }}",
        [{"role": "user", "content": "é🙂"}],
        {},
        '{"role": "user", "content": "\\u00e9\\ud83d\\ude42"}',
    ),
    (
        "tojson ensure_ascii false",
        "{{ messages[0].content | tojson(ensure_ascii=False) }}",
        [{"role": "user", "content": "é"}],
        {},
        '"é"',
    ),
    ("tojson indent", "{{ messages[0] | tojson(indent=2) }}", [USER], {}, '{\n  "role": "user",\n  "content": "hi"\n}'),
    (
        "tojson separators",
        "{{ messages[0] | tojson(separators=(',', ':')) }}",
        [USER],
        {},
        '{"role":"user","content":"hi"}',
    ),
    ("tojson sort_keys", "{{ messages[0] | tojson(sort_keys=True) }}", [USER], {}, '{"content": "hi", "role": "user"}'),
    (
        "tojson positional",
        "{{ messages[0] | tojson(false, 1) }}",
        [USER],
        {},
        '{\n "role": "user",\n "content": "hi"\n}',
    ),
    (
        "content none",
        "{% if messages[1].content is none %}N{% else %}[{{ messages[1].content }}]{% endif %}",
        [USER, CALLS, RESULT],
        {},
        "N",
    ),
    ("content none printed", "{{ messages[1].content }}", [USER, CALLS, RESULT], {}, "None"),
    (
        "tools none",
        "{% if tools is not none %}T{% else %}-{% endif %}{% if tools is defined %}d{% endif %}",
        [USER],
        {},
        "-d",
    ),
    (
        "documents none",
        "{% if documents is none %}-{% endif %}{% for d in documents or [] %}{{ d.title }}{% endfor %}",
        [USER],
        {},
        "-",
    ),
    (
        "documents given",
        "{% for d in documents %}{{ loop.index }}:{{ d['title'] }};{% endfor %}",
        [USER],
        {"documents": [{"title": "A", "text": "x"}, {"title": "B"}]},
        "1:A;2:B;",
    ),
    (
        "loopcontrols",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        [USER, THINKS, THINKS],
        {},
        "<think>a</think>b",
    ),
    (
        "generation",
        "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
        [USER, THINKS],
        {},
        "hi!<think>a</think>b!",
    ),
    (
        "generation scope",
        "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ x }}{{ m.content }}{{ loop.index }}{% endgeneration %}{{ x }}{% endfor %}",
        [USER, THINKS],
        {},
        "2hi112<think>a</think>b21",
    ),
    (
        "trim blocks",
        "a\n{% if true %}\n  b\n{% endif %}\nc\n    {% if true %}x{% endif %}\n",
        [USER],
        {},
        "a\n  b\nc\nx",
    ),
    (
        "think split",
        "{% set c = messages[1].content %}{% if '</think>' in c %}{{ c.split('</think>')[-1] }}|{{ c.split('</think>')[0].split('<think>')[-1] }}{% endif %}",
        [USER, THINKS],
        {},
        "b|a",
    ),
    (
        "think rstrip",
        "{{ messages[1].content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}",
        [USER, THINKS],
        {},
        "a",
    ),
    (
        "args items",
        "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        [USER, CALLS, RESULT],
        {},
        "city=Pâris;n=2;",
    ),
    (
        "args tojson",
        "{{ messages[1].tool_calls[0].function.arguments | tojson }}",
        [USER, CALLS, RESULT],
        {},
        '{"city": "Pâris", "n": 2}',
    ),
    (
        "args mapping",
        "{% set a = messages[1].tool_calls[0].function.arguments %}{% if a is mapping %}M{% elif a is string %}S{% endif %}",
        [USER, CALLS, RESULT],
        {},
        "M",
    ),
    (
        "call tojson",
        "{{ messages[1].tool_calls[0] | tojson }}",
        [USER, CALLS, RESULT],
        {},
        '{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Pâris", "n": 2}}}',
    ),
    ("call id", "{{ messages[2].tool_call_id }}{{ messages[1].tool_calls[0].id }}", [USER, CALLS, RESULT], {}, "c1c1"),
    (
        "special tokens",
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ additional_special_tokens | default([]) | join(',') }}",
        [USER],
        {},
        "<s></s>False",
    ),
    (
        "kwargs",
        "{{ enable_thinking }}{{ depth + 1 }}{{ x is defined }}{{ names | join(', ') }}",
        [USER],
        {"enable_thinking": False, "depth": 3, "names": ["a", "b"]},
        "False4Falsea, b",
    ),
    (
        "namespace",
        "{% set ns = namespace(n=0, t='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.t = ns.t ~ m.role ~ ns.n %}{% endfor %}{{ ns.t }}",
        [USER, THINKS],
        {},
        "user1assistant2",
    ),
    (
        "macro",
        "{% macro say(m, end='') %}<{{ m.role }}>{{ m.content | trim }}{{ end }}{% endmacro %}{% for m in messages %}{{ say(m, end='.') }}{% endfor %}",
        [SYSTEM, USER],
        {},
        "<system>sys.<user>hi.",
    ),
    (
        "set block",
        "{% set x %}<{{ messages[0].content }}>{% endset %}{{ x | upper }}{{ x | length }}",
        [USER],
        {},
        "<HI>4",
    ),
    (
        "filters",
        "{{ messages[0].content | replace('s','z') | trim | title | indent(2) }}{{ messages | map(attribute='role') | join('+') }}",
        [SYSTEM, USER],
        {},
        "Zyzsystem+user",
    ),
    (
        "selectattr",
        "{{ (messages | selectattr('role','equalto','user') | list | last).content }}{{ messages[-1]['content'][::-1] }}{{ messages[1:] | length }}",
        [SYSTEM, USER],
        {},
        "hiih1",
    ),
    (
        "percent",
        "{{ '<%s>%s' % (messages[0].role, messages[0].content) }}{{ '{}-{x}'.format(messages[0].role, x=messages[0].content) }}",
        [USER],
        {},
        "<user>hiuser-hi",
    ),
    (
        "reversed messages",
        "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.content }}{{ ',' if not loop.last }}{% endfor %}",
        [SYSTEM, USER],
        {},
        "0hi,1 sys ",
    ),
    ("dict printed", "{{ messages[0] }}", [USER], {}, "{'role': 'user', 'content': 'hi'}"),
    ("undefined", "[{{ messages[0].nothing }}]{{ messages[0].nothing is defined }}", [USER], {}, "[]False"),
    (
        "parts",
        "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }};{% endfor %}",
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        {},
        "text:a;text:b;",
    ),
    (
        "reasoning",
        "{{ messages[0].reasoning_content }}{{ messages[0].name }}",
        [{"role": "assistant", "content": "x", "reasoning_content": "why", "name": "bob"}],
        {},
        "whybob",
    ),
    (
        "isin",
        "{{ 'tool_calls' in messages[0] }}{{ messages[0].get('x','d') }}{{ messages[0].keys()|list }}",
        [USER],
        {},
        "Falsed['role', 'content']",
    ),
    (
        "slices",
        "{{ messages[0].content[1:] }}{{ messages[0].content[-1] }}{{ messages[0].content.startswith('h') }}{{ messages[0].content.splitlines() }}",
        [USER],
        {},
        "iiTrue['hi']",
    ),
    (
        "int math",
        "{{ 7 // 2 }}{{ 2 ** 3 }}{{ '-' * 3 }}{{ 7 % 4 }}{{ 1.5 + 1 }}{{ true }}{{ none }}",
        [USER],
        {},
        "38---32.5TrueNone",
    ),
    (
        "filter block",
        "{% filter upper %}a{{ messages[0].content }}{% endfilter %}{{ messages[0].content is string }}",
        [USER],
        {},
        "AHITrue",
    ),
    (
        "call block",
        "{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}{{ messages[0].content }}{% endcall %}",
        [USER],
        {},
        "[hi]",
    ),
    (
        "string filter",
        "{{ messages[0]|string }}{{ messages[0].content|string|e }}{{ messages[0].content ~ 1 ~ none }}",
        [{"role": "user", "content": "<b>"}],
        {},
        "{'role': 'user', 'content': '<b>'}&lt;b&gt;<b>1None",
    ),
    ("strftime", "{{ strftime_now('%Y')|length }}{{ strftime_now is defined }}", [USER], {}, "4True"),
    (
        "cycler",
        "{% set c = cycler('a','b') %}{{ c.next() }}{{ c.next() }}{{ dict(a=1).a }}{{ range(3)|list }}",
        [USER],
        {},
        "ab1[0, 1, 2]",
    ),
    (
        "dictsort",
        "{{ messages[0]|dictsort }}{{ messages[0].items()|list }}{{ messages|groupby('role')|length }}",
        [USER],
        {},
        "[('content', 'hi'), ('role', 'user')][('role', 'user'), ('content', 'hi')]1",
    ),
    ("lstrip", "  {%- if true %}\n   y {%+ if true %}z{% endif %}{% endif %}\n\t{# c #}\nq\n", [USER], {}, "   y zq"),
]


def template(source: str) -> ChatTemplate:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(TemplateFiles({"default": (source, Path("chat_template.jinja"))}, special))


def rendered(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return str(template(source).render(messages, kwargs, 1 << 20))


@pytest.mark.parametrize(("name", "source", "messages", "kwargs", "expected"), SNIPPETS, ids=[s[0] for s in SNIPPETS])
def test_a_template_makes_what_transformers_makes_of_it(
    name: str, source: str, messages: list[dict[str, Any]], kwargs: dict[str, Any], expected: str
) -> None:
    assert rendered(source, messages, **kwargs) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'x' + a + 'y' }}", f"x{ARGUMENTS}y"),
        ("{{ a }}{{ '' ~ a }}{{ a | string }}", ARGUMENTS * 3),
        ("{% if a is string %}S{% else %}{{ a['city'] }}{% endif %}", "Pâris"),
    ],
)
def test_arguments_are_an_object_that_prints_as_the_text_the_client_sent(source: str, expected: str) -> None:
    """Some families' templates iterate over the arguments, others (DeepSeek) add them to a text."""
    a = "{% set a = messages[1].tool_calls[0].function.arguments %}"
    assert rendered(a + source, [USER, CALLS, RESULT]) == expected


def test_a_text_is_joined_where_the_template_does_not_walk_over_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered("{{ messages[0].content }}", parts) == "ab"
    walks = "{% for m in messages %}{% set c = m['content'] %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }},"
    assert rendered(walks + "{% endfor %}{% endif %}{% endfor %}", parts) == "a,b,"


# ---- refusals


def refusal(source: str, messages: list[dict[str, Any]], max_chars: int = 1 << 20, **kwargs: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        template(source).render(messages, kwargs, max_chars)
    assert caught.value.status == 400
    return caught.value


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    assert "no user here" in str(refusal("{{ raise_exception('no ' + messages[0].role + ' here') }}", [USER]))
    assert "TypeError" in str(refusal("{{ 1 + messages[0].content }}", [USER]))
    assert str(refusal("{{ raise_exception('One thing only.') }}", [USER])).endswith(": One thing only.")
    long = {"role": "user", "content": "x" * 100_000}
    assert len(str(refusal("{{ raise_exception(messages[0].content) }}", [long]))) < 2000
    assert len(str(refusal("{{ {}[messages[0].content].x }}", [long]))) < 2000


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{{ messages[0].content * 50 }}{% endfor %}{% endfor %}",
        "{{ 'x' * 2000000 }}",
        "{% macro m() %}{% for i in range(99999) %}{{ messages[0].content * 50 }}{% endfor %}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_that_makes_too_much_is_refused(source: str) -> None:
    assert "makes too much" in str(refusal(source, [USER]))


@pytest.mark.parametrize("source", ["{{ 9 ** 999999999 }}", "{{ 'x' * 9999999999 }}", "{{ [1] * 9999999999 }}"])
def test_one_operation_can_not_take_all_memory(source: str) -> None:
    assert "too l" in str(refusal(source, [USER]))


# ---- developer


def test_a_developer_message_is_known_or_system_or_refused() -> None:
    assert rendered(CHATML, [DEVELOPER, USER]) == "<|system|>be brief<|user|>hi"
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D:{% endif %}{{ m.content }}{% endfor %}"
    assert rendered(knows, [DEVELOPER, USER]) == "D:be briefhi"
    drops = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    refused = refusal(drops, [USER, DEVELOPER])
    assert (refused.code, refused.param) == ("template_error", "messages[1]")
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ messages[-1].content }}"
    assert rendered(first, [DEVELOPER, USER]) == "be briefhi"
    assert refusal(first, [SYSTEM, DEVELOPER, USER]).param == "messages[1]"


def test_many_developer_messages_are_looked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    generate = jinja2.Template.generate

    def counted(*args: Any, **kwargs: Any) -> Iterator[str]:
        runs.append(args)
        return generate(*args, **kwargs)

    monkeypatch.setattr(jinja2.Template, "generate", counted)
    assert rendered(CHATML, [DEVELOPER] * 40) == "<|system|>be brief" * 40
    assert len(runs) == 2
    drops_one = "{% for m in messages %}{{ m.content if loop.index0 != 2 }}{% endfor %}"
    assert refusal(drops_one, [DEVELOPER] * 12).param == "messages[2]"


def test_a_system_message_is_the_templates_affair() -> None:
    drops = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert rendered(drops, [SYSTEM, USER]) == "hi"


# ---- files


def write(model: Path, files: dict[str, Any]) -> ChatTemplate:
    for name, content in files.items():
        path = model / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return ChatTemplate(read_template_files(model))


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "C"}}, "J", "J"),
        ({"tokenizer_config.json": {"chat_template": "C"}, "chat_template.json": {"chat_template": "P"}}, "C", "C"),
        ({"chat_template.json": {"chat_template": "P"}}, "P", "P"),
        ({"chat_template.json": {"chat_template": NAMED}}, "D", "T"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "D", "T"),
        ({"tokenizer_config.json": {"chat_template": [NAMED[1]]}}, "T", "T"),
        ({"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "A"}, "J", "A"),
        ({"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": "J"}, "J", "T"),
    ],
)
def test_every_place_of_a_template_is_found(tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str) -> None:
    made = write(tmp_path, files)
    assert made.render([USER], {}, 100) == plain
    assert made.render([USER], {"tools": [{"name": "f"}]}, 100) == with_tools


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer_config.json": {"chat_template": [{"name": "a", "template": "A"}, NAMED[1]]}}]
)
def test_without_a_template_the_refusal_names_the_files(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        write(tmp_path, files).render([USER], {}, 100)
    assert caught.value.code == "no_chat_template"
    for name in ("chat_template.jinja", "additional_chat_templates", "tokenizer_config.json", "chat_template.json"):
        assert name in str(caught.value)


def test_special_tokens_come_from_all_forms_of_the_file(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ unk_token is defined }}{{ additional_special_tokens }}{{ pad_token }}"
    config = {
        "chat_template": source,
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "unk_token": None,
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "extra_special_tokens": {"image_token": "<i>"},
    }
    files = {"tokenizer_config.json": config, "special_tokens_map.json": {"pad_token": "<p>", "eos_token": "<old>"}}
    assert write(tmp_path, files).render([USER], {}, 100) == "<s></s><i>False['<a>', '<b>']<p>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", "x" * (5 << 20)),
        ("chat_template.json", "[1]"),
        ("chat_template.json", '{"chat_template": 7}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}'),
        ("special_tokens_map.json", "{"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(ContainerError, match=name):
        write(tmp_path, {name: content})


def test_a_pipe_in_the_place_of_a_template_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(ContainerError, match="a named pipe"):
        read_template_files(tmp_path)
