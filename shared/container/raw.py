"""Bytes that are no record and no tensor of ours yet: matrices row after row, read and repacked. Through the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from native.matrix import TILE_ROWS, RepackMatrix, repack, repack_matrix, scale_bytes, weight_bytes
from shared.container.entries import DenseEntry, ExpertFile, RawMatrix
from shared.container.pack import F32, pack_matrix
from shared.errors import ContainerError, ShortRead
from shared.files import open_file

U8 = npt.NDArray[np.uint8]
_PIECE_BYTES = 32 << 20
_N_READERS = 2


def read_range(path: Path, what: str, offset: int, n_bytes: int) -> U8:
    """Bytes of a file, which then leave the page cache. ShortRead, ContainerError."""
    data = np.empty(n_bytes, np.uint8)
    view, done = memoryview(data.data), 0
    try:
        fd = open_file(path)
        try:
            while done < n_bytes:
                n_read = os.preadv(fd, [view[done : done + (4 << 20)]], offset + done)
                if not n_read:
                    raise ShortRead(
                        f"{path}: {what} needs {n_bytes:,} bytes at offset {offset:,}, the file ends after {done:,}. Copy the "
                        "file again."
                    )
                done += n_read
            os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise ContainerError(f"{path}: {what} can't be read at offset {offset:,}: {error.strerror}.") from None
    return data


def make_dense(entries: Sequence[tuple[DenseEntry, U8, U8]]) -> None:
    """(entry, its weights, its scales): reads and repacks each into the two views. ContainerError for a bad scale."""

    def make(entry: DenseEntry, weight: U8, scale: U8) -> None:
        raw = entry.raw
        assert raw is not None
        try:
            if raw.format == entry.format and not raw.is_transposed and raw.format != "f32":
                _repack(raw, entry, weight, scale)
            else:
                _pack(raw, entry, weight, scale)
        except ValueError as error:
            raise ContainerError(f"{raw.file}: {entry.name} can't be used: {error}. Copy the file again.") from None

    with ThreadPoolExecutor(_N_READERS) as pool:
        for made in [pool.submit(make, *each) for each in entries]:
            made.result()


def _spans(raw: RawMatrix, entry: DenseEntry) -> Iterator[tuple[int, int, int]]:
    """(matrix of the stack, its rows from .. to), in pieces that begin at a tile."""
    n_rows = raw.n_rows or raw.out
    step = max(_PIECE_BYTES // max(raw.row_bytes, 1) // TILE_ROWS, 1) * TILE_ROWS
    for i in range(entry.stack):
        for begin in range(0, n_rows, step):
            yield i, begin, min(begin + step, n_rows)


def _repack(raw: RawMatrix, entry: DenseEntry, weight: U8, scale: U8) -> None:
    """Rows as they are: only their order in memory changes."""
    n_rows, fmt = raw.n_rows or raw.out, raw.format
    of_matrix = weight_bytes(fmt, n_rows, raw.in_), scale_bytes(fmt, n_rows, raw.in_)
    scales = read_range(raw.scale_file, entry.name, raw.scale_offset, raw.scale_bytes)
    for i, begin, end in _spans(raw, entry):
        first = i * raw.stride + raw.start + begin
        rows = read_range(raw.file, entry.name, raw.offset + first * raw.row_bytes, (end - begin) * raw.row_bytes)
        n_scale = raw.scale_row_bytes
        data = np.concatenate([rows, scales[first * n_scale : (first + end - begin) * n_scale]])
        at = [
            i * n + (size(fmt, begin, raw.in_) if begin else 0)
            for n, size in zip(of_matrix, (weight_bytes, scale_bytes))
        ]
        # Two targets: each with addresses of its own.
        made_w = np.empty(weight_bytes(fmt, end - begin, raw.in_) + scale_bytes(fmt, end - begin, raw.in_), np.uint8)
        n_weight = weight_bytes(fmt, end - begin, raw.in_)
        matrix = repack_matrix(fmt, end - begin, raw.in_, raw.group, raw.is_f16, (0, rows.size), (0, n_weight))
        repack([matrix], data, made_w)
        weight[at[0] : at[0] + n_weight] = made_w[:n_weight]
        scale[at[1] : at[1] + made_w.size - n_weight] = made_w[n_weight:]


def _pack(raw: RawMatrix, entry: DenseEntry, weight: U8, scale: U8) -> None:
    """Values in another format than they lie in."""
    n_rows = raw.n_rows or raw.out
    for i in range(entry.stack):
        values = raw_rows(raw, entry.name, i * raw.stride + raw.start, n_rows)
        packed, scales = pack_matrix(np.ascontiguousarray(values.T) if raw.is_transposed else values, entry.format)
        weight[i * packed.size : (i + 1) * packed.size] = packed
        if scales is not None:
            scale[i * scales.size : (i + 1) * scales.size] = scales


def raw_rows(raw: RawMatrix, what: str, first: int, n_rows: int) -> F32:
    """Values f32[n_rows, in] of some rows."""
    data = read_range(raw.file, what, raw.offset + first * raw.row_bytes, n_rows * raw.row_bytes)
    if raw.format == "f32":
        return data.view(np.float32).reshape(n_rows, raw.in_)
    n_scale = raw.scale_row_bytes
    plain = read_range(raw.scale_file, what, raw.scale_offset + first * n_scale, n_rows * n_scale)
    scales = plain.view(np.float16 if raw.is_f16 else np.float32).astype(np.float32).reshape(n_rows, -1)
    if not np.isfinite(scales).all():
        raise ValueError("a scale is NaN or infinite")
    if raw.format == "q8":
        q = data.view(np.int8).reshape(n_rows, raw.in_).astype(np.float32)
    else:
        nibbles = data.reshape(n_rows, -1)
        both = np.stack([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-1).reshape(n_rows, -1)
        q = both[:, : raw.in_].astype(np.float32) - np.float32(8)
    values: F32 = q * np.repeat(scales, raw.group or raw.in_, axis=1)[:, : raw.in_]
    return values


def make_record(file: ExpertFile, expert: int) -> U8:
    """One expert's record from its ranges: for tests and tools, not for the hot path."""
    assert file.raw is not None
    record = file.raw.record(expert)
    stage = np.zeros(file.raw.stage_bytes, np.uint8)
    for extent in record.extents:
        what = f"layer {file.layer} expert {expert}"
        stage[extent.at : extent.at + extent.n_bytes] = read_range(extent.path, what, extent.offset, extent.n_bytes)
    made = np.zeros(file.record_bytes, np.uint8)
    try:
        repack(repack_matrices(file, expert), stage, made)
    except ValueError as error:
        raise ContainerError(
            f"{record.extents[0].path}: layer {file.layer} expert {expert} can't be used: {error}."
        ) from None
    return made


def repack_matrices(file: ExpertFile, expert: int) -> list[RepackMatrix]:
    """Of gate, up and down: from a stage into a record."""
    raw, layout = file.raw, file.layout
    assert raw is not None
    assert layout.gate_s is not None
    assert layout.up_s is not None
    assert layout.down_s is not None
    places = raw.record(expert).places
    targets = ((layout.gate_w, layout.gate_s), (layout.up_w, layout.up_s), (layout.down_w, layout.down_s))
    return [
        repack_matrix(m.format, m.out, m.in_, m.group, m.is_f16, (places[i], places[i + 3]), target)
        for i, (m, target) in enumerate(zip(raw.matrices, targets))
    ]
