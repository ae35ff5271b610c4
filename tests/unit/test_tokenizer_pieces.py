"""Tokens and text: the bytes of single tokens, and texts that no tokenizer should have to split."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.router.pieces import Pieces, read_pieces
from services.router.tokenizer import ModelTokenizer
from shared.errors import ContainerError, Refused

EMBEDDED = Path(__file__).parents[2] / "models" / "fledgling"


def test_pieces_of_a_byte_level_vocabulary_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["héllo wörld, héllo"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens([AddedToken("<|user|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model, pieces = ModelTokenizer(tmp_path), read_pieces(tmp_path)
    for text in ("héllo wörld", "🙂 你好\n\t\x00\x7f\xa0\xad", "a <think> b", "".join(map(chr, range(0x250)))):
        ids = model.encode(text)
        assert b"".join(map(pieces.of, ids)).decode() == text
        assert pieces.of(ids[0], True) == pieces.of(ids[0])
    (control,) = model.encode("<|user|>")
    assert pieces.of(control) == b""
    assert pieces.of(1 << 20) == b""


def test_byte_fallback_pieces_are_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257, "b": 258, "\ufffd": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    for steps in (spaces, [*spaces, decoders.Strip(" ", 1, 0)]):
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        read = read_pieces(tmp_path)
        assert b"".join(read.of(byte + 1) for byte in "é".encode()) == "é".encode()
        assert [read.of(257), read.of(258), read.of(259)] == [b" a", b"b", "\ufffd".encode()]
        for ids in ([257, 257, 258], [258, 257]):  # as a text of its own
            pieces = [read.of(token, idx == 0) for idx, token in enumerate(ids)]
            assert b"".join(pieces).decode() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "fallback", "stripped", "words"])
def test_pieces_read_from_the_file_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    if kind == "words":
        tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3}, unk_token="[UNK]"))
        tokenizer.decoder = decoders.WordPiece()
    elif kind != "bytes":
        vocab = {
            "<unk>": 0,
            **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
            "▁a": 257,
            "b▁": 258,
            "▁▁": 259,
            "日": 260,
        }
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if kind == "stripped" else steps)
    tokenizer.add_tokens([AddedToken(" x▁", special=False), AddedToken("<|s|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read, library = read_pieces(tmp_path), Pieces(tokenizer)
    for token in range(tokenizer.get_vocab_size() + 2):
        for is_start in (False, True):
            assert read.of(token, is_start) == library.of(token, is_start), (token, is_start)


def test_an_added_token_in_plain_spelling_is_its_spelling(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("  ", special=False), AddedToken("日", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = read_pieces(tmp_path)
    for text in ("  ", "日"):
        assert read.of(tokenizer.token_to_id(text)).decode() == text


@pytest.mark.parametrize("letter", ["a", "é ", " "])
def test_a_text_that_can_not_fit_is_refused_without_splitting_it(letter: str) -> None:
    """Megabytes take a minute in which the router serves nobody."""
    model, text = ModelTokenizer(EMBEDDED), letter * (8 << 20)
    begin = time.monotonic()
    for encode in (
        lambda: model.encode(text, 2047),
        lambda: model.encode_chat([{"role": "user", "content": text}], {}, 2047),
    ):
        with pytest.raises(Refused, match="tokens or more, at most 2047 fit") as refused:
            encode()
        assert refused.value.code == "context_length_exceeded"
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("kind", ["normaliser", "lstrip", "words"])
def test_no_kind_of_tokenizer_makes_a_long_text_costly(tmp_path: Path, kind: str) -> None:
    """Characters may vanish in a normaliser, or in a token that takes blanks along: counting does not mind."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    if kind == "normaliser":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    elif kind == "lstrip":
        tokenizer.add_special_tokens([AddedToken("<|mask|>", special=True, lstrip=True, rstrip=True)])
    else:
        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "Once": 1}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model, text = ModelTokenizer(tmp_path), "Once upon a <|mask|>  time. " * 500_000
    begin = time.thread_time()
    with pytest.raises(Refused, match="at most 2047 fit"):
        model.encode(text, 2047)
    assert time.thread_time() - begin < 2


def test_a_bound_is_never_above_the_number_of_tokens() -> None:
    model = ModelTokenizer(EMBEDDED)
    text = "Once upon a time, there was a little bird. " * 7000
    n = len(model.encode(text))
    assert len(model.encode(text, n)) == n


def test_a_panic_of_the_tokenizer_is_a_refusal() -> None:
    """Its regular expressions give up on so many blanks; the router must not end with them."""
    with pytest.raises(Refused, match="can't split this text") as refused:
        ModelTokenizer(EMBEDDED).encode(" " * (12 << 20))
    assert refused.value.status == 400
    assert ModelTokenizer(EMBEDDED).encode("hello")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"a":'),
        ("tokenizer_config.json", b'{"x"'),
        ("tokenizer_config.json", b"[1]"),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    for path in EMBEDDED.glob("*token*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ContainerError, match=f"{name} can't be used: .*Copy the file again"):
        ModelTokenizer(tmp_path)
