"""GGUF files that can't be right: each ends in a sentence, whatever byte is wrong, and nothing half-done counts as done."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cli.main import cli
from conversion.convert import Conversion
from conversion.gguf.kept import AS_IT_IS
from conversion.provenance import compare_sources
from shared.container.reader import Container
from shared.errors import ColibriError, ContainerError
from shared.model.tokenizer_file import load_tokenizer
from tests.gguf_files import Data, Number, build

Metadata, Tensors = dict[str, Any], dict[str, Data]


def small() -> tuple[Metadata, Tensors]:
    """A Mixtral of width 32 in f32, with a vocabulary of bytes."""
    rng = np.random.default_rng(3)
    width, vocab = 32, 260
    metadata: Metadata = {
        "general.architecture": "llama", "general.alignment": 32, "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": width, "llama.feed_forward_length": width, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.freq_base": 1e4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.expert_count": 2, "llama.expert_used_count": 1, "llama.rope.dimension_count": 8,
        "general.sampling.temp": 0.5, "general.sampling.top_k": 40,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4, 5], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257, "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }  # fmt: skip
    shapes = {"token_embd": (vocab, width), "output": (vocab, width), "blk.0.attn_q": (width, width),
              "blk.0.attn_k": (16, width), "blk.0.attn_v": (16, width), "blk.0.attn_output": (width, width),
              "blk.0.ffn_gate_inp": (2, width), "output_norm": (width,), "blk.0.attn_norm": (width,),
              "blk.0.ffn_norm": (width,),
              **{f"blk.0.ffn_{part}_exps": (2, width, width) for part in ("gate", "up", "down")}}  # fmt: skip
    return metadata, {f"{name}.weight": Data.of(rng.standard_normal(shape)) for name, shape in shapes.items()}


def vocabulary() -> list[str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [chr(256 + i) for i in range(256 - len(plain))]
    return [*map(chr, plain), *odd, "ab", "<|end|>", "<think>", "[PAD259]"]


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ColibriError) as caught:
        Conversion(path, "f32")
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert "\n" not in text
    return text


def test_vocabulary_becomes_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(*small()))
    conversion = Conversion(path, "f32")
    assert conversion.notes() == []
    conversion.run(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    assert tokenizer.encode("ab<think>1<|end|>").tokens == ["ab", "<think>", "1", "<|end|>"]
    assert tokenizer.decode([tokenizer.token_to_id("ab")]) == "ab" and tokenizer.token_to_id("[PAD259]") is None
    assert [t.special for _, t in sorted(tokenizer.get_added_tokens_decoder().items())] == [True, False]
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"temperature": 0.5}
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == {"eos_token": "<|end|>"}
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "out/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
    assert Container.open(tmp_path / "out").spec.eos_ids == (257,)
    assert {found for _, found in compare_sources(Container.open(tmp_path / "out"), path)} == {None}
    data = bytearray(path.read_bytes())
    data[-40] ^= 1  # of the last expert
    path.write_bytes(data)
    assert sum(found is not None for _, found in compare_sources(Container.open(tmp_path / "out"), path)) == 2


def test_inspect_and_convert_by_command(tmp_path: Path) -> None:
    """A GGUF file gets its own precision unless another is asked for; a damaged one is a sentence, code 78."""
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    metadata, tensors = small()
    raw = np.random.default_rng(2).integers(0, 30, (260, 34), np.uint8)
    path.write_bytes(build(metadata, {**tensors, "output.weight": Data("Q8_0", (260, 32), raw.tobytes())}))
    found = CliRunner().invoke(cli, ["inspect", str(path), "--json"])
    facts = json.loads(found.output)
    assert facts["family"] == "mixtral" and facts["types"] == {"F32": 12, "Q8_0": 1}
    assert facts["kept_precision"]["head"] == "q8g32" and "tokenizer.json" in facts["copied"]
    said = CliRunner().invoke(cli, ["inspect", str(path)]).output
    assert "GGUF" in said and "12 x F32, 1 x Q8_0" in said
    said = CliRunner().invoke(cli, ["convert", str(path), str(out)]).output
    assert "no weight was rounded" in said and Container.open(out).precision["head"] == "q8g32"
    path.write_bytes(path.read_bytes()[:-64])
    broken = CliRunner().invoke(cli, ["inspect", str(path)])
    assert isinstance(broken.exception, ContainerError) and "truncated" in str(broken.exception)


def test_pieces_with_scores(tmp_path: Path) -> None:
    """A vocabulary of SentencePiece: the pair with the best score is joined first; other characters become bytes."""
    metadata, tensors = small()
    tokens = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces = ["▁", "a", "b", "ab", "▁a"]
    tensors["token_embd.weight"] = tensors["output.weight"] = Data.of(np.zeros((264, 32)))
    metadata |= {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 5,
        "tokenizer.ggml.scores": [0.0] * 258 + [-9.0, -8.0, -7.0, -2.0, -1.0],
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    path.write_bytes(build(metadata, tensors))
    Conversion(path, "f32").run(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    assert tokenizer.encode("ab bé", add_special_tokens=False).tokens == ["▁a", "b", "▁", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab bé").ids) == "ab bé"


Change = Callable[[Metadata, Tensors], None]
BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "unknown architecture": (lambda m, t: m.update({"general.architecture": "rwkv7"}), ("'rwkv7'", "deepseek2")),
    "no architecture": (lambda m, t: m.pop("general.architecture"), ("general.architecture",)),
    "a missing key": (lambda m, t: m.pop("llama.block_count"), ("llama.block_count", "no key")),
    "a key of another type": (lambda m, t: m.update({"llama.block_count": "1"}), ("llama.block_count", "'1'")),
    "more layers than there are": (lambda m, t: m.update({"llama.block_count": 2}), ("blk.1.", "has no tensor")),
    "a dense model": (lambda m, t: m.pop("llama.expert_count"), ("dense model", "nothing to stream")),
    "a wrong width": (lambda m, t: m.update({"llama.embedding_length": 64}), ("has shape", "call for")),
    "rope that is not understood": (
        lambda m, t: m.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}),
        ("rope_type", "'linear'"),
    ),
    "a tensor too many": (lambda m, t: t.update({"rope_freqs.weight": Data.of(np.ones(4))}), ("has no place",)),
    "a vocabulary alone": (lambda m, t: t.clear(), ("a vocabulary without weights",)),
    "an unknown way to cut": (lambda m, t: m.update({"tokenizer.ggml.pre": "mystery"}), ("'mystery'", "qwen2")),
    "an unknown vocabulary": (lambda m, t: m.update({"tokenizer.ggml.model": "rwkv"}), ("'rwkv'", "gpt2")),
    "more tokens than rows": (
        lambda m, t: m.update({"tokenizer.ggml.tokens": [f"t{i}" for i in range(300)]}),
        ("300 tokens", "260 rows"),
    ),
    "merges of nothing": (lambda m, t: m.update({"tokenizer.ggml.merges": ["ab"]}), ("'ab'", "joins nothing")),
    "merges of unknown tokens": (lambda m, t: m.update({"tokenizer.ggml.merges": ["a zz"]}), ("tokenizer can't be used",)),
    "types of fewer tokens": (lambda m, t: m.update({"tokenizer.ggml.token_type": [1]}), ("260", "1 entries")),
    "an odd alignment": (lambda m, t: m.update({"general.alignment": 24}), ("no power of two",)),
    "a split of which it is not": (lambda m, t: m.update({"split.count": 3}), ("3", "by its name")),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_the_keys_say_must_be_possible(tmp_path: Path, what: str) -> None:
    change, words = BROKEN[what]
    metadata, tensors = small()
    change(metadata, tensors)
    path = tmp_path / "model.gguf"
    path.write_bytes(build(metadata, tensors))
    refused(path, *words)


def test_headers_that_lie(tmp_path: Path) -> None:
    good, path = build(*small()), tmp_path / "model.gguf"
    first = good.index(b"output.weight") + len(b"output.weight") + 4 + 16  # its type

    def at(offset: int, raw: bytes) -> bytes:
        return good[:offset] + raw + good[offset + len(raw) :]

    for data, words in (
        (b"", ("truncated or damaged",)),
        (b"GGML" + good[4:], ("no GGUF file", "GGML")),
        (at(4, struct.pack(">I", 3)), ("big-endian",)),
        (at(4, struct.pack("<I", 1)), ("version 1",)),
        (at(8, struct.pack("<Q", 1 << 60)), ("promises", "tensors")),
        (at(16, struct.pack("<Q", 1 << 60)), ("promises", "keys")),
        (at(8, struct.pack("<Q", 12)), ("damaged",)),
        (at(24, struct.pack("<Q", 1 << 50)), ("a key", "more than")),
        (at(first, struct.pack("<I", 999)), ("type 999",)),
        (at(first, struct.pack("<I", 14)), ("Q6_K", "whole blocks of 256")),
        (at(first + 4, struct.pack("<Q", 32)), ("begin at byte",)),
        (at(first - 8, struct.pack("<Q", 1 << 62)), ("output.weight",)),
        (good[:-100], ("is truncated", "ends at byte")),
        (good[: len(good) // 40], ("promises 260 texts",)),
        (good + bytes(64), ("something lies behind",)),
    ):
        path.write_bytes(data)
        refused(path, str(path), *words)
    metadata, tensors = small()
    for value, words in (([["a"]], ("not read",)), (Number(55, "B", 1), ("type 55",)), (Number(7, "B", 7), ("truth",))):
        path.write_bytes(build({**metadata, "extra": value}, tensors))
        refused(path, *words)
    path.write_bytes(build(metadata, tensors).replace(b"general.sampling.top_k", b"general.sampling.top_\xff"))
    refused(path, "UTF-8")


def test_any_damage_of_a_header_ends_in_a_sentence(tmp_path: Path) -> None:
    """Some hundred random changes: the file converts, or an error of ours says why not."""
    rng, path = np.random.default_rng(11), tmp_path / "model.gguf"
    metadata, tensors = small()
    for key in ("tokens", "token_type", "merges"):  # most of the header, and tested above
        del metadata[f"tokenizer.ggml.{key}"]
    metadata["tokenizer.ggml.model"] = "none"
    good = build(metadata, tensors)
    n_header = len(good) - sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors.values())
    n_refused = n_read = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            offset = int(rng.integers(0, n_header))
            if rng.random() < 0.5:
                data[offset] ^= 1 << int(rng.integers(0, 8))
            else:
                data[offset : offset + 4] = rng.choice([0, 1, 255], 4).astype(np.uint8).tobytes()
        if rng.random() < 0.1:
            del data[int(rng.integers(0, len(data))) :]
        path.write_bytes(data)
        try:
            Conversion(path, AS_IT_IS).checkpoint.close()
        except ColibriError as error:
            n_refused += "\n" not in str(error)
        else:
            n_read += 1
    assert n_refused + n_read == 400 and n_refused > 200


# ---- several files, and interrupted work -----------------------------------------------------------------------------


def split(directory: Path) -> list[Path]:
    """The small model in three files."""
    metadata, tensors = small()
    names = list(tensors)
    paths = [directory / f"small-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for i, path in enumerate(paths):
        own = {"split.no": i, "split.count": 3, "split.tensors.count": len(names)}
        path.write_bytes(build({**(metadata if i == 0 else {}), **own}, {name: tensors[name] for name in names[i::3]}))
    return paths


def test_a_model_in_several_files(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(build(*small()))
    Conversion(whole, "f32").run(tmp_path / "wanted")
    paths = split(tmp_path)
    Conversion(paths[1], "f32").run(tmp_path / "out")
    for name in ("dense-00000.safetensors", "experts-000.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name
    kept = paths[2].read_bytes()
    paths[2].unlink()
    refused(paths[0], str(paths[2]), "is missing")
    paths[2].write_bytes(paths[1].read_bytes())
    refused(paths[0], "part 1", "by its name it is part 2")
    paths[2].write_bytes(kept[:-40])
    refused(paths[0], str(paths[2]), "truncated")


def test_interrupted_work_goes_on_and_is_not_taken_for_done(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(*small()))
    Conversion(path, AS_IT_IS).run(tmp_path / "wanted")
    n_done = 0

    def stop(n_bytes: int) -> None:
        nonlocal n_done
        n_done += n_bytes
        if n_done > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Conversion(path, AS_IT_IS).run(tmp_path / "out", stop)
    with pytest.raises(ContainerError, match="unfinished"):
        Container.open(tmp_path / "out")
    Conversion(path, AS_IT_IS).run(tmp_path / "out")
    for file in sorted((tmp_path / "wanted").iterdir()):
        if file.is_file():
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    metadata, tensors = small()
    raw = np.zeros((260, 34), np.uint8)
    raw[7, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    tensors["output.weight"] = Data("Q8_0", (260, 32), raw.tobytes())
    path = tmp_path / "model.gguf"
    path.write_bytes(build(metadata, tensors))
    for precision in (AS_IT_IS, "int8"):
        with pytest.raises(ContainerError, match=r"output\.weight.*(NaN or infinite)"):
            Conversion(path, precision).run(tmp_path / precision)
        assert not (tmp_path / precision / "colibri.json").exists()
