"""Sequences: what a request has become inside the router. Pure: no sockets, no arrays.

Owns the token list of each request, how far the KV cache follows it, and the rules that end it. Does not know how
tokens are computed, nor who asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.text_stream import TextStream
from shared.errors import ErrorCode
from shared.messages.gateway import FinishReason
from shared.messages.router import Sampling


@dataclass(frozen=True)
class Fault:
    """Why a row has no true result, or a request no further token: a code for programs and a sentence for people."""

    code: ErrorCode
    message: str


@dataclass(eq=False)
class Sequence:
    """One request in progress. ``tokens`` = prompt and answer; the KV cache holds the first ``n_cached`` of them."""

    request: str
    n_prompt: int
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    text: TextStream
    eos_ids: frozenset[int] = frozenset()
    n_logprobs: int | None = None
    n_cached: int = 0
    drafts: list[int] = field(
        default_factory=list
    )  # guesses of the tokens behind the newest; whoever has some puts them here
    blocks: list[int] = field(default_factory=list)
    state: int = -1  # which of the group's states is its own while it runs
    n_drafted: int = 0
    n_accepted: int = 0
    error: Fault | None = None
    finish_reason: FinishReason | None = None

    @property
    def is_over(self) -> bool:
        """No further token will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def is_prefilling(self) -> bool:
        """More than the newest token is missing from the cache."""
        return self.n_cached < len(self.tokens) - 1

    def append(self, token: int) -> str:
        """Take one sampled token; returns the text to send and sets ``finish_reason`` when it was the last."""
        self.tokens.append(token)
        if token in self.eos_ids:
            self.finish_reason = FinishReason.STOP
            return self.text.finish()
        out = self.text.push(token)
        if self.text.is_stopped:
            self.finish_reason = FinishReason.STOP
        elif self.n_generated >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
            out += self.text.finish()
            if self.text.is_stopped:
                self.finish_reason = FinishReason.STOP
        return out
