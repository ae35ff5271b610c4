"""All rows in the trace-event format, for Perfetto or chrome://tracing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cli.profile.analysis import kind_name, stage_name
from shared.step.stages import NO_LAYER, Stage, unpack_found
from shared.wire.endpoints import SERVICES


def chrome_trace(rows: np.ndarray) -> dict[str, Any]:
    """All rows in the trace-event format (Perfetto, chrome://tracing): a process per service, reads on lanes of their own."""
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
    origin = int(rows["start_ns"][0]) if len(rows) else 0
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, int], str] = {}
    lanes: list[int] = []  # end of the last read on each lane
    for start, end, n_bytes, step, stage, layer, service in (row[:7] for row in rows.tolist()):
        track, name, args = 0, stage_name(stage), {"step": step}
        label = "work"
        if stage == Stage.STEP:
            track, label, name = 1, "steps", kind_name(layer)
            args["rows"] = n_bytes
        else:
            if layer != NO_LAYER:
                args["layer"] = layer
            if stage == Stage.UNION:
                args |= zip(("hits", "late_hits", "misses"), unpack_found(n_bytes), strict=True)
            elif n_bytes:
                args["bytes"] = n_bytes
        if stage == Stage.IO_READ:
            lane = next((i for i, busy_until in enumerate(lanes) if busy_until <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            track, label = 2 + lane, f"read {lane}"
        tracks.setdefault((service, track), label)
        events.append(
            {
                "ph": "X", "name": name, "cat": label.split()[0], "pid": service, "tid": track,
                "ts": (start - origin) / 1e3, "dur": (end - start) / 1e3, "args": args,
            }
        )  # fmt: skip
    return {"traceEvents": [*_track_names(tracks), *events], "displayTimeUnit": "ms"}


def _track_names(tracks: Mapping[tuple[int, int], str]) -> Iterable[dict[str, Any]]:
    for service in sorted({service for service, _ in tracks}):
        name = SERVICES[service] if 0 <= service < len(SERVICES) else f"service {service}"
        yield {"ph": "M", "name": "process_name", "pid": service, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": service, "tid": 0, "args": {"sort_index": service}}
    for (service, track), label in sorted(tracks.items()):
        yield {"ph": "M", "name": "thread_name", "pid": service, "tid": track, "args": {"name": label}}
