"""Optimiser with f32 master copies of bf16 weights.

Matrices inside the layers take orthogonalised momentum steps (the method known as Muon: momentum,
then a few Newton-Schulz iterations towards the nearest orthogonal matrix); stacked experts are a
batch of such matrices.  Embedding, head, gates and vectors take AdamW steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(update: Tensor, n_steps: int = 5) -> Tensor:
    """update [..., rows, cols] -> bf16 of the same shape, singular values pushed towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt().bfloat16() + 1e-7)
    for _ in range(n_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


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
            self.state[name] = {"master": p.detach().float().clone(), "m": torch.zeros_like(p, dtype=torch.float32)}
            if not is_matrix:
                self.state[name]["v"] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self, scale: float, max_norm: float = 1.0) -> float:
        """One update from the gradients, which are freed; returns their norm before clipping."""
        self.n_steps += 1
        grads = [(e, e[1].grad) for e in self.entries if e[1].grad is not None]
        norm = float(torch.stack([g.float().square().sum() for _, g in grads]).sum().sqrt())
        clip = min(1.0, max_norm / (norm + 1e-6))
        for (name, p, is_matrix), grad in grads:
            state = self.state[name]
            g = grad.float() * clip
            master = state["master"]
            if is_matrix:
                state["m"].mul_(0.95).add_(g, alpha=0.05)
                direction = orthogonalize(g.lerp(state["m"], 0.95))
                lr = self.matrix_lr * scale
                master.mul_(1 - lr * self.decay)
                rows, cols = p.shape[-2:]
                master.add_(direction.float(), alpha=-lr * max(1.0, rows / cols) ** 0.5)
            else:
                lr = self.vector_lr * scale
                state["m"].mul_(0.9).add_(g, alpha=0.1)
                state["v"].mul_(0.95).addcmul_(g, g, value=0.05)
                m = state["m"] / (1 - 0.9**self.n_steps)
                v = state["v"] / (1 - 0.95**self.n_steps)
                master.addcdiv_(m, v.sqrt().add_(1e-10), value=-lr)
            p.copy_(master)
            p.grad = None
        return norm

    def state_dict(self) -> dict[str, object]:
        return {"n_steps": self.n_steps, "state": self.state}

    def load_state_dict(self, saved: dict) -> None:
        self.n_steps = saved["n_steps"]
        for name, tensors in saved["state"].items():
            for key, value in tensors.items():
                self.state[name][key].copy_(value)
