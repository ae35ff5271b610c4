"""What ``StoreState`` hears (events) and what it has its shell do (instructions). Plain values; no behaviour.

Times are nanoseconds of one monotonic clock. Slots are numbered through all tiers; a *tier* is the memory of one expert engine
(``engines.py``). An event's number, its *stimulus*, stands in every instruction that it caused and in the stories of the
slots that it moved (``slots.py``), so that one can follow who did what and why.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shared.errors import ErrorCode
from shared.experts.residency import Key


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that has happened."""

    now_ns: int


class VisitBegan(Event, frozen=True, gc=False):
    """A layer's rows lie in the frame; which experts they want is not known yet."""

    step: int
    layer: int
    n_rows: int


class ExpertsChosen(Event, frozen=True, gc=False):
    """The gate's answer for the visit under way. ``rows``: expert, ascending -> how many rows want it.

    ``passing``: of those the ones that no decode row wants, with the share of the prompt's rows (0..1] that chose them.
    ``is_timed``: the visit counts in trials, being of decode rows alone in a group with a predictor.
    """

    step: int
    layer: int
    rows: Mapping[int, int]
    passing: Mapping[int, float]
    is_timed: bool = False


class Hinted(Event, frozen=True, gc=False):
    """The router guesses experts of a coming layer, the likeliest first; ``signal`` says from what."""

    step: int
    layer: int
    experts: tuple[int, ...]
    signal: int


class ReadLanded(Event, frozen=True, gc=False):
    """All of the expert lies in its slot and is as it was written; the drive worked on ``n_bytes`` from start to end."""

    slot: int
    generation: int
    start_ns: int
    end_ns: int
    n_bytes: int


class ReadFailed(ReadLanded, frozen=True, gc=False):
    """No copy of the record could be read; ``message`` is a sentence with numbers and remedy."""

    code: ErrorCode
    message: str


class ReadCancelled(ReadLanded, frozen=True, gc=False):
    """A read that was called off has ended: nothing writes into the slot any more."""


class Computed(Event, frozen=True, gc=False):
    """An engine has finished what ``Compute`` gave it; the results are written."""

    tier: int
    experts: tuple[int, ...]


class ComputeFailed(Computed, frozen=True, gc=False):
    """An engine could not compute these; the rows that want them can't go on."""

    code: ErrorCode
    message: str


class Free(Event, frozen=True, gc=False):
    """The shell has looked at all messages and would do a piece of work now."""


class VisitEnded(Event, frozen=True, gc=False):
    """The sum is handed on: the visit is over."""


class VisitAbandoned(Event, frozen=True, gc=False):
    """Nobody waits for this visit any more."""


class LeftBehind(Event, frozen=True, gc=False):
    """Before anything else: slots of ``tier`` with experts that an earlier process left whole. ``is_by_policy`` as below."""

    tier: int
    residents: Mapping[int, Key]
    is_by_policy: bool


class CapacityChanged(Event, frozen=True, gc=False):
    """``tier`` may use ``n_slots`` from now on. ``is_by_policy``: the policy says who leaves, else the highest numbers do.

    ``expected``: uses per step by experience, the warmest first: for a policy that starts now and for filling free slots.
    """

    tier: int
    n_slots: int
    is_by_policy: bool
    expected: Mapping[Key, float]


class Tick(Event, frozen=True, gc=False):
    """Some time has passed: several times a second."""


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """Something to do now, before the next instruction is asked for."""

    stimulus: int


class Read(Instruction, frozen=True, gc=False):
    """Bring ``key`` into the slot. ``is_speculative``: only while the drive has nothing else to do."""

    tier: int
    slot: int
    generation: int
    key: Key
    is_speculative: bool


class Promote(Instruction, frozen=True, gc=False):
    """The slot's read is waited for now."""

    tier: int
    slot: int


class Cancel(Instruction, frozen=True, gc=False):
    """Stop the slot's read as soon as possible; its end is still to be told."""

    tier: int
    slot: int


class GiveBack(Instruction, frozen=True, gc=False):
    """These slots hold nothing and are beyond the capacity: their memory goes back to where it came from."""

    tier: int
    slots: tuple[int, ...]


class Compute(Instruction, frozen=True, gc=False):
    """Run the experts, which lie in ``slots``, on the rows that want them. The slots stay as they are until it is done."""

    tier: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]


class ComputeShared(Instruction, frozen=True, gc=False):
    """Run the layer's shared expert on the rows from ``begin`` to ``end``, at once."""

    begin: int
    end: int


class Finish(Instruction, frozen=True, gc=False):
    """All parts are there: add them, hand the sum on, and say that the visit has ended."""


class FailExpert(Instruction, frozen=True, gc=False):
    """An expert can't be had. ``is_wanted``: the rows of the visit that want it end with this error."""

    key: Key
    code: ErrorCode
    message: str
    is_wanted: bool
    story: str


class SayWarmed(Instruction, frozen=True, gc=False):
    """The free slots were filled with what was used most: ``n_experts`` were read for that."""

    n_experts: int
