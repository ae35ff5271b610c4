"""Told to the drafter (besides Mixed of ``layer`` and StepAbandoned of ``attention``)."""

from __future__ import annotations

from shared.messages.base import Frame, Msg, Rows, Step


class DraftWanted(Msg, tag="draft_wanted", frozen=True, array_like=True, gc=False):
    """Router -> Drafter: absorb the pairs (token, final) of the frame, then draft ``n_drafts`` tokens per sequence.

    ``final`` holds the main model's normed hidden rows, ``token`` the token that followed each; ``logit_row`` the last
    row of each sequence, ``n_logits`` of them. Steps ``step`` .. ``step + n_drafts - 1`` belong to this draft.
    """

    step: Step
    frame: Frame
    n_rows: Rows
    n_logits: Rows
    n_sequences: Rows
    n_drafts: Rows


class EmbedReady(Msg, tag="embed_ready", frozen=True, array_like=True, gc=False):
    """Attention -> Drafter: ``embed`` is in the frame."""

    step: Step


class HeadReady(Msg, tag="head_ready", frozen=True, array_like=True, gc=False):
    """Attention -> Drafter: draft ``logits`` are in the frame."""

    step: Step
