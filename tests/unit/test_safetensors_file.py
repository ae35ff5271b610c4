"""Headers of safetensors files: whatever the safetensors library refuses we refuse too, and name the tensor."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from shared.container.safetensors_file import read_header
from shared.errors import ContainerError
from tests.oracle import oracle_dir


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, header: Any, n_data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(n_data))
    return path


def library_refuses(path: Path) -> bool:
    try:
        with safe_open(path, "np"):
            return False
    except (SafetensorError, OSError):
        return True


A, B = entry(0, 8), entry(8, 16)
TWICE = b'{"a": %s, "b": %s, "a": %s}'
BAD: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "the same bytes twice": ({"a": A, "b": A}, 8, ("'b'", "should begin at")),
    "overlap": ({"a": A, "b": entry(4, 12)}, 12, ("'b'", "should begin at")),
    "shifted by two bytes": ({"a": entry(2, 10), "b": entry(10, 18)}, 18, ("'a'", "where the header ends")),
    "hole": ({"a": A, "b": entry(9, 17)}, 17, ("'b'", "where 'a' ends")),
    "rest": ({"a": A, "b": B}, 17, ("'b'", "lies behind")),
    "rest without tensors": ({}, 1, ("lies behind its header",)),
    "cut": ({"a": A, "b": B}, 15, ("'b'", "truncated")),
    "a tensor twice": (TWICE % tuple(json.dumps(e).encode() for e in (A, B, entry(16, 24))), 24, ("'a'", "twice")),
    "a field twice": (
        b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        8,
        ("'dtype'",),
    ),
    "backwards": ({"a": entry(8, 0, shape=[2])}, 8, ("'a'", "bytes")),
    "too few bytes for its shape": ({"a": entry(0, 8, shape=[3])}, 8, ("'a'", "12 bytes")),
    "wrong dtype": ({"a": entry(0, 8, "F16", [2])}, 8, ("'a'", "4 bytes")),
    "unknown dtype": ({"a": entry(0, 8, "F33")}, 8, ("'a'", "F33")),
    "half a byte": ({"a": entry(0, 2, "F4", [3])}, 2, ("'a'",)),
    "not a number": ({"a": entry(0, 8, shape=[2.0])}, 8, ("'a'", "malformed")),
    "a flag for a number": ({"a": entry(0, 4, shape=[True])}, 4, ("'a'", "malformed")),
    "endless shape": ({"a": entry(0, 8, shape=[1 << 60] * 10_000)}, 8, ("'a'",)),
    "notes that are no text": ({"__metadata__": {"n": 1}, "a": A}, 8, ("__metadata__", "'wanted'")),
    "notes that are a list": ({"__metadata__": [], "a": A}, 8, ("__metadata__",)),
    "notes that are a number": ({"__metadata__": 0, "a": A}, 8, ("__metadata__",)),
    "not JSON": (b'{"a": ', 8, ("not valid JSON", "'wanted'")),
    "zeroes behind": (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}\0', 8, ("not valid JSON",)),
    "other encoding": ('{"a": 1}'.encode("utf-16"), 8, ("not valid JSON",)),
    "NaN": (b'{"a": NaN}', 8, ("not valid JSON",)),
    "a list": (b"[]", 8, ("not a JSON object", "'wanted'")),
    "half a character": (b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8, ("malformed",)),
}


@pytest.mark.parametrize("what", BAD)
def test_refused_as_the_library_does(tmp_path: Path, what: str) -> None:
    header, n_data, words = BAD[what]
    path = write(tmp_path / "x.safetensors", header, n_data)
    with pytest.raises(ContainerError) as caught:
        read_header(path, "wanted")
    for word in (str(path), *words):
        assert word in str(caught.value), str(caught.value)
    assert library_refuses(path) or what in ("a flag for a number",)


def test_length_that_lies(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": A}, 8)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for wrong in (0, 1, length - 1, length + 1, length + 8, length + 9, 1 << 40, (1 << 64) - 1):
        path.write_bytes(struct.pack("<Q", wrong) + data[8:])
        with pytest.raises(ContainerError, match=r"x\.safetensors.*'wanted'"):
            read_header(path, "wanted")
        assert library_refuses(path)


def test_a_header_that_is_there_but_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.safetensors", {"a": A}, 8)
    monkeypatch.setattr("shared.container.safetensors_file._HEADER_LIMIT", 32)
    with pytest.raises(ContainerError) as caught:
        read_header(path, "wanted")
    assert "more than the 32" in str(caught.value) and "truncated" not in str(caught.value)


def test_good_headers(tmp_path: Path) -> None:
    """In any order, with empty tensors, every dtype and notes."""
    dtypes = {"BOOL": 1, "I16": 2, "U32": 4, "F64": 8, "F8_E5M2": 1, "F8_E8M0": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}, "b": entry(8, 16), "none": entry(8, 8, shape=[0, 7])}
    header |= {"a": A, "scalar": entry(16, 20, shape=[])}
    at = 20
    for dtype, size in dtypes.items():
        header[dtype] = entry(at, at + 2 * size, dtype, [2])
        at += 2 * size
    path = write(tmp_path / "x.safetensors", header, at)
    found = read_header(path)
    assert set(found.tensors) == set(header) - {"__metadata__"}
    assert list(found.tensors)[:3] == ["a", "none", "b"]
    assert (found.tensors["b"].offset, found.tensors["b"].n_bytes) == (found.data_offset + 8, 8)
    assert not library_refuses(path)


def test_never_milder_than_the_library(tmp_path: Path) -> None:
    """Mutated headers and bytes: what we open the library opens with the same tensors; refusals name the file."""
    rng = random.Random(4)
    original = (oracle_dir("deepseek_v3") / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    header = json.loads(original[8 : 8 + length])
    names = sorted(set(header) - {"__metadata__"})
    path = tmp_path / "x.safetensors"
    n_opened = 0
    refusals = []
    for i in range(200):
        if i % 2:
            changed = json.loads(json.dumps(header))
            for _ in range(rng.randint(1, 2)):
                victim = changed[rng.choice(names)]
                key = rng.choice(["dtype", "shape", "data_offsets", "extra"])
                if key == "dtype":
                    victim[key] = rng.choice(["F32", "BF16", "F16", "U16", "I16", "F8_E4M3", "X"])
                elif key == "extra":
                    victim[key] = 1
                else:
                    at = rng.randrange(len(victim[key]))
                    victim[key][at] += rng.choice([-2, -1, 0, 1, 2, 1 << 40])
            text = json.dumps(changed).encode()
            data = struct.pack("<Q", len(text)) + text + original[8 + length :]
        else:
            mutable = bytearray(original)
            mutable[rng.randrange(8 + length)] = rng.randrange(256)
            data = bytes(mutable[: rng.randrange(len(mutable))] if rng.random() < 0.2 else mutable)
        path.write_bytes(data)
        try:
            found = read_header(path, "wanted")
        except ContainerError as error:
            refusals.append(str(error))
            continue
        n_opened += 1
        with safe_open(path, "np") as opened:
            assert set(opened.keys()) == set(found.tensors)
    assert all(str(path) in words for words in refusals)
    assert 10 < n_opened < 150
