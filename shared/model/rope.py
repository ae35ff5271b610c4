"""Rotary position embedding: which components turn, and how fast."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """The first ``dim`` components turn in pairs: neighbours when interleaved, else component i with i + dim / 2."""

    dim: int
    theta: float
    is_interleaved: bool
    amplitude: float = 1.0
    """On cosine and sine."""
    n_turning: int = 0
    """Pairs that turn at all; 0 = all."""
    yarn_factor: float = 1.0
    """1 = no YaRN."""
    yarn_original_context: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True

    def inv_freq(self) -> list[float]:
        """``dim / 2`` angles per position, f64, YaRN applied."""
        d = self.dim
        base = [self.theta ** (-2.0 * i / d) for i in range(d // 2)]
        if self.n_turning:
            base[self.n_turning :] = [0.0] * (d // 2 - self.n_turning)
        if self.yarn_factor <= 1.0:
            return base

        def pair_at(rotations: float) -> float:
            length = self.yarn_original_context / (rotations * 2.0 * math.pi)
            return d * math.log(length) / (2.0 * math.log(self.theta))

        low, high = pair_at(self.yarn_beta_fast), pair_at(self.yarn_beta_slow)
        if self.yarn_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        result = []
        for i, freq in enumerate(base):
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            result.append(freq / self.yarn_factor * ramp + freq * (1.0 - ramp))
        return result

    def turn(self, x: F32, positions: NDArray[np.int64]) -> F32:
        """x f32[T, heads, n >= dim] turned by each row's position; interleaved pairs come back de-interleaved."""
        angles = positions[:, None] * np.array(self.inv_freq())
        cos = np.cos(angles).astype(np.float32)[:, None] * np.float32(self.amplitude)
        sin = np.sin(angles).astype(np.float32)[:, None] * np.float32(self.amplitude)
        half = self.dim // 2
        first = x[..., : self.dim : 2] if self.is_interleaved else x[..., :half]
        second = x[..., 1 : self.dim : 2] if self.is_interleaved else x[..., half : self.dim]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., self.dim :]], axis=-1)
