"""Damaged checkpoints, at random: the same container as from the sound one, or one sentence that names the file.

The safetensors library, which shares nothing with our reader, says what a damaged shard holds.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from conversion.convert import Conversion
from shared.errors import ColibriError, ConfigError
from tests.oracle import oracle_dir

Converted = Callable[[str, str], Path]
NAME, PRECISION = "glm_moe_dsa_fp8", "int4"
INDEX = "model.safetensors.index.json"


def with_header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def two(header: dict[str, Any], rng: random.Random) -> tuple[str, str]:
    names = sorted(set(header) - {"__metadata__"})
    first, second = rng.sample(names, 2)
    return first, second


def one_number(header: dict[str, Any], rng: random.Random) -> None:
    entry = header[two(header, rng)[0]]
    field = entry[rng.choice(["shape", "data_offsets"])]
    if field:
        field[rng.randrange(len(field))] += rng.choice([-4096, -2, -1, 1, 2, 64, 1 << 33])


def shared_bytes(header: dict[str, Any], rng: random.Random) -> None:
    first, second = two(header, rng)
    header[first]["data_offsets"] = header[second]["data_offsets"]


def shifted(header: dict[str, Any], rng: random.Random) -> None:
    by = rng.choice([-2, 1, 2, 4, 128])
    for name in set(header) - {"__metadata__"}:
        header[name]["data_offsets"] = [at + by for at in header[name]["data_offsets"]]


def swapped(header: dict[str, Any], rng: random.Random) -> None:
    first, second = two(header, rng)
    header[first], header[second] = header[second], header[first]


def renamed(header: dict[str, Any], rng: random.Random) -> None:
    name = two(header, rng)[0]
    header[rng.choice(["x", name + ".bias", "__metadata__", "model.layers.99.norm.weight"])] = header.pop(name)


def retyped(header: dict[str, Any], rng: random.Random) -> None:
    header[two(header, rng)[0]]["dtype"] = rng.choice(["F32", "BF16", "F16", "F8_E4M3", "U8", "F8_E5M2", "Q4", None])


def odd_entry(header: dict[str, Any], rng: random.Random) -> None:
    header[two(header, rng)[0]] = rng.choice([None, [], {}, 1, "x", {"dtype": "F32"}])


CHANGES = (one_number, one_number, shared_bytes, shifted, swapped, renamed, retyped, odd_entry)


def damaged(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    kind = rng.randrange(7)
    if kind <= 2:
        change = rng.choice(CHANGES)
        return with_header(data, lambda header: change(header, rng))
    if kind == 3:  # bytes of the header
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(8 + length)] = rng.randrange(256)
        return bytes(changed)
    if kind == 4:
        return data[: rng.choice([0, 7, 8, 8 + length, len(data) - 1, rng.randrange(len(data))])]
    if kind == 5:
        return data + bytes(rng.choice([1, 2, 4096]))
    return struct.pack("<Q", rng.choice([0, 2, length - 1, length + 1, len(data), 1 << 50])) + data[8:]


def holds(path: Path) -> dict[str, tuple[str, list[int], bytes]] | None:
    """What the library finds in a shard; None when it refuses it."""
    try:
        with safe_open(path, "np") as opened:
            names = list(opened.keys())
    except SafetensorError:
        return None
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name in names:
        begin, end = header[name]["data_offsets"]
        found[name] = (header[name]["dtype"], header[name]["shape"], data[8 + length + begin : 8 + length + end])
    return found


def convert(source: Path, out: Path) -> str:
    """The refusal, or "" when a container was made."""
    try:
        Conversion(source, PRECISION).run(out)
    except ColibriError as error:
        return str(error)
    return ""


def link_source(target: Path) -> Path:
    target.mkdir()
    for path in oracle_dir(NAME).iterdir():
        if path.suffix in (".json", ".safetensors"):
            (target / path.name).symlink_to(path)
    return target


def try_damaged_shard(source: Path, out: Path, reference: Path, rng: random.Random) -> str:
    """One damaged shard, converted; gives the refusal. The container, if there is one, is compared."""
    shard = rng.choice(sorted(oracle_dir(NAME).glob("*.safetensors")))
    path = source / shard.name
    path.unlink()
    path.write_bytes(damaged(shard.read_bytes(), rng))
    refusal = convert(source, out)
    found, sound = holds(path), holds(shard)
    if found is None:
        assert refusal, "the library refuses what was converted"
    if not refusal and found == sound:
        for file in reference.glob("*.safetensors"):
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    if refusal:
        assert str(source) in refusal and "\n" not in refusal and len(refusal) < 1000, refusal
    if found == sound:
        assert not refusal, refusal
    return refusal


@pytest.mark.parametrize("seed", range(40))
def test_damaged_shard(converted: Converted, tmp_path: Path, seed: int) -> None:
    try_damaged_shard(
        link_source(tmp_path / "in"), tmp_path / "out", converted(NAME, PRECISION), random.Random(f"shard {seed}")
    )


def test_damaged_json(tmp_path: Path) -> None:
    """Every other file of the checkpoint: bytes changed, cut, doubled."""
    rng = random.Random("json")
    source = link_source(tmp_path / "in")
    for name in ("config.json", "generation_config.json"):
        sound = (oracle_dir(NAME) / name).read_bytes()
        path = source / name
        path.unlink()
        n_refused = 0
        for _ in range(60):
            changed = bytearray(sound)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            kind = rng.randrange(4)
            path.write_bytes(
                changed[: rng.randrange(len(changed))] if kind == 0 else changed * 2 if kind == 1 else changed
            )
            try:
                Conversion(source, PRECISION)
            except ColibriError as error:
                n_refused += name in str(error) or not isinstance(error, ConfigError)
        assert n_refused > 10
        path.write_bytes(sound)
        Conversion(source, PRECISION)
