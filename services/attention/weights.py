"""The dense part: everything of the main layers that is neither a gate nor an expert, in private huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from native.kernels import Ffn
from native.matrix import ACT_F32
from native.memory import HugeBuffer
from shared.container.reader import Container, Tensor
from shared.layer_weights import attn_layer_of, ffn_of, inv_freq_of, matrix_of

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def is_attentions(name: str, n_layers: int) -> bool:
    """Whether attention holds this tensor: other services hold gates, shared experts and the MTP layer."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return True
    return int(match[1]) < n_layers and not match[2].startswith(("mlp.gate.", "mlp.shared_experts."))


class DenseWeights:
    """All structs that the forward pass needs, and the memory below them."""

    def __init__(self, model_dir: Path) -> None:
        container = Container.open(model_dir)
        self.spec = spec = container.spec
        self._buffers: list[HugeBuffer] = []
        self._tensors: dict[str, Tensor] = container.read_dense(
            lambda name: is_attentions(name, spec.n_layers), allocate=self._allocate
        )
        self._inv_freq = inv_freq_of(spec)
        tensors = self._tensors
        self.layers = [attn_layer_of(spec, i, tensors, self._inv_freq) for i in range(spec.n_layers)]
        self.dense_ffn: dict[int, Ffn] = {
            i: ffn_of(tensors, f"model.layers.{i}.mlp.") for i in range(spec.n_layers) if spec.layer_kind(i) == "dense"
        }
        self.final_norm = tensors["model.norm.weight"].weight
        self.head = matrix_of(tensors["lm_head.weight"], ACT_F32)
        self.embedding = tensors["model.embed_tokens.weight"]

    @property
    def n_bytes(self) -> int:
        return sum(buffer.array.nbytes for buffer in self._buffers)

    def _allocate(self, n_bytes: int) -> np.ndarray:
        buffer = HugeBuffer(n_bytes)
        self._buffers.append(buffer)
        return buffer.array

    def close(self) -> None:
        """Forgets the memory; structs are invalid from here on."""
        self._buffers.clear()
