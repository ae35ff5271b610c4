"""Checkpoints in formats of their own: what is in 4 or 8 bits there stays as it is, what can't is refused with a sentence.

The checkpoints are made byte by byte from the tools' descriptions, with numbers that a plain f32 checkpoint holds too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conversion.convert import Conversion
from shared.container.pack import pack_codes, unpack_matrix
from shared.container.plain import dense_values, expert_values
from shared.container.reader import Container, aligned_buffer
from shared.errors import ContainerError
from tests.oracle import Raw, oracle_config, oracle_dir, read_tensors, write_checkpoint

WIDTH, INNER, EXPERTS, LAYERS = 256, 128, 4, 2
CONFIG: dict[str, Any] = oracle_config("qwen3_moe") | {
    "hidden_size": WIDTH, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 64, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
Parts = dict[str, Raw]
Encode = Callable[[np.ndarray, np.ndarray], Parts]
"""codes u8[out, in] 0..15 and scales f32[out, groups] -> tensors by the part of the name after the matrix's."""


def f32(x: np.ndarray) -> Raw:
    return "F32", x.shape, np.ascontiguousarray(x, np.float32).tobytes()


def i32(x: np.ndarray) -> Raw:
    return "I32", x.shape, np.ascontiguousarray(x).astype(np.uint32).tobytes()


def f16(x: np.ndarray) -> Raw:
    return "F16", x.shape, np.ascontiguousarray(x).astype(np.float16).tobytes()


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight codes of the last axis to a word: the one at place ``order[i]`` in bits 4 i and up."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return sum(eights[..., order[i]] << np.uint32(4 * i) for i in range(8))  # type: ignore[return-value]


def compressed(codes: np.ndarray, scales: np.ndarray) -> Parts:
    bf16 = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {
        "weight_packed": i32(words(codes)),
        "weight_scale": ("BF16", scales.shape, bf16.tobytes()),
        "weight_shape": ("I64", (2,), np.array(codes.shape, np.int64).tobytes()),
    }


