"""A service's share of the dense part in memory, and how its tensors become the kernels' structs.

Names are the container's (docs/container.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from native.attention import AttnLayer
from native.kernels import Ffn, ffn
from native.matrix import ACT_F32, Matrix, absent_matrix, matrix
from shared.memory.big_memory import Home, NamedMemory, PrivateMemory, content_of
from shared.memory.huge_pages import huge_bytes

if TYPE_CHECKING:
    from shared.container.reader import Container, DenseEntry, Tensor
    from shared.model.spec import ModelSpec


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


# Hard-coded in every implementation of the indexer (specs of the checkpoints, LayerNorm of its keys).
INDEX_NORM_EPS = 1e-6


def matrix_of(tensor: Tensor, act: int | None = None) -> Matrix:
    """The kernels' view of one stored matrix, or of a stack of them."""
    out, in_ = tensor.shape
    return matrix(tensor.weight, tensor.scale, tensor.format, out, in_, act)


def ffn_of(tensors: Mapping[str, Tensor], prefix: str) -> Ffn:
    """gate, up and down projection below ``prefix`` (a dense layer's ``mlp.`` or ``mlp.shared_experts.``)."""
    return ffn(*(matrix_of(tensors[f"{prefix}{part}_proj.weight"]) for part in ("gate", "up", "down")))


def attn_layer_of(spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor]) -> AttnLayer:
    """The attention half of layer ``layer`` (the MTP layer included): norms, MLA, indexer."""
    prefix = f"model.layers.{layer}."
    attn = prefix + "self_attn."

    def vector(name: str) -> NDArray[np.float32]:
        return tensors[name].weight

    def weight(name: str, act: int | None = None) -> Matrix:
        return matrix_of(tensors[f"{attn}{name}.weight"], act)

    has_lora = spec.q_lora_rank is not None
    kind = spec.index_kind(layer)
    owns_indexer = kind == "full"
    return AttnLayer(
        hidden=spec.hidden,
        n_heads=spec.n_heads,
        q_rank=spec.q_lora_rank or 0,
        kv_rank=spec.kv_lora_rank,
        nope=spec.qk_nope,
        rope=spec.qk_rope,
        v_dim=spec.v_head,
        rope_interleave=spec.rope_interleave,
        rms_eps=spec.rms_eps,
        latent_eps=spec.latent_eps,
        softmax_scale=spec.softmax_scale,
        index_kind=kind,
        index_heads=spec.index_heads,
        index_dim=spec.index_dim,
        index_topk=spec.index_topk,
        index_rope_interleave=spec.index_rope_interleave,
        inv_freq=np.array(spec.inv_freq(), np.float32),
        rope_amplitude=spec.rope_amplitude,
        index_norm_eps=INDEX_NORM_EPS,
        input_norm=vector(prefix + "input_layernorm.weight"),
        q_a_norm=vector(attn + "q_a_layernorm.weight") if has_lora else None,
        kv_a_norm=vector(attn + "kv_a_layernorm.weight"),
        post_norm=vector(prefix + "post_attention_layernorm.weight"),
        q_a=weight("q_a_proj") if has_lora else absent_matrix(),
        q_b=weight("q_b_proj" if has_lora else "q_proj"),
        kv_a=weight("kv_a_proj_with_mqa"),
        k_b=weight("k_b"),
        v_b=weight("v_b"),
        o=weight("o_proj"),
        index_wq_b=weight("indexer.wq_b") if owns_indexer else absent_matrix(),
        index_wk=weight("indexer.wk") if owns_indexer else absent_matrix(),
        index_weights=weight("indexer.weights_proj", ACT_F32) if owns_indexer else absent_matrix(),
        index_k_norm_w=vector(attn + "indexer.k_norm.weight") if owns_indexer else None,
        index_k_norm_b=vector(attn + "indexer.k_norm.bias") if owns_indexer else None,
    )
