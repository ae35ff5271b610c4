"""What ``colibri quality`` found, as lines of text and as plain values for JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cli.quality.errors import ErrorReport
from cli.quality.measure import LaneResult, Quality
from cli.quality.schemes import SCHEMES
from cli.show import Column, Table, plain_lines

TABLES = {
    "model": "The container as the engine runs it",
    "formats": "Formats of experts, FFN and attention (embedding and head int8 per row, where weights are rounded)",
    "roles": "One role rounded, everything else f32",
    "changes": "Single changes of the default (int4-gs64, embedding and head int8, int8 activations)",
}


def format_report(quality: Quality) -> list[str]:
    """The report as lines."""
    return plain_lines(parts_of(quality))


def parts_of(quality: Quality) -> list[str | Table]:
    """The report for ``show``."""
    pair = quality.pair
    lines: list[str | Table] = [
        f"container {pair.container.path}: {', '.join(f'{r} {f}' for r, f in pair.container.precision.items())}",
        f"source    {pair.source.source}: {pair.spec.family}, {pair.n_values:,} values; the container takes "
        f"{pair.bytes_per_weight():.3f} bytes for each",
    ]
    if quality.errors is not None:
        lines += ["", *_format_errors(quality.errors)]
    if quality.lanes is not None and quality.tokens is not None:
        tokens = quality.tokens
        lines += [
            "",
            f"Logits over {tokens.n:,} tokens in {len(tokens.sequences)} sequences of {tokens.what}, against the source in "
            "f32.",
            "KL(source || lane) in nats; loss: change of -log p of the next token (paired); ± one standard error.",
        ]
        for table, title in TABLES.items():
            rows = [result for result in quality.lanes if result.lane.table == table]
            if rows:
                lines += ["", title, _format_lanes(rows)]
    return lines


def _format_errors(errors: ErrorReport) -> list[str | Table]:
    rows: list[tuple[str, ...]] = [("role", "format", "tensors", "values", "relative error", "largest error")]
    for (role, fmt), sums in errors.roles.items():
        rows.append(
            (
                role,
                fmt,
                f"{sums.n_tensors:,}",
                f"{sums.n_values:,}",
                f"{sums.relative:.5f}",
                f"{sums.largest_error:.3g}",
            )
        )
    lines: list[str | Table] = [
        "Tensor errors: RMS of the difference over RMS of the source, and the largest difference",
        align(rows, 2),
    ]
    if all(sums.relative == 0.0 for sums in errors.roles.values()):
        return [*lines, "All tensors are exact."]
    if not errors.worst:
        return lines
    rows = [("worst tensors", "format", "relative error", "largest error")]
    for worst in errors.worst:
        rows.append((worst.name, worst.format, f"{worst.sums.relative:.5f}", f"{worst.sums.largest_error:.3g}"))
    return [*lines, "", align(rows, 2)]


def _format_lanes(results: Sequence[LaneResult]) -> Table:
    rows = [("lane", "activations", "bytes/weight", "KL mean", "KL p99", "top-1", "perplexity", "loss")]
    rows.append(
        ("source", "f32", f"{SCHEMES['f32'].bytes_per_weight(1):.3f}", "0", "0", "100%",
         f"{results[0].scores.perplexity_of_source:.4f}", "0")
    )  # fmt: skip
    for result in results:
        s = result.scores
        rows.append(
            (
                result.lane.name,
                result.lane.activations,
                f"{result.bytes_per_weight:.3f}",
                f"{s.kl_mean:.5f} ± {s.kl_error:.5f}",
                f"{s.kl_p99:.4f}",
                f"{100 * s.top1:.2f}%",
                f"{s.perplexity:.4f}",
                f"{s.loss_change:+.5f} ± {s.loss_change_error:.5f}",
            )
        )
    return align(rows, 2)


def align(rows: Sequence[Sequence[str]], n_left: int) -> Table:
    """The first row is the head; the first ``n_left`` columns are words, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    columns = [Column(title, widths[i], i >= n_left, "  " if i else "") for i, title in enumerate(rows[0])]
    return Table(columns, rows[1:])


def as_json(quality: Quality) -> dict[str, Any]:
    """Everything as plain values; a number that is none (no next token) is null."""
    pair = quality.pair
    found: dict[str, Any] = {
        "model": str(pair.container.path),
        "source": str(pair.source.source),
        "fingerprint": pair.container.fingerprint,
        "precision": pair.container.precision,
        "n_values": pair.n_values,
        "bytes_per_weight": pair.bytes_per_weight(),
    }
    if quality.errors is not None:
        found["errors"] = {
            "roles": [
                {"role": role, "format": fmt, "n_tensors": s.n_tensors, "n_values": s.n_values, "relative": s.relative,
                 "rms": s.rms, "largest": s.largest_error}
                for (role, fmt), s in quality.errors.roles.items()
            ],
            "worst": [
                {"name": w.name, "role": w.role, "format": w.format, "relative": w.sums.relative,
                 "largest": w.sums.largest_error}
                for w in quality.errors.worst
            ],
        }  # fmt: skip
    if quality.lanes is not None and quality.tokens is not None:
        found["text"] = {
            "what": quality.tokens.what,
            "n_tokens": quality.tokens.n,
            "n_sequences": len(quality.tokens.sequences),
        }
        found["kv_dtype"] = quality.kv_dtype
        found["lanes"] = [
            {
                "table": result.lane.table,
                "name": result.lane.name,
                "formats": dict(result.lane.formats),
                "int8_inputs": sorted(result.lane.int8_inputs),
                "kv_dtype": result.lane.kv_dtype,
                "bytes_per_weight": result.bytes_per_weight,
                **asdict(result.scores),
            }
            for result in quality.lanes
        ]
    plain: dict[str, Any] = _without_nan(found)
    return plain


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
