"""The small files of a checkpoint, made from a GGUF file's keys: tokenizer, chat templates, sampling defaults.

A vocabulary is of one of three kinds: merges of bytes, merges of characters, or pieces with scores (SentencePiece), whose
merges follow from the scores. How text is cut before merging has only a name in the file (``tokenizer.ggml.pre``); what stands
behind a name is listed here, as the models' own tokenizers have it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from conversion.gguf.architectures import CHARACTERS, EMBEDDING, Facts
from shared.errors import ContainerError
from shared.messages.router import SAMPLING_RANGES

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letter: str = r"\p{L}", mark: str = r"\p{L}") -> str:
    """Words with the character before them, ``digits``, signs with the blank before them, blanks."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?[^\s{mark}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased(letters: str, end: str) -> str:
    """Words that end where a capital follows a small letter, their contractions with them. ``letters``: what is left out."""
    capital, small = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
    )
    before, after = r"[^\r\n\p{L}\p{N}]?", f"{_CONTRACTIONS}?"
    return (
        rf"{before}{capital}*{small}+{after}|{before}{capital}+{small}*{after}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+{end}*|"
        + _BLANKS
    )


class Cut(msgspec.Struct, frozen=True):
    """How text is cut before merging: by these expressions in turn. ``whole``: a piece that is a token needs no merges."""

    expressions: tuple[str, ...]
    is_composed: bool = False
    """Characters and their marks are joined beforehand (NFC)."""
    whole: bool = False


_LLAMA3 = Cut((_words(r"\p{N}{1,3}"),), whole=True)
_QWEN2 = Cut((_words(r"\p{N}"),), is_composed=True)
_CUTS: dict[str, Cut] = {
    "gpt-2": Cut((_GPT2,)),
    "olmo": Cut((_GPT2,), is_composed=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "chatglm-bpe": Cut(_LLAMA3.expressions),
    "glm4": _LLAMA3,
    "glm5": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Cut((_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}"),), is_composed=True),
    "deepseek-v3": Cut(
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            + _BLANKS,
        )
    ),
    "gpt-4o": Cut((_cased("", r"[\r\n/]"),), whole=True),
    "kimi-k2": Cut((r"\p{Han}+|" + _cased(r"&&[^\p{Han}]", r"[\r\n]"),), whole=True),
}
_END_TEXTS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|observation|>",
    "<turn|>", "<|tool_response>", "<end_of_turn>", "[EOT]", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Control tokens that end a turn wherever there is one: files name one, two or three of a model's."""
_TOKENS, _TYPES, _MERGES, _SCORES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges", "scores"))
_SAMPLING = {"temp": "temperature"}


def end_ids(facts: Facts) -> list[int]:
    """Ids that end a turn."""
    found = {_id(facts, f"{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    tokens, types = (value if isinstance(value := facts.metadata.get(key), list) else [] for key in (_TOKENS, _TYPES))
    found |= {
        i for i, (text, kind) in enumerate(zip(tokens, types)) if kind in (_CONTROL, _USER) and text in _END_TEXTS
    }
    return sorted(i for i in found if i is not None)


def documents_of(facts: Facts) -> dict[str, bytes]:
    """Name -> content of the files beside config.json that the keys have something for. ContainerError names the key."""
    found = {name: _dumped(content) for name, content in _tokenizer_files(facts).items()}
    found |= _templates(facts)
    if sampling := _sampling(facts):
        found["generation_config.json"] = _dumped(sampling)
    return found


def _tokenizer_files(facts: Facts) -> dict[str, Json]:
    kind = facts.metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return {}
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ContainerError(
            f"{facts.where} has a tokenizer of the kind {kind!r}; those understood are {', '.join(_KINDS)}. Use a file of the "
            "same model with one of them, or its safetensors repository."
        )
    tokens, types = _texts(facts, _TOKENS), _token_types(facts)
    n_rows = facts.shape(EMBEDDING)[0]
    if len(tokens) > n_rows:
        raise ContainerError(
            f'{facts.where}: the key "{_TOKENS}" has {len(tokens):,} tokens, the embedding {n_rows:,} rows. Copy the '
            "file again."
        )
    if len(types) != len(tokens):
        raise ContainerError(
            f'{facts.where}: the keys "{_TOKENS}" and "{_TYPES}" have {len(tokens):,} and {len(types):,} entries, as many are '
            "needed. Copy the file again."
        )
    vocab = {text: i for i, (text, of) in enumerate(zip(tokens, types)) if of != _UNUSED}
    body = _KINDS[kind](facts, vocab, types)
    added = [
        {
            "id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": of != _USER,
        }
        for i, (text, of) in enumerate(zip(tokens, types))
        if of in (_UNKNOWN, _CONTROL, _USER) and text
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **body,
    }
    _require_loadable(facts, tokenizer)
    special: Json = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        idx = _id(facts, f"{key}_token_id")
        if idx is not None and idx < len(tokens):
            special[f"{role}_token"] = tokens[idx]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": special}


def _bytes_bpe(facts: Facts, vocab: dict[str, int], types: Sequence[int]) -> Json:
    name = facts.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _CUTS:
        raise ContainerError(
            f'{facts.where} cuts text in the way {name!r} (its key "tokenizer.ggml.pre"); those understood are '
            f"{', '.join(_CUTS)}. Use a file of the same model with one of them, or its safetensors repository."
        )
    cut = _CUTS[name]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.expressions
    ]
    return {
        "normalizer": {"type": "NFC"} if cut.is_composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": level,
        "model": {"type": "BPE", "ignore_merges": cut.whole, "vocab": vocab, "merges": _merges(facts)},
    }


def _characters_bpe(facts: Facts, vocab: dict[str, int], types: Sequence[int]) -> Json:
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "decoder": _pieces_decoder(has_prefix=False),
        "model": _pieces_model(facts, vocab, _merges(facts), types),
    }


def _sentence_pieces(facts: Facts, vocab: dict[str, int], types: Sequence[int]) -> Json:
    scores = facts.metadata.get(_SCORES)
    if not isinstance(scores, list) or len(scores) != len(types) or not isinstance(scores[0], float):
        raise ContainerError(
            f'{facts.where}: the key "{_SCORES}" must have a number for each of {len(types):,} tokens. Copy the file again.'
        )
    has_prefix = facts.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if has_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
    usable = {text: i for text, i in vocab.items() if types[i] == _NORMAL}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": _pieces_decoder(has_prefix),
        "model": _pieces_model(facts, vocab, _merges_of_scores(usable, scores), types),
    }


