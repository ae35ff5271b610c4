"""The bytes of single tokens, which the text of an answer must be made of."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.router.tokenizer import ModelTokenizer


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
    model = ModelTokenizer(tmp_path)
    for text in ("héllo wörld", "🙂 你好\n\t\x00\x7f\xa0\xad", "a <think> b", "".join(map(chr, range(0x250)))):
        ids = model.encode(text)
        assert b"".join(map(model.piece, ids)).decode() == text
        assert model.decode(ids) == text
    (control,) = model.encode("<|user|>")
    assert model.piece(control) == b""
    assert model.piece(1 << 20) == b""


def test_byte_fallback_pieces_are_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = ModelTokenizer(tmp_path)
    assert b"".join(model.piece(byte + 1) for byte in "é".encode()) == "é".encode()
    assert model.piece(257).strip() == b"a"