def gptq(codes: np.ndarray, scales: np.ndarray, zero: int = 7) -> Parts:
    inputs = codes.shape[1]
    return {
        "qweight": i32(words(codes).T),
        "qzeros": i32(words(np.full(scales.T.shape, zero))),
        "scales": f16(scales.T),
        "g_idx": i32(np.arange(inputs) // (inputs // scales.shape[1])),
    }


def awq(codes: np.ndarray, scales: np.ndarray, zero: int = 8) -> Parts:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    zeros = words(np.full(scales.T.shape, zero), order)
    return {"qweight": i32(words(codes.T, order)), "qzeros": i32(zeros), "scales": f16(scales.T)}


ENCODINGS: dict[str, Encode] = {"compressed-tensors": compressed, "GPTQ": gptq, "AWQ": awq}


def plain_tensors(rng: np.random.Generator) -> Parts:
    """Everything of the model that is never quantised."""
    shapes = {"model.embed_tokens.weight": (64, WIDTH), "lm_head.weight": (64, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        shapes |= {p + "mlp.gate.weight": (EXPERTS, WIDTH), p + "input_layernorm.weight": (WIDTH,)}
        shapes |= {p + "post_attention_layernorm.weight": (WIDTH,)}
        shapes |= {p + "self_attn.q_norm.weight": (32,), p + "self_attn.k_norm.weight": (32,)}
    return {name: f32(rng.standard_normal(shape)) for name, shape in shapes.items()}


def matrices() -> dict[str, tuple[int, int]]:
    found = {}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        for name, out in (("q", 128), ("k", 64), ("v", 64)):
            found[f"{p}self_attn.{name}_proj."] = (out, WIDTH)
        found[f"{p}self_attn.o_proj."] = (WIDTH, 128)
        for expert in range(EXPERTS):
            e = f"{p}mlp.experts.{expert}."
            found |= {
                f"{e}gate_proj.": (INNER, WIDTH),
                f"{e}up_proj.": (INNER, WIDTH),
                f"{e}down_proj.": (WIDTH, INNER),
            }
    return found


def pair(
    tmp_path: Path, encode: Encode, group: int, change: Callable[[Parts], None] = lambda _: None
) -> tuple[Path, Path]:
    """(a checkpoint with int4 in groups, 0 = whole rows; one with the same values in f32)."""
    rng = np.random.default_rng(3)
    packed = plain_tensors(rng)
    plain = dict(packed)
    for name, (out, inputs) in matrices().items():
        codes = rng.integers(0, 16, (out, inputs))
        n_groups = inputs // group if group else 1
        scales = rng.uniform(0.004, 0.03, (out, n_groups)).astype(np.float32)
        scales = (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # bf16 numbers are f16 numbers here
        packed |= {name + part: raw for part, raw in encode(codes, scales).items()}
        plain[name + "weight"] = f32((codes - 8) * np.repeat(scales, inputs // n_groups, axis=1))
    change(packed)
    return tuple(  # type: ignore[return-value]
        write_checkpoint(tmp_path / where, CONFIG, {"model.safetensors": tensors})
        for where, tensors in (("packed", packed), ("plain", plain))
    )


def values_of(container: Container) -> dict[str, np.ndarray]:
    """Every matrix, dequantised."""
    found = {}
    for key, tensor in container.read_dense(lambda _: True, aligned_buffer).items():
        if tensor.kind == "matrix":
            found[key] = next(iter(dense_values(tensor)))
    for layer, file in container.experts.items():
        for expert in range(EXPERTS):
            for part, values in zip(
                ("gate", "up", "down"), expert_values(container.read_expert(layer, expert), file.layout)
            ):
                found[f"{layer}.{expert}.{part}"] = values
    return found


def made(source: Path, precision: str) -> Container:
    out = source.parent / f"{source.name}-{precision}"
    Conversion(source, precision).run(out)
    return Container.open(out)


@pytest.mark.parametrize("kind", ENCODINGS)
@pytest.mark.parametrize(("group", "fmt"), [(32, "q4g32"), (64, "q4"), (128, "q4"), (0, "q4")])
def test_int4_in_groups_is_kept_as_it_is(tmp_path: Path, kind: str, group: int, fmt: str) -> None:
    packed, plain = pair(tmp_path, ENCODINGS[kind], group)
    wanted = values_of(made(plain, "f32"))
    for precision in ("int4", "int8"):
        container = made(packed, precision)
        assert {container.precision[role] for role in ("expert", "attention")} == {fmt}
        found = values_of(container)
        for name, values in found.items():
            if container.dense.get(name) is None or container.dense[name].role == "attention":
                assert np.array_equal(values, wanted[name]), name
    widened = values_of(made(packed, "f32"))
    assert all(np.array_equal(widened[name], values) for name, values in wanted.items())


def test_zero_points_of_another_version_of_gptq(tmp_path: Path) -> None:
    packed, plain = pair(tmp_path, lambda codes, scales: gptq(codes, scales, zero=8), 64)
    quantization = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    text = (packed / "config.json").read_text()
    (packed / "config.json").write_text(
        text.rstrip()[:-1] + f', "quantization_config": {quantization}}}'.replace("'", '"')
    )
    assert values_of(made(packed, "f32")).keys() == values_of(made(plain, "f32")).keys()
    wanted = values_of(Container.open(tmp_path / "plain-f32"))
    assert all(
        np.array_equal(v, wanted[k]) for k, v in values_of(made(packed, "int4")).items() if k != "lm_head.weight"
    )


def test_asymmetric_zero_points_are_refused_but_can_be_rounded(tmp_path: Path) -> None:
    """AWQ's usual kind: no format of ours has a zero point; floats hold the values."""
    packed, plain = pair(tmp_path, lambda codes, scales: awq(codes, scales, zero=3), 64)
    with pytest.raises(ContainerError, match=r"zero points.*expected 8.*--precision bf16"):
        made(packed, "int4")
    assert not (tmp_path / "packed-int4" / "colibri.json").exists()
    found, symmetric = values_of(made(packed, "f32")), values_of(made(plain, "f32"))
    name = "model.layers.0.self_attn.q_proj.weight"
    steps = found[name] / np.where(symmetric[name] == 0, np.inf, symmetric[name])
    assert not np.array_equal(found[name], symmetric[name])
    assert np.isfinite(steps).all()


Q = "model.layers.1.self_attn.q_proj."
E = "model.layers.1.mlp.experts.2.down_proj."


def _no(part: str) -> Callable[[Parts], None]:
    return lambda tensors: tensors.pop(part) and None  # type: ignore[func-returns-value]


def _put(part: str, raw: Raw) -> Callable[[Parts], None]:
    return lambda tensors: tensors.update({part: raw})


def _scale(part: str, value: float) -> Callable[[Parts], None]:
    def change(tensors: Parts) -> None:
        dtype, shape, data = tensors[part]
        raw = np.frombuffer(data, np.uint16).copy()
        raw[3] = np.float16(value).view(np.uint16) if dtype == "F16" else np.float32(value).view(np.uint32) >> 16
        tensors[part] = (dtype, shape, raw.tobytes())

    return change


def _unpack_one(tensors: Parts) -> None:
    for part in ("packed", "scale", "shape"):
        del tensors[f"{E}weight_{part}"]
    tensors[E + "weight"] = f32(np.ones((WIDTH, INNER)))


BROKEN: dict[str, tuple[str, Callable[[Parts], None], str]] = {
    "no scales": ("compressed-tensors", _no(E + "weight_scale"), "weight_scale"),
    "a scale that is no number": ("compressed-tensors", _scale(Q + "weight_scale", np.nan), "q_proj.*negative, NaN"),
    "a negative scale": ("GPTQ", _scale(E + "scales", -0.01), "down_proj.*negative, NaN or infinite"),
    "an endless scale": ("AWQ", _scale(E + "scales", np.inf), "down_proj.*negative, NaN or infinite"),
    "a scale below f16": ("compressed-tensors", _scale(E + "weight_scale", 1e-9), "no f16 number.*--precision bf16"),
    "too few words": ("compressed-tensors", _put(Q + "weight_packed", i32(np.zeros((128, 31)))), r"\[128, 31\].*\[128, 32\]"),
    "scales of another matrix": ("GPTQ", _put(E + "scales", f16(np.ones((4, 120)))), "down_proj"),
    "integers as scales": ("GPTQ", _put(E + "scales", i32(np.ones((4, 256)))), "I32, expected one of F16, BF16, F32"),
    "no zero points": ("GPTQ", _no(E + "qzeros"), "qzeros.*not there"),
    "inputs in another order": ("GPTQ", _put(Q + "g_idx", i32(np.arange(256) % 8)), "act-order"),
    "groups of 16": ("compressed-tensors", _put(E + "weight_scale", f32(np.ones((256, 8)))), "groups of 16 inputs"),
    "some experts in floats": ("compressed-tensors", _unpack_one, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_int4_is_refused(tmp_path: Path, what: str) -> None:
    kind, change, sentence = BROKEN[what]
    packed, _ = pair(tmp_path, ENCODINGS[kind], 32, change)
    if not sentence:  # one format for a role: these are rounded to it, unless 8 bits were asked for
        assert made(packed, "int4").precision["expert"] == "q4g32"
        sentence, precision = "expert matrices some are in q4g32, others are not.*--precision int4", "int8"
    else:
        precision = "int4"
    with pytest.raises(ContainerError, match=sentence):
        made(packed, precision)
    assert not (tmp_path / f"packed-{precision}" / "colibri.json").exists()


def test_other_widths_are_refused_by_name(tmp_path: Path) -> None:
    packed, _ = pair(tmp_path, gptq, 64)
    text = (packed / "config.json").read_text()
    quantization = '{"quant_method": "gptq", "bits": 8}'
    (packed / "config.json").write_text(text.rstrip()[:-1] + f', "quantization_config": {quantization}}}')
    with pytest.raises(ContainerError, match="GPTQ with 8 bits; what can be read is int4"):
        Conversion(packed, "int4")


# ---- fp8 ----------------------------------------------------------------------------------------------------------

_FP8_SCALES: dict[str, Callable[[tuple[int, int]], tuple[int, ...]]] = {
    "per tensor": lambda _: (), "per tensor, as a vector": lambda _: (1,), "per row": lambda shape: (shape[0], 1),
    "per row, as a vector": lambda shape: (shape[0],), "per block": lambda shape: tuple(-(-dim // 128) for dim in shape),
}  # fmt: skip


def widened(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Multipliers of each value of a matrix."""
    if scale.size == 1 or scale.shape[0] == shape[0]:
        return np.broadcast_to(scale.reshape(-1, 1), shape)
    return np.repeat(np.repeat(scale, 128, axis=0)[: shape[0]], 128, axis=1)[:, : shape[1]]


def fp8_pair(
    tmp_path: Path, shape_of: Callable[[tuple[int, int]], tuple[int, ...]], suffix: str
) -> tuple[Path, Parts, Path]:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(4)
    packed = plain_tensors(rng)
    plain = dict(packed)
    for name, shape in matrices().items():
        values = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.01, 0.1, shape_of(shape)).astype(np.float32)
        packed[name + "weight"] = ("F8_E4M3", shape, values.tobytes())
        packed[name + suffix] = ("F32", scale.shape, np.asarray(scale).tobytes())
        packed[name + "input_scale"] = f32(np.ones(1))
        wide = widened(scale, shape)
        plain[name + "weight"] = f32(values.astype(np.float32) * wide)
    sources = [
        write_checkpoint(tmp_path / w, CONFIG, {"model.safetensors": t})
        for w, t in (("packed", packed), ("plain", plain))
    ]
    return sources[0], packed, sources[1]


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("scales", _FP8_SCALES)
def test_fp8_with_every_kind_of_scale(tmp_path: Path, scales: str, suffix: str) -> None:
    packed, _, plain = fp8_pair(tmp_path, _FP8_SCALES[scales], suffix)
    wanted, found = values_of(made(plain, "f32")), values_of(made(packed, "f32"))
    assert all(np.array_equal(found[name], values) for name, values in wanted.items())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_fp8_scales_that_cannot_be(tmp_path: Path, bad: float) -> None:
    packed, tensors, _ = fp8_pair(tmp_path, _FP8_SCALES["per tensor"], "weight_scale")
    tensors[E + "weight_scale"] = f32(np.array(bad))
    write_checkpoint(packed, CONFIG, {"model.safetensors": tensors})
    with pytest.raises(ContainerError, match=r"2\.down_proj\.weight_scale.*negative, NaN or infinite"):
        made(packed, "int4")
    del tensors[E + "weight_scale"]
    write_checkpoint(packed, CONFIG, {"model.safetensors": tensors})
    with pytest.raises(ContainerError, match=r"2\.down_proj"):
        Conversion(packed, "int4")


# ---- MXFP4 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int4", "mxfp4", "int8"])
def test_mxfp4_keeps_every_bit(converted: Callable[[str, str], Path], precision: str) -> None:
    """Codes and scales of gpt_oss' experts are those of the checkpoint, under each precision that quantises."""
    raw = {name: np.frombuffer(data, np.uint8).reshape(shape) for name, (dtype, shape, data) in
           read_tensors(oracle_dir("gpt_oss")).items() if dtype == "U8"}  # fmt: skip
    container = Container.open(converted("gpt_oss", precision))
    assert container.precision["expert"] == "mxfp4"
    assert container.precision["attention"] == {"int4": "q4"}.get(precision, "q8")
    for layer, file in container.experts.items():
        layout, p = file.layout, f"model.layers.{layer}.mlp.experts."
        for expert in (0, file.n_experts - 1):
            record = container.read_expert(layer, expert)
            for what, rows, weight_at, scale_at in (
                ("gate_up", slice(0, None, 2), layout.gate_w, layout.gate_s),
                ("gate_up", slice(1, None, 2), layout.up_w, layout.up_s),
                ("down", slice(None), layout.down_w, layout.down_s),
            ):
                blocks, scales = (raw[f"{p}{what}_proj_{part}"][expert, rows] for part in ("blocks", "scales"))
                codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
                weight, scale = pack_codes(codes, scales, "mxfp4")
                assert scale_at is not None
                assert np.array_equal(record[weight_at : weight_at + weight.size], weight)
                assert np.array_equal(record[scale_at : scale_at + scale.size], scale)


def test_mxfp4_means_what_gguf_says() -> None:
    """All codes with all scales that are numbers, beside the gguf library, whose blocks hold codes i and i + 16 in a byte."""
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (16, 253 * 32), np.uint8)
    codes[:, :16] = np.arange(16)
    scales = np.tile(np.arange(253, dtype=np.uint8), (16, 1))
    halves = codes.reshape(16, 253, 2, 16)
    blocks = np.concatenate([scales[:, :, None], halves[:, :, 0] | (halves[:, :, 1] << 4)], axis=2)
    wanted = quants.dequantize(np.ascontiguousarray(blocks).reshape(16, -1), GGMLQuantizationType.MXFP4)
    found = unpack_matrix(*pack_codes(codes, scales, "mxfp4"), "mxfp4", *codes.shape)
    assert np.array_equal(found, wanted.reshape(16, -1))


@pytest.mark.parametrize(("byte", "words"), [(255, "NaN or infinite"), (253, "too large")])
def test_an_mxfp4_scale_that_is_no_number(tmp_path: Path, byte: int, words: str) -> None:
    tensors = read_tensors(oracle_dir("gpt_oss"))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, data[:-1] + bytes([byte]))
    source = write_checkpoint(tmp_path / "in", oracle_config("gpt_oss"), {"model.safetensors": tensors})
    with pytest.raises(ContainerError, match=f"down_proj_scales.*{words}"):
        Conversion(source, "int4").run(tmp_path / "out")
    assert not (tmp_path / "out" / "colibri.json").exists()


# ---- experts together and apart -----------------------------------------------------------------------------------


def bf16_array(raw: Raw) -> np.ndarray:
    return np.frombuffer(raw[2], np.uint16).reshape(raw[1])


def as_bf16(x: np.ndarray) -> Raw:
    return "BF16", x.shape, np.ascontiguousarray(x).tobytes()


def stacked(tensors: Parts, n_layers: int, n_experts: int, is_turned: bool) -> Parts:
    """The experts of a checkpoint that has them apart, in two tensors a layer."""
    found = {name: raw for name, raw in tensors.items() if ".mlp.experts." not in name}
    for layer in range(n_layers):
        p = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([bf16_array(tensors[f"{p}{e}.{part}_proj.weight"]) for e in range(n_experts)])
            for part in ("gate", "up", "down")
        )
        both = np.concatenate([gate, up], axis=1)
        found[f"{p}gate_up_proj"] = as_bf16(both.transpose(0, 2, 1) if is_turned else both)
        found[f"{p}down_proj"] = as_bf16(down.transpose(0, 2, 1) if is_turned else down)
    return found


def same_files(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.glob("*.safetensors"))
    return names == sorted(path.name for path in b.glob("*.safetensors")) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_experts_stacked_either_way_are_those_apart(
    converted: Callable[[str, str], Path], tmp_path: Path, name: str, is_turned: bool
) -> None:
    """2 * 48 rows of 96 inputs: gate and up are square, so the other tensor has to tell which way round they lie."""
    config, tensors = oracle_config(name), read_tensors(oracle_dir(name))
    made_of = stacked(tensors, config["num_hidden_layers"], config["num_experts"], is_turned)
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": made_of})
    Conversion(source, "int4").run(tmp_path / "out")
    assert same_files(tmp_path / "out", converted(name, "int4"))


@pytest.mark.parametrize("is_turned", [False, True])
def test_gpt_oss_in_bf16_as_others_publish_it(
    converted: Callable[[str, str], Path], tmp_path: Path, is_turned: bool
) -> None:
    """Widened MXFP4 is bf16 exactly; the rows of gate and up still alternate. Bit for bit the f32 container of the original."""
    config, tensors = oracle_config("gpt_oss"), read_tensors(oracle_dir("gpt_oss"))
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = (
            np.frombuffer(tensors.pop(n)[2], np.uint8) for n in (name, name.replace("_blocks", "_scales"))
        )
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(-1, 32)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        values = (table[codes] * 2.0 ** (scales.astype(float)[:, None] - 127)).astype(np.float32)
        shape = (16, 96, 64) if "down" in name else (16, 128, 96)
        bits = (values.reshape(shape).view(np.uint32) >> 16).astype(np.uint16)
        tensors[name.removesuffix("_blocks")] = as_bf16(bits.transpose(0, 2, 1) if is_turned else bits)
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": tensors})
    a, b = made(source, "f32"), Container.open(converted("gpt_oss", "f32"))
    for layer, file in b.experts.items():
        for expert in (0, 15):
            pairs = zip(*(expert_values(c.read_expert(layer, expert), file.layout) for c in (a, b)), strict=True)
            assert all(np.array_equal(x, y) for x, y in pairs)


def test_gemma4_with_its_experts_apart(converted: Callable[[str, str], Path], tmp_path: Path) -> None:
    tensors = read_tensors(oracle_dir("gemma4"))
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        both, down = bf16_array(tensors.pop(name)), bf16_array(tensors.pop(prefix + "down_proj"))
        for e in range(len(both)):
            tensors[f"{prefix}{e}.gate_proj.weight"], tensors[f"{prefix}{e}.up_proj.weight"] = map(
                as_bf16, np.split(both[e], 2)
            )
            tensors[f"{prefix}{e}.down_proj.weight"] = as_bf16(down[e])
    source = write_checkpoint(tmp_path / "in", oracle_config("gemma4"), {"model.safetensors": tensors})
    Conversion(source, "int4").run(tmp_path / "out")
    assert same_files(tmp_path / "out", converted("gemma4", "int4"))


@pytest.mark.parametrize("victim", ["gate_up_proj", "down_proj"])
def test_stacked_experts_of_a_wrong_shape(tmp_path: Path, victim: str) -> None:
    config, tensors = oracle_config("qwen3_moe"), read_tensors(oracle_dir("qwen3_moe"))
    made_of = stacked(tensors, config["num_hidden_layers"], config["num_experts"], False)
    name = f"model.layers.1.mlp.experts.{victim}"
    made_of[name] = as_bf16(bf16_array(made_of[name])[:, :-1])
    source = write_checkpoint(tmp_path / "in", config, {"model.safetensors": made_of})
    with pytest.raises(ContainerError, match=rf"1\.mlp\.experts\.{victim}.*shape"):
        Conversion(source, "int4")


def test_plan_and_estimate_know_what_is_kept(converted: Callable[[str, str], Path], tmp_path: Path) -> None:
    """An int8 container of gpt_oss is as large as they say: its experts have 4 bits."""
    from click.testing import CliRunner

    from cli.estimate import command as estimate
    from cli.plan import _facts

    container = Container.open(converted("gpt_oss", "int8"))
    _, facts, _ = _facts(oracle_dir("gpt_oss"), "int8", ())
    assert facts.record_bytes == container.facts().record_bytes
    asked = [str(oracle_dir("gpt_oss")), "--at", str(tmp_path), "--disk", "1", "--memory", "10", "--assume", "8G"]
    said = CliRunner().invoke(estimate, asked, catch_exceptions=False).output
    plan = Conversion(oracle_dir("gpt_oss"), "int8").plan
    assert f"{plan.dense_bytes + plan.expert_bytes:,}" in said
