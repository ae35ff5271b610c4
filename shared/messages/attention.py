"""Told to attention."""

from __future__ import annotations

from shared.messages.base import Frame, Msg, Rows, Step


class StepPlan(Msg, tag="step_plan", frozen=True, array_like=True, gc=False):
    """Router -> Attention: rows, positions and block tables of one step are in the frame; run all layers.

    A newer plan replaces an unfinished older one (the router replays a step after a peer was lost).
    """

    step: Step
    frame: Frame
    n_rows: Rows
    n_logits: Rows
    n_sequences: Rows
    want_final: bool = False


class EmbedWanted(Msg, tag="embed_wanted", frozen=True, array_like=True, gc=False):
    """Drafter -> Attention: write ``embed`` for the frame's tokens, answer EmbedReady."""

    step: Step
    frame: Frame
    n_rows: Rows


class HeadWanted(Msg, tag="head_wanted", frozen=True, array_like=True, gc=False):
    """Drafter -> Attention: ``final`` holds normed rows; write ``logits`` for ``logit_row``, answer HeadReady."""

    step: Step
    frame: Frame
    n_logits: Rows


class StepAbandoned(Msg, tag="step_abandoned", frozen=True, array_like=True, gc=False):
    """Router -> Attention, ExpertIO, Drafter: forget every step below ``before``; its frame is reused."""

    before: Step
