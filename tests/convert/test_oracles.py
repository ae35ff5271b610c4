"""Containers say the same as the checkpoints they were made from: bit by bit, and through a whole forward pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.container.format import PRECISIONS as FORMATS_BY_PRECISION
from shared.container.reader import Container, aligned_buffer
from shared.model.family import source_name
from shared.model.spec import ModelSpec
from tests.oracle import (
    LATENT_ORACLES,
    MTP_ORACLES,
    ORACLES,
    PRECISIONS,
    Raw,
    convert_oracle,
    oracle_array,
    oracle_dir,
    read_tensors,
)
from tests.reference.gqa_moe import FP4
from tests.reference.mla_moe import Reference, Weights, plain_values

ATOL = 2e-3
# The oracles were computed with 1e-6 for the two inner norms whatever rms_norm_eps says (transformers does so).
LATENT_EPS = 1e-6
EXACT_ATOL = {"gemma4": 3e-4}
"""Between float64 and the oracle's f32; 1e-4 elsewhere. Its unscaled scores enlarge roundings: tests/reference/gqa_moe.py, read
from the checkpoint, is just as far from it."""

Converted = Callable[[str, str], Path]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def source_values(name: str) -> dict[str, np.ndarray]:
    """Every weight of an oracle as f32, decoded element by element from the definitions."""
    raw = read_tensors(oracle_dir(name))
    table = np.array([e4m3(i) if i & 127 != 127 else np.nan for i in range(256)], np.float32)
    values: dict[str, np.ndarray] = {}
    for key, (dtype, shape, data) in raw.items():
        if key.endswith(("_scale_inv", "_scales")):
            continue
        if key.endswith("_blocks"):
            values[key.removesuffix("_blocks")] = mxfp4(raw, key)
            continue
        if dtype == "BF16":
            value = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif dtype == "F32":
            value = np.frombuffer(data, np.float32)
        else:
            assert dtype == "F8_E4M3"
            value = table[np.frombuffer(data, np.uint8)]
        value = value.reshape(shape)
        if key + "_scale_inv" in raw:
            _, scale_shape, scale_data = raw[key + "_scale_inv"]
            scale = np.frombuffer(scale_data, np.float32).reshape(scale_shape)
            rows, columns = np.indices(shape)
            value = value * scale[rows // 128, columns // 128]
        values[key] = value
    return values


def mxfp4(raw: dict[str, Raw], key: str) -> np.ndarray:
    """Nibbles, the lower first; groups of 32 share an exponent."""
    (_, shape, blocks), (_, _, scales) = raw[key], raw[key.replace("_blocks", "_scales")]
    nibbles = [part for byte in blocks for part in (byte & 15, byte >> 4)]
    plain = FP4[nibbles].reshape(-1, 32) * 2.0 ** (np.frombuffer(scales, np.uint8).astype(float) - 127)[:, None]
    return plain.astype(np.float32).reshape(*shape[:-2], -1)


def qwen3_5_values(spec: ModelSpec, key: str, source: dict[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """(the checkpoint's tensor, what the container should have of it): norms are stored less 1, queries and gates by heads."""
    name = source_name(spec.family, key, spec.mtp_layer)
    if "self_attn.q_" in key and "norm" not in key:
        name = name.replace("q_gate", "q_proj")
        heads = source[name].reshape(4, 2, 32, 64)
        return name, heads[:, int("q_gate" in key)].reshape(128, 64)
    plain = source[name].reshape(len(source[name]), -1) if "conv1d" in key else source[name]
    return name, plain + np.float32(1) if key.endswith("norm.weight") and "linear_attn" not in key else plain


def expert_part(spec: ModelSpec, layer: int, expert: int, part: str, kind: str) -> tuple[str, Any]:
    """(the checkpoint's tensor, which of it) of a projection's "weight" or "bias"."""
    family = spec.family
    if family == "gpt_oss":
        suffix = "_bias" if kind == "bias" else ""
        fused = f"model.layers.{layer}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj{suffix}"
        return fused, (expert, {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part])
    if family in ("gemma4", "qwen3_5_moe"):
        width, prefix = 32, f"model.language_model.layers.{layer}."
        if family == "qwen3_5_moe":
            prefix = ("mtp.layers.0." if layer == spec.mtp_layer else prefix) + "mlp."
        fused = f"{prefix}experts.{'down' if part == 'down' else 'gate_up'}_proj"
        return fused, (expert, {"gate": slice(0, width), "up": slice(width, None), "down": slice(None)}[part])
    return source_name(family, f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{kind}"), ...


def quantised(value: np.ndarray, fmt: str) -> np.ndarray:
    """What a format keeps of a matrix: the quantisers of docs/container.md, written a second time and slowly."""
    if fmt in ("f32", "mxfp4"):  # kept as it is
        return value
    if fmt == "bf16":
        import ml_dtypes

        return value.astype(ml_dtypes.bfloat16).astype(np.float32)
    result = np.empty_like(value)
    for r, row in enumerate(value):
        if fmt == "q8":
            scale = np.float32(np.abs(row).max()) / np.float32(127)
            q = np.clip(np.rint(row / scale), -127, 127) if scale else np.zeros_like(row)
            result[r] = q.astype(np.float32) * scale
            continue
        for start in range(0, len(row), 64):
            group = row[start : start + 64]
            first = min(group, key=lambda value: (-abs(value), value))
            f16 = np.float16(first / np.float32(-8))
            if abs(first) > np.float32(8.5) * abs(np.float32(f16)):
                f16 = np.nextafter(f16, np.float16(-np.inf if first > 0 else np.inf))
            scale = np.float32(f16)
            q = np.clip(np.rint(group / scale), -8, 7) if scale else np.zeros_like(group)
            result[r, start : start + 64] = q.astype(np.float32) * scale
    return result


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ORACLES)
def test_container_holds_every_weight(converted: Converted, name: str, precision: str) -> None:
    """Each stored tensor and each record unpacks to the (quantised) source values, bit by bit."""
    source = source_values(name)
    container = Container.open(converted(name, precision))
    spec = container.spec
    formats = FORMATS_BY_PRECISION[precision]
    if name == "gpt_oss" and precision.startswith("int"):  # its experts stay in the 4 bits that they are in
        formats = {**formats, "expert": "mxfp4"}
    tensors = container.read_dense(lambda _: True, aligned_buffer)
    used = set()
    for key, tensor in tensors.items():
        entry = container.dense[key]
        assert entry.format == formats[entry.role]
        found = plain_values(tensor)
        if key.endswith(("k_b.weight", "v_b.weight")):
            origin = key.rsplit(".", 2)[0] + ".kv_b_proj.weight"
            mla = spec.attention[0]
            heads = source[origin].reshape(mla.n_heads, mla.nope + mla.v_dim, mla.kv_rank)
            is_k = key.endswith("k_b.weight")
            wanted = [head[: mla.nope].T if is_k else head[mla.nope :] for head in heads]
            for stored, plain in zip(found, wanted, strict=True):
                assert np.array_equal(stored, quantised(np.ascontiguousarray(plain), tensor.format)), key
            used.add(origin)
            continue
        origin = source_name(spec.family, key)
        if key == "lm_head.weight" and spec.tie_embeddings:
            origin = source_name(spec.family, "model.embed_tokens.weight")
        plain = source.get(origin)
        if spec.family == "qwen3_5_moe":
            origin, plain = qwen3_5_values(spec, key, source)
        assert np.array_equal(found, quantised(plain, tensor.format) if plain.ndim == 2 else plain), key
        used.add(origin)
    weights = Weights(container)
    for layer in spec.moe_layers:
        for expert in range(spec.n_experts):
            for matrix, part in zip(weights.expert(layer, expert), ("gate", "up", "down"), strict=True):
                key, which = expert_part(spec, layer, expert, part, "weight")
                fmt = formats["mtp" if layer == spec.mtp_layer else "expert"]
                assert np.array_equal(matrix.astype(np.float32), quantised(source[key][which], fmt)), key
                used.add(key)
            for bias, part in zip(weights.biases(layer, expert), ("gate", "up", "down")):
                key, which = expert_part(spec, layer, expert, part, "bias")
                assert np.array_equal(bias.astype(np.float32), source[key][which]), key
                used.add(key)
    copies = {f"model.layers.{spec.mtp_layer}.{part}" for part in ("embed_tokens.weight", "shared_head.head.weight")}
    assert {name for name in set(source) - used if ".visual." not in name} <= copies


@pytest.mark.parametrize("name", ORACLES)
def test_reference_over_container_reproduces_oracle(converted: Converted, name: str) -> None:
    """f32: prompt logits, greedy tokens and MTP drafts, read through the container alone."""
    reference = Reference(converted(name, "f32"), latent_eps=LATENT_EPS)
    prompt, tokens = oracle_array(name, "prompt_ids"), oracle_array(name, "greedy_tokens")
    logits, hidden = reference.forward([*prompt, *tokens])
    n, atol = len(prompt), EXACT_ATOL.get(name, 1e-4)
    assert np.abs(logits[:n] - oracle_array(name, "logits")).max() < atol
    assert np.abs(hidden[:n] - oracle_array(name, "hidden")).max() < atol
    assert np.abs(logits[n - 1 : -1] - oracle_array(name, "greedy_logits")).max() < atol
    assert logits[n - 1 : -1].argmax(axis=1).tolist() == tokens.tolist()
    if name not in MTP_ORACLES:
        return
    next_ids, state = oracle_array(name, "mtp_input_ids"), oracle_array(name, "mtp_hidden_in").astype(np.float64)
    draft, out = reference.draft(next_ids, state)
    assert np.abs(draft - oracle_array(name, "mtp_logits")).max() < 1e-4
    assert np.abs(out - oracle_array(name, "mtp_hidden_out")).max() < 1e-4
    chain = oracle_array(name, "mtp_chain_tokens")
    assert reference.draft_chain(next_ids, state, len(chain)) == chain.tolist()


@pytest.mark.parametrize("name", LATENT_ORACLES)
def test_default_latent_eps_stays_within_the_oracles_tolerance(converted: Converted, name: str) -> None:
    """The engine uses rms_norm_eps for the inner norms; the oracle must still hold, tokens exactly."""
    reference = Reference(converted(name, "f32"))
    assert all(layer.latent_eps == reference.spec.rms_eps for layer in reference.spec.attention)
    prompt, tokens = oracle_array(name, "prompt_ids"), oracle_array(name, "greedy_tokens")
    logits, _ = reference.forward([*prompt, *tokens])
    n = len(prompt)
    assert np.abs(logits[:n] - oracle_array(name, "logits")).max() < ATOL
    assert logits[n - 1 : -1].argmax(axis=1).tolist() == tokens.tolist()


def test_one_corrupted_weight_is_noticed(converted: Converted, tmp_path: Path) -> None:
    """The comparison can fail: one weight off by 10 % exceeds the tolerance, and its checksum no longer fits."""
    out = tmp_path / "copy"
    shutil.copytree(converted("glm_moe_dsa", "f32"), out)
    entry = Container.open(out).dense["model.layers.0.self_attn.o_proj.weight"]
    with open(entry.file, "r+b") as file:
        file.seek(entry.offset)
        values = np.frombuffer(file.read(entry.bytes), np.float32).copy()
        values[np.abs(values).argmax()] *= 1.1
        file.seek(entry.offset)
        file.write(values.tobytes())
    from shared.errors import ChecksumMismatch

    with pytest.raises(ChecksumMismatch, match="o_proj"):
        Reference(out)
    index = json.loads((out / "colibri.json").read_text())
    from shared.container.checksum import checksum

    index["dense"]["model.layers.0.self_attn.o_proj.weight"]["checksum"] = checksum(values)
    (out / "colibri.json").write_text(json.dumps(index))
    logits, _ = Reference(out, latent_eps=LATENT_EPS).forward(oracle_array("glm_moe_dsa", "prompt_ids").tolist())
    assert np.abs(logits - oracle_array("glm_moe_dsa", "logits")).max() > ATOL


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_per_weight_are_those_asked_for(converted: Converted, precision: str) -> None:
    """--precision decides what lies on disk, in the data and not just in the index."""
    container = Container.open(converted("glm_moe_dsa", precision))
    layout = container.experts[3].layout
    spec = container.spec
    per_value = {"f32": 4, "bf16": 2, "int8": 1, "int4": 0.5}[precision]
    padded = -(-spec.hidden // 64) * 64 if precision.startswith("int") else spec.hidden
    assert layout.up_w - layout.gate_w == spec.expert_inner * padded * per_value
    assert {path.name for path in container.path.glob("experts-*")} == {
        f"experts-{i:03d}.safetensors" for i in range(3, 9)
    }


def test_safetensors_library_opens_what_we_write(converted: Converted) -> None:
    from safetensors import safe_open

    container = Container.open(converted("deepseek_v32", "int8"))
    for path in sorted(container.path.glob("*.safetensors")):
        with safe_open(path, framework="np") as handle:
            names = set(handle.keys())
            assert names
            for name in names:
                assert handle.get_tensor(name).nbytes > 0
    file = container.experts[2]
    with safe_open(file.path, framework="np") as handle:
        record = handle.get_tensor("model.layers.2.mlp.experts.5")
    assert np.array_equal(record, container.read_expert(2, 5))
    assert file.offset_of(5) % 4096 == 0
    assert file.record_bytes % 4096 == 0


def test_conversion_is_deterministic(converted: Converted, tmp_path: Path) -> None:
    first, second = converted("deepseek_v3", "int4"), convert_oracle("deepseek_v3", "int4", tmp_path / "again")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
