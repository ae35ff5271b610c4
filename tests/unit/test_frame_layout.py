"""The frame's layout comes from C: order, alignment, no overlap, and sizes as cb_frame.h states them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from native.frame import STAGE_DTYPE, frame_layout
from native.library import NativeError

HEADER = Path(__file__).parents[2] / "native/include/cb_frame.h"
DIMS = {
    "rows": 37, "logit_rows": 5, "sequences": 3, "blocks_per_sequence": 11, "hidden": 136, "gate_k": 4, "vocab": 257,
    "stages": 50, "residual_rows": 7,
}  # fmt: skip
GLM = {
    "rows": 2048 + 16, "logit_rows": 64, "sequences": 16, "blocks_per_sequence": 2048, "hidden": 6144, "gate_k": 8,
    "vocab": 154880, "stages": 1500, "residual_rows": 0,
}  # fmt: skip


@pytest.mark.parametrize("dims", [DIMS, GLM, dict.fromkeys(DIMS, 1)])
def test_fields_follow_each_other_aligned(dims: dict[str, int]) -> None:
    fields, total = frame_layout(**dims)
    end = 0
    for f in fields:
        assert f.offset % 64 == 0
        assert end <= f.offset < end + 64, f"{f.name} neither overlaps its neighbour nor leaves a hole"
        end = f.offset + int(np.prod(f.shape)) * f.dtype.itemsize
    assert total % 4096 == 0
    assert end <= total < end + 4096


def test_names_types_and_shapes_are_those_of_the_headers_table() -> None:
    sizes = {"T": "rows", "L": "logit_rows", "S": "sequences", "B": "blocks_per_sequence", "D": "hidden", "K": "gate_k"}
    sizes |= {"V": "vocab", "cb_frame_dims.stages": "stages", "R": "residual_rows"}
    dtypes = {"i32": np.dtype("i4"), "f32": np.dtype("f4"), "i64": np.dtype("i8"), "cb_stage": STAGE_DTYPE}
    table = re.findall(r"^ \*   (\w+) +(i32|f32|i64|cb_stage) +((?:\[[^\]]+\])+) ", HEADER.read_text(), re.MULTILINE)
    fields, _ = frame_layout(**DIMS)
    assert [f.name for f in fields] == [name for name, _, _ in table]
    for f, (name, dtype, shape) in zip(fields, table, strict=True):
        stated = [part.strip() for group in re.findall(r"\[([^\]]+)\]", shape) for part in group.split(",")]
        assert f.dtype == dtypes[dtype], name
        assert f.shape == tuple(int(s) if s.isdigit() else DIMS[sizes[s]] for s in stated), name


def test_stage_rows_are_forty_bytes() -> None:
    assert STAGE_DTYPE.itemsize == 40
    assert STAGE_DTYPE.names == ("start_ns", "end_ns", "bytes", "step", "stage", "layer")


def test_views_over_one_buffer_do_not_disturb_each_other() -> None:
    fields, total = frame_layout(**DIMS)
    buffer = np.zeros(total, np.uint8)
    views = [
        buffer[f.offset : f.offset + int(np.prod(f.shape)) * f.dtype.itemsize].view(f.dtype).reshape(f.shape)
        for f in fields
    ]
    for i, view in enumerate(views):
        view.view(np.uint8)[...] = i + 1
    for i, view in enumerate(views):
        assert (view.view(np.uint8) == i + 1).all(), fields[i].name


@pytest.mark.parametrize("bad", [{"rows": -1}, {"vocab": 1 << 40}, {"rows": 1 << 31, "hidden": 1 << 31}])
def test_impossible_sizes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(NativeError, match="cb_frame_layout"):
        frame_layout(**{**DIMS, **bad})


def test_optional_parts_may_be_empty() -> None:
    fields, _ = frame_layout(**{**DIMS, "gate_k": 0, "logit_rows": 0, "stages": 0})
    assert {f.name: f.shape for f in fields}["gate_id"] == (37, 0)
