"""Which tokens begin turns, for the shapes of templates there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest

from services.router.tokenizer import ModelTokenizer
from services.router.turns import turn_markers

EMBEDDED = Path(__file__).parents[2] / "models" / "fledgling"

CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""
CHATML_CONTROLS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>"]

HEADERS = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

TWO_ROLES = """{{ bos_token }}{% for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

ROUNDS = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""

PARTS = """{% for m in messages %}{% if m.role == 'assistant' %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|channel|>commentary<|message|>{}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

NAMED = """{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>
{%- elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}
{%- if m.tool_calls %}<|calls|><|call|>x<|/call|><|/calls|>{% endif %}<|im_end|>
{%- else %}<|im_system|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
NAMED_MARKERS = {"<|im_user|>", "<|im_assistant|>", "<|im_system|>"}

RESULTS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls[0].function.name }}{{ eos_token }}
{%- elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
{%- else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
RESULTS_CONTROLS = [
    "[INST]",
    "[/INST]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
]


def markers(source: str, controls: list[str], **tokens: str) -> set[str]:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string(source)

    def render(messages: list[dict[str, Any]], variables: dict[str, Any], with_prompt: bool) -> str | None:
        try:
            return template.render(
                messages=messages, add_generation_prompt=with_prompt, **{"tools": None, **variables}, **tokens
            )
        except (jinja2.TemplateError, TypeError):
            return None

    return set(turn_markers(render, controls, tokens.get("bos_token")))


@pytest.mark.parametrize(
    ("source", "controls", "tokens", "expected"),
    [
        (CHATML, CHATML_CONTROLS, {"bos_token": "<|endoftext|>"}, {"<|im_start|>"}),
        (CHATML, CHATML_CONTROLS, {"bos_token": "<|im_start|>"}, {"<|im_start|>"}),
        (
            HEADERS,
            ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            {"bos_token": "<|begin|>"},
            {"<|start_header_id|>"},
        ),
        (TWO_ROLES, ["<bos>", "<start_of_turn>", "<end_of_turn>"], {"bos_token": "<bos>"}, {"<start_of_turn>"}),
        (ROUNDS, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, set()),
        (ROUNDS, ["<s>", "</s>", "[INST]", "[/INST]"], {"bos_token": "<s>", "eos_token": "</s>"}, {"[INST]"}),
        (PARTS, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"], {}, set()),
        (NAMED, [*NAMED_MARKERS, "<|im_middle|>", "<|im_end|>", "<|calls|>", "<|call|>"], {}, NAMED_MARKERS),
        (
            RESULTS,
            ["<s>", "</s>", *RESULTS_CONTROLS],
            {"bos_token": "<s>", "eos_token": "</s>"},
            {"[INST]", "[TOOL_RESULTS]", "[SYSTEM_PROMPT]"},
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ["<think>"], {}, set()),
        ("{{ raise_exception('never') }}", ["<|user|>"], {}, set()),
        (CHATML, [], {}, set()),
    ],
    ids=[
        "chatml",
        "chatml-bos",
        "headers",
        "two-roles",
        "rounds",
        "rounds-inst",
        "parts",
        "named",
        "results",
        "plain",
        "no",
        "none",
    ],
)
def test_the_markers_of_turns(source: str, controls: list[str], tokens: dict[str, str], expected: set[str]) -> None:
    assert markers(source, controls, **tokens) == expected


def test_the_embedded_model() -> None:
    model = ModelTokenizer(EMBEDDED)
    expected = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    assert model.turn_ends == {model.encode(text)[0] for text in expected}


def test_without_a_template_there_are_none(tmp_path: Path) -> None:
    shutil.copy(EMBEDDED / "tokenizer.json", tmp_path)
    assert ModelTokenizer(tmp_path).turn_ends == frozenset()
