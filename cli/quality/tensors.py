"""The checkpoint and the container side by side: the same tensors in the same pieces, at most one of each in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cli.quality.errors import Pieces
from cli.quality.schemes import SCHEMES, Lane
from conversion.convert import Conversion, chunk_rows
from shared.container.entries import Tensor
from shared.container.format import DenseItem, ExpertFilePlan
from shared.container.pack import F32
from shared.container.plain import dense_values, expert_biases, expert_values, table_values
from shared.container.reader import Container, aligned_buffer
from shared.container.recognise import why_no_checkpoint
from shared.errors import ContainerError
from shared.model.family import load_spec
from shared.model.spec import ModelSpec

_FREE_FIELDS = frozenset({"eos_ids", "max_context"})
"""Of the spec: they change neither a tensor nor a logit."""

EMBEDDING = "model.embed_tokens.weight"


class Pair:
    """A container and the checkpoint that it should have been made from. ContainerError when they can't belong together."""

    def __init__(self, model: Path, source: Path) -> None:
        self.container = Container.open(model)
        has_mtp = bool(self.container.spec.n_mtp)  # `colibri convert --no-mtp` left it out
        if complaint := why_no_checkpoint(source):
            raise ContainerError(complaint)
        source_spec = load_spec(source, has_mtp=has_mtp)
        require_same_model(model, self.container.spec, source, source_spec)
        # f32: the plan's names and shapes are those of every precision, its values are not used.
        self.source = Conversion(source, "f32", has_mtp=has_mtp)
        self.spec = self.container.spec
        self.items: dict[str, DenseItem] = {item.name: item for file in self.source.plan.dense for item in file.items}
        self.layers: dict[int, ExpertFilePlan] = {file.layer: file for file in self.source.plan.experts}

    def close(self) -> None:
        self.source.checkpoint.close()

    @property
    def n_values(self) -> int:
        """Values of all tensors of the container."""
        dense = sum(item.stack * int(np.prod(item.shape, dtype=np.int64)) for item in self.items.values())
        per_expert = {
            e.layer: 3 * e.layout.inner * e.layout.hidden + sum(e.layout.bias_widths) for e in self.layers.values()
        }
        return dense + sum(per_expert[e.layer] * e.n_experts for e in self.layers.values())

    def bytes_per_weight(self) -> float:
        """Of the whole container on disk, scales and padding included."""
        facts = sum(entry.bytes + entry.scale_bytes for entry in self.container.dense.values())
        records = sum(file.record_bytes * file.n_experts for file in self.container.experts.values())
        return (facts + records) / self.n_values

    def all_tensors(self) -> Iterator[tuple[str, str, str, Pieces]]:
        """(name, role, format, pieces of both) of every tensor; experts are one tensor per projection."""
        for name, item in self.items.items():
            yield name, item.role, self.container.dense[name].format, self._dense_pairs(item)
        for layer, plan in self.layers.items():
            role = "mtp" if layer >= self.spec.n_layers else "expert"
            fmt = self.container.experts[layer].format
            for expert in range(plan.n_experts):
                stored = self.stored_expert(layer, expert)
                for (name, source), found in zip(self.source.expert_matrices(plan, expert), stored, strict=True):
                    yield name, role, fmt, [(source, found)]
                kept = self.stored_biases(layer, expert)
                for (name, source), found in zip(self.source.expert_biases(plan, expert), kept, strict=True):
                    yield name, "exact", "f32", [(source, found)]

    def _dense_pairs(self, item: DenseItem) -> Iterator[tuple[F32, F32]]:
        return zip(self.source.dense_pieces(item), self.stored_pieces(item), strict=True)

    def stored_pieces(self, item: DenseItem) -> Iterator[F32]:
        """The container's values in the pieces in which the checkpoint gives its own."""
        return dense_values(self._load(item.name), chunk_rows(item.shape[-1]))

    def stored_embedding_rows(self, ids: Sequence[int]) -> F32:
        """f32[len(ids), hidden]."""
        return table_values(self._load(EMBEDDING), ids)

    def stored_expert(self, layer: int, expert: int) -> tuple[F32, F32, F32]:
        """(gate, up, down), dequantised; the record's checksum is verified."""
        return expert_values(self.container.read_expert(layer, expert), self.container.experts[layer].layout)

    def stored_biases(self, layer: int, expert: int) -> tuple[F32, ...]:
        """Those of gate, up and down, if there are any."""
        layout = self.container.experts[layer].layout
        return expert_biases(self.container.read_expert(layer, expert), layout) if layout.biases else ()

    def _load(self, name: str) -> Tensor:
        return self.container.read_dense([name], aligned_buffer)[name]


