"""The dense part: everything of the main layers that is neither a gate nor an expert."""

from __future__ import annotations

from pathlib import Path

from native.kernels import Ffn
from native.matrix import ACT_F32
from shared.big_memory import DENSE, Home
from shared.container.format import owner_of
from shared.container.reader import Container
from shared.layer_weights import DensePart, attn_layer_of, ffn_of, matrix_of


class DenseWeights:
    """All structs that the forward pass needs, and the memory below them."""

    def __init__(self, model_dir: Path, home: Home | None = None) -> None:
        container = Container.open(model_dir, with_copies=False)
        self.spec = spec = container.spec
        self._part = DensePart(container, lambda entry: owner_of(entry.name, spec) == "dense", DENSE, home)
        tensors = self._part.tensors
        self.layers = [attn_layer_of(spec, i, tensors) for i in range(spec.n_layers)]
        self.dense_ffn: dict[int, Ffn] = {
            i: ffn_of(tensors, f"model.layers.{i}.mlp.") for i in range(spec.n_layers) if spec.layer_kind(i) == "dense"
        }
        self.final_norm = tensors["model.norm.weight"].weight
        self.head = matrix_of(tensors["lm_head.weight"], ACT_F32)
        self.embedding = tensors["model.embed_tokens.weight"]

    @property
    def n_bytes(self) -> int:
        return self._part.n_bytes

    def describe(self) -> str:
        """Which memory it is."""
        return self._part.describe()

    def close(self) -> None:
        """Gives the memory back; the structs are invalid from here on."""
        self._part.close()
