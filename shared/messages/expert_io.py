"""Told to expert_io (besides HiddenReady of ``layer`` and StepAbandoned of ``attention``)."""

from __future__ import annotations

from shared.messages.base import Frame, Layer, Msg, Rows, Step

NEXT_LAYER, OWN_INPUT = 0, 1
"""What a guess was made from: the state of the layer before, or, later and better, the layer's own input."""


class ExpertsWanted(Msg, tag="experts_wanted", frozen=True, array_like=True, gc=False):
    """Router -> ExpertIO: gate_id and gate_weight of one layer are in the frame; run the batch-union.

    The last ``n_prefill`` rows belong to a prompt: what only they want must not push out what others decode with.
    """

    step: Step
    layer: Layer
    frame: Frame
    n_rows: Rows
    n_prefill: Rows = 0


class PilotHint(Msg, tag="pilot_hint", frozen=True, array_like=True, gc=False):
    """Router -> ExpertIO: these experts of a coming layer are likely, most likely first. Droppable."""

    step: Step
    layer: Layer
    experts: tuple[int, ...]
    signal: int = 0