class LaneWeights:
    """Every lane's version of one tensor at a time: read once, rounded once per scheme, forgotten with the next piece."""

    def __init__(self, pair: Pair, lanes: Sequence[Lane]) -> None:
        self._pair, self._lanes = pair, lanes
        self._has_stored = any(lane.is_stored for lane in lanes)

    def role(self, name: str) -> str:
        return self._pair.items[name].role

    def vectors(self, name: str) -> list[F32]:
        """f32[n] for each lane; vectors are never rounded."""
        return next(self.pieces(name))

    def stacks(self, name: str) -> list[F32]:
        """f32[stack, out, in] for each lane."""
        pieces = list(self.pieces(name))
        return [np.stack([piece[i] for piece in pieces]) for i in range(len(self._lanes))]

    def pieces(self, name: str) -> Iterator[list[F32]]:
        """Rows of a matrix (or the matrices of a stack) in order; each piece as a list with one array per lane."""
        item = self._pair.items[name]
        if not self._has_stored:
            for plain in self._pair.source.dense_pieces(item):
                yield self._versions(item.role, name, plain, None)
            return
        for plain, stored in zip(self._pair.source.dense_pieces(item), self._pair.stored_pieces(item), strict=True):
            yield self._versions(item.role, name, plain, stored)

    def embeddings(self, ids: Sequence[int]) -> list[F32]:
        """f32[len(ids), hidden] for each lane."""
        stored = self._pair.stored_embedding_rows(ids) if self._has_stored else None
        return self._versions("embed", EMBEDDING, self._pair.source.embedding_rows(ids), stored)

    def expert(self, layer: int, expert: int) -> tuple[list[F32], list[F32], list[F32]]:
        """gate, up and down, each with one array per lane."""
        stored = self._pair.stored_expert(layer, expert) if self._has_stored else (None, None, None)
        found = []
        for (name, plain), other in zip(
            self._pair.source.expert_matrices(self._pair.layers[layer], expert), stored, strict=True
        ):
            found.append(self._versions("expert", name, plain, other))
        gate, up, down = found
        return gate, up, down

    def biases(self, layer: int, expert: int) -> tuple[F32, ...]:
        """Of gate, up and down, the same for every lane: they are kept exactly."""
        return tuple(bias for _, bias in self._pair.source.expert_biases(self._pair.layers[layer], expert))

    def _versions(self, role: str, name: str, plain: F32, stored: F32 | None) -> list[F32]:
        if plain.ndim > 1 and not np.isfinite(plain).all():
            raise ContainerError(f"{self._pair.source.source}: tensor {name!r} holds a NaN or an infinity.")
        rounded: dict[str, F32] = {}
        versions = []
        for lane in self._lanes:
            if lane.is_stored:
                assert stored is not None
                versions.append(stored)
                continue
            scheme = "f32" if plain.ndim == 1 else lane.scheme(role)
            if scheme not in rounded:
                try:
                    rounded[scheme] = SCHEMES[scheme].round(plain)
                except ValueError as error:
                    raise ContainerError(
                        f"{self._pair.source.source}: tensor {name!r} can't be held as {scheme}: {error}."
                    ) from None
            versions.append(rounded[scheme])
        return versions


def require_same_model(model: Path, found: ModelSpec, source: Path, wanted: ModelSpec) -> None:
    """ContainerError names the first difference that makes two directories different models."""
    ours, theirs = dict(_leaves(msgspec.to_builtins(found))), dict(_leaves(msgspec.to_builtins(wanted)))
    for name in (*ours, *theirs):
        if name not in _FREE_FIELDS and ours.get(name) != theirs.get(name):
            raise ContainerError(
                f"{model} has {name} = {_short(ours.get(name))}, {source} has {_short(theirs.get(name))}: the container was "
                "not made from this checkpoint. Give the directory it was converted from."
            )


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Every plain value with its path, outer ones first: ``attention.0.rope.theta``."""
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        inner = [(str(i), item) for i, item in enumerate(value)]
    else:
        yield name, value
    for key, item in sorted(inner, key=lambda pair: isinstance(pair[1], dict | list | tuple)):
        yield from _leaves(item, f"{name}.{key}" if name else key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
