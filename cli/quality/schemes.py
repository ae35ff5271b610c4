"""Number formats as functions on f32 values, and the lanes that are compared. Pure: opens nothing.

A *scheme* rounds a matrix to the values that a format can hold; what a container stores comes from the same quantisers
(``shared.container.pack``). A *lane* is one way to run the model: a scheme per role, where activations are rounded, and
the cache's precision. Arithmetic is f32 everywhere, so lanes differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from native.matrix import GROUP
from shared.container.pack import (
    F32,
    SCALED,
    from_bf16,
    pack_matrix,
    quantise_groups,
    quantise_rows,
    to_bf16,
    unpack_matrix,
)

INT8_INPUTS = frozenset({"expert", "shared", "attention", "head"})
"""Roles whose matrices take int8 activations where they are quantised (docs/container.md)."""


@dataclass(frozen=True)
class Scheme:
    """A format for weights. ``group``: inputs that share a scale, 0 for a whole row; ``scale_bytes`` 0 when unscaled."""

    bits: int
    round: Callable[[F32], F32]
    scale_bytes: int = 0
    group: int = 0

    def bytes_per_weight(self, in_: int) -> float:
        """Stored bytes divided by values, for rows of ``in_`` inputs; padding to whole groups and tiles is not counted."""
        return self.bits / 8 + (self.scale_bytes / (self.group or in_) if self.scale_bytes else 0.0)


def _int4(w: F32, group: int) -> F32:
    """Each row in groups with one f16 scale; group 0 is the whole row."""
    width = w.shape[1]
    size = group or width
    padded = np.pad(w, ((0, 0), (0, -width % size)))
    q, scale = quantise_groups(padded, size)
    values = q.reshape(len(w), -1, size) * scale.astype(np.float32)[:, :, None]
    return np.ascontiguousarray(values.reshape(len(w), -1)[:, :width])


def _int4_searched(w: F32, divisors: tuple[float, ...]) -> F32:
    """Groups of 64, each with the scale that has the least square error, of v / d for negative and |v| / d for positive
    divisors d; v is the value of largest magnitude. No container is made so.
    """
    width = w.shape[1]
    groups = np.pad(w, ((0, 0), (0, -width % GROUP))).reshape(len(w), -1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)
    scales = [(largest if d < 0 else np.abs(largest)) / np.float32(d) for d in divisors]
    best = np.zeros_like(groups)
    least = np.full((*groups.shape[:2], 1), np.inf, np.float32)
    for exact in scales:
        scale = exact.astype(np.float16).astype(np.float32)
        q = np.clip(np.rint(groups / np.where(scale == 0, np.float32(1.0), scale)), -8.0, 7.0)
        values = q * scale
        error = np.sum(np.square(values - groups), axis=2, keepdims=True)
        best = np.where(error < least, values, best)
        least = np.minimum(error, least)
    return np.ascontiguousarray(best.reshape(len(w), -1)[:, :width])


def _int8(w: F32) -> F32:
    q, scale = quantise_rows(w)
    return q.astype(np.float32) * scale[:, None]


def _grouped(w: F32, fmt: str) -> F32:
    """As a container's format with a scale per 32 inputs holds it."""
    return unpack_matrix(*pack_matrix(w, fmt), fmt, *w.shape)


_FITTED = tuple(d / f for d in (-8.0, 7.0) for f in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7))
"""-8: what containers do; 7: steps of the same width on both sides, -8 left unused; each also narrower, which clips."""

SCHEMES: Mapping[str, Scheme] = {
    "f32": Scheme(32, lambda w: w),
    "bf16": Scheme(16, lambda w: from_bf16(to_bf16(w))),
    "int8": Scheme(8, _int8, scale_bytes=4),
    "int8-gs32": Scheme(8, lambda w: _grouped(w, "q8g32"), scale_bytes=2, group=32),
    "mxfp4": Scheme(4, lambda w: _grouped(w, "mxfp4"), scale_bytes=1, group=32),
    "int4-gs32": Scheme(4, lambda w: _int4(w, 32), scale_bytes=2, group=32),
    "int4-gs64": Scheme(4, lambda w: _int4(w, GROUP), scale_bytes=2, group=GROUP),
    "int4-gs64-fitted": Scheme(4, lambda w: _int4_searched(w, _FITTED), scale_bytes=2, group=GROUP),
    "int4-gs64-max7": Scheme(4, lambda w: _int4_searched(w, (7.0,)), scale_bytes=2, group=GROUP),
    "int4-row": Scheme(4, lambda w: _int4(w, 0), scale_bytes=2),
}


def round_activations(x: F32) -> F32:
    """int8 in groups of 64 along the last axis, as the kernels quantise them (docs/numerics.md, Linear)."""
    width = x.shape[-1]
    groups = np.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -width % GROUP))).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, np.float32(127.0) / largest, np.float32(0.0)).astype(np.float32)
        scale = np.where(np.isfinite(inverse), largest / np.float32(127.0), np.float32(0.0)).astype(np.float32)
        q = np.where(np.isfinite(inverse), np.clip(np.rint(groups * inverse), -127.0, 127.0), np.float32(0.0))
    values = (q * scale).astype(np.float32)
    return np.ascontiguousarray(values.reshape(*x.shape[:-1], -1)[..., :width])


