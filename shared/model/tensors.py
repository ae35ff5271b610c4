"""What a part of a model says of its tensors: name, shape, role, and which checkpoint tensor they are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from native.matrix import ALIGNMENT, Matrix, matrix

F32 = NDArray[np.float32]


class Source(msgspec.Struct, frozen=True):
    """The checkpoint tensor that something is made from, under its name in the container's spelling.

    ``index``: only this entry of its first dimension counts, and of that every ``step``-th row from ``start`` on, ``n_rows``
    at most if that is not 0.

    Without it, ``n_rows`` = 0: the whole tensor, its dimensions behind the first taken as one. Else block ``i`` is rows ``i *
    stride + start`` .. ``+ n_rows`` of it, transposed if ``is_transposed``: a matrix of a stack, or so many rows of one matrix.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    stride: int = 0
    n_rows: int = 0
    is_transposed: bool = False
    index: int | None = None
    step: int = 1


class PlannedTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer. ``name`` is the one below ``model.layers.L.``; ``kind``: "matrix" or "vector".

    ``role`` decides the format ("attention", "shared", "mtp", "exact"). ``shape`` is that of one matrix of the ``stack``,
    or of the vector. ``source``: None when the checkpoint has a tensor of the same name and shape; its name is below the
    layer, too.
    """

    name: str
    kind: str
    role: str
    shape: tuple[int, ...]
    stack: int = 1
    source: Source | None = None


def planned_matrix(
    name: str, role: str, out: int, in_: int, stack: int = 1, source: Source | None = None
) -> PlannedTensor:
    return PlannedTensor(f"{name}.weight", "matrix", role, (out, in_), stack, source)


def planned_vector(name: str, n: int) -> PlannedTensor:
    return PlannedTensor(name, "vector", "exact", (n,))


class StoredTensor(Protocol):
    """What kernels need of a loaded tensor (``shared.container.entries.Tensor``): arrays, or addresses."""

    @property
    def weight(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, StoredTensor]
"""Loaded tensors by their full names."""


class StandIn(msgspec.Struct, frozen=True):
    """A tensor of the right shape whose values nobody looks at: for a dry pool."""

    weight: Any
    scale: Any
    format: str
    shape: tuple[int, ...]


def stand_ins(planned: Iterable[PlannedTensor], prefix: str = "") -> dict[str, StandIn]:
    """In the format whose activations take most scratch."""
    return {
        prefix + tensor.name: StandIn(np.empty(tensor.shape, np.float32), None, "f32", tensor.shape)
        if tensor.kind == "vector"
        else StandIn(ALIGNMENT, ALIGNMENT, "f32" if tensor.role == "exact" else "q8", tensor.shape)
        for tensor in planned
    }


def matrix_of(tensor: StoredTensor, act: int | None = None) -> Matrix:
    """The kernels' view of one stored matrix, or of a stack of them."""
    out, in_ = tensor.shape
    return matrix(tensor.weight, tensor.scale, tensor.format, out, in_, act)
