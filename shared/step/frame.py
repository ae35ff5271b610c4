"""Step frames as NumPy views: the tensors of one step that cross process borders. Layout and offsets come from C.

Attached by router, attention, expert_io and drafter (``cb_frame.h`` says who writes which field). The segment ``frames`` holds
``n_frames`` frames one behind the other.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from native.frame import STAGE_DTYPE, frame_layout
from shared.model.kv_layout import blocks_for
from shared.wire.endpoints import SERVICES

if TYPE_CHECKING:
    from shared.model.spec import ModelSpec
    from shared.run.config import GroupConfig

I32 = np.ndarray
F32 = np.ndarray


@dataclass(frozen=True)
class FrameDims:
    """The sizes of ``cb_frame_dims``, in its order."""

    rows: int
    logit_rows: int
    sequences: int
    blocks_per_sequence: int
    hidden: int
    gate_k: int
    vocab: int
    stages: int
    residual_rows: int


def stage_rows(spec: ModelSpec) -> int:
    """Stage rows of one service in one step. expert_io writes the most: per expert a read, a wait, a run and its slots."""
    return (spec.n_layers + 1) * (16 + 4 * spec.n_experts) + 128


def frame_dims(config: GroupConfig, spec: ModelSpec) -> FrameDims:
    """The sizes of this group's frames: one prefill chunk besides a row and its drafts of every sequence."""
    rows = config.prefill_chunk + config.max_sequences * (1 + config.n_drafts)
    return FrameDims(
        rows=rows,
        logit_rows=config.logit_rows,
        sequences=config.max_sequences,
        blocks_per_sequence=blocks_for(config.max_context),
        hidden=spec.hidden,
        gate_k=max(1, spec.gate_k),
        vocab=spec.vocab,
        stages=stage_rows(spec),
        residual_rows=rows if spec.gate.reads_residual else 0,
    )


def frame_bytes(dims: FrameDims) -> int:
    """Bytes of one frame, a multiple of 4096."""
    return int(frame_layout(*astuple(dims))[1])


class Frame:
    """Views of one frame: T rows, L logit rows, S sequences with B blocks each, D hidden, K gate_k, V vocabulary."""

    token: I32  # [T]
    position: I32  # [T]
    seq: I32  # [T]
    logit_row: I32  # [L]
    block_table: I32  # [S, B]
    state: I32  # [S]
    embed: F32  # [T, D]
    layer_input: F32  # [8, D]; PILOT guesses for as many rows
    hidden: F32  # [T, D]
    residual: F32  # [T, D], or [0, D] where no gate reads it
    gate_id: I32  # [T, K]
    gate_weight: F32  # [T, K]
    mixed: F32  # [T, D]
    final: F32  # [T, D]
    logits: F32  # [L, V]
    stage: np.ndarray  # STAGE_DTYPE[5, stages], in the order of endpoints.SERVICES
    stage_count: np.ndarray  # i64[5, 8]

    def stage_rows(self, service: str) -> np.ndarray:
        """The stage rows ``service`` has written so far (a view)."""
        block = SERVICES.index(service)
        rows: np.ndarray = self.stage[block][: int(self.stage_count[block][0])]
        return rows


class FrameSet:
    """All frames of a group over the segment ``frames``. Raises ValueError when the segment is too small for them."""

    def __init__(self, segment_buf: Any, dims: FrameDims, n_frames: int) -> None:
        fields, total = frame_layout(*astuple(dims))
        have = memoryview(segment_buf).nbytes
        if have < total * n_frames:
            raise ValueError(f"{n_frames} frames of {total} bytes do not fit into a segment of {have}")
        self.dims = dims
        self.n_frames = n_frames
        self.frame_bytes = total
        self._frames = [Frame() for _ in range(n_frames)]
        for idx, frame in enumerate(self._frames):
            for field in fields:
                dtype = STAGE_DTYPE if field.name == "stage" else np.dtype(field.dtype)
                shape = tuple(field.shape)
                view = np.frombuffer(
                    segment_buf, dtype=dtype, count=int(np.prod(shape)), offset=idx * total + field.offset
                ).reshape(shape)
                setattr(frame, field.name, view)

    def frame(self, idx: int) -> Frame:
        return self._frames[idx]
