"""Where a checkpoint has what the container's tensors are made from: of Hugging Face's layouts and of others."""

from __future__ import annotations

from typing import Protocol

import msgspec

from shared.container.format import DenseItem
from shared.model.family import added, expert_source, ignores, source_name
from shared.model.tensors import Source


class Names(Protocol):
    def layer(self, layer: int) -> str:
        """How names of a layer's tensors begin."""

    def tensor(self, name: str) -> str:
        """The checkpoint's name of what is ``name`` in a Hugging Face checkpoint whose family has no names of its own."""

    def ours(self, name: str) -> str:
        """The other way round; a name that is none of ours in any spelling."""

    def dense(self, item: DenseItem) -> Source:
        """What an item is made from, under the checkpoint's name."""

    def expert(self, layer: int, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
        """As ``shared.model.family.expert_source``."""

    def added(self, name: str) -> float:
        """As ``shared.model.family.added``."""

    def ignores(self, name: str) -> bool:
        """Whether a tensor belongs to a part of the model that is left out."""


class HubNames:
    """Of the safetensors checkpoints of a family."""

    def __init__(self, family: str, mtp_layer: int) -> None:
        self._family, self._mtp_layer = family, mtp_layer

    def layer(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def tensor(self, name: str) -> str:
        return source_name(self._family, name, self._mtp_layer)

    def ours(self, name: str) -> str:
        return name

    def dense(self, item: DenseItem) -> Source:
        source = item.source or Source(item.name, item.shape)
        return msgspec.structs.replace(source, name=self.tensor(source.name))

    def expert(self, layer: int, expert: int, n_experts: int, part: str, shape: tuple[int, ...]) -> Source:
        return expert_source(self._family, layer, expert, n_experts, part, shape, self._mtp_layer)

    def added(self, name: str) -> float:
        return added(self._family, name)

    def ignores(self, name: str) -> bool:
        return ignores(self._family, name)
