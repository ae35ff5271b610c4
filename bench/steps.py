"""What a group's stage rows say about its steps: time of the MoE layers, time in which somebody computed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from shared.step.stages import COMPUTE, Stage, StepKind, unpack_found

OUTSIDE = frozenset({Stage.PLAN, Stage.EMBED, Stage.HEAD, Stage.DENSE_FFN, Stage.SAMPLE, Stage.STREAM})
"""Stages that belong to no MoE layer; every other one does unless its layer is a dense one."""
BESIDE = frozenset({Stage.PILOT, Stage.STREAM})
"""Stages nobody waits for."""


@dataclass(frozen=True)
class Steps:
    """The steps of one kind within a span. Times in ns, sums over the steps."""

    n_steps: int
    wall_ns: int
    """As the router measured them."""
    moe_ns: int
    """Without head, embedding, dense layers, planning and sampling."""
    compute_ns: int
    """In which at least one process computed: what the steps would take with every expert in memory, hops aside."""
    n_asked: dict[int, int] = field(default_factory=dict)
    """Layer -> distinct experts asked for, summed over the steps."""
    n_reads: dict[int, int] = field(default_factory=dict)
    """Layer -> reads of its experts that ended in these steps."""


def steps_of(
    rows: np.ndarray, kind: StepKind, dense_layers: Collection[int], begin_ns: int = 0, end_ns: int = 1 << 62,
    counting: Collection[Stage] = COMPUTE - BESIDE,
) -> Steps:  # fmt: skip
    """``rows``: of ``TraceRing``. Counts the steps that lie wholly between the two times. ``counting``: what is computing."""
    is_step = (rows["stage"] == Stage.STEP) & (rows["layer"] == kind)
    is_step &= (rows["start_ns"] >= begin_ns) & (rows["end_ns"] <= end_ns)
    steps = rows[is_step]
    work = rows[np.isin(rows["step"], steps["step"]) & (rows["stage"] != Stage.STEP)]
    wall = int((steps["end_ns"] - steps["start_ns"]).sum())
    outside = np.isin(work["stage"], list(OUTSIDE)) | np.isin(work["layer"], list(dense_layers))
    # A dense layer's rows and a stage without layer follow one another: nothing of them overlaps.
    outside_ns = int((work["end_ns"] - work["start_ns"])[outside].sum())
    computing = work[np.isin(work["stage"], list(counting))]
    asked: Counter[int] = Counter()
    for row in work[work["stage"] == Stage.UNION]:
        asked[int(row["layer"])] += sum(unpack_found(int(row["bytes"])))
    reads = Counter(work["layer"][work["stage"] == Stage.IO_READ].tolist())
    return Steps(
        len(steps), wall, max(0, wall - outside_ns), _covered_ns(computing), dict(sorted(asked.items())),
        dict(sorted(reads.items())),
    )  # fmt: skip


def _covered_ns(rows: np.ndarray) -> int:
    """Length of the union of the rows' intervals."""
    order = np.argsort(rows["start_ns"], kind="stable")
    starts, ends = rows["start_ns"][order], rows["end_ns"][order]
    if not len(starts):
        return 0
    until = np.maximum.accumulate(ends)
    from_ = np.maximum(starts[1:], until[:-1])
    return int(ends[0] - starts[0] + np.maximum(0, ends[1:] - from_).sum())
