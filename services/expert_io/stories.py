"""What happened to slots: the latest moves of all of them, with the events that caused them."""

from __future__ import annotations

from collections import deque

from services.expert_io.events import Event, ExpertsChosen, Hinted
from services.expert_io.states import SlotState
from shared.experts.residency import Key

N_MOVES = 4096
"""Moves of slots that stories are told from, the latest of all slots together."""
N_TOLD = 8
"""Moves of one slot that a log line or an error tells."""
N_SHOWN = 64
"""Moves of one slot that ``colibri ram --slot`` shows."""


class Stories:
    """A ring of moves. ``add`` is on the path of every layer: one tuple and no more."""

    def __init__(self) -> None:
        self.moves: deque[tuple[int, Event | None, int, SlotState, Key | None]] = deque(maxlen=N_MOVES)
        """(number of the event, the event, slot, its new state, its expert), the latest last"""
        self.add = self.moves.append

    def tell(self, index: int, now_ns: int) -> list[str]:
        """The moves of one slot, the oldest first, a line each."""
        lines = []
        for stimulus, cause, at, to, key in self.moves:
            if at == index:
                who = "" if key is None else f", expert {key[1]} of layer {key[0]}"
                ago = f" {(now_ns - cause.now_ns) / 1e6:.3f} ms before" if cause else ""
                lines.append(f"#{stimulus}{ago} {name_of(cause)}: {to.name}{who}")
        return lines


def name_of(cause: Event | None) -> str:
    if cause is None:
        return "start"
    where = f" of step {cause.step} layer {cause.layer}" if isinstance(cause, ExpertsChosen | Hinted) else ""
    return type(cause).__name__ + where
