"""One model for both engines: a container's plan, and the same tensors under GGUF's names and in its formats.

Everything follows from the container's own plan, so widths, layers and experts can't differ. Pure arithmetic.

Bits. A Q4_0 weight costs 4.5 bits (an f16 for each 32), ours 4.25 (one for each 64); Q8_0 costs 8.5, our int8 8 and four
bytes a row. The embedding and the head are int8 with us; Q8_0 gives them the same bits there, Q4_0 half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.peers.architectures import OF_MODEL, SHAPES, Shape
from conversion.presets import preset_config
from conversion.synth import Synthesis
from shared.container.format import ContainerPlan, DenseItem, ExpertFilePlan
from shared.errors import ConfigError
from shared.model.spec import ModelSpec

PRECISION = "int4"
BLOCK_BYTES: Mapping[str, int] = {"Q4_0": 18, "Q8_0": 34}
"""Of 32 weights."""
BLOCK = 32
HEAD_TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF file. ``shape``: slowest dimension first, as numpy has it; ``type``: F32, Q4_0 or Q8_0."""

    name: str
    shape: tuple[int, ...]
    type: str
    role: str
    """The container's: "expert", "embed", "head", "exact" ..."""

    @property
    def n_bytes(self) -> int:
        n = math.prod(self.shape)
        return 4 * n if self.type == "F32" else n // BLOCK * BLOCK_BYTES[self.type]


@dataclass(frozen=True)
class Model:
    """A shape with its numbers of layers, for both engines."""

    synthesis: Synthesis
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, Any]
    """GGUF's keys; Python int, float, bool, str or list[int]."""

    @property
    def spec(self) -> ModelSpec:
        return self.synthesis.spec

    @property
    def gguf_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def peer_bytes_per_token(self) -> int:
        """Weights that llama.cpp must read for one token: everything once, k experts, one row of the embedding."""
        return sum(self._read(tensor.n_bytes, tensor.role, tensor.shape[0]) for tensor in self.tensors)

    @property
    def our_bytes_per_token(self) -> int:
        """The same for our container."""
        plan = self.synthesis.plan
        dense = sum(self._read(item.n_bytes, item.role, item.shape[0]) for file in plan.dense for item in file.items)
        return dense + sum(self.spec.gate_k * layer.layout.record_bytes for layer in plan.experts)

    def _read(self, n_bytes: int, role: str, n: int) -> int:
        """Of a tensor whose first dimension is n."""
        return n_bytes * {"expert": self.spec.gate_k, "embed": 1}.get(role, n) // n


def make_model(shape: str, n_layers: int, n_dense: int | None, head_type: str, seed: int = 0) -> Model:
    """``n_layers`` 0: the preset's. ``n_dense`` None: one where the family has dense layers, else none.

    ConfigError when the numbers of layers or a width are impossible.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, found {shape!r}.")
    chosen = SHAPES[shape]
    config = {**preset_config(shape, n_layers), **chosen.changes}
    if chosen.has_dense:
        n_dense, n_layers = 1 if n_dense is None else n_dense, config["num_hidden_layers"]
        if not 1 <= n_dense < n_layers:
            raise ConfigError(f"--dense {n_dense} of --layers {n_layers}: at least one of each kind is needed.")
        config["first_k_dense_replace"] = n_dense
    elif n_dense:
        raise ConfigError(f"--dense {n_dense}: {shape} has no dense layers. Leave it out.")
    synthesis = Synthesis(config, PRECISION, seed)
    tensors = tuple(_tensors(synthesis.plan, chosen, HEAD_TYPES[head_type]))
    return Model(synthesis, tensors, chosen.metadata(synthesis.spec))


def _tensors(plan: ContainerPlan, shape: Shape, head_type: str) -> Iterator[Tensor]:
    for file in plan.dense:
        for item in file.items:
            yield _dense(item, shape, head_type)
    for layer in plan.experts:
        yield from _experts(layer)


def _dense(item: DenseItem, shape: Shape, head_type: str) -> Tensor:
    stem, name = item.name, OF_MODEL.get(item.name)
    if name is None:
        layer, _, stem = item.name.removeprefix("model.layers.").partition(".")
        name = f"blk.{layer}.{shape.of_layer[stem]}"
    kind = {"f32": "F32", "q4": "Q4_0", "q8": head_type}[item.format]
    size = (item.stack, *item.shape) if item.stack > 1 else item.shape
    return _checked(Tensor(name, size, kind, item.role))


def _experts(layer: ExpertFilePlan) -> Iterator[Tensor]:
    n, inner, hidden = layer.n_experts, layer.layout.inner, layer.layout.hidden
    for part, out, in_ in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield _checked(Tensor(f"blk.{layer.layer}.ffn_{part}_exps.weight", (n, out, in_), "Q4_0", "expert"))


def _checked(tensor: Tensor) -> Tensor:
    if tensor.type != "F32" and tensor.shape[-1] % BLOCK:
        raise ConfigError(f"{tensor.name}: {tensor.shape[-1]} inputs can't be cut into blocks of {BLOCK}.")
    return tensor
