"""Packing, the record layout, and what Container.open refuses."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from conversion.presets import preset_config
from conversion.synth import Synthesis
from native.matrix import ACT_F32, FORMATS, matrix, scale_bytes, weight_bytes
from shared.container.format import PRECISIONS, expert_layout, plan_container, plan_facts
from shared.container.pack import (
    SCALED,
    from_bf16,
    pack_codes,
    pack_matrix,
    quantise_groups,
    to_bf16,
    unpack_matrix,
    unpack_quants,
)
from shared.container.reader import Container, aligned_buffer
from shared.errors import ChecksumMismatch, ConfigError, ContainerError, ShortRead

SIZES = [(1, 1), (16, 64), (17, 65), (15, 63), (48, 136), (136, 32), (33, 200)]


def sample(out: int, in_: int, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((out, in_)).astype(np.float32)
    w[0] *= 1e-3
    if out > 2:
        w[1] = 0.0
    return w


# ---- packing: against the header's formulas, element by element ----------------------------------------------------


@pytest.mark.parametrize(("out", "in_"), SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_of_the_library_is_packed_in_its_size(fmt: str, out: int, in_: int) -> None:
    assert set(SCALED) == {fmt for fmt in FORMATS if scale_bytes(fmt, 1, 1)}
    weight, scale = pack_matrix(sample(out, in_), fmt)
    assert weight.size == weight_bytes(fmt, out, in_)
    assert (0 if scale is None else scale.size) == scale_bytes(fmt, out, in_)


@pytest.mark.parametrize(("out", "in_"), SIZES)
def test_every_element_lies_where_the_header_says(out: int, in_: int) -> None:
    w = sample(out, in_)
    n_tiles, n_groups = -(-out // 16), -(-in_ // 64)
    f32 = pack_matrix(w, "f32")[0].view(np.float32).reshape(n_tiles, in_, 16)
    q8, s8 = pack_matrix(w, "q8")
    q4, s4 = pack_matrix(w, "q4")
    plain8, _ = unpack_quants(q8, s8, "q8", out, in_)
    plain4, _ = unpack_quants(q4, s4, "q4", out, in_)
    tiles8, tiles4 = q8.reshape(n_tiles, n_groups, 16, 16, 4), q4.reshape(n_tiles, n_groups, 8, 16, 4)
    assert s8 is not None
    assert s4 is not None
    scales8, scales4 = s8.view(np.float32), s4.view(np.float16).reshape(n_tiles, n_groups, 16)
    for r in range(n_tiles * 16):
        for k in range(n_groups * 64):
            inside = r < out and k < in_
            tile, row, group, i = r // 16, r % 16, k // 64, k % 64
            if k < in_:
                assert f32[tile, k, row] == (w[r, k] if inside else 0.0)
            stored = int(tiles8[tile, group, i // 4, row, i % 4])
            assert stored == (int(plain8[r, k]) if inside else 0) + 128
            byte = int(tiles4[tile, group, i % 32 // 4, row, i % 4])
            nibble = byte & 15 if i < 32 else byte >> 4
            assert nibble == (int(plain4[r, k]) if inside else 0) + 8
            if not r < out:
                assert scales8[r] == 0
                assert scales4[tile, group, row] == 0


@pytest.mark.parametrize(("out", "in_"), SIZES)
@pytest.mark.parametrize("fmt", ["q8g32", "q4g32", "mxfp4"])
def test_formats_with_a_scale_per_32_inputs(fmt: str, out: int, in_: int) -> None:
    """Codes lie where those of q8 and q4 do, scales half by half; what is packed from codes is what is packed from values."""
    kind, n_tiles, n_groups = SCALED[fmt], -(-out // 16), -(-in_ // 64)
    rng = np.random.default_rng(out * in_)
    n_scales = -(-in_ // 32)
    if fmt == "mxfp4":
        q: np.ndarray = rng.integers(0, 16, (out, in_), np.uint8)
        scale: np.ndarray = rng.integers(2, 253, (out, n_scales)).astype(np.uint8)
    else:
        q = rng.integers(-8, 8, (out, in_), np.int8) * (1 if kind.bits == 4 else 16)
        scale = rng.standard_normal((out, n_scales)).astype(np.float16)
    weight, packed_scale = pack_codes(q, scale, fmt)
    tiles = weight.reshape(n_tiles, n_groups, 1024 // (2 if kind.bits == 4 else 1) // 64, 16, 4)
    scales = packed_scale.view(kind.scale).reshape(n_tiles, n_groups, 2, 16)
    for r in range(n_tiles * 16):
        for k in range(0, n_groups * 64, 3):
            inside = r < out and k < in_
            tile, row, group, i = r // 16, r % 16, k // 64, k % 64
            byte = int(tiles[tile, group, (i % 32 if kind.bits == 4 else i) // 4, row, i % 4])
            stored = byte if kind.bits == 8 else byte & 15 if i < 32 else byte >> 4
            assert stored == (int(q[r, k]) if inside else 0) + kind.zero
            assert scales[tile, group, i // 32, row] == (scale[r, k // 32] if r < out and k // 32 < n_scales else 0)
    values = unpack_matrix(weight, packed_scale, fmt, out, in_)
    if fmt == "mxfp4":
        plain = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [0, -0.5, -1, -1.5, -2, -3, -4, -6])
        wanted = plain[q] * 2.0 ** (np.repeat(scale, 32, axis=1)[:, :in_].astype(float) - 127)
    else:
        wanted = q * np.repeat(scale, 32, axis=1)[:, :in_].astype(float)
    assert np.array_equal(values, wanted.astype(np.float32))
    if fmt == "mxfp4":  # its own values lose nothing
        assert np.array_equal(unpack_matrix(*pack_matrix(values, fmt), fmt, out, in_), values)


def test_mxfp4_rounds_as_its_specification_says() -> None:
    """Ties go to the even mantissa, what lies beyond 6 becomes 6, the scale is that of the largest value's exponent."""
    w = np.zeros((16, 64), np.float32)
    w[0, :16] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5.01, 7.9, -0.26, 0.24, -0.0, 0.5, 1.5, -3]
    w[1, 40] = 6 * 2.0**-100
    w[2, 3] = 2.0**-149
    w[3, 3] = 3e38
    values = unpack_matrix(*pack_matrix(w, "mxfp4"), "mxfp4", 16, 64)
    assert values[0, :16].tolist() == [4, 0, 1, 1, 2, 2, 4, 4, -6, 6, -0.5, 0, 0, 0.5, 1.5, -3]
    assert values[1, 40] == w[1, 40]
    assert values[2, 3] in (0, w[2, 3])
    assert values[3, 3] == np.float32(6 * 2.0**125)  # 2^127 would be nearer with a larger scale, which has no 6


