"""The dense part: everything of the main layers that is neither a gate nor an expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from native.attention import embed
from native.kernels import Ffn
from native.memory import HugeBuffer
from shared.container.entries import DenseEntry
from shared.container.format import owner_of
from shared.container.layer_weights import DensePart
from shared.container.reader import Container
from shared.container.table import TableOnDisk, witness
from shared.errors import ContainerError
from shared.memory.big_memory import Home, content_of
from shared.memory.named_file import DENSE
from shared.model.branch import BranchKernel
from shared.model.tensors import matrix_of

EMBEDDING = "model.embed_tokens.weight"


class DenseWeights:
    """All structs that the forward pass needs, and the memory below them."""

    def __init__(self, model_dir: Path, home: Home | None = None, *, embedding_on_disk: bool = False) -> None:
        container = Container.open(model_dir, with_copies=False)
        self.spec = spec = container.spec

        def is_wanted(entry: DenseEntry) -> bool:
            return owner_of(entry.name, spec) == "dense" and not (embedding_on_disk and entry.name == EMBEDDING)

        content = list(container.dense_content(is_wanted)) if home else []
        self._table: TableOnDisk | None = None
        if embedding_on_disk:
            content.append(witness(container, EMBEDDING))
            # First, because verifying it takes memory that is not needed afterwards. Who left a complete dense part behind
            # has verified this file.
            self._table = _table_on_disk(container, home is not None and home.has_complete(DENSE, content_of(content)))
        self._part = DensePart(container, is_wanted, DENSE, home, content)
        tensors = self._part.tensors
        self.layers = [a.kernel(f"model.layers.{i}.", tensors) for i, a in enumerate(spec.main_attention)]
        self.dense_ffn: dict[int, Ffn] = {
            i: spec.inner.kernel(f"model.layers.{i}.mlp.", tensors)
            for i in range(spec.n_layers)
            if spec.layer_kind(i) == "dense"
        }
        self.branches: dict[int, BranchKernel] = {}
        """Beside the experts of MoE layers."""
        if spec.branch:
            moe_layers = (i for i in spec.moe_layers if i < spec.n_layers)
            self.branches = {i: spec.branch.kernel(f"model.layers.{i}.", tensors) for i in moe_layers}
        self.final_norm = tensors["model.norm.weight"].weight
        self.head = matrix_of(tensors["lm_head.weight"])
        self._embedding = tensors.get(EMBEDDING)

    def embed(self, tokens: np.ndarray, out: np.ndarray) -> dict[str, tuple[int, ...]]:
        """out f32[T, D]: the embeddings of token ids i32[T], the same bits wherever the table lies.

        Returns what could not be read: a sentence -> the rows it speaks of, which are zeros. NativeError for an id that is
        none.
        """
        if self._table is None:
            assert self._embedding is not None
            embed(self._embedding.weight, self._embedding.scale, self._embedding.format, tokens, out)
            return {}
        try:
            self._embed_from(self._table, tokens, out)
            return {}
        except ContainerError:
            return self._embed_each(self._table, tokens, out)

    def _embed_each(self, table: TableOnDisk, tokens: np.ndarray, out: np.ndarray) -> dict[str, tuple[int, ...]]:
        """Row by row: a row that can't be read is no reason to do without the others."""
        faults: dict[str, tuple[int, ...]] = {}
        for row in range(len(tokens)):
            part = slice(row, row + 1)
            try:
                self._embed_from(table, tokens[part], out[part])
            except ContainerError as error:
                out[part] = 0.0
                faults[str(error)] = (*faults.get(str(error), ()), row)
        return faults

    @staticmethod
    def _embed_from(table: TableOnDisk, tokens: np.ndarray, out: np.ndarray) -> None:
        rows, scale = table.rows(tokens)
        embed(rows, scale, table.format, np.arange(len(tokens), dtype=np.int32), out)

    @property
    def n_bytes(self) -> int:
        return self._part.n_bytes

    def describe(self) -> str:
        """Which memory it is."""
        return self._part.describe()

    def close(self) -> None:
        """Gives the memory back; the structs are invalid from here on."""
        self._part.close()
        if self._table is not None:
            self._table.close()


def _table_on_disk(container: Container, is_verified: bool) -> TableOnDisk:
    buffers: list[HugeBuffer] = []

    def allocate(n_bytes: int) -> np.ndarray:
        buffers.append(HugeBuffer(n_bytes))
        return buffers[0].array

    return TableOnDisk(container, EMBEDDING, allocate, lambda: buffers.pop().close(), is_verified)
