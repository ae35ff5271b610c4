"""Per-layer messages with more than one possible receiver: the ring itself. Each is below 64 bytes."""

from __future__ import annotations

from shared.messages.base import Frame, Layer, Msg, Rows, Step


class HiddenReady(Msg, tag="hidden_ready", frozen=True, array_like=True, gc=False):
    """Attention or Drafter -> Router and ExpertIO: ``hidden`` of this layer is in the frame."""

    step: Step
    layer: Layer
    frame: Frame
    n_rows: Rows


class Mixed(Msg, tag="mixed", frozen=True, array_like=True, gc=False):
    """ExpertIO -> Attention or Drafter (who sent the layer's HiddenReady): ``mixed`` of this layer is in the frame."""

    step: Step
    layer: Layer
    frame: Frame


class LayerFailed(Msg, tag="layer_failed", frozen=True, array_like=True, gc=False):
    """ExpertIO or Attention or Drafter -> Router: the step can't go on; ``row`` names the culprit, -1 = every row."""

    step: Step
    layer: int
    row: int
    code: str
    message: str