@pytest.mark.parametrize(("out", "in_"), SIZES)
def test_unpacking_is_exact_or_within_half_a_step(out: int, in_: int) -> None:
    w = sample(out, in_)
    assert np.array_equal(unpack_matrix(*pack_matrix(w, "f32"), "f32", out, in_), w)
    assert np.array_equal(unpack_matrix(*pack_matrix(w, "bf16"), "bf16", out, in_), from_bf16(to_bf16(w)))
    step8 = np.abs(w).max(axis=1, keepdims=True) / 127
    assert (np.abs(unpack_matrix(*pack_matrix(w, "q8"), "q8", out, in_) - w) <= step8 * 0.5001).all()
    q4 = pack_matrix(w, "q4")
    error4 = np.abs(unpack_matrix(*q4, "q4", out, in_) - w)
    step4 = np.repeat(unpack_quants(*q4, "q4", out, in_)[1], 64, axis=1)[:, :in_]
    # Beyond step 7 a value of the other sign than the largest is clipped: up to a whole step is lost.
    is_clipped = w / np.where(step4 == 0, np.inf, step4) > 7.5
    assert (error4 <= np.abs(step4) * np.where(is_clipped, 1.005, 0.501)).all()
    assert is_clipped.mean() < 0.05


def test_large_matrices_are_packed_in_pieces_alike() -> None:
    """Rows packed in pieces of whole tiles join to the same bytes."""
    w = sample(3000, 520)
    for fmt in FORMATS:
        weight, scale = pack_matrix(w, fmt)
        parts = [pack_matrix(w[at : at + 1008], fmt) for at in range(0, 3000, 1008)]
        assert np.array_equal(np.concatenate([p[0] for p in parts]), weight)
        if scale is not None:
            assert np.array_equal(np.concatenate([p[1] for p in parts if p[1] is not None]), scale)


