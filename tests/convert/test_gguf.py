"""GGUF files convert to what the same model's safetensors convert to; what can't be right is refused with a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conversion.convert import Conversion
from conversion.gguf.header import read_gguf_header
from shared.container.reader import Container
from shared.model.family import load_spec
from tests.gguf_files import GGUF_ORACLES, gemma4_file, write_oracle
from tests.oracle import oracle_dir

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
