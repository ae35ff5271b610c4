"""The network of the demonstration model: the GLM-5.2 shape, small, written for training on a CPU.

Owns the definition of the layers and the names of their weights, which are those of the published
checkpoints, so export is a copy.  Knows nothing of data, optimisers or files.

Three choices are for speed on a CPU: experts are dispatched with static shapes (sort, pad to a
capacity, one batched product), so that the compiler sees no data-dependent size; experts are stored
stacked (`experts_gate` [E, F, D]) and split only when exported; attention is the expanded form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; every inner size is a multiple of 64, the group of the int4 format."""

    vocab_size: int = 3072
    hidden: int = 192
    n_layers: int = 6
    n_dense_layers: int = 1
    dense_inner: int = 512
    n_experts: int = 64
    gate_k: int = 4
    expert_inner: int = 64
    routed_scale: float = 1.0
    n_heads: int = 4
    q_rank: int = 128
    kv_rank: int = 64
    nope_dim: int = 64
    rope_dim: int = 32
    v_dim: int = 64
    index_heads: int = 4
    index_dim: int = 64
    index_topk: int = 256
    index_types: tuple[str, ...] = field(default=("full", "full", "shared", "full", "shared", "shared"))
    rope_theta: float = 10000.0
    eps: float = 1e-5
    max_positions: int = 2048
    capacity: float = 1.25


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def linear(d_in: int, d_out: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(d_in, d_out, bias=False)
    nn.init.normal_(layer.weight, std=gain * d_in**-0.5)
    return layer


def rope_table(n: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin f32[n, dim/2]."""
    inv = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * inv[None, :]
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, dim], interleaved pairs.  Returns the pairs de-interleaved: dot products are the same."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


class Indexer(nn.Module):
    """Scores every earlier token for every query; trained after the rest (see train_indexer.py)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = linear(shape.q_rank, shape.index_heads * shape.index_dim)
        self.wk = linear(shape.hidden, shape.index_dim)
        self.k_norm = nn.LayerNorm(shape.index_dim, eps=1e-6)
        self.weights_proj = linear(shape.hidden, shape.index_heads)

    def forward(self, h: Tensor, q_lat: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """h [B, T, D], q_lat [B, T, q_rank] -> scores f32[B, T, T], not masked."""
        s = self.shape
        batch, n, _ = h.shape
        q = self.wq_b(q_lat).view(batch, n, s.index_heads, s.index_dim)
        k = self.k_norm(self.wk(h).to(self.k_norm.weight.dtype)).view(batch, n, 1, s.index_dim)
        r = s.rope_dim
        q = torch.cat([rotate(q[..., :r], cos, sin), q[..., r:]], -1)
        k = torch.cat([rotate(k[..., :r], cos, sin), k[..., r:]], -1)[:, :, 0]
        weight = self.weights_proj(h).float() * (s.index_heads**-0.5 * s.index_dim**-0.5)
        score = torch.zeros(batch, n, n, dtype=torch.float32, device=h.device)
        for j in range(s.index_heads):
            dots = (q[:, :, j] @ k.transpose(1, 2)).float()
            score = score + weight[:, :, j, None] * dots.relu()
        return score


def select(score: Tensor, topk: int) -> Tensor:
    """score f32[B, T, T] -> bool[B, T, T]: the `topk` best keys among those not after the query."""
    n = score.shape[-1]
    causal = torch.ones(n, n, dtype=torch.bool, device=score.device).tril()
    if n <= topk:
        return causal.expand_as(score)
    masked = score.masked_fill(~causal, float("-inf"))
    keep = torch.zeros_like(masked, dtype=torch.bool)
    keep.scatter_(-1, masked.topk(topk, dim=-1).indices, True)
    return keep & causal


class Attention(nn.Module):
    """Multi-head latent attention, expanded form."""

    def __init__(self, shape: Shape, has_indexer: bool) -> None:
        super().__init__()
        s = self.shape = shape
        self.q_a_proj = linear(s.hidden, s.q_rank)
        self.q_a_layernorm = RMSNorm(s.q_rank, s.eps)
        self.q_b_proj = linear(s.q_rank, s.n_heads * (s.nope_dim + s.rope_dim))
        self.kv_a_proj_with_mqa = linear(s.hidden, s.kv_rank + s.rope_dim)
        self.kv_a_layernorm = RMSNorm(s.kv_rank, s.eps)
        self.kv_b_proj = linear(s.kv_rank, s.n_heads * (s.nope_dim + s.v_dim))
        self.o_proj = linear(s.n_heads * s.v_dim, s.hidden, gain=(2 * s.n_layers) ** -0.5)
        self.indexer = Indexer(shape) if has_indexer else None

    def heads(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k [B, H, T, nope+rope], v [B, H, T, v_dim] and the query latent [B, T, q_rank]."""
        s = self.shape
        batch, n, _ = h.shape
        q_lat = self.q_a_layernorm(self.q_a_proj(h))
        q = self.q_b_proj(q_lat).view(batch, n, s.n_heads, s.nope_dim + s.rope_dim)
        kv = self.kv_a_proj_with_mqa(h)
        latent = self.kv_a_layernorm(kv[..., : s.kv_rank])
        k_rope = rotate(kv[..., s.kv_rank :].view(batch, n, 1, s.rope_dim), cos, sin)
        up = self.kv_b_proj(latent).view(batch, n, s.n_heads, s.nope_dim + s.v_dim)
        q = torch.cat([q[..., : s.nope_dim], rotate(q[..., s.nope_dim :], cos, sin)], -1)
        k = torch.cat([up[..., : s.nope_dim], k_rope.expand(-1, -1, s.n_heads, -1)], -1)
        v = up[..., s.nope_dim :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q_lat

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, keep: Tensor | None) -> Tensor:
        """h [B, T, D]; keep bool[B, T, T] restricts the keys, None means causal.  Returns [B, T, D]."""
        s = self.shape
        batch, n, _ = h.shape
        q, k, v, _ = self.heads(h, cos, sin)
        # padded to the width of the keys: the fused kernel wants one head size
        v = F.pad(v, (0, s.nope_dim + s.rope_dim - s.v_dim))
        if keep is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None])
        out = out[..., : s.v_dim].transpose(1, 2).reshape(batch, n, s.n_heads * s.v_dim)
        return self.o_proj(out)


class Regroup(torch.autograd.Function):
    """rows[take], whose gradient is gathered too (scattered adds are slow on a CPU).

    `take` i64[M] lists a row for every output row, with rows.shape[0] meaning a row of zeros.  `back`
    i64[N, K] lists for every input row the K output rows made from it, with M meaning none.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, take)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        padded = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])
        out = padded.index_select(0, back[:, 0])
        for k in range(1, back.shape[1]):
            out = out + padded.index_select(0, back[:, k])
        return out, None, None


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int, gain: float) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Sigmoid gate with a choice-only correction bias, one shared expert, stacked routed experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        gain = (2 * s.n_layers) ** -0.5
        self.gate_weight = nn.Parameter(torch.randn(s.n_experts, s.hidden) * s.hidden**-0.5)
        self.register_buffer("correction_bias", torch.zeros(s.n_experts))
        self.experts_gate = nn.Parameter(torch.randn(s.n_experts, s.expert_inner, s.hidden) * s.hidden**-0.5)
        self.experts_up = nn.Parameter(torch.randn(s.n_experts, s.expert_inner, s.hidden) * s.hidden**-0.5)
        self.experts_down = nn.Parameter(
            torch.randn(s.n_experts, s.hidden, s.expert_inner) * s.expert_inner**-0.5 * gain
        )
        self.shared_experts = GatedMLP(s.hidden, s.expert_inner, gain)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> (output [B, T, D], tokens per expert f32[E])."""
        s = self.shape
        flat = x.reshape(-1, s.hidden)
        n = flat.shape[0]
        prob = torch.sigmoid(flat.float() @ self.gate_weight.float().t())
        eids = (prob.detach() + self.correction_bias).topk(s.gate_k, dim=-1).indices
        weight = prob.gather(1, eids)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * s.routed_scale

        # Rank of every (token, choice) within its expert; what exceeds the capacity is dropped (training only).
        pairs = eids.reshape(-1)
        n_pairs = pairs.numel()
        capacity = min(n, int(n * s.gate_k / s.n_experts * s.capacity + 15) // 16 * 16)
        n_slots = s.n_experts * capacity
        order = torch.argsort(pairs, stable=True)
        counts = (pairs[:, None] == torch.arange(s.n_experts, device=x.device)).sum(0)
        starts = torch.cumsum(counts, 0) - counts
        sorted_pairs = pairs[order]
        rank = torch.arange(n_pairs, device=x.device) - starts[sorted_pairs]
        slot = torch.where(rank < capacity, sorted_pairs * capacity + rank, n_slots)
        slot_of_pair = torch.empty_like(slot).scatter(0, order, slot)
        pair_of_slot = torch.full((n_slots + 1,), n_pairs, dtype=torch.long, device=x.device)
        pair_of_slot = pair_of_slot.scatter(0, slot, order)[:n_slots]
        token_of_slot = pair_of_slot // s.gate_k

        rows = Regroup.apply(flat, token_of_slot, slot_of_pair.view(n, s.gate_k))
        rows = rows.view(s.n_experts, capacity, s.hidden)
        inner = F.silu(torch.bmm(rows, self.experts_gate.transpose(1, 2))) * torch.bmm(
            rows, self.experts_up.transpose(1, 2)
        )
        out = torch.bmm(inner, self.experts_down.transpose(1, 2)).view(n_slots, s.hidden)
        picked = Regroup.apply(out, slot_of_pair, pair_of_slot.view(n_slots, 1)).view(n, s.gate_k, s.hidden)
        routed = (picked.float() * weight.unsqueeze(-1)).sum(1)
        result = routed.to(x.dtype) + self.shared_experts(flat)
        return result.view_as(x), counts.float()


class Layer(nn.Module):
    def __init__(self, shape: Shape, is_sparse: bool, has_indexer: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, has_indexer)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.is_sparse = is_sparse
        gain = (2 * shape.n_layers) ** -0.5
        self.mlp = MoE(shape) if is_sparse else GatedMLP(shape.hidden, shape.dense_inner, gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, keep)
        h = self.post_attention_layernorm(x)
        if self.is_sparse:
            out, counts = self.mlp(h)
            return x + out, counts
        return x + self.mlp(h), None


class DraftLayer(nn.Module):
    """The MTP layer: from the hidden state at i and the token at i+1 to the token at i+2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm = RMSNorm(shape.hidden, shape.eps)
        self.hnorm = RMSNorm(shape.hidden, shape.eps)
        self.eh_proj = linear(2 * shape.hidden, shape.hidden)
        self.layer = Layer(shape, is_sparse=True, has_indexer=True)
        self.head_norm = RMSNorm(shape.hidden, shape.eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))