@pytest.mark.parametrize("sign", [1, -1])
def test_q4_scale_is_raised_where_rounding_down_would_clip(sign: int) -> None:
    """In f16's denormal range a scale loses so much that the largest weight would not fit: then the next f16 is taken."""
    tiny = 2.0**-24
    for steps, n_tiny, q_largest in (
        (1e-3, 1, 0), (0.4, 1, 0), (4.0, 1, -4), (8.4, 1, -8), (8.5, 1, -8), (8.6, 2, -4), (12.0, 2, -6), (16.9, 2, -8),
        (17.1, 3, -6), (19.3, 3, -6), (25.4, 3, -8), (25.6, 4, -6), (27.9, 4, -7), (33.9, 4, -8), (34.1, 5, -7),
    ):  # fmt: skip
        w = np.zeros((1, 64), np.float32)
        w[0, 3] = sign * steps * tiny
        q, scale = quantise_groups(w)
        assert scale[0, 0] == -sign * n_tiny * tiny, f"{steps}: {scale[0, 0] / tiny} instead of {n_tiny}"
        assert q[0, 3] == q_largest, steps
        assert not q[0, :3].any() and not q[0, 4:].any()


def test_q4_the_largest_value_is_step_minus_eight() -> None:
    w = np.random.default_rng(5).standard_normal((500, 192)).astype(np.float32)
    q, scale = quantise_groups(w)
    at = np.abs(w).reshape(500, 3, 64).argmax(axis=2)[:, :, None]
    largest = np.take_along_axis(w.reshape(500, 3, 64), at, axis=2)[:, :, 0]
    assert (np.take_along_axis(q.reshape(500, 3, 64), at, axis=2) == -8).all()
    assert np.array_equal(scale, (largest / -8).astype(np.float16))
    assert 0.4 < (scale < 0).mean() < 0.6
    assert set(np.unique(q)) == set(range(-8, 8))
    # The other way round everything is the same, but for the sign of the scale.
    q_of_minus, scale_of_minus = quantise_groups(-w)
    assert np.array_equal(q_of_minus, q) and np.array_equal(scale_of_minus, -scale)


def test_q4_of_two_largest_the_negative_one_counts() -> None:
    for at, other in ((3, 40), (40, 3)):
        w = np.zeros((1, 64), np.float32)
        w[0, at], w[0, other] = 4.0, -4.0
        q, scale = quantise_groups(w)
        assert scale[0, 0] == 0.5
        assert (q[0, at], q[0, other]) == (7, -8)


def test_q4_of_zeros_is_plain_zero() -> None:
    """Whatever their signs: padding and emptiness have one form, and a scale of -0 is not it."""
    w = np.zeros((3, 64), np.float32)
    w[1] = -0.0
    w[2, ::2] = -0.0
    q, scale = quantise_groups(w)
    assert not q.any()
    assert not scale.view(np.uint16).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_q4_reaches_as_far_as_f16_scales(sign: int) -> None:
    w = np.zeros((2, 64), np.float32)
    w[1, 9] = sign * 8 * 65504
    q, scale = quantise_groups(w)
    assert q[1, 9] == -8 and scale[1, 0] == -sign * 65504
    w[1, 9] = np.nextafter(w[1, 9], np.float32(sign * np.inf))
    with pytest.raises(ValueError, match=rf"a weight of {'-' if sign < 0 else ''}524032 is too large.*at most 524032"):
        quantise_groups(w)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused(fmt: str, bad: float) -> None:
    w = sample(20, 70)
    w[13, 66] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        pack_matrix(w, fmt)


