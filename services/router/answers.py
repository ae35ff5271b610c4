"""What a request hears: accepted or refused, its tokens, its one final answer. Keeps the counters and log lines of requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from native.sampling import log_softmax
from services.router.scheduler import Advance
from services.router.sequences import Sequence
from services.router.text_stream import PieceOf
from shared.errors import Refused
from shared.log import Log
from shared.messages.gateway import FinishReason, RequestAccepted, RequestDone, RequestRefused, TokenLogprob, TokenOut
from shared.messages.router import Submit
from shared.step.counters import Counters
from shared.wire.endpoints import GATEWAY
from shared.wire.protocols import Posts

COUNTERS = {FinishReason.ERROR: "failed", FinishReason.ABORT: "aborted"}


class Answers:
    """Everything the router tells the gateway about requests."""

    def __init__(self, bus: Posts, counters: Counters, log: Log, piece_of: PieceOf | None) -> None:
        self._bus = bus
        self._counters = counters
        self._log = log
        self._piece_of = piece_of

    def refused(self, request: str, refusal: Refused) -> None:
        self._counters.add("refused", 1)
        words = RequestRefused(request, refusal.status, refusal.code, str(refusal), refusal.param)
        self._bus.post(GATEWAY, words)

    def accepted(self, msg: Submit, sequence: Sequence) -> None:
        self._counters.add("requests", 1)
        self._counters.add("prompt_tokens", sequence.n_prompt)
        prompt_ids = tuple(sequence.tokens[: sequence.n_prompt]) if msg.want_prompt_ids else ()
        self._bus.post(GATEWAY, RequestAccepted(msg.request, sequence.n_prompt, sequence.max_tokens, prompt_ids))
        self._log.info(
            "request",
            request=msg.request,
            n_prompt=sequence.n_prompt,
            max_tokens=sequence.max_tokens,
            resumed=len(msg.resume_ids),
        )

    def deliver(self, advances: Iterable[Advance], logits: NDArray[np.float32]) -> None:
        """The new tokens of a finished step; logits f32[L, V] are the step's."""
        for advance in advances:
            self._counters.add("tokens", len(advance.new_tokens))
            if advance.span.n_rows > 1 and not advance.span.is_prefill:
                self._counters.add("drafts", advance.span.n_rows - 1)
                self._counters.add("accepted", advance.n_accepted)
            if advance.new_tokens:
                self._bus.post(GATEWAY, self._token_out(advance, logits))

    def _token_out(self, advance: Advance, logits: NDArray[np.float32]) -> TokenOut:
        sequence, tokens = advance.sequence, tuple(advance.new_tokens)
        first = sequence.n_generated - len(tokens)
        logprobs: tuple[TokenLogprob, ...] = ()
        if sequence.n_logprobs is not None:
            begins = sequence.text.begins_with_first
            logprobs = tuple(
                self._logprob(logits[row], token, sequence.n_logprobs, begins and idx == 0)
                for idx, (row, token) in enumerate(zip(advance.logit_rows, tokens, strict=True), first)
            )
        return TokenOut(sequence.request, first, tokens, advance.text, logprobs)

    def _logprob(self, logits: NDArray[np.float32], token: int, n_top: int, is_start: bool) -> TokenLogprob:
        values = np.empty(len(logits), np.float32)
        log_softmax(logits, values)
        top: tuple[tuple[int, float, bytes], ...] = ()
        if n_top:
            n_top = min(n_top, len(values))
            best = np.argpartition(-values, n_top - 1)[:n_top]
            ordered = sorted(best.tolist(), key=lambda t: (-values[t], t))
            top = tuple((t, float(values[t]), self._piece(t, is_start)) for t in ordered)
        return TokenLogprob(token, float(values[token]), self._piece(token, is_start), top)

    def _piece(self, token: int, is_start: bool) -> bytes:
        return self._piece_of(token, is_start) if self._piece_of else b""

    def left(self, msg: Submit, reason: str) -> None:
        """The client left before its prompt was read."""
        self._counters.add("aborted", 1)
        self._bus.post(GATEWAY, RequestDone(msg.request, FinishReason.ABORT, 0, len(msg.resume_ids)))
        self._log.info("request_done", request=msg.request, reason=FinishReason.ABORT, code=reason, n_generated=0)

    def done(self, sequence: Sequence) -> None:
        """The one final answer."""
        error = sequence.error
        reason = FinishReason.ERROR if error else sequence.finish_reason
        assert reason is not None, "nothing ends without a reason"
        self._counters.add(COUNTERS.get(reason, "finished"), 1)
        self._bus.post(
            GATEWAY,
            RequestDone(
                sequence.request,
                reason,
                sequence.n_prompt,
                sequence.n_generated,
                error_code=error.code if error else None,
                error=error.message if error else "",
                n_draft=sequence.n_drafted,
                n_accepted=sequence.n_accepted,
            ),
        )
        self._log.info(
            "request_done",
            request=sequence.request,
            reason=reason,
            code=error.code if error else "",
            n_generated=sequence.n_generated,
            drafts=sequence.n_drafted,
            accepted=sequence.n_accepted,
        )