def round_cache(x: F32, dtype: str) -> F32:
    """What the KV cache gives back of rows f32[..., n]: ``dtype`` is "f32", "bf16" or "int8"."""
    if dtype == "int8":
        return _round_cache_int8(x)
    return from_bf16(to_bf16(x)) if dtype == "bf16" else x


def round_queries(x: F32, dtype: str) -> F32:
    """Queries f32[..., n] as they meet a cache of this format."""
    return round_activations(x) if dtype == "int8" else x


def _round_cache_int8(x: F32) -> F32:
    """Groups of 64 along the last axis, scales in bf16 (docs/numerics.md, int8 cache)."""
    width = x.shape[-1]
    groups = np.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -width % GROUP))).reshape(*x.shape[:-1], -1, GROUP)
    scale = from_bf16(to_bf16(np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127.0)))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scale > 0, np.float32(1.0) / scale, np.float32(0.0)).astype(np.float32)
        is_usable = np.isfinite(inverse)
        q = np.where(is_usable, np.clip(np.rint(groups * inverse), -127.0, 127.0), np.float32(0.0))
    values = (q * np.where(is_usable, scale, np.float32(0.0))).astype(np.float32)
    return np.ascontiguousarray(values.reshape(*x.shape[:-1], -1)[..., :width])


@dataclass(frozen=True)
class Lane:
    """One way to run the model.

    ``formats``: role -> scheme; a role that is not named stays as the checkpoint has it. ``int8_inputs``: roles whose
    activations are rounded. ``is_stored``: weights come from the container instead, which has its own formats.
    """

    name: str
    table: str
    formats: Mapping[str, str] = field(default_factory=dict)
    int8_inputs: frozenset[str] = frozenset()
    kv_dtype: str = "f32"
    is_stored: bool = False

    def scheme(self, role: str) -> str:
        return self.formats.get(role, "f32")

    @property
    def activations(self) -> str:
        return "int8" if self.int8_inputs else "f32"


SOURCE_LANE = Lane("source", "")
"""The checkpoint itself with f32 arithmetic: what every other lane is compared with."""


def stored_lane(precision: Mapping[str, str], kv_dtype: str) -> Lane:
    """The container as the engine runs it; ``precision`` is its format of each role."""
    inputs = frozenset(role for role in INT8_INPUTS if precision[role] in SCALED)
    return Lane("model", "model", int8_inputs=inputs, kv_dtype=kv_dtype, is_stored=True)


def candidate_lanes() -> list[Lane]:
    """The ablation: formats of the body times activations, then one role at a time, then single changes of the default."""
    body, tables = ("expert", "shared", "attention"), ("embed", "head")
    lanes = [
        Lane("weights f32", "formats", {}, INT8_INPUTS),
    ]
    for scheme in ("int8", "int4-gs32", "int4-gs64-fitted", "int4-gs64", "int4-gs64-max7", "int4-row"):
        formats = {**dict.fromkeys(body, scheme), **dict.fromkeys(tables, "int8")}
        lanes += [Lane(scheme, "formats", formats), Lane(scheme, "formats", formats, INT8_INPUTS)]
    for role in (*body, *tables):
        lanes += [Lane(f"{role} {scheme}", "roles", {role: scheme}) for scheme in ("int8", "int4-gs64")]
    lanes += [Lane("gate, indexer gains int8", "roles", {"exact": "int8"})]
    default = {**dict.fromkeys(body, "int4-gs64"), **dict.fromkeys(tables, "int8")}
    changes: Iterable[tuple[str, dict[str, str], frozenset[str], str]] = (
        ("default", {}, INT8_INPUTS, "f32"),
        ("KV cache bf16", {}, INT8_INPUTS, "bf16"),
        ("attention int8", {"attention": "int8"}, INT8_INPUTS, "f32"),
        ("shared and dense FFN int8", {"shared": "int8"}, INT8_INPUTS, "f32"),
        ("attention, shared, dense FFN int8", {"attention": "int8", "shared": "int8"}, INT8_INPUTS, "f32"),
        (
            "the same, experts int4-gs64-fitted",
            {"attention": "int8", "shared": "int8", "expert": "int4-gs64-fitted"},
            INT8_INPUTS,
            "f32",
        ),
        ("experts int4-gs32", {"expert": "int4-gs32"}, INT8_INPUTS, "f32"),
        ("embedding and head bf16", dict.fromkeys(tables, "bf16"), INT8_INPUTS, "f32"),
        ("head int4-gs64", {"head": "int4-gs64"}, INT8_INPUTS, "f32"),
        ("head with f32 activations", {}, INT8_INPUTS - {"head"}, "f32"),
        ("gate with int8 activations", {}, INT8_INPUTS | {"exact"}, "f32"),
    )
    lanes += [Lane(name, "changes", {**default, **change}, inputs, kv) for name, change, inputs, kv in changes]
    return lanes
