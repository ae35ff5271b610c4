"""The gated delta rule in float64, one sequence, one token after the other: what the kernel is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass
class DeltaLayer:
    """One layer. Matrices [out, in]: qkv, z, a, b, out, conv [channels, taps]; vectors norm, a_log, dt_bias, input_norm."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    w: dict[str, F64]


@dataclass
class State:
    """What comes after a token: the newest inputs of the convolution, oldest first, and S of each head."""

    inputs: F64  # [taps - 1, channels]
    s: F64  # [V, dk, dv]


def _silu(x: F64) -> F64:
    y: F64 = x / (1 + np.exp(-x))
    return y


def _normed(x: F64, w: F64, eps: float) -> F64:
    y: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
    return y


def mixer(layer: DeltaLayer, x: F64) -> tuple[F64, State]:
    """What joins the residual stream x [S, D] of positions 0 .. S - 1, and the state behind the last one."""
    y, w = layer, layer.w
    h = _normed(x, w["input_norm"], y.eps)
    taps, keys = w["conv"].shape[1], y.n_key_heads * y.key_dim
    inputs = np.concatenate([np.zeros((taps - 1, len(w["qkv"]))), h @ w["qkv"].T])
    z = (h @ w["z"].T).reshape(len(x), y.n_value_heads, y.value_dim)
    decay = np.exp(-np.exp(w["a_log"]) * np.logaddexp(h @ w["a"].T + w["dt_bias"], 0))
    beta = 1 / (1 + np.exp(-(h @ w["b"].T)))
    s, rows = np.zeros((y.n_value_heads, y.key_dim, y.value_dim)), []
    for t in range(len(x)):
        mixed = _silu((inputs[t : t + taps].T * w["conv"]).sum(1))
        q, k = (part.reshape(y.n_key_heads, y.key_dim) for part in (mixed[:keys], mixed[keys : 2 * keys]))
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        for head in range(y.n_value_heads):
            i = head * y.n_key_heads // y.n_value_heads
            v = mixed[2 * keys :].reshape(y.n_value_heads, -1)[head]
            s[head] *= decay[t, head]
            s[head] += np.outer(k[i], beta[t, head] * (v - k[i] @ s[head]))
            read = q[i] * y.key_dim**-0.5 @ s[head]
            rows.append(_normed(read, w["norm"], y.eps) * _silu(z[t, head]))
    out = np.array(rows).reshape(len(x), -1) @ w["out"].T
    return out, State(inputs[len(inputs) - taps + 1 :], s)
