"""Sequences and their text: what a request has become inside the router. Pure: no sockets, no arrays.

Owns the token list of each request, how far the KV cache follows it, and the rules that end it. Does not know how
tokens are computed, nor who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

REPLACEMENT = "\ufffd"
NO_DRAFTS = -1
"""In ``n_mtp``: the drafter's cache has a gap, or there is no drafter; this sequence goes on without drafts."""


class TextStream:
    """Turns a growing list of token ids into text that may be sent: whole characters, no part of a stop string.

    ``decode(ids)`` gives the text of a list of ids. A character split over tokens waits for its last byte; text that
    could be the beginning of a stop string waits until that is ruled out. ``finish`` flushes what is left.
    """

    def __init__(self, decode: Callable[[SequenceOf[int]], str] | None, stop: SequenceOf[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._prefix = 0  # first id of the decoding window
        self._read = 0  # ids whose text is in _held or sent
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Text that this token completed and that may be sent."""
        self._ids.append(token)
        if self._decode is None or self.is_stopped:
            return ""
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        # Both ends of the window stand between characters: text was released only where none was split.
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """The rest: an unfinished character as one replacement character, text held back for a stop string."""
        if self._decode is None or self.is_stopped:
            return ""
        before = self._decode(self._ids[self._prefix : self._read])
        tail = self._decode(self._ids[self._prefix :])[len(before) :]
        self._read = len(self._ids)
        if tail.endswith(REPLACEMENT):
            tail = tail.rstrip(REPLACEMENT) + REPLACEMENT
        text = self._release(tail)
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        cut = min((i for i in (text.find(s) for s in self._stop) if i >= 0), default=-1)
        if cut >= 0:
            self.is_stopped = True
            self._held = ""
            return text[:cut]
        keep = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:n]):
                    keep = n
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


@dataclass
class SamplingParams:
    """How one sequence chooses its tokens; see docs/numerics.md."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Sequence:
    """One request in progress. ``tokens`` = prompt and answer; the KV cache holds the first ``n_cached`` of them."""

    request: str
    n_prompt: int
    tokens: list[int]
    max_tokens: int
    sampling: SamplingParams
    text: TextStream
    eos_ids: frozenset[int] = frozenset()
    n_logprobs: int | None = None
    n_cached: int = 0
    n_mtp: int = 0  # pairs that the drafter has absorbed without a gap
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    n_drafted: int = 0
    n_accepted: int = 0
    error: tuple[str, str] | None = None  # (code, message): ends the sequence when its step is over
    finish_reason: str = ""

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
            self.finish_reason = "stop"
            return self.text.finish()
        out = self.text.push(token)
        if self.text.is_stopped:
            self.finish_reason = "stop"
        elif self.n_generated >= self.max_tokens:
            self.finish_reason = "length"
            out += self.text.finish()
            if self.text.is_stopped:
                self.finish_reason = "stop"
        return out
