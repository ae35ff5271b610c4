"""The MTP layer's own dense part and its KV: pairs (next token, hidden) in, states for draft logits out.

Method: multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, section 2.2), wiring as in specs of GLM-5. Embedding
rows and draft logits are made by attention, which owns those matrices; the experts are expert_io's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from native.kernels import linear, rmsnorm
from native.library import Pool
from shared.container.format import owner_of
from shared.container.layer_weights import DensePart, attention_step
from shared.container.reader import Container
from shared.memory.big_memory import Home
from shared.memory.named_file import MTP
from shared.model.tensors import matrix_of
from shared.run.config import GroupConfig

F32 = NDArray[np.float32]


class MtpLayer:
    """Weights and scratch for at most ``max_rows`` rows. ``x`` f32[T, D] is the residual stream inside the layer."""

    def __init__(
        self,
        container: Container,
        pool: Pool,
        kv_buf: object,
        config: GroupConfig,
        max_rows: int,
        home: Home | None = None,
    ) -> None:
        self.spec = spec = container.spec
        self._pool = pool
        prefix = f"model.layers.{spec.mtp_layer}."
        # Its gate is the router's and its shared expert is expert_io's, as with every other layer.
        self._part = DensePart(container, lambda entry: owner_of(entry.name, spec) == "mtp", MTP, home)
        tensors = self._part.tensors
        self._layer = spec.attention[spec.mtp_layer].kernel(prefix, tensors)
        self._eh_proj = matrix_of(tensors[prefix + "eh_proj.weight"])
        self._enorm, self._hnorm, self._out_norm = (
            tensors[f"{prefix}{name}.weight"].weight for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self.x = np.empty((max_rows, spec.hidden), np.float32)
        self.hidden = np.empty((max_rows, spec.hidden), np.float32)
        self._pair = np.empty((max_rows, 2 * spec.hidden), np.float32)
        self._half = np.empty((max_rows, spec.hidden), np.float32)
        self._rows, [self._caches] = attention_step(spec.mtp_attention, config, self.x, kv_buf, is_mtp=True)

    def attend(
        self,
        embedded: F32,
        final: F32,
        position: NDArray[np.int32],
        seq: NDArray[np.int32],
        block_table: NDArray[np.int32],
    ) -> None:
        """embedded f32[T, D] of the next tokens, final f32[T, D] of the main model -> ``x`` and ``hidden``; writes the KV."""
        n, d, eps = len(embedded), self.spec.hidden, self.spec.rms_eps
        pair, half = self._pair[:n], self._half[:n]
        rmsnorm(self._pool, embedded, self._enorm, eps, half)
        pair[:, :d] = half
        rmsnorm(self._pool, final, self._hnorm, eps, half)
        pair[:, d:] = half
        linear(self._pool, self._eh_proj, pair, self.x[:n])
        self._rows.set_rows(n, position, seq, block_table, self.hidden)
        self._layer.run(self._pool, self._rows, self._caches)

    def finish(self, rows: NDArray[np.int32], mixed: F32, out: F32) -> None:
        """x of ``rows`` plus mixed f32[n, D], normed into out f32[n, D]: what the head reads and the next draft is fed."""
        y = np.ascontiguousarray(self.x[rows]) + mixed
        rmsnorm(self._pool, y, self._out_norm, self.spec.rms_eps, out)

    def describe(self) -> str:
        """Which memory its weights are in."""
        return self._part.describe()

    def close(self) -> None:
        self._part.close()