class Fledgling(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(
            Layer(shape, i >= shape.n_dense_layers, shape.index_types[i] == "full") for i in range(shape.n_layers)
        )
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = linear(shape.hidden, shape.vocab_size, gain=0.5)
        self.draft = DraftLayer(shape)
        cos, sin = rope_table(shape.max_positions, shape.rope_dim, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def is_full(self, idx: int) -> bool:
        return self.shape.index_types[idx] == "full"

    def selection(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """bool[B, T, T] chosen by the layer's own indexer for its input x."""
        h = layer.input_layernorm(x)
        attn = layer.self_attn
        q_lat = attn.q_a_layernorm(attn.q_a_proj(h))
        return select(attn.indexer(h, q_lat, cos, sin), self.shape.index_topk)

    def hidden_states(self, ids: Tensor, use_indexer: bool = False) -> tuple[Tensor, list[Tensor]]:
        """ids i64[B, T] -> (states after the final norm [B, T, D], tokens per expert of each sparse layer)."""
        n = ids.shape[1]
        cos, sin = self.cos[:n], self.sin[:n]
        x = self.embed_tokens(ids)
        loads: list[Tensor] = []
        keep = None
        is_selecting = use_indexer and n > self.shape.index_topk
        for i, layer in enumerate(self.layers):
            if is_selecting and self.is_full(i):
                keep = self.selection(layer, x, cos, sin)
            x, counts = layer(x, cos, sin, keep)
            if counts is not None:
                loads.append(counts)
        return self.norm(x), loads

    def draft_states(self, next_ids: Tensor, hidden: Tensor, use_indexer: bool = False) -> tuple[Tensor, Tensor]:
        """next_ids i64[B, T] (token at i+1), hidden [B, T, D] -> (normed draft states [B, T, D], tokens per expert)."""
        n = next_ids.shape[1]
        cos, sin = self.cos[:n], self.sin[:n]
        x = self.draft.join(self.embed_tokens(next_ids), hidden)
        keep = None
        if use_indexer and n > self.shape.index_topk:
            keep = self.selection(self.draft.layer, x, cos, sin)
        x, counts = self.draft.layer(x, cos, sin, keep)
        assert counts is not None
        return self.draft.head_norm(x), counts

    def losses(
        self, ids: Tensor, use_indexer: bool = False, draft_rows: int = 0
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """ids i64[B, T+1] -> (main loss, draft loss, tokens per expert of every sparse layer, draft layer last).

        The draft layer trains on the first `draft_rows` rows only (0: all), which saves time.
        """
        inputs, targets = ids[:, :-1], ids[:, 1:]
        hidden, loads = self.hidden_states(inputs, use_indexer)
        main = cross_entropy(self.lm_head(hidden), targets)
        if draft_rows:
            hidden, targets = hidden[:draft_rows], targets[:draft_rows]
        out, counts = self.draft_states(targets[:, :-1], hidden[:, :-1], use_indexer)
        draft = cross_entropy(self.lm_head(out), targets[:, 1:])
        return main, draft, [*loads, counts]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def count_parameters(shape: Shape) -> dict[str, int]:
    """Parameter counts of a model of this shape: total, and those one token passes through (without MTP)."""
    with torch.device("meta"):
        model = Fledgling(shape)
    total = sum(p.numel() for p in model.parameters())
    draft = sum(p.numel() for p in model.draft.parameters())
    expert = 3 * shape.hidden * shape.expert_inner
    idle = (shape.n_layers - shape.n_dense_layers) * (shape.n_experts - shape.gate_k) * expert
    embedding = shape.vocab_size * shape.hidden
    return {"total": total, "draft layer": draft, "active": total - draft - idle - embedding, "expert": expert}
