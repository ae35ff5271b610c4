"""Runs the measurements of ``colibri quality`` and gathers what they found. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cli.quality.compare import Comparison, Scores
from cli.quality.errors import ErrorReport, measure
from cli.quality.forward import Forward
from cli.quality.schemes import SCHEMES, SOURCE_LANE, Lane, candidate_lanes, stored_lane
from cli.quality.tensors import LaneWeights, Pair
from cli.quality.text import Tokens

STORED = {
    "q4": "int4-gs64", "q8": "int8", "bf16": "bf16", "f32": "f32", "q4g32": "int4-gs32", "q8g32": "int8-gs32", "mxfp4": "mxfp4",
}  # fmt: skip
"""Formats of a container as schemes."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class LaneResult:
    lane: Lane
    bytes_per_weight: float
    scores: Scores


@dataclass(frozen=True)
class Quality:
    """What one run found. ``errors`` and ``lanes`` are None where they were not asked for."""

    pair: Pair
    errors: ErrorReport | None
    tokens: Tokens | None
    lanes: list[LaneResult] | None
    kv_dtype: str


def tensor_errors(pair: Pair, n_worst: int, progress: Progress) -> ErrorReport:
    """Every tensor of the container beside its origin. ``progress`` gets values done, ``pair.n_values`` in all."""
    return measure(pair.all_tensors(), n_worst, progress)


def lanes_to_run(pair: Pair, kv_dtype: str, has_formats: bool) -> list[Lane]:
    """The container as it runs and, when asked, all candidates."""
    return [stored_lane(pair.container.precision, kv_dtype), *(candidate_lanes() if has_formats else [])]


def forward_units(pair: Pair) -> int:
    """How often ``compare_lanes`` reports progress."""
    spec = pair.spec
    return spec.n_layers + sum(spec.n_experts for kind in spec.layer_kinds if kind == "moe")


def compare_lanes(pair: Pair, lanes: Sequence[Lane], tokens: Tokens, progress: Progress) -> list[LaneResult]:
    """Logits of every lane against those of the checkpoint, over all rows of ``tokens``."""
    everyone = [SOURCE_LANE, *lanes]
    forward = Forward(pair.spec, LaneWeights(pair, everyone), everyone, tokens.sequences, progress)
    comparison = Comparison(next_tokens(tokens.sequences), len(lanes))
    for reference, *others in forward.logits():
        comparison.add(reference, others)
    return [LaneResult(lane, bytes_per_weight(pair, lane), comparison.scores(i)) for i, lane in enumerate(lanes)]


def next_tokens(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """i64[T]: the token that follows each row in its sequence, -1 at the end."""
    return np.array([token for s in sequences for token in (*s[1:], -1)], np.int64)


def bytes_per_weight(pair: Pair, lane: Lane) -> float:
    """Stored bytes per weight of the main layers' matrices (no padding of records), embedding and head included."""
    n_bytes, n_values = 0.0, 0
    for role, (_, in_), n in main_matrices(pair):
        scheme = STORED[pair.container.precision[role]] if lane.is_stored else lane.scheme(role)
        n_values += n
        n_bytes += n * SCHEMES[scheme].bytes_per_weight(in_)
    return n_bytes / n_values


def main_matrices(pair: Pair) -> Iterator[tuple[str, tuple[int, int], int]]:
    """(role, shape of one matrix, values in all) of what the main layers are made of."""
    for item in pair.items.values():
        if item.kind != "vector" and not item.name.startswith(f"model.layers.{pair.spec.mtp_layer}."):
            out, in_ = item.shape
            yield item.role, (out, in_), item.stack * out * in_
    for layer, plan in pair.layers.items():
        if layer < pair.spec.n_layers:
            inner, hidden = plan.layout.inner, plan.layout.hidden
            yield "expert", (inner, hidden), 2 * plan.n_experts * inner * hidden
            yield "expert", (hidden, inner), plan.n_experts * inner * hidden
