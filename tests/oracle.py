"""The stored oracles, converted on demand, and a writer of small checkpoints. Used by convert, service and group tests.

Each folder in ``tests/oracles`` is a tiny checkpoint under real tensor names with what transformers computed from it in f32
(prompt logits, greedy tokens, MTP drafts; ``oracle.json`` has the tolerances). All arrays lie beside it as ``.npy``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conversion.convert import Conversion
from shared.model.family import names

DIRECTORY = Path(__file__).parent / "oracles"


def _oracles() -> tuple[str, ...]:
    """Those of the families that the engine runs, the embedded model's first."""
    found = [path.parent.name for path in DIRECTORY.glob("*/greedy_tokens.npy") if _family(path.parent) in names()]
    return tuple(sorted(found, key=lambda name: (not name.startswith("glm_moe_dsa"), name)))


def _family(directory: Path) -> str:
    family: str = json.loads((directory / "config.json").read_text())["model_type"]
    return family


ORACLES = _oracles()
"""A new family's is found by its folder."""
MTP_ORACLES = tuple(name for name in ORACLES if (DIRECTORY / name / "mtp_logits.npy").exists())
LATENT_ORACLES = tuple(name for name in ORACLES if "kv_lora_rank" in (DIRECTORY / name / "config.json").read_text())
PRECISIONS = ("f32", "bf16", "int8", "int4")

Raw = tuple[str, tuple[int, ...], bytes]
"""A safetensors tensor: dtype, shape, bytes."""


def oracle_dir(name: str) -> Path:
    return DIRECTORY / name


def oracle_array(name: str, what: str) -> np.ndarray:
    """``prompt_ids``, ``logits``, ``greedy_tokens``, ``mtp_logits``, ``mtp_chain_tokens``, ..."""
    return np.load(oracle_dir(name) / f"{what}.npy")


def convert_oracle(name: str, precision: str, out: Path) -> Path:
    """The container of an oracle in ``out``; converted unless it is there."""
    if not (out / "colibri.json").exists():
        Conversion(oracle_dir(name), precision).run(out)
    return out


def read_tensors(directory: Path) -> dict[str, Raw]:
    """All tensors of a checkpoint, by a few lines that share nothing with the code under test."""
    found: dict[str, Raw] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + begin : 8 + length + end])
    return found


def write_shard(path: Path, tensors: Mapping[str, Raw]) -> None:
    """One safetensors file."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def write_checkpoint(directory: Path, config: Mapping[str, Any], shards: Mapping[str, Mapping[str, Raw]]) -> Path:
    """A checkpoint folder: config.json, the shards, and an index when there are several."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for file, tensors in shards.items():
        write_shard(directory / file, tensors)
    if len(shards) > 1:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def oracle_config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((oracle_dir(name) / "config.json").read_text())
    return loaded
