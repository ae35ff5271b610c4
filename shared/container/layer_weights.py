"""A service's share of the dense part in memory, and how its tensors become the kernels' structs.

Names are the container's (docs/container.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from native.attention import AttnStep
from native.library import NativeError, address
from shared.memory.big_memory import Home, NamedMemory, PrivateMemory, content_of
from shared.memory.huge_pages import huge_bytes
from shared.model.attention.kind import LayerKv
from shared.model.kv_layout import group_kv

if TYPE_CHECKING:
    from shared.container.entries import DenseEntry, Tensor
    from shared.container.reader import Container
    from shared.model.attention.kind import Attention
    from shared.run.config import GroupConfig


class DensePart:
    """The dense tensors that one service holds, in huge pages (only this process reads them).

    ``wanted`` chooses entries of the container. With ``home`` they lie in named memory of this ``kind`` and are read from the
    disk only if no predecessor has done so; ``content`` says what they are, by default what the container says. Raises what
    ``Container.read_dense`` raises, NativeError without memory.
    """

    def __init__(
        self,
        container: Container,
        wanted: Callable[[DenseEntry], bool],
        kind: str = "",
        home: Home | None = None,
        content: Iterable[str] | None = None,
    ) -> None:
        self._memory: NamedMemory | PrivateMemory | None = None

        def allocate(n_bytes: int) -> NDArray[np.uint8]:
            named = home.open(kind, content_of(content or container.dense_content(wanted)), n_bytes) if home else None
            self._memory = named or PrivateMemory(n_bytes)
            return self._memory.array

        def is_filled() -> bool:
            return isinstance(self._memory, NamedMemory) and self._memory.is_complete

        self.tensors: dict[str, Tensor] = container.read_dense(wanted, allocate, is_filled)
        self.was_adopted = is_filled()
        if isinstance(self._memory, NamedMemory) and not self.was_adopted:
            self._memory.set_complete()

    @property
    def n_bytes(self) -> int:
        return self._memory.n_bytes if self._memory else 0

    def describe(self) -> str:
        """For people: which memory it is, and in which pages."""
        if not isinstance(self._memory, NamedMemory):
            return "private"
        huge, present = huge_bytes(self._memory.address, self._memory.n_bytes)
        share = huge / present if present else 0.0
        return f"named, {share:.0%} huge pages, {'adopted' if self.was_adopted else 'read'}"

    def close(self) -> None:
        """Gives the memory back; tensors and structs over it must not be used again."""
        self.tensors = {}
        if self._memory:
            self._memory.close()


def attention_step(
    layers: Sequence[Attention], config: GroupConfig, x: NDArray[np.float32], kv: object, *, is_mtp: bool = False
) -> tuple[AttnStep, list[LayerKv]]:
    """The rows of a step for these layers over x f32[N, D], and the addresses of each layer's caches.

    ``kv``: the buffer of the layers' KV segment; NativeError when it is too small for the group.
    """
    layout = group_kv(layers, config, is_mtp=is_mtp)
    buffer = np.frombuffer(kv, np.uint8)  # type: ignore[call-overload]
    if buffer.nbytes < layout.total_bytes:
        raise NativeError(f"KV segment: {buffer.nbytes:,} bytes, {layout.n_blocks} blocks need {layout.total_bytes:,}")
    start = address(buffer)
    n_rows, n_selected = len(x), max(layer.n_selected for layer in layers)
    step = AttnStep(
        kv=start,
        index_k=None,
        kv_format=config.kv_dtype,
        n_blocks=config.n_kv_blocks,
        x=x,
        selected=np.empty((n_rows, max(1, n_selected)), np.int32),
        n_selected=np.full(n_rows, -1, np.int32),
    )
    return step, [layer.at(start) for layer in layout.layers]