def _pieces_model(facts: Facts, vocab: dict[str, int], merges: list[tuple[str, str]], types: Sequence[int]) -> Json:
    """Characters that are no token become their bytes' tokens."""
    unknown = next((text for text, i in vocab.items() if types[i] == _UNKNOWN), None)
    return {
        "type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": merges,
    }  # fmt: skip


def _pieces_decoder(has_prefix: bool) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


_KINDS = {"gpt2": _bytes_bpe, "llama": _sentence_pieces, CHARACTERS: _characters_bpe}


def _merges(facts: Facts) -> list[tuple[str, str]]:
    found = []
    for text in _texts(facts, _MERGES):
        at = text.find(" ", 1)
        if at < 0 or at == len(text) - 1:
            raise ContainerError(
                f'{facts.where}: the key "{_MERGES}" has {text[:60]!r}, which joins nothing. Copy the file again.'
            )
        found.append((text[:at], text[at + 1 :]))
    return found


def _merges_of_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two, those of tokens with the higher score first: SentencePiece joins the best pair."""
    found = []
    for text, i in vocab.items():
        halves = [(text[:at], text[at:]) for at in range(1, len(text))]
        pairs = [(a, b) for a, b in halves if a in vocab and b in vocab]
        found += [(-scores[i], i, vocab[a], vocab[b], a, b) for a, b in pairs]
    return [(a, b) for *_, a, b in sorted(found)]


def _require_loadable(facts: Facts, tokenizer: Json) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # noqa: BLE001  (the library raises plain Exception)
        raise ContainerError(f"{facts.where}: its tokenizer can't be used: {error}. Copy the file again.") from None


def _texts(facts: Facts, key: str) -> list[str]:
    value = facts.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ContainerError(
            f'{facts.where}: the key "{key}" must be a list of texts, which its tokenizer needs. Copy the file again.'
        )
    return value


def _token_types(facts: Facts) -> list[int]:
    value = facts.metadata.get(_TYPES)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ContainerError(
            f'{facts.where}: the key "{_TYPES}" must be a list of numbers, which its tokenizer needs. Copy the file again.'
        )
    return value


def _id(facts: Facts, key: str) -> int | None:
    value = facts.metadata.get(f"tokenizer.ggml.{key}")
    return value if type(value) is int and value >= 0 else None


def _templates(facts: Facts) -> dict[str, bytes]:
    found = {}
    for key, value in facts.metadata.items():
        if not key.startswith("tokenizer.chat_template") or not isinstance(value, str):
            continue
        name = key.removeprefix("tokenizer.chat_template").removeprefix(".")
        if not name:
            found["chat_template.jinja"] = value.encode()
        elif re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
            found[f"additional_chat_templates/{name}.jinja"] = value.encode()
    return found


def _sampling(facts: Facts) -> Json:
    found: Json = {}
    for key, value in facts.metadata.items():
        name = key.removeprefix("general.sampling.")
        name = _SAMPLING.get(name, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if key.startswith("general.sampling.") and name in SAMPLING_RANGES and is_number:
            found[name] = value
    return found


def _dumped(content: Json) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
