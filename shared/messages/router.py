"""Told to the router (besides HiddenReady and LayerFailed of ``layer``, and the control messages)."""

from __future__ import annotations

from shared.messages.base import Frame, Layer, Msg, Rows, Step, TokenId

MAX_TEMPERATURE = 2.0
SAMPLING_RANGES = {"temperature": (0.0, MAX_TEMPERATURE), "top_p": (0.0, 1.0)}
SEED_RANGE = (-(1 << 63), (1 << 64) - 1)
"""What a client may ask for; as ``Sampling`` a negative seed is the unsigned number of the same 64 bits."""


class Sampling(Msg, frozen=True, array_like=True, gc=False):
    """How tokens are chosen. Random numbers belong to (seed, position), see docs/numerics.md."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Submit(Msg, tag="submit", frozen=True, array_like=True, gc=False):
    """Gateway -> Router: a request. Gets TokenOut messages and then exactly one RequestDone or RequestRefused.

    Exactly one of ``messages_json`` (chat, rendered by the checkpoint's template), ``prompt`` (text) and ``prompt_ids``
    is set. ``resume_ids`` are tokens already delivered: after the loss of a router the gateway submits again and the
    answer goes on behind them. Their text was delivered with them. ``router`` is the incarnation this is meant for (0: any):
    what was sent to a dead router may lie in the socket of the next one, which is asked again once it is known.
    """

    request: str
    sampling: Sampling
    max_tokens: int | None = None
    messages_json: bytes | None = None
    prompt: str | None = None
    prompt_ids: tuple[TokenId, ...] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n_logprobs: int | None = None
    resume_ids: tuple[TokenId, ...] = ()
    template_kwargs_json: bytes | None = None
    want_prompt_ids: bool = False
    router: int = 0


class Abort(Msg, tag="abort", frozen=True, array_like=True, gc=False):
    """Gateway -> Router: nobody waits for this request any more."""

    request: str
    reason: str


class LogitsReady(Msg, tag="logits_ready", frozen=True, array_like=True, gc=False):
    """Attention -> Router: ``logits`` (and ``final`` when asked) of a finished step are in the frame.

    ``n_faults``: the LayerFailed messages of this step. They come from others and may be late: wait for so many.
    """

    step: Step
    n_faults: int = 0


class InputReady(Msg, tag="input_ready", frozen=True, array_like=True, gc=False):
    """Attention -> Router: ``layer_input`` of a MoE layer is in the frame, its attention begins. Droppable: for PILOT alone."""

    step: Step
    layer: Layer
    frame: Frame
    n_rows: Rows


class DraftReady(Msg, tag="draft_ready", frozen=True, array_like=True, gc=False):
    """Drafter -> Router: drafted tokens, one tuple per sequence in the order of ``logit_row``."""

    step: Step
    tokens: tuple[tuple[TokenId, ...], ...]
