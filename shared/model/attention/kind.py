"""What a layer's attention must be able to say of itself, whatever its kind.

A kind is one module with one ``Attention``: its tensors, what it keeps in memory, what it costs, the kernel's struct, and
the same arithmetic in numpy. The rest of the engine knows this class alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from native.attention import KV_BLOCK, AttnStep
from native.library import Pool
from native.matrix import ALIGNMENT
from shared.model.lanes import Lanes
from shared.model.tensors import F32, PlannedTensor, Tensors, stand_ins


class PositionRows(msgspec.Struct, frozen=True):
    """Vectors of ``n_values`` that a layer caches of every position, in blocks of KV_BLOCK positions and in the KV format."""

    name: str
    n_values: int
    n_vectors: int = 1


class SequenceState(msgspec.Struct, frozen=True):
    """Something that a layer keeps of every open sequence, however long it is: f32 values that each token rewrites.

    It can't be cut as rows can, nor written twice. So there are two slots of ``n_values``: a step reads the one that belongs
    to its first position and writes the other, and can be done again after whatever cut it off. A rejected draft is undone
    from the state before the drafts: ``draft_values`` of each drafted position are kept until it is verified, and the accepted
    updates are done again from them, with the bits of plain decoding. A shared prefix or a fork needs a snapshot, an exact copy
    of a slot taken at its end.
    """

    name: str
    n_values: int
    draft_values: int = 0


@dataclass(frozen=True)
class LayerKv:
    """Byte offsets of one layer in its segment: one per entry of ``Attention.rows``; None where it keeps no state.

    ``ring``: blocks of each sequence that are used in turn, where a window ends; 0: every position has its own place.
    """

    rows: tuple[int, ...]
    state: int | None = None
    drafts: int | None = None
    ring: int = 0

    def at(self, start: int) -> LayerKv:
        """The same as addresses, the segment being at ``start``."""
        state, drafts = (None if offset is None else start + offset for offset in (self.state, self.drafts))
        return LayerKv(tuple(start + offset for offset in self.rows), state, drafts, self.ring)


class AttentionKernel(Protocol):
    """One layer's weights as native structs."""

    def run(self, pool: Pool, step: AttnStep, caches: LayerKv) -> None:
        """x += attention(norm(x)) and hidden = norm(x) for the rows of ``step``.

        ``caches``: the addresses of what ``Attention.rows`` and ``Attention.state`` list.
        """


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention, from the norm before it to the norm after it (``hidden``, what experts and gate read)."""

    hidden: int
    rms_eps: float

    def tensors(self) -> Iterator[PlannedTensor]:
        """In the order in which they are stored."""
        raise NotImplementedError

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint's tensor ``name`` (below the layer) may be left out: this layer makes no use of it."""
        return False

    @property
    def hidden_norm(self) -> str:
        """The tensor (below the layer) whose norm makes ``hidden``."""
        return "post_attention_layernorm.weight"

    @property
    def rows(self) -> tuple[PositionRows, ...]:
        """What is cached of every position."""
        return ()

    @property
    def reach(self) -> int:
        """Positions that a row sees, its own included; 0: all."""
        return 0

    @property
    def state(self) -> SequenceState | None:
        """What is kept of every sequence, when there is such a thing."""
        return None

    @property
    def n_selected(self) -> int:
        """Key positions of a row that are handed from layer to layer; 0: none."""
        return 0

    @property
    def weights_per_row(self) -> int:
        """Weights that a row is multiplied with: two operations each."""
        raise NotImplementedError

    def measure(self, dry: Pool, n_rows: int, context: int, kv_dtype: str) -> None:
        """Runs 1 .. ``n_rows`` rows at the end of ``context`` positions: ``dry.scratch_bytes`` tells what they take."""
        kernel = self.kernel("", stand_ins(self.tensors()))
        for rows in sorted({min(1 << i, n_rows) for i in range(n_rows.bit_length() + 1)}):
            for per_sequence in {1, min(rows, context)}:
                n_sequences = -(-rows // per_sequence)
                step = AttnStep(
                    kv=ALIGNMENT,
                    index_k=ALIGNMENT,
                    kv_format=kv_dtype,
                    n_blocks=1,
                    selected=np.empty((rows, max(1, self.n_selected)), np.int32),
                    n_selected=np.full(rows, -1, np.int32),
                    x=np.empty((rows, self.hidden), np.float32),
                )
                at = np.arange(rows, dtype=np.int32)
                # Without rows it makes no difference where a sequence stands.
                position = at % per_sequence + np.int32(context - per_sequence if self.rows else 0)
                table = np.zeros((n_sequences, -(-context // KV_BLOCK)), np.int32)
                step.set_rows(rows, position, at // per_sequence, table, np.empty((rows, self.hidden), np.float32))
                step.set_states(np.arange(n_sequences, dtype=np.int32), n_sequences, 0)
                kernel.run(dry, step, LayerKv((ALIGNMENT,) * len(self.rows), ALIGNMENT, ALIGNMENT))

    def kernel(self, prefix: str, tensors: Tensors) -> AttentionKernel:
        """``prefix``: of the layer's tensors, ``model.layers.L.``."""
        raise NotImplementedError

    def forward(self, lanes: Lanes, prefix: str, h: Sequence[F32]) -> list[F32]:
        """The kernel's arithmetic in numpy: normed rows f32[T, D] in, what joins the residual stream out."""
        raise NotImplementedError

    def describe(self) -> str:
        """For people, without the layer's place."""
        raise NotImplementedError
