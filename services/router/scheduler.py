"""The scheduler: which rows run in the next step, and what a finished step means. Pure: requests in, plans out.

Owns the waiting and running sequences, the KV blocks and the states. One step holds the decode rows of every running sequence
(the newest token and its drafts) and at most one prefill chunk. Promise: a row's tokens never depend on its
neighbours, so any plan gives the same text; plans decide speed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.router.sequences import Fault, Sequence
from shared.model.kv_layout import blocks_for


class BlockPool:
    """Free KV blocks (or states), lowest number first so that a small group touches little memory."""

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


@dataclass(slots=True)
class Span:
    """Consecutive rows of one sequence in a step. ``rows[first .. first + n)`` stand at ``position`` and on. Where they lie
    in the step ``MainPlan.of`` fills in."""

    sequence: Sequence
    tokens: tuple[int, ...]
    position: int
    n_logits: int  # the span's last n_logits rows have logits
    is_prefill: bool
    table_row: int = 0
    first: int = 0
    logit_first: int = -1  # index of the first wanted logit row, -1 = none

    @property
    def n_rows(self) -> int:
        return len(self.tokens)

    @property
    def has_drafts(self) -> bool:
        return not self.is_prefill and len(self.tokens) > 1

    def without_drafts(self) -> Span:
        """A span of the rows whose tokens are certain."""
        return replace(self, tokens=self.tokens[:1], n_logits=1) if self.has_drafts else replace(self)


@dataclass(frozen=True)
class MainPlan:
    """One step of the main model: its rows, span by span."""

    spans: tuple[Span, ...]
    n_rows: int
    n_logits: int

    @classmethod
    def of(cls, spans: Iterable[Span]) -> MainPlan:
        """The spans, which are the plan's from now on, one behind the other; a prompt chunk must be the last."""
        placed = tuple(spans)
        n_rows = n_logits = 0
        for table_row, span in enumerate(placed):
            span.table_row, span.first, span.logit_first = table_row, n_rows, n_logits if span.n_logits else -1
            n_rows += span.n_rows
            n_logits += span.n_logits
        return cls(placed, n_rows, n_logits)

    @property
    def is_prefill(self) -> bool:
        """A prompt chunk is in it."""
        return bool(self.spans) and self.spans[-1].is_prefill

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
    n_accepted: int = 0  # drafts that were right
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
        all_logits: bool = False,
    ) -> None:
        self._pool = BlockPool(n_blocks)
        self._states = BlockPool(max_sequences)
        self._max_sequences = max_sequences
        self._prefill_chunk = prefill_chunk
        self._max_rows = max_rows
        self._max_logits = max_logits
        self._all_logits = all_logits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    # -- requests --------------------------------------------------------------------------------------------

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
            self._states.give_back([sequence.state])
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
            [sequence.state] = self._states.take(1)
            self.running.append(sequence)

    # -- steps -----------------------------------------------------------------------------------------------

    def plan(self) -> MainPlan | None:
        """The next step, or None when nothing runs."""
        spans: list[Span] = []
        n_rows = n_logits = 0
        for sequence in self.running:
            if sequence.is_prefilling:
                continue
            room = min(self._max_rows - n_rows, self._max_logits - n_logits)
            if room < 1:
                continue
            # A draft beyond the last token that may be generated would be wasted.
            left = sequence.max_tokens - sequence.n_generated - 1
            drafts = sequence.drafts[: max(0, min(left, room - 1))]
            tokens = (sequence.tokens[-1], *drafts)
            spans.append(Span(sequence, tokens, sequence.n_cached, len(tokens), is_prefill=False))
            n_rows += len(tokens)
            n_logits += len(tokens)
        for sequence in self.running:
            if not sequence.is_prefilling:
                continue
            room = min(self._prefill_chunk, self._max_rows - n_rows)
            if self._all_logits:
                room = min(room, self._max_logits - n_logits)
            if room < 1 or self._max_logits - n_logits < 1:
                break
            tokens = tuple(sequence.tokens[sequence.n_cached : sequence.n_cached + room])
            reaches_end = sequence.n_cached + len(tokens) == len(sequence.tokens)
            n_wanted = len(tokens) if self._all_logits else int(reaches_end)
            spans.append(Span(sequence, tokens, sequence.n_cached, n_wanted, is_prefill=True))
            break
        return MainPlan.of(spans) if spans else None

    def again(self, plan: MainPlan, *, is_apart: bool) -> list[MainPlan]:
        """What of a step that came to nothing has to run again: without drafts, of which one may be the reason, and, when
        ``is_apart``, each sequence in a step of its own, so that it suffers from itself alone."""
        spans = [span.without_drafts() for span in plan.spans if span.sequence in self.running]
        if is_apart:
            return [MainPlan.of([span]) for span in spans]
        return [MainPlan.of(spans)] if spans else []

    def complete(
        self,
        plan: MainPlan,
        choose: Callable[[Sequence, int, int], int | Fault],
        faults: Mapping[int, Fault] | None = None,
    ) -> list[Advance]:
        """Apply a finished step. ``choose(sequence, logit_row, position)`` samples the token of ``position``; ``faults`` are
        the rows of the step that have no true result.

        A draft row counts only while every earlier draft of its span equals the token chosen there. Its fault does not
        count earlier either: a sequence ends where it would have ended without drafts.
        """
        faults = faults or {}
        out = []
        for span in plan.spans:
            if span.sequence not in self.running:
                continue  # aborted while the step ran
            advance = Advance(span.sequence, span)
            out.append(advance)
            if span.is_prefill:
                self._complete_chunk(advance, choose, faults)
            else:
                self._complete_decode(advance, choose, faults)
        return out

    def _complete_chunk(
        self, advance: Advance, choose: Callable[[Sequence, int, int], int | Fault], faults: Mapping[int, Fault]
    ) -> None:
        sequence, span = advance.sequence, advance.span
        found = (faults[row] for row in range(span.first, span.first + span.n_rows) if row in faults)
        sequence.error = next(found, None)
        if sequence.error:
            return
        advance.n_kept_rows = span.n_rows
        sequence.n_cached += span.n_rows
        if sequence.n_cached == len(sequence.tokens):
            self._take(advance, span.logit_first + span.n_logits - 1, choose)

    def _complete_decode(
        self, advance: Advance, choose: Callable[[Sequence, int, int], int | Fault], faults: Mapping[int, Fault]
    ) -> None:
        sequence, span = advance.sequence, advance.span
        drafts = span.tokens[1:]
        sequence.n_drafted += len(drafts)
        sequence.drafts = []
        for i in range(span.n_rows):
            sequence.error = faults.get(span.first + i)
            if sequence.error:
                return
            sequence.n_cached += 1
            advance.n_kept_rows += 1
            token = self._take(advance, span.logit_first + i, choose)
            if sequence.is_over or i == len(drafts) or token != drafts[i]:
                return
            sequence.n_accepted += 1
            advance.n_accepted += 1

    @staticmethod
    def _take(advance: Advance, logit_row: int, choose: Callable[[Sequence, int, int], int | Fault]) -> int | None:
        """The token that was chosen; None when there is none."""
        sequence = advance.sequence
        token = choose(sequence, logit_row, len(sequence.tokens))
        if isinstance(token, Fault):
            sequence.error = token
            return None
        advance.text += sequence.append(token)
        advance.new_tokens.append(token)
        advance.logit_rows.append(logit_row)
        return token
