"""Per-layer messages with more than one possible receiver: the ring itself. Each is below 64 bytes, but for sentences."""

from __future__ import annotations

from shared.errors import ErrorCode
from shared.messages.base import Frame, Layer, Msg, Rows, Step

EMBEDDING = -1
"""In ``LayerFailed.layer``: the embedding, before the first layer."""


class HiddenReady(Msg, tag="hidden_ready", frozen=True, array_like=True, gc=False):
    """Attention or Drafter -> Router and ExpertIO: ``hidden`` of this layer is in the frame."""

    step: Step
    layer: Layer
    frame: Frame
    n_rows: Rows


class Mixed(Msg, tag="mixed", frozen=True, array_like=True, gc=False):
    """ExpertIO -> Attention or Drafter (who sent the layer's HiddenReady): ``mixed`` of this layer is in the frame.

    ``n_faults``: the LayerFailed messages that the router gets because of this layer.
    """

    step: Step
    layer: Layer
    frame: Frame
    n_faults: int = 0


class LayerFailed(Msg, tag="layer_failed", frozen=True, array_like=True, gc=False):
    """ExpertIO or Attention or Drafter -> Router: rows of this step have no true result from this layer on.

    ``rows`` names them; the step goes on for the others. None named: the step as a whole can't go on.
    """

    step: Step
    layer: int
    rows: tuple[Rows, ...]
    code: ErrorCode
    message: str
