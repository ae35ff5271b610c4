"""A model directory may come from a stranger: whatever its files hold, the answer is one of our errors, never a crash."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conversion.checkpoint import Checkpoint
from conversion.convert import Conversion
from conversion.presets import preset_config
from conversion.synth import Synthesis
from shared.container.reader import Container, aligned_buffer
from shared.errors import ColibriError, ConfigError
from shared.model.family import spec_of
from tests.oracle import oracle_config, oracle_dir

ODD_VALUES: list[Any] = [
    *[None, True, False, 0, -1, 1, 2, 1 << 31, 1 << 62, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")],
    *["", "full", "\ud800", "x" * 500],
    *[[], [None], [[]], ["full"], [1, 2, 3]],
    *[{}, {"a": 1}, {"rope_theta": "x"}, {"rope_type": []}, {"type": {}}, {"factor": -1}],
]


def mutated(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place changed, somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.2:
            del changed[key]
        else:
            changed[key] = mutated(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng), *value[i + 1 :]]
    return rng.choice(ODD_VALUES)


@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32", "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "gemma4"])
def test_config_json(name: str) -> None:
    rng = random.Random(name)
    base = oracle_config(name)
    n_refused = 0
    for _ in range(2000):
        config = mutated(base, rng)
        if not isinstance(config, dict):
            continue
        if rng.random() < 0.3:
            config = mutated(config, rng)
        try:
            spec = spec_of(config if isinstance(config, dict) else {})
        except ConfigError as error:
            str(error).encode()  # printable: a lone surrogate in the file must not reach the terminal
            n_refused += 1
        else:
            assert all(len(a.rope.inv_freq()) == a.rope.dim // 2 for a in spec.attention)
            assert len(spec.attention) == spec.n_layers + spec.n_mtp
    assert n_refused > 250


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "model"
    Synthesis(preset_config("tiny", 2), "int4").run(out)
    return out


@pytest.fixture
def model(finished: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(finished, tmp_path / "model")
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model")


def opens(model: Path) -> bool:
    try:
        container = Container.open(model)
        container.read_dense(lambda _: True, aligned_buffer)
    except ColibriError as error:
        str(error).encode()
        return False
    return True


def test_index(model: Path) -> None:
    rng = random.Random(3)
    path = model / "colibri.json"
    base = json.loads(path.read_text())
    n_opened = 0
    for _ in range(300):
        path.write_text(json.dumps(mutated(base, rng)))
        n_opened += opens(model)
    assert n_opened < 100  # only the converter's own notes and the fingerprint may change freely


@pytest.mark.parametrize("name", ["colibri.json", "config.json", "dense-00000.safetensors", "experts-001.safetensors"])
def test_flipped_and_cut_bytes(model: Path, name: str) -> None:
    rng = random.Random(name)
    path = model / name
    original = path.read_bytes()
    reach = min(len(original), 6000)  # headers and indices; weights have their checksums
    for _ in range(150):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(reach)] = rng.randrange(256)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        opens(model)
    path.write_bytes(original)
    assert opens(model)


def test_checkpoint_headers(tmp_path: Path) -> None:
    rng = random.Random(9)
    for path in oracle_dir("deepseek_v3").glob("*.json"):
        shutil.copy(path, tmp_path)
    original = (oracle_dir("deepseek_v3") / "model.safetensors").read_bytes()
    length = int.from_bytes(original[:8], "little")
    header = json.loads(original[8 : 8 + length])
    for i in range(150):
        if i % 2:
            text = json.dumps(mutated(header, rng)).encode()
            data = len(text).to_bytes(8, "little") + text + original[8 + length :]
        else:
            data = bytearray(original)
            data[rng.randrange(length + 8)] = rng.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            Conversion(tmp_path, "int4")
            checkpoint = Checkpoint.open(tmp_path)
            for name in list(checkpoint.tensors)[:20]:
                if checkpoint.tensors[name].entry.dtype in ("BF16", "F32"):
                    checkpoint.rows(name)
            checkpoint.close()
        except ColibriError as error:
            str(error).encode()
