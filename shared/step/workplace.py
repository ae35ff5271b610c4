"""What every engine service works with: compute threads, the step frames, counters, a stage timer, segments. Closed as one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, TypeVar

from native.library import Pool
from shared.memory.segments import COUNTERS, FRAMES, Segment
from shared.step.counters import Counters
from shared.step.frame import Frame, FrameSet, frame_dims
from shared.step.stages import StepTimer
from shared.wire.endpoints import EXPERT_IO

if TYPE_CHECKING:
    from mmap import mmap

    from shared.model.spec import ModelSpec
    from shared.run.config import GroupConfig


class Closes(Protocol):
    """Anything that has to be closed."""

    def close(self) -> object: ...


Held = TypeVar("Held", bound=Closes)


class Workplace:
    """Opens what a service shares with the others of its group. ``keep`` adds what it alone holds; ``close`` gives back all,
    the last first."""

    def __init__(self, config: GroupConfig, service: str, spec: ModelSpec) -> None:
        self._run_id = config.run_id
        self._held = contextlib.ExitStack()
        self.pool = Pool(config.n_threads)
        self._held.callback(self.pool.close)
        self.frames = FrameSet(self.segment(FRAMES), frame_dims(config, spec), config.n_frames)
        cells = self.segment(COUNTERS)
        self.counters = Counters(cells, service)
        self.store_counters = Counters(cells, EXPERT_IO)
        """expert_io's, to be read."""
        self.timer = StepTimer(service)

    def frame(self, idx: int) -> Frame:
        return self.frames.frame(idx)

    def segment(self, name: str) -> mmap:
        """The bytes of a segment of this group, attached until ``close``."""
        return self.keep(Segment.attach(self._run_id, name)).buf

    def keep(self, held: Held) -> Held:
        """``held`` is closed with the workplace, before what was opened earlier."""
        self._held.callback(held.close)
        return held

    def close(self) -> None:
        self._held.close()
