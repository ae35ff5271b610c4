"""An embedding without memory of its own: the stored bits of each row, and sentences for what can go wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from conversion.presets import preset_config
from conversion.synth import Synthesis
from native.library import NativeError
from shared.container.reader import Container, aligned_buffer
from shared.container.table import TableOnDisk, witness
from shared.errors import ChecksumMismatch, ContainerError

NAME = "model.embed_tokens.weight"


@pytest.fixture(params=["int4", "f32"])
def container(request: pytest.FixtureRequest, tmp_path: Path) -> Container:
    """int4 has an int8 table with scales, f32 one without."""
    Synthesis(preset_config("tiny", 2), request.param).run(tmp_path / "model", n_threads=1)
    return Container.open(tmp_path / "model")


def opened(container: Container) -> TableOnDisk:
    return TableOnDisk(container, NAME, aligned_buffer, lambda: None)


def test_rows_are_those_of_the_table_in_memory(container: Container) -> None:
    whole = container.read_dense({NAME}, aligned_buffer)[NAME]
    table = opened(container)
    ids = np.array([0, 1023, 7, 7, 512], np.int32)
    rows, scale = table.rows(ids)
    assert table.format == whole.format
    assert rows.dtype == whole.weight.dtype
    assert np.array_equal(rows, whole.weight[ids])
    assert (scale is None) == (whole.scale is None)
    if scale is not None and whole.scale is not None:
        assert np.array_equal(scale, whole.scale[ids])
    assert table.rows(ids[:0])[0].shape == (0, 64)
    table.close()


def test_its_memory_is_given_back_before_anything_is_asked(container: Container) -> None:
    said = []
    table = TableOnDisk(container, NAME, aligned_buffer, lambda: said.append("free"))
    assert said == ["free"]
    table.close()


@pytest.mark.parametrize("bad", [-1, 1024])
def test_an_id_that_is_none_is_refused(container: Container, bad: int) -> None:
    table = opened(container)
    with pytest.raises(NativeError, match="vocabulary of 1024"):
        table.rows(np.array([0, bad], np.int32))
    table.close()


def test_a_file_that_shrank_is_said(container: Container) -> None:
    table = opened(container)
    entry = container.dense[NAME]
    with entry.file.open("r+b") as file:
        file.truncate(entry.offset + 100)
    with pytest.raises(ContainerError, match=f"{NAME} ends before"):
        table.rows(np.array([1000], np.int32))
    table.close()


def test_a_damaged_table_is_refused_when_it_is_opened(container: Container) -> None:
    entry = container.dense[NAME]
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + 5)
        byte = file.read(1)
        file.seek(entry.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ChecksumMismatch, match=NAME):
        opened(container)


def test_what_an_earlier_process_has_verified_is_opened_without_reading_it(container: Container) -> None:
    def refuse(n_bytes: int) -> np.ndarray:
        raise AssertionError(f"{n_bytes} bytes were asked for")

    known = TableOnDisk(container, NAME, refuse, lambda: None, is_verified=True)
    table = opened(container)
    ids = np.array([3, 1000], np.int32)
    for a, b in zip(known.rows(ids), table.rows(ids), strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or np.array_equal(a, b)
    known.close()
    table.close()


def test_a_file_that_was_written_to_is_another_witness(container: Container) -> None:
    before = witness(container, NAME)
    assert witness(container, NAME) == before
    path = container.dense[NAME].file
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert witness(container, NAME) != before


def test_damaged_scales_are_refused_even_then(container: Container) -> None:
    entry = container.dense[NAME]
    if not entry.scale_bytes:
        assert container.read_scale(NAME) is None
        return
    with entry.file.open("r+b") as file:
        file.seek(entry.scale_offset + 3)
        file.write(b"\x55")
    with pytest.raises(ChecksumMismatch):
        TableOnDisk(container, NAME, aligned_buffer, lambda: None, is_verified=True)