def test_extremes() -> None:
    w = np.full((16, 64), 3.0e38, np.float32)
    for fmt in ("f32", "q8"):
        assert np.isfinite(unpack_matrix(*pack_matrix(w, fmt), fmt, 16, 64)).all()
    for fmt, what in (("q4", "int4"), ("q4g32", "int4"), ("q8g32", "int8 in groups")):
        with pytest.raises(ValueError, match=f"too large for {what}"):
            pack_matrix(w, fmt)
    denormal = np.full((16, 64), 1e-45, np.float32)
    for fmt in FORMATS:
        assert np.isfinite(unpack_matrix(*pack_matrix(denormal, fmt), fmt, 16, 64)).all()


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, np.uint32)
    values = bits.view(np.float32)
    ours = from_bf16(to_bf16(values))
    assert np.array_equal(np.isnan(ours), np.isnan(values))
    number = ~np.isnan(values)
    assert np.array_equal(ours[number], values[number].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_kernels_read_what_is_packed() -> None:
    """The native linear over packed bytes equals the product with the unpacked matrix."""
    library, kernels = pytest.importorskip("native.library"), pytest.importorskip("native.kernels")
    pool = library.Pool(1)
    x = np.random.default_rng(3).standard_normal((3, 136)).astype(np.float32)
    for fmt in FORMATS:
        weight, scale = pack_matrix(sample(40, 136), fmt)
        buffer = aligned_buffer(weight.size + 64 + (0 if scale is None else scale.size))
        buffer[: weight.size] = weight
        at = -(-weight.size // 64) * 64
        if scale is not None:
            buffer[at : at + scale.size] = scale
        part = None if scale is None else buffer[at : at + scale.size]
        made = matrix(buffer[: weight.size], part, fmt, 40, 136, ACT_F32)
        out = np.zeros((3, 40), np.float32)
        kernels.linear(pool, made, x, out)
        wanted = x.astype(np.float64) @ unpack_matrix(weight, scale, fmt, 40, 136).T.astype(np.float64)
        assert np.abs(out - wanted).max() < 1e-4 * np.abs(wanted).max(), fmt
    pool.close()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("inner", "hidden"), [(32, 136), (2048, 6144), (1, 1)])
def test_expert_record(fmt: str, inner: int, hidden: int) -> None:
    layout = expert_layout(fmt, inner, hidden)
    weights = [(layout.gate_w, inner, hidden), (layout.up_w, inner, hidden), (layout.down_w, hidden, inner)]
    spans = [(at, weight_bytes(fmt, out, in_)) for at, out, in_ in weights]
    scales = [(layout.gate_s, inner, hidden), (layout.up_s, inner, hidden), (layout.down_s, hidden, inner)]
    spans += [(at, scale_bytes(fmt, out, in_)) for at, out, in_ in scales if at is not None]
    assert len(spans) == (6 if fmt in SCALED else 3)
    end = 0
    for at, size in spans:
        assert at % 64 == 0
        assert end <= at < end + 64
        end = at + size
    assert layout.record_bytes % 4096 == 0
    assert 0 <= layout.record_bytes - end < 4096
    if (fmt, inner) == ("q4", 2048):
        assert layout.record_bytes == 20_054_016


# ---- opening ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("synth") / "model"
    Synthesis(preset_config("tiny", 3, has_mtp=True), "int4").run(out)
    return out


@pytest.fixture
def model(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A container that the test may damage."""
    target = tmp_path / "model"
    shutil.copytree(finished, target)
    yield target
    shutil.rmtree(target)


def refused(path: Path, *words: str) -> None:
    with pytest.raises((ContainerError, ConfigError)) as caught:
        Container.open(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def change_index(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = model / "colibri.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_a_good_container_opens(finished: Path) -> None:
    container = Container.open(finished)
    assert [row for row in container.verify() if row[2]] == []
    assert sorted(container.experts) == [1, 2, 3]
    tensors = container.read_dense(["model.norm.weight", "lm_head.weight"], aligned_buffer)
    assert set(tensors) == {"model.norm.weight", "lm_head.weight"}
    for tensor in container.read_dense(lambda entry: True, aligned_buffer).values():
        assert tensor.weight.ctypes.data % 64 == 0
        assert tensor.scale is None or tensor.scale.ctypes.data % 64 == 0


def test_facts_agree_with_the_files(finished: Path) -> None:
    container = Container.open(finished)
    facts = container.facts()
    planned = plan_facts(container.spec, plan_container(container.spec, PRECISIONS["int4"]))
    assert (planned.has_tokenizer, facts.has_tokenizer) == (
        True,
        False,
    )  # a plan is of a real model, this has random weights
    assert facts == msgspec.structs.replace(planned, has_tokenizer=False)
    total = facts.dense_bytes + facts.gate_bytes + facts.shared_bytes + facts.mtp_bytes
    in_memory = (n for entry in container.dense.values() for n in (entry.bytes, entry.scale_bytes))
    assert total == sum(-(-n_bytes // 64) * 64 for n_bytes in in_memory)
    assert facts.record_bytes == tuple(container.experts[layer].record_bytes for layer in (1, 2, 3))


def test_same_seed_same_bytes(finished: Path, tmp_path: Path) -> None:
    Synthesis(preset_config("tiny", 3, has_mtp=True), "int4").run(tmp_path / "again")
    Synthesis(preset_config("tiny", 3, has_mtp=True), "int4", seed=1).run(tmp_path / "other")
    name = "experts-001.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (finished / name).read_bytes()
    assert (tmp_path / "other" / name).read_bytes() != (finished / name).read_bytes()


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_random_weights_have_a_sane_scale(tmp_path: Path, precision: str) -> None:
    from tests.reference.mla_moe import Reference

    Synthesis(preset_config("tiny", 3), precision).run(tmp_path / "m")
    logits, hidden = Reference(tmp_path / "m").forward(list(range(12)))
    assert np.isfinite(logits).all()
    assert 0.5 < hidden.std() < 2.0
    assert 1.0 < logits.std() < 10.0


def test_missing_file(model: Path) -> None:
    (model / "experts-002.safetensors").unlink()
    refused(model, "experts-002.safetensors", "missing")


@pytest.mark.parametrize("name", ["dense-00000.safetensors", "experts-001.safetensors"])
def test_truncated_file(model: Path, name: str) -> None:
    path = model / name
    size = path.stat().st_size
    for keep in (size - 1, 5000, 100, 4, 0):
        with open(path, "r+b") as file:
            file.truncate(keep)
        refused(model, name, "truncated")


def test_file_that_is_too_long(model: Path) -> None:
    for name in ("experts-001.safetensors", "dense-00000.safetensors"):
        with open(model / name, "ab") as file:
            file.write(b"x")
        refused(model, name, "should have")
        with open(model / name, "r+b") as file:
            file.truncate((model / name).stat().st_size - 1)


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    assert len(text) <= length
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


def test_wrong_shape_in_a_file(model: Path) -> None:
    change_header(model / "dense-00000.safetensors", lambda h: h["model.norm.weight"].update(shape=[8, 8]))
    refused(model, "dense-00000.safetensors", "model.norm.weight", "[64]", "[8, 8]")


def test_wrong_record_in_a_file(model: Path) -> None:
    def swap(header: dict[str, Any]) -> None:
        a, b = header["model.layers.1.mlp.experts.3"], header["model.layers.1.mlp.experts.4"]
        a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]

    change_header(model / "experts-001.safetensors", swap)
    refused(model, "experts-001.safetensors", "experts.3")


def test_no_index(model: Path) -> None:
    (model / "colibri.json").unlink()
    refused(model, "colibri convert")
    (model / ".unfinished").mkdir()
    refused(model, "unfinished")
    refused(model / "nowhere", "not a directory")
    refused(model / "config.json", "not a directory")


def test_unknown_family(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    refused(model, "llama", "glm_moe_dsa")


def test_config_of_another_model(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 64}))
    refused(model, "colibri.json")
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    refused(model, "colibri.json", "model.layers.")
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    refused(model, "does not have")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.update(format_version=2), ("version 2", "version 1")),
        (lambda i: i.pop("format_version"), ("format version None",)),
        (lambda i: i.update(family="deepseek_v3"), ("deepseek_v3", "glm_moe_dsa")),
        (lambda i: i.update(surprise=1), ("malformed",)),
        (lambda i: i.pop("dense"), ("malformed",)),
        (lambda i: i["precision"].pop("mtp"), ("roles", "mtp")),
        (lambda i: i["precision"].update(expert="q3"), ("expert", "q3")),
        (lambda i: i["precision"].update(exact="q8"), ("exact", "q8")),
        (lambda i: i["precision"].update(embed="q4"), ("embed", "q4")),
        (lambda i: i["precision"].update(expert="q8"), ("layer 1", "q8")),
        (lambda i: i["dense"].pop("lm_head.weight"), ("lm_head.weight", "lacks")),
        (lambda i: i["dense"].update(extra=i["dense"]["lm_head.weight"]), ("extra", "does not have")),
        (lambda i: i["dense"]["lm_head.weight"].update(shape=[64, 1024]), ("lm_head.weight", "[64, 1024]")),
        (lambda i: i["dense"]["lm_head.weight"].update(format="f32"), ("lm_head.weight",)),
        (lambda i: i["dense"]["lm_head.weight"].update(file="../x.safetensors"), ("../x.safetensors", "own directory")),
        (lambda i: i["dense"]["lm_head.weight"].update(file="/etc/passwd"), ("/etc/passwd", "own directory")),
        (lambda i: i["dense"]["lm_head.weight"].update(file="experts-001.safetensors"), ("lm_head.weight", "nothing")),
        (lambda i: i["dense"]["lm_head.weight"].pop("scale_checksum"), ("lm_head.weight",)),
        (lambda i: i["dense"]["lm_head.weight"].update(stack="x"), ("malformed", "'lm_head.weight'")),
        (lambda i: i["experts"]["2"].pop("n_experts"), ("malformed", "layer '2'")),
        (lambda i: i["experts"].pop("1"), ("1",)),
        (lambda i: i["experts"].update({"0": i["experts"]["1"]}), ("0",)),
        (lambda i: i["experts"]["1"].update(record_bytes=4096), ("layer 1", "4,096")),
        (lambda i: i["experts"]["1"].update(n_experts=15), ("layer 1", "15")),
        (lambda i: i["experts"]["1"].update(data_offset=8192), ("8,192",)),
        (lambda i: i["experts"]["1"].update(file="experts-002.safetensors"), ("experts-002.safetensors",)),
        (lambda i: i["experts"]["1"].update(file="..\\x"), ("own directory",)),
        (lambda i: i["experts"]["1"].update(checksums=["0"]), ("checksums", "layer 1")),
    ],
)
def test_index_that_contradicts_the_model(
    model: Path, change: Callable[[dict[str, Any]], object], words: tuple[str, ...]
) -> None:
    change_index(model, change)
    refused(model, *words)


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "[" * 100_000, '{"format_version": 1}'])
def test_index_that_is_no_index(model: Path, text: str) -> None:
    (model / "colibri.json").write_text(text)
    refused(model, "colibri.json")


# ---- damage that only reading shows ---------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def test_damaged_dense_tensor(model: Path) -> None:
    container = Container.open(model)
    entry = container.dense["model.layers.1.self_attn.o_proj.weight"]
    flip(entry.file, entry.scale_offset + 3)
    with pytest.raises(ChecksumMismatch, match=r"o_proj\.weight\.scale at offset .* expected"):
        container.read_dense([entry.name], aligned_buffer)
    assert [row[0] for row in container.verify() if row[2]] == [f"{entry.name}.scale"]


def test_damaged_expert(model: Path) -> None:
    container = Container.open(model)
    file = container.experts[2]
    flip(file.path, file.offset_of(7) + file.record_bytes - 1)
    with pytest.raises(ChecksumMismatch, match="layer 2 expert 7"):
        container.read_expert(2, 7)
    assert [row[0] for row in container.verify() if row[2]] == ["layer 2 expert 7"]


def test_file_that_shrinks_after_opening(model: Path) -> None:
    container = Container.open(model)
    entry = container.dense["lm_head.weight"]
    with open(entry.file, "r+b") as file:
        file.truncate(entry.offset + 10)
    with pytest.raises(ShortRead, match=r"lm_head\.weight needs .* ends after"):
        container.read_dense(["lm_head.weight"], aligned_buffer)


def test_unknown_name_and_bad_buffer(finished: Path) -> None:
    container = Container.open(finished)
    with pytest.raises(ContainerError, match="no tensor 'x'"):
        container.read_dense(["x"], aligned_buffer)
    with pytest.raises(ValueError, match="aligned"):
        container.read_dense(["model.norm.weight"], lambda n: aligned_buffer(n + 1)[1:])
