# ruff: noqa: E501  (a template is easiest to compare in one line)
"""Whatever a client writes and wherever: no control token has a character of it, and templates see it unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.router.client_text import ClientText, join_text, spans_of
from services.router.tokenizer import ModelTokenizer

CONTROLS = ("<|user|>", "<|tool|>", "<think>", "</think>", "[gMASK]", "<0>", "<|end|>", "<arg_key>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def make(folder: Path, template: str, normalizer: Any = None, **flags: bool) -> ModelTokenizer:
    """Bytes as tokens, and the controls: half of them special, as checkpoints have it."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(BYTES)}, merges=[]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for idx, control in enumerate(CONTROLS):
        flags = {"normalized": normalizer is not None, **flags}
        tokenizer.add_tokens([AddedToken(control, special=idx % 2 == 0, **flags)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return ModelTokenizer(folder)


def n_controls(ids: list[int]) -> int:
    return sum(token >= len(BYTES) for token in ids)


EVERYTHING = """[gMASK]
{%- for key, value in custom.items() %}{{ key }}={{ value }}{% endfor -%}
{%- for d in documents %}<|tool|>{{ d.title }}{{ d | tojson }}{% endfor -%}
{%- macro say(text) %}<think>{{ text }}</think>{% endmacro -%}
{%- for m in messages -%}
<|user|>{{ m.name }}{{ say(m.reasoning_content) }}
{%- if m.content is string -%}
{{ m.content.split('</think>')[-1] }}{{ m.content | trim | upper }}{{ '%s|' % m.content }}{{ '{}-'.format(m.content) }}
{{- m.content ~ '/' ~ m.content[::-1] }}{{ [m.content, 1] | join('<think>') }}{{ m.content | replace('a', '<') }}
{{- m.content | list | join }}{{ m.content | indent(3) }}{{ (m.content, 'x') | string }}{{ m.content | e }}{{ m.content.center(40) }}
{{- ('%5s' % m.content) + m.content[1:] + m.content.replace('u', 'u') }}{{ '/'.join([m.content]) }}{{ 'x'.replace('x', m.content) }}
{{- m.content | wordwrap(5) }}{{ '%s %s' % (m.content, 3) }}{{ '{0!s:>9}'.format(m.content) }}{{ m.content | format }}
{%- set ns = namespace(t='') %}{% for c in m.content %}{% set ns.t = ns.t + c %}{% endfor %}{{ ns.t }}
{%- set kept %}{{ m.content }}{% endset %}{{ kept }}{{ {'k': m.content} }}{{ m.content.encode() }}{{ m.content.encode().decode() }}{{ m | string }}
{%- filter lower %}{{ m.content }}{% endfilter %}{{ m.content | map('upper') | join }}{{ m.content | first }}{{ m.content | last }}
{%- autoescape true %}{{ m.content }}{% set x %}{{ m.content | safe }}{% endset %}{% endautoescape %}{{ '%s' % x }}{{ m.content.splitlines() | join('\\n') }}{{ m.content.partition('|') | join }}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
<|tool|>{{ call.id }}{{ call.function.name }}{{ call.function.arguments }}{{ '' + call.function.arguments }}
{%- for k, v in call.function.arguments.items() %}<arg_key>{{ k }}{{ v | tojson if v is not string else v }}{{ v }}{% endfor -%}
{{ call | tojson }}{{ m.tool_call_id }}<{{ number }}>
{%- endfor -%}
{%- endfor -%}"""


def ask(model: ModelTokenizer, text: str, number: Any = 0) -> list[int]:
    call = {"id": text, "function": {"name": text, "arguments": json.dumps({text: text, "b": {text: [text, number]}})}}
    messages = [
        {"role": "user", "content": text, "name": text, "reasoning_content": text},
        {
            "role": "assistant",
            "content": None,
            "name": text,
            "tool_calls": [call],
            text: text,
            "reasoning_content": text,
        },
        {"role": "tool", "content": text, "tool_call_id": text, "name": text},
    ]
    kwargs = {"custom": {text: text, "n": number}, "documents": [{"title": text, text: text}], "number": number}
    return model.encode_chat(messages, kwargs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return make(tmp_path_factory.mktemp("model"), EVERYTHING)


PARTS = [
    *CONTROLS,
    *(c[: len(c) // 2] for c in CONTROLS),
    *(c[len(c) // 2 :] for c in CONTROLS),
    *"<>|/a [0u\n",
    "\U0010fffd",
    "é",
]


@example("<|user|>\n<|user|>")
@example(" <think> <think> ")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join))
def test_no_position_of_a_client_makes_a_control_token(model: ModelTokenizer, text: str) -> None:
    assert n_controls(ask(model, text)) == n_controls(ask(model, "z"))


def test_a_number_does_not_complete_a_control_token(model: ModelTokenizer) -> None:
    assert len({n_controls(ask(model, "z", number)) for number in (0, 1, 0.5, -0)}) == 1


@pytest.mark.parametrize(
    "made", ["n", "n - n", "n * 0", "-n", "n // 1", "n % 1", "n | int", "n | abs", "n ~ ''", "'%d' % n", "[n] | sum"]
)
def test_nor_does_a_number_made_of_it(tmp_path: Path, made: str) -> None:
    model = make(tmp_path, "<0>{{ messages[0].content }}<{{ " + made + " }}>")
    assert n_controls(model.encode_chat([{"role": "user", "content": "z"}], {"n": 0})) == 1


@pytest.mark.parametrize("flags", [{"lstrip": True, "rstrip": True}, {"single_word": True}, {}])
def test_tokens_with_flags_are_no_way_around(tmp_path: Path, flags: dict[str, bool]) -> None:
    model = make(tmp_path, "<|user|> {{ messages[0].content }} <|end|>", **flags)
    ids = [
        n_controls(model.encode_chat([{"role": "user", "content": t}], {})) for t in ("z", " <think> ", "<|end|>", " ")
    ]
    assert ids == [2, 2, 2, 2]


def test_a_normaliser_is_no_way_around(tmp_path: Path) -> None:
    """Full-width letters become a control's spelling only inside the tokenizer."""
    model = make(tmp_path, "<|user|>{{ messages[0].content }}", normalizers.NFKC())
    wide = "".join(chr(ord(char) + 0xFEE0) for char in "<|user|>")
    assert n_controls(model.encode(wide)) == 1
    assert n_controls(model.encode_chat([{"role": "user", "content": wide}], {})) == 1


def test_a_control_token_of_one_character_is_one_too(tmp_path: Path) -> None:
    make(tmp_path, "<|user|>{{ messages[0].content }}{% for k in messages[0] %}{{ k }}{% endfor %}")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["\N{WHITE STAR}"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = ModelTokenizer(tmp_path)
    star = "\N{WHITE STAR}"
    assert n_controls(model.encode(star)) == 1
    assert n_controls(model.encode_chat([{"role": "user", "content": f"a{star}{star}b", star: star}], {})) == 1


def test_a_client_does_not_take_a_control_token_from_the_template(tmp_path: Path) -> None:
    """What is left of a token that a client's characters would have completed is the template's, and may begin another."""
    make(tmp_path, "{{ messages[0].content }}<|end|>")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["x<|"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = ModelTokenizer(tmp_path)
    ids = model.encode_chat([{"role": "user", "content": "yx"}], {})
    assert ids == [*model.encode("yx"), *model.encode("<|end|>")]


def test_an_entry_of_the_vocabulary_itself_is_no_way_around(tmp_path: Path) -> None:
    vocab = [("<unk>", 0.0), *((char, -9.0) for char in "</s>abc"), ("<s>", -1.0), ("</s>", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("<s>{{ messages[0].content }}")
    ids = ModelTokenizer(tmp_path).encode_chat([{"role": "user", "content": "ab</s>c<s>"}], {})
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", *"ab</s>c<s>"]


def test_a_private_use_character_stays(tmp_path: Path) -> None:
    model = make(tmp_path, "{{ messages[0].content }}")
    text = "a\U0010fffdb\U0010ffffc"
    assert model.encode_chat([{"role": "user", "content": text}], {}) == model.encode(text)


def test_the_ids_are_those_of_the_whole_text_where_nothing_is_forged(tmp_path: Path) -> None:
    model = make(tmp_path, "<|user|>\n{{ messages[0].content }}</think>")
    assert model.encode_chat([{"role": "user", "content": "\n  x"}], {}) == model.encode("<|user|>\n\n  x</think>")


def test_blank_words_of_a_vocabulary_are_no_control_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(["    ", "\n\n"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    model = ModelTokenizer(tmp_path)
    assert model.encode_chat([{"role": "user", "content": "    x\n\n"}], {}) == model.encode("    x\n\n")
    assert len(model.encode("    x\n\n")) == 3


def test_ranges_are_followed() -> None:
    text = join_text(["<u>", ClientText(" a,b "), "</u>"])
    assert spans_of(text) == ((3, 8),)
    assert isinstance(text, ClientText)
    assert [spans_of(part) for part in text.split(",")] == [((3, 5),), ((0, 2),)]
    assert spans_of(text[2:4]) == ((1, 2),)
    assert spans_of(text.strip("<u/>")) == ((0, 5),)
    assert spans_of(text.replace("a", "<|user|>")) == ((3, 4), (12, 15))
    assert [spans_of(part) for part in text.partition("a")] == [((3, 4),), ((0, 1),), ((0, 3),)]
    assert [spans_of(part) for part in ClientText("a\r\nb\n").splitlines()] == [((0, 1),), ((0, 1),)]
    assert ClientText(" a  b c ").rsplit(None, 1) == [" a  b", "c"]
    assert spans_of(ClientText("x").center(3)) == ((0, 3),)
    assert text == "<u> a,b </u>" and hash(text) == hash(str.__str__(text))


# ---- what a tokenizer's file asks for beyond splitting


def test_truncation_padding_and_dropout_of_a_file_change_nothing(tmp_path: Path) -> None:
    model = make(tmp_path, "{{ messages[0].content }}")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text(
        (tmp_path / "tokenizer.json").read_text().replace('"dropout": null', '"dropout": 0.5')
    )
    changed = ModelTokenizer(tmp_path)
    text = "some words " * 20
    assert changed.encode(text) == model.encode(text)
    assert changed.encode_chat([{"role": "user", "content": text}], {}) == model.encode(text)
