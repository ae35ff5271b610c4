"""GGUF files convert to what the same model's safetensors convert to; what can't be right is refused with a sentence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conversion.convert import Conversion
from conversion.gguf.header import read_gguf_header
from conversion.gguf.kept import AS_IT_IS
from native.matrix import scale_bytes, weight_bytes
from shared.container.pack import unpack_matrix
from shared.container.reader import Container, aligned_buffer
from shared.errors import ConfigError
from shared.model.family import load_spec
from tests.gguf_files import GGUF_ORACLES, Data, build, gemma4_file, write_oracle
from tests.oracle import oracle_dir
from tests.reference.mla_moe import Weights, plain_values

Converted = Callable[[str, str], Path]
DATA = "*.safetensors"


def same_weights(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.glob(DATA))
    return names == sorted(path.name for path in b.glob(DATA)) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("name", [*GGUF_ORACLES, "gemma4"])
def test_container_is_the_one_of_the_checkpoint(converted: Converted, tmp_path: Path, name: str) -> None:
    """Byte for byte, f32: the same weights, in the same places; and the same spec but for the ids that end a turn.

    So an oracle's tokens follow from the file as they do from the checkpoint.
    """
    path = tmp_path / "model.gguf"
    if name == "gemma4":
        path.write_bytes(gemma4_file())
    else:
        write_oracle(name, path)
    conversion = Conversion(path, "f32")
    has_mtp = bool(conversion.spec.n_mtp)
    conversion.run(tmp_path / "out")
    if has_mtp == bool(load_spec(oracle_dir(name)).n_mtp):
        wanted = converted(name, "f32")
    else:
        wanted = tmp_path / "wanted"
        Conversion(oracle_dir(name), "f32", has_mtp=False).run(wanted)
    assert same_weights(tmp_path / "out", wanted)
    found, own = load_spec(tmp_path / "out"), load_spec(wanted)
    family = "deepseek_v3" if name == "glm4_moe_lite" else own.family  # without a vocabulary nothing tells them apart
    assert found.family == family
    for field in set(own.__struct_fields__) - {"family", "eos_ids"}:
        assert getattr(found, field) == getattr(own, field), field


@pytest.mark.parametrize("name", GGUF_ORACLES)
def test_header_is_what_the_library_reads(tmp_path: Path, name: str) -> None:
    from gguf import GGUFReader

    path = write_oracle(name, tmp_path / "model.gguf")
    ours, theirs = read_gguf_header(path), GGUFReader(path)
    assert {
        t.name: (t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    } == {name: (entry.dtype, entry.shape, entry.offset, entry.n_bytes) for name, entry in ours.tensors.items()}
    wanted = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(wanted) == set(ours.metadata)
    for key, value in wanted.items():
        found = ours.metadata[key]
        assert np.float32(found) == np.float32(value) if isinstance(value, float) else found == value, key


def test_without_mtp(converted: Converted, tmp_path: Path) -> None:
    path = write_oracle("glm4_moe", tmp_path / "model.gguf")
    Conversion(path, "int8", has_mtp=False).run(tmp_path / "out")
    Conversion(oracle_dir("glm4_moe"), "int8", has_mtp=False).run(tmp_path / "wanted")
    assert same_weights(tmp_path / "out", tmp_path / "wanted")
    assert not Container.open(tmp_path / "out").spec.n_mtp
    shutil.rmtree(tmp_path / "wanted")


# ---- blocks ---------------------------------------------------------------------------------------------------------

BLOCKED = ("Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K")


def blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Data:
    """Random blocks of every possible code, with scales of the size that weights have."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    n_values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (int(np.prod(shape)) // n_values, n_bytes), np.uint8)
    scales = (rng.uniform(0.001, 0.004, (len(raw), 2)) * rng.choice([-1, 1], (len(raw), 2))).astype(np.float16)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(115, 122, len(raw))
    elif kind == "Q6_K":
        raw[:, -2:] = scales.view(np.uint8)[:, :2]
    else:
        raw[:, : 2 if kind.endswith("_0") else 4] = scales.view(np.uint8)[:, : 2 if kind.endswith("_0") else 4]
    return Data(kind, shape, raw.tobytes())


def mixtral(kind: str, other: str = "") -> tuple[dict[str, object], dict[str, Data]]:
    """A small Mixtral whose matrices are of ``kind``, attention's v of ``other``."""
    rng = np.random.default_rng(5)
    width, vocab, n_experts = 256, 64, 3
    metadata: dict[str, object] = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": width,
        "llama.feed_forward_length": width, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 1e6, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.expert_count": n_experts,
        "llama.expert_used_count": 2, "llama.rope.dimension_count": 64,
    }  # fmt: skip
    tensors = {
        "token_embd.weight": blocks(kind, (vocab, width), rng),
        "output.weight": blocks(kind, (vocab, width), rng),
    }
    for part, rows in (("q", width), ("k", 128), ("v", 128), ("output", width)):
        tensors[f"blk.0.attn_{part}.weight"] = blocks(other if other and part == "v" else kind, (rows, width), rng)
    for part in ("gate", "up", "down"):
        tensors[f"blk.0.ffn_{part}_exps.weight"] = blocks(kind, (n_experts, width, width), rng)
    tensors["blk.0.ffn_gate_inp.weight"] = Data.of(rng.standard_normal((n_experts, width)))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        tensors[name] = Data.of(np.ones(width))
    return metadata, tensors


