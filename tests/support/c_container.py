"""Writes containers of the C engine byte by byte from the description of their format; shares nothing with the code under test.

A matrix [O, I] becomes two flat tensors of one file: NAME as U8 (int8: two's complement; int4: q + 8 in nibbles, the lower
one first) and NAME.qs as F32 scales, one a row or one for each 64 inputs. Files hold the F32 region first, then the U8 region,
each sorted by name. The output file number follows the shard that a tensor came from; the MTP layer has a file of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from tests.oracle import Raw, oracle_config, oracle_dir, write_shard

F32 = np.ndarray


def values(raw: Raw) -> F32:
    dtype, shape, data = raw
    if dtype == "F32":
        return np.frombuffer(data, np.float32).reshape(shape)
    assert dtype == "BF16"
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)


def int8(w: F32) -> tuple[bytes, F32, F32]:
    """(bytes, scales, the values that they stand for)."""
    scale = np.maximum(np.abs(w).max(axis=1) / np.float32(127), np.float32(1e-8)).astype(np.float32)
    q = np.clip(np.rint(w / scale[:, None]), -128, 127).astype(np.int8)
    return q.tobytes(), scale, q * scale[:, None]


def int4(w: F32, group: int) -> tuple[bytes, F32, F32]:
    """``group`` 0: one scale a row. The last group of a row may be partial."""
    out, in_ = w.shape
    width = group or in_
    scales = []
    plain = np.zeros_like(w)
    quants = np.zeros((out, in_ + in_ % 2), np.int8)
    for begin in range(0, in_, width):
        part = w[:, begin : begin + width]
        scale = np.maximum(np.abs(part).max(axis=1) / np.float32(7), np.float32(1e-8)).astype(np.float32)
        q = np.clip(np.rint(part / scale[:, None]), -8, 7)
        quants[:, begin : begin + part.shape[1]] = q
        plain[:, begin : begin + part.shape[1]] = (
            q.astype(np.float32) * scale.astype(np.float16).astype(np.float32)[:, None]
        )
        scales.append(scale)
    nibbles = (quants + 8).astype(np.uint8)
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed.tobytes(), np.stack(scales, axis=1).reshape(-1), plain


def write_c_container(
    directory: Path,
    oracle: str = "glm_moe_dsa",
    precision: str = "gs64",
    *,
    has_indexer: bool = False,
    has_mtp: bool = True,
    scale_dtype: str = "F32",
    shuffle: int | None = None,
    config: dict[str, object] | None = None,
) -> dict[str, F32]:
    """The oracle's model as the C engine has it, ``precision``: gs64, row or int8. ``shuffle``: a seed by which tensors
    lie in any file, in any order (all but the embedding's, whose two lie in one). Returns the values that its tensors
    stand for (int4 with scales as f16 has them)."""
    directory.mkdir(parents=True, exist_ok=True)
    made_config = config or oracle_config(oracle)
    n_layers = made_config["num_hidden_layers"]
    plain: dict[str, F32] = {}
    files: dict[str, dict[str, Raw]] = {}
    for i, shard in enumerate(sorted(oracle_dir(oracle).glob("*.safetensors"))):
        for name, raw in read_one(shard).items():
            is_mtp = name.startswith(f"model.layers.{n_layers}.")
            is_index = ".indexer." in name
            if (is_index and (is_mtp or not has_indexer)) or (is_mtp and not has_mtp):
                continue
            if is_mtp and name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
                continue
            file = "out-mtp-00000" if is_mtp else f"out-idx-{i:05d}" if is_index else f"out-{i:05d}"
            tensors = files.setdefault(f"{file}.safetensors", {})
            w = np.ascontiguousarray(values(raw))
            is_exact = w.ndim == 1 or name.endswith("mlp.gate.weight")
            if is_exact:
                tensors[name] = ("F32", w.shape, w.tobytes())
                plain[name] = w
                continue
            is_int8 = (
                precision == "int8" or is_mtp or is_index or name in ("model.embed_tokens.weight", "lm_head.weight")
            )
            data, scale, plain[name] = int8(w) if is_int8 else int4(w, 64 if precision == "gs64" else 0)
            tensors[name] = ("U8", (len(data),), data)
            if scale_dtype == "F16" and not name.startswith("model.embed"):
                scale = scale.astype(np.float16)
                if is_int8:
                    plain[name] = np.frombuffer(data, np.int8).reshape(w.shape) * scale.astype(np.float32)[:, None]
            tensors[f"{name}.qs"] = ("F16" if scale.dtype == np.float16 else "F32", scale.shape, scale.tobytes())
    if shuffle is not None:
        files = scattered(files, np.random.default_rng(shuffle))
    for file, tensors in files.items():
        width = {"F32": 4, "F16": 2, "U8": 1, "I8": 1}
        ordered = dict(sorted(tensors.items(), key=lambda item: (-width[item[1][0]], item[0])))
        write_shard(directory / file, tensors if shuffle is not None else ordered)
    quantised = {**made_config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (directory / "config.json").write_text(json.dumps(quantised))
    generation = oracle_dir(oracle) / "generation_config.json"
    if generation.exists():
        shutil.copy(generation, directory)
    (directory / ".coli_usage").write_text("-1 8 12\n")
    return plain


def scattered(files: dict[str, dict[str, Raw]], rng: np.random.Generator) -> dict[str, dict[str, Raw]]:
    names = sorted(files)
    everything = [item for tensors in files.values() for item in tensors.items()]
    found: dict[str, dict[str, Raw]] = {name: {} for name in names}
    for i in rng.permutation(len(everything)):
        name, raw = everything[i]
        found[names[0] if name.startswith("model.embed_tokens") else names[rng.integers(len(names))]][name] = raw
    return found


def read_one(path: Path) -> dict[str, Raw]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Raw] = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + begin : 8 + length + end])
    return found
