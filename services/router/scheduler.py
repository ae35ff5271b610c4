"""The scheduler: which rows run in the next step, and what a finished step means. Pure: requests in, plans out.

Owns the waiting and running sequences and the KV blocks. One step holds the decode rows of every running sequence
(the newest token and its drafts) and at most one prefill chunk. Promise: a row's tokens never depend on its
neighbours, so any plan gives the same text; plans decide speed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.router.sequences import Sequence
from shared.model.kv_layout import blocks_for


class BlockPool:
    """Free KV blocks, lowest number first so that a small group touches little memory."""

    def __init__(self, n_blocks: int) -> None:
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        assert n <= len(self._free)
        return [self._free.pop() for _ in range(n)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)
        self._free.sort(reverse=True)


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence in a step. ``rows[first .. first + n)`` stand at ``position`` and on."""

    sequence: Sequence
    table_row: int
    first: int
    tokens: tuple[int, ...]
    position: int
    logit_first: int  # index of the first wanted logit row, -1 = none
    n_logits: int  # the span's last n_logits rows have logits
    is_prefill: bool

    @property
    def n_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """One step."""

    spans: tuple[Span, ...]
    n_rows: int
    n_logits: int
    is_prefill: bool

    @property
    def n_prefill(self) -> int:
        """The rows of the prompt chunk; they are the last ones."""
        return self.spans[-1].n_rows if self.is_prefill else 0


@dataclass
class Advance:
    """What a finished step did to one sequence."""

    sequence: Sequence
    span: Span
    new_tokens: list[int] = field(default_factory=list)
    text: str = ""
    n_kept_rows: int = 0  # rows of the span that stand in the cache for good
    logit_rows: list[int] = field(default_factory=list)  # row of ``logits`` behind each new token


class Scheduler:
    """Admits sequences while blocks last, plans steps, applies results."""

    def __init__(
        self,
        n_blocks: int,
        max_sequences: int,
        prefill_chunk: int,
        max_rows: int,
        max_logits: int,
        max_waiting: int,
        all_logits: bool = False,
    ) -> None:
        self._pool = BlockPool(n_blocks)
        self._max_sequences = max_sequences
        self._prefill_chunk = prefill_chunk
        self._max_rows = max_rows
        self._max_logits = max_logits
        self._max_waiting = max_waiting
        self._all_logits = all_logits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """No place to wait in."""
        return len(self.waiting) >= self._max_waiting

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._admit()

    def find(self, request: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request == request), None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks; the caller has made sure that no step in flight uses it."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            # Blocks for the longest possible answer are reserved, so a running sequence never meets a full cache.
            n = blocks_for(sequence.n_prompt + sequence.max_tokens)
            if n > self._pool.n_free:
                return
            self.waiting.popleft()
            sequence.blocks = self._pool.take(n)
            self.running.append(sequence)

    # -- steps -----------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nothing runs."""
        spans: list[Span] = []
        n_rows = n_logits = 0

        def add(sequence: Sequence, tokens: list[int], wanted: int, is_prefill: bool) -> None:
            nonlocal n_rows, n_logits
            spans.append(
                Span(
                    sequence,
                    len(spans),
                    n_rows,
                    tuple(tokens),
                    sequence.n_cached,
                    n_logits if wanted else -1,
                    wanted,
                    is_prefill,
                )
            )
            n_rows += len(tokens)
            n_logits += wanted

        for sequence in self.running:
            if sequence.is_prefilling:
                continue
            room = min(self._max_rows - n_rows, self._max_logits - n_logits)
            if room < 1:
                continue
            # A draft beyond the last token that may be generated would be wasted.
            left = sequence.max_tokens - sequence.n_generated - 1
            drafts = sequence.drafts[: max(0, min(left, room - 1))]
            add(sequence, [sequence.tokens[-1], *drafts], 1 + len(drafts), False)
        is_prefill = False
        for sequence in self.running:
            if not sequence.is_prefilling:
                continue
            room = min(self._prefill_chunk, self._max_rows - n_rows)
            if self._all_logits:
                room = min(room, self._max_logits - n_logits)
            if room < 1 or self._max_logits - n_logits < 1:
                break
            tokens = sequence.tokens[sequence.n_cached : sequence.n_cached + room]
            reaches_end = sequence.n_cached + len(tokens) == len(sequence.tokens)
            add(sequence, tokens, len(tokens) if self._all_logits else int(reaches_end), True)
            is_prefill = True
            break
        if not spans:
            return None
        return Plan(tuple(spans), n_rows, n_logits, is_prefill)

    def complete(self, plan: Plan, choose: Callable[[Sequence, int, int], int]) -> list[Advance]:
        """Apply a finished step. ``choose(sequence, logit_row, position)`` samples the token of ``position``.

        A draft row counts only while every earlier draft of its span equals the token chosen there.
        """
        out = []
        for span in plan.spans:
            sequence = span.sequence
            if sequence not in self.running:
                continue  # aborted while the step ran
            advance = Advance(sequence, span)
            out.append(advance)
            if sequence.error is not None:
                continue
            if span.is_prefill:
                advance.n_kept_rows = span.n_rows
                sequence.n_cached += span.n_rows
                if sequence.n_cached == len(sequence.tokens):
                    self._take(advance, span.logit_first + span.n_logits - 1, choose)
                continue
            drafts = span.tokens[1:]
            sequence.n_drafted += len(drafts)
            for i in range(span.n_rows):
                sequence.n_cached += 1
                advance.n_kept_rows += 1
                token = self._take(advance, span.logit_first + i, choose)
                if sequence.finish_reason or i == len(drafts) or token != drafts[i]:
                    break
                sequence.n_accepted += 1
            sequence.drafts = []
        return out

    @staticmethod
    def _take(advance: Advance, logit_row: int, choose: Callable[[Sequence, int, int], int]) -> int:
        sequence = advance.sequence
        token = choose(sequence, logit_row, len(sequence.tokens))
        advance.text += sequence.append(token)
        advance.new_tokens.append(token)
        advance.logit_rows.append(logit_row)
        return token