def library_values(path: Path) -> dict[str, np.ndarray]:
    from gguf import GGUFReader, dequantize

    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", BLOCKED)
def test_blocks_are_dequantised_as_the_library_does(tmp_path: Path, kind: str) -> None:
    """Bit for bit, through the container in f32; the rows of q and k from where llama.cpp has them."""
    path = tmp_path / "model.gguf"
    path.write_bytes(build(*mixtral(kind)))
    Conversion(path, "f32").run(tmp_path / "out")
    wanted, weights = library_values(path), Weights(Container.open(tmp_path / "out"))
    tensors = Container.open(tmp_path / "out").read_dense(lambda _: True, aligned_buffer)
    head = tensors["lm_head.weight"]
    assert np.array_equal(plain_values(head), wanted["output.weight"])
    v, q = (plain_values(tensors[f"model.layers.0.self_attn.{part}_proj.weight"]) for part in "vq")
    assert np.array_equal(v, wanted["blk.0.attn_v.weight"])
    assert np.array_equal(q, wanted["blk.0.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256))
    for expert in range(3):
        for matrix, part in zip(weights.expert(0, expert), ("gate", "up", "down"), strict=True):
            assert np.array_equal(matrix.astype(np.float32), wanted[f"blk.0.ffn_{part}_exps.weight"][expert])


@pytest.mark.parametrize(
    ("kind", "other", "expert", "attention"),
    [
        ("Q8_0", "", "q8g32", "q8g32"),
        ("Q4_0", "", "q4g32", "q4g32"),
        ("MXFP4", "", "mxfp4", "mxfp4"),
        ("Q4_0", "Q8_0", "q4g32", "q8g32"),
        ("MXFP4", "Q4_0", "mxfp4", "q8g32"),
    ],
)
def test_native_blocks_are_not_rounded_again(
    tmp_path: Path, kind: str, other: str, expert: str, attention: str
) -> None:
    """In the file's own precision every weight is what the library says, in 4 or 8 bits."""
    path = tmp_path / "model.gguf"
    path.write_bytes(build(*mixtral(kind, other)))
    conversion = Conversion(path, AS_IT_IS)
    conversion.run(tmp_path / "out")
    assert conversion.losses is not None and conversion.losses.describe() == "no weight was rounded"
    container, wanted = Container.open(tmp_path / "out"), library_values(path)
    assert (container.precision["expert"], container.precision["attention"]) == (expert, attention)
    tensors = container.read_dense(lambda _: True, aligned_buffer)
    assert np.array_equal(tensors["model.embed_tokens.weight"].weight, wanted["token_embd.weight"])
    for ours, theirs in (("lm_head", "output"), ("model.layers.0.self_attn.v_proj", "blk.0.attn_v")):
        found = tensors[f"{ours}.weight"]
        values = unpack_matrix(found.weight, found.scale, found.format, *found.shape)
        assert np.array_equal(values, wanted[f"{theirs}.weight"]), ours
    layout = container.experts[0].layout
    for idx in range(3):
        record = container.read_expert(0, idx)
        weight = record[layout.gate_w : layout.gate_w + weight_bytes(expert, 256, 256)]
        scale = record[layout.gate_s : layout.gate_s + scale_bytes(expert, 256, 256)]
        assert np.array_equal(unpack_matrix(weight, scale, expert, 256, 256), wanted["blk.0.ffn_gate_exps.weight"][idx])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_blocks_become_int8_in_groups_and_the_loss_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(*mixtral(kind)))
    conversion = Conversion(path, AS_IT_IS)
    conversion.run(tmp_path / "out")
    container = Container.open(tmp_path / "out")
    assert container.precision == {**dict.fromkeys(container.precision, "q8g32"), "embed": "q8", "exact": "f32",
                                   "shared": "f32", "mtp": "f32"}  # fmt: skip
    assert conversion.losses is not None
    said = conversion.losses.describe()
    found = re.search(rf"expert ([\d.]+) % \({kind}\)", said)
    assert found is not None and 0.05 < float(found[1]) < 1.0, said
    layout, idx = container.experts[0].layout, 1
    record = container.read_expert(0, idx)
    weight = record[layout.up_w : layout.up_w + weight_bytes("q8g32", 256, 256)]
    scale = record[layout.up_s : layout.up_s + scale_bytes("q8g32", 256, 256)]
    wanted = library_values(path)["blk.0.ffn_up_exps.weight"][idx]
    error = unpack_matrix(weight, scale, "q8g32", 256, 256) - wanted
    assert np.sqrt(np.square(error).mean() / np.square(wanted).mean()) == pytest.approx(float(found[1]) / 100, rel=0.2)


def test_kept_precision_is_for_gguf_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for GGUF files"):
        Conversion(oracle_dir("mixtral"), AS_IT_IS)
