"""What the services need beside weights while rows go through a layer: asked of the kernels, which state it themselves."""

from __future__ import annotations

from functools import cache

from native.library import Pool
from shared.model.spec import ModelSpec

_EXPERT_PAIRS = 512
"""(row, expert) pairs from which on a call takes no more scratch."""


def attention_work_bytes(spec: ModelSpec, rows: int, context: int, n_threads: int, kv_dtype: str) -> int:
    """What attention (or the drafter) needs beside the weights while ``rows`` rows go through a layer.

    Kept per row: residual, final, selection; share and scratch of a dense branch. The rest is the kernels' scratch, which
    they state themselves.
    """
    per_row = 4 * ((4 if spec.branch else 2) * spec.hidden + spec.n_selected)
    return rows * per_row + _attention_scratch(spec, rows, context, n_threads, kv_dtype)


@cache
def _attention_scratch(spec: ModelSpec, rows: int, context: int, n_threads: int, kv_dtype: str) -> int:
    with Pool(n_threads, is_dry=True) as dry:
        for attention in dict.fromkeys(spec.attention):
            attention.measure(dry, rows, context, kv_dtype)
        if spec.dense_inner:
            spec.inner.measure(dry, spec.hidden, spec.dense_inner, rows)
        if spec.branch:
            spec.branch.measure(dry, rows)
        return dry.scratch_bytes


@cache
def expert_scratch(spec: ModelSpec, rows: int, n_threads: int) -> int:
    with Pool(n_threads, is_dry=True) as dry:
        n_pairs = min(rows * spec.gate_k, _EXPERT_PAIRS)
        spec.inner.measure_experts(dry, spec.hidden, spec.expert_inner, rows, n_pairs, spec.n_experts)
        if spec.n_shared:
            spec.inner.measure(dry, spec.hidden, spec.shared_inner, rows)
        return dry.scratch_bytes


@cache
def gate_scratch(spec: ModelSpec, rows: int, n_threads: int) -> int:
    with Pool(n_threads, is_dry=True) as dry:
        spec.gate.measure(dry, spec.hidden, rows)
        return dry.scratch_bytes


def measured_frame_bytes(spec: ModelSpec, rows: int, logit_rows: int, sequences: int, blocks: int) -> int:
    from shared.step.frame import FrameDims, frame_bytes, stage_rows  # needs the native library

    residual_rows = rows if spec.gate.reads_residual else 0
    dims = FrameDims(
        rows, logit_rows, sequences, blocks, spec.hidden, spec.gate_k, spec.vocab, stage_rows(spec), residual_rows
    )
    return frame_bytes(dims)
