"""What a model is: sizes, layer kinds, each layer's attention, routing, ids that end a turn.

No weights. Every process that needs a shape asks here. ``family`` reads it from ``config.json``; what a family's keys mean
is its module's in ``families``; what depends on a kind of attention, of gate or of inner function is that kind's module.
"""

from __future__ import annotations

import msgspec

from shared.model.attention.kind import Attention
from shared.model.branch import DenseBranch
from shared.model.gate import Gate
from shared.model.inner import Inner


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model's geometry. Sizes count values, not bytes."""

    family: str
    n_layers: int
    """Main layers; the MTP layer, when there is one, is layer ``n_layers``."""
    hidden: int
    vocab: int
    attention: tuple[Attention, ...]
    """Of the main layers, then of the MTP layer when there is one."""
    layer_kinds: tuple[str, ...]
    """Of the main layers: "dense" or "moe"."""
    dense_inner: int
    """0: no layer is dense."""
    n_experts: int
    expert_inner: int
    n_shared: int
    gate: Gate
    inner: Inner
    rms_eps: float
    n_mtp: int
    max_context: int
    eos_ids: tuple[int, ...]
    tie_embeddings: bool
    shared_width: int = 0
    """Of the shared expert; 0: n_shared times a routed one's."""
    has_shared_gate: bool = False
    """The shared expert's rows are multiplied with sigmoid(own_gate h), a number per row."""
    branch: DenseBranch | None = None
    """Beside the experts of every main MoE layer."""
    embedding_scale: float = 1.0
    logit_cap: float = 0.0
    """Logits z become cap * tanh(z / cap); 0: they stay."""

    @property
    def gate_k(self) -> int:
        """Experts that a token uses in one layer."""
        return self.gate.k

    @property
    def shared_inner(self) -> int:
        return self.shared_width or self.expert_inner * self.n_shared

    @property
    def expert_values(self) -> int:
        """Of one routed expert."""
        biases = 2 * self.expert_inner + self.hidden if self.inner.has_biases else 0
        return 3 * self.expert_inner * self.hidden + biases

    @property
    def main_attention(self) -> tuple[Attention, ...]:
        return self.attention[: self.n_layers]

    @property
    def mtp_attention(self) -> tuple[Attention, ...]:
        """One, or none without an MTP layer."""
        return self.attention[self.n_layers :]

    @property
    def n_selected(self) -> int:
        """Key positions that a row hands from layer to layer."""
        return max(attention.n_selected for attention in self.attention)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state of each sequence."""
        return any(attention.state for attention in self.attention)

    @property
    def mtp_layer(self) -> int:
        return self.n_layers

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Main layers, then the MTP layer when there is one."""
        return tuple(range(self.n_layers + self.n_mtp))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending; the MTP layer is one."""
        return tuple(layer for layer in self.all_layers if self.layer_kind(layer) == "moe")

    def layer_kind(self, layer: int) -> str:
        return "moe" if layer == self.n_layers and self.n_mtp else self.layer_kinds[layer]
