"""Containers of random weights, of any size, for measurements and tests: written directly in packed form.

Weights have zero mean and a standard deviation of 1/sqrt(inputs), so activations keep a sane scale through the layers; what
the model says is noise. Every tensor has its own random stream, so an interrupted run goes on with the same bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conversion.convert import VERSION, Ahead, expert_record, pack_chunks, table_chunks
from conversion.writer import ContainerWriter
from native.matrix import GROUP, TILE_ROWS, scale_bytes, weight_bytes
from shared.container.format import PRECISIONS, Converter, DenseItem, ExpertFilePlan, Index, plan_container
from shared.container.pack import E2M1_TWICE, F32, SCALED, U8
from shared.errors import ConfigError
from shared.model.family import spec_of


def _rms(steps: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(steps, dtype=np.float64))))


_RMS = {4: _rms(range(-8, 8)), 8: _rms(range(-127, 128))}
"""Of the integers of so many bits."""


_Q8_STEPS = np.where(np.arange(256) == 0, 128, np.arange(256)).astype(np.uint8)


class Synthesis:
    """A random model: its config, and the loop that writes it. ``config`` is a complete config.json."""

    def __init__(self, config: Mapping[str, Any], precision: str, seed: int = 0) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"--precision must be one of {', '.join(PRECISIONS)}, found {precision!r}.")
        self.config, self.precision, self.seed = dict(config), precision, seed
        self.spec = spec_of(self.config)
        self.plan = plan_container(self.spec, PRECISIONS[precision])

    @property
    def n_bytes(self) -> int:
        return self.plan.dense_bytes + self.plan.expert_bytes

    def run(self, out: Path, progress: Callable[[int], None] = lambda _: None, n_threads: int = 2) -> Index:
        """Writes the container. CapacityError beforehand when the file system is too small."""
        identity = {
            "command": "synth",
            "version": VERSION,
            "precision": self.precision,
            "seed": self.seed,
            "config": self.config,
        }
        with ContainerWriter(out, self.plan, identity) as writer:
            writer.require_space()
            with ThreadPoolExecutor(n_threads) as pool:
                ahead = Ahead(pool, self._make_expert, depth=n_threads + 1)
                try:
                    writer.write(lambda items: map(self._make_dense, items), ahead.each, progress)
                finally:
                    ahead.cancel()
            writer.put_file("config.json", json.dumps(self.config, indent=1).encode() + b"\n")
            arguments = {"synth": "random weights", "precision": self.precision, "seed": str(self.seed)}
            return writer.finish(self.spec.family, Converter(VERSION, arguments))

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, zlib.crc32(name.encode())])))

    def _make_dense(self, item: DenseItem) -> Iterator[Any]:
        rng = self._rng(item.name)
        out, in_ = (item.shape[0], item.shape[-1])
        if item.kind == "vector":
            middle, spread = (0.0, 0.02) if item.name.endswith("bias") else (1.0, 0.1)
            yield (middle + spread * rng.standard_normal(out, np.float32)).astype(np.float32)
        elif item.kind == "table":
            step = max((4 << 20) // in_, 1)
            rows = (rng.standard_normal((min(step, out - at), in_), np.float32) for at in range(0, out, step))
            yield from table_chunks(rows, item.format)
        else:
            # A sharper head: the tokens of a random model would otherwise be close to uniform.
            gain = 3.0 if item.role == "head" else 1.0
            yield from self._matrix(rng, item.format, out, in_, item.stack, gain)

    def _matrix(self, rng: np.random.Generator, fmt: str, out: int, in_: int, stack: int, gain: float) -> Iterator[Any]:
        if fmt in ("f32", "bf16") or out % TILE_ROWS or in_ % GROUP:
            step = max((4 << 20) // in_ // TILE_ROWS, 1) * TILE_ROWS
            shapes = [(min(step, out - at), in_) for _ in range(stack) for at in range(0, out, step)]
            yield from pack_chunks(iter(_normal(rng, shape, gain) for shape in shapes), fmt)
            return
        left = stack * weight_bytes(fmt, out, in_)
        while left:
            n = min(left, 16 << 20)
            yield _random_quants(rng, fmt, n)
            left -= n
        yield _random_scales(rng, fmt, stack * scale_bytes(fmt, out, in_), in_, gain)

    def _make_expert(self, source: tuple[ExpertFilePlan, int]) -> U8:
        layer, expert = source
        layout = layer.layout
        rng = self._rng(layer.tensor_name(expert))
        matrices = []
        for out, in_ in ((layout.inner, layout.hidden), (layout.inner, layout.hidden), (layout.hidden, layout.inner)):
            parts = list(self._matrix(rng, layout.format, out, in_, 1, 1.0))
            n_weight = weight_bytes(layout.format, out, in_)
            joined = np.concatenate([np.asarray(part).view(np.uint8).reshape(-1) for part in parts])
            matrices.append((joined[:n_weight], joined[n_weight:] if joined.size > n_weight else None))
        biases = [np.float32(0.02) * rng.standard_normal(width, np.float32) for width in layout.bias_widths]
        record: U8 = expert_record(layer, matrices, biases)
        return record


def _normal(rng: np.random.Generator, shape: tuple[int, int], gain: float) -> F32:
    return rng.standard_normal(shape, np.float32) * np.float32(gain / np.sqrt(shape[1]))


def _random_quants(rng: np.random.Generator, fmt: str, n_bytes: int) -> U8:
    raw = rng.integers(0, 1 << 64, n_bytes // 8, np.uint64).view(np.uint8)
    return raw if SCALED[fmt].bits == 4 else _Q8_STEPS[raw]


def _random_scales(rng: np.random.Generator, fmt: str, n_bytes: int, in_: int, gain: float) -> npt.NDArray[Any]:
    kind, deviation = SCALED[fmt], gain / np.sqrt(in_)
    dtype = np.dtype(kind.scale)
    if fmt == "mxfp4":  # powers of two around the scale wanted
        middle = np.log2(deviation / _rms(E2M1_TWICE / 2)) + 127
        exponents: U8 = np.rint(middle + rng.uniform(-0.5, 0.5, n_bytes)).astype(np.uint8)
        return exponents
    scales: npt.NDArray[Any] = deviation / _RMS[kind.bits] * rng.uniform(0.8, 1.2, n_bytes // dtype.itemsize)
    if kind.bits == 4:
        # As the converter's are. It also gives zero mean to steps that reach from -8 to 7.
        scales *= rng.choice([-1.0, 1.0], scales.size)
    return scales.astype(dtype)
