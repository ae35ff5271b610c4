"""Optimiser of the demonstration model, for f32 weights.

Matrices inside the layers take orthogonalised momentum steps (the method known as Muon: momentum,
then a few Newton-Schulz iterations towards the nearest orthogonal matrix); stacked experts are a
batch of such matrices.  Embedding, head, gates and vectors take AdamW steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(update: Tensor, n_steps: int = 5, chunk: int = 16) -> Tensor:
    """update [..., rows, cols] -> the same shape, singular values pushed towards 1.

    A stack of matrices is worked off in chunks that stay in the cache of a core.
    """
    if update.ndim == 2:
        return orthogonalize(update[None], n_steps, chunk)[0]
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = update.shape[-2] > update.shape[-1]
    out = torch.empty_like(update)
    for first in range(0, len(update), chunk):
        x = update[first : first + chunk]
        if is_tall:
            x = x.mT
        x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
        for _ in range(n_steps):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        out[first : first + chunk] = x.mT if is_tall else x
    return out


class Optimizer:
    """Steps all parameters of a model; `scale` in `step` multiplies both base learning rates."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        matrix_lr: float = 0.02,
        vector_lr: float = 3e-3,
        decay: float = 0.05,
    ) -> None:
        self.matrix_lr, self.vector_lr, self.decay = matrix_lr, vector_lr, decay
        self.entries: list[tuple[str, nn.Parameter, bool]] = []
        self.state: dict[str, dict[str, Tensor]] = {}
        self.n_steps = 0
        for name, p in named:
            is_matrix = p.ndim >= 2 and not any(key in name for key in ("embed_tokens", "lm_head", "gate_weight"))
            self.entries.append((name, p, is_matrix))
            self.state[name] = {"m": torch.zeros_like(p)}
            if not is_matrix:
                self.state[name]["v"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, scale: float, max_norm: float = 1.0) -> float:
        """One update from the gradients, which are freed; returns their norm before clipping."""
        self.n_steps += 1
        grads = [(e, e[1].grad) for e in self.entries if e[1].grad is not None]
        norm = float(torch.stack([g.square().sum() for _, g in grads]).sum().sqrt())
        clip = min(1.0, max_norm / (norm + 1e-6))
        for (name, p, is_matrix), grad in grads:
            state = self.state[name]
            g = grad.mul_(clip)
            if is_matrix:
                state["m"].lerp_(g, 0.05)
                direction = orthogonalize(g.lerp_(state["m"], 0.95))
                lr = self.matrix_lr * scale
                p.mul_(1 - lr * self.decay)
                rows, cols = p.shape[-2:]
                p.add_(direction, alpha=-lr * max(1.0, rows / cols) ** 0.5)
            else:
                lr = self.vector_lr * scale
                state["m"].mul_(0.9).add_(g, alpha=0.1)
                state["v"].mul_(0.95).addcmul_(g, g, value=0.05)
                m = state["m"] / (1 - 0.9**self.n_steps)
                v = state["v"] / (1 - 0.95**self.n_steps)
                p.addcdiv_(m, v.sqrt().add_(1e-10), value=-lr)
            p.grad = None
        return norm

    def state_dict(self) -> dict[str, object]:
        return {"n_steps": self.n_steps, "state": self.state}

    def load_state_dict(self, saved: dict) -> None:
        self.n_steps = saved["n_steps"]
        for name, tensors in saved["state"].items():
            for key, value in tensors.items():
                self.state[name][key].copy_(value)
