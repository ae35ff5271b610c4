"""Who drafts, and what the drafter's cache holds. Pure: finished steps in, draft plans out.

The drafter can guess on only where its own cache follows the accepted text without a gap. A gap (it was away, or a fault) is
for good: the sequence goes on without drafts. Guesses land in ``Sequence.drafts``, where the scheduler finds them; it does
not ask who guessed. Nothing here can end a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from services.router.scheduler import Advance
from services.router.sequences import Sequence
from shared.messages.layer import EMBEDDING
from shared.model.kv_layout import KV_BLOCK

GAP = -1


@dataclass(frozen=True)
class DraftSpan:
    """Accepted rows of one sequence that the drafter absorbs: rows ``[first, first + n_rows)`` of the draft frame, from
    ``main_first`` on in the main one. ``tokens`` are those that followed each row, ``position`` is the first row's."""

    sequence: Sequence
    table_row: int
    first: int
    tokens: tuple[int, ...]
    position: int
    main_first: int
    is_drafting: bool

    @property
    def n_rows(self) -> int:
        return len(self.tokens)

    @property
    def last(self) -> int:
        """The row that drafts start from."""
        return self.first + self.n_rows - 1


@dataclass(frozen=True)
class DraftPlan:
    """One draft step: absorb all spans, then guess ``n_drafts`` tokens for those that draft, one pass each."""

    spans: tuple[DraftSpan, ...]
    n_drafts: int
    drafting: tuple[DraftSpan, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafting", tuple(span for span in self.spans if span.is_drafting))

    @property
    def n_rows(self) -> int:
        return sum(span.n_rows for span in self.spans)

    def owners(self, n_pass: int, layer: int, rows: Iterable[int]) -> list[DraftSpan]:
        """Whose rows these are, as ``layer`` counts them in a pass: the embedding of the first pass has every absorbed row,
        all else one row for each span that drafts."""
        if layer == EMBEDDING and n_pass == 0:
            wanted = set(rows)
            return [span for span in self.spans if not wanted.isdisjoint(range(span.first, span.last + 1))]
        return [self.drafting[row] for row in rows if row < len(self.drafting)]


class Drafting:
    """``n_drafts``: guesses per step, 0 = nobody drafts. ``vocab``: ids from there on are no tokens of the main model."""

    def __init__(self, n_drafts: int, vocab: int) -> None:
        self._n_drafts = n_drafts
        self._vocab = vocab
        self._held: dict[str, int] = {}  # request -> pairs absorbed without a gap, or GAP
        self.has_drafter = False

    def held(self, sequence: Sequence) -> int:
        """How many pairs of the sequence the drafter has absorbed, GAP when it can't go on with it."""
        return self._held.get(sequence.request, 0)

    def plan(self, advances: Iterable[Advance]) -> DraftPlan | None:
        """What the drafter should do with a finished step, None: nothing. From here on its cache counts as filled so far."""
        if not self._n_drafts:
            return None
        spans: list[DraftSpan] = []
        n_rows = 0
        for advance in advances:
            sequence, kept = advance.sequence, advance.n_kept_rows
            if sequence.is_over or not kept:
                continue
            position = advance.span.position
            if not self.has_drafter or self.held(sequence) != position:
                self._stop(sequence)
                continue
            self._held[sequence.request] = position + kept
            tokens = tuple(sequence.tokens[position + 1 : position + 1 + kept])
            is_drafting = self._may_draft(sequence, position + kept)
            spans.append(DraftSpan(sequence, len(spans), n_rows, tokens, position, advance.span.first, is_drafting))
            n_rows += kept
        return DraftPlan(tuple(spans), self._n_drafts) if spans else None

    def _may_draft(self, sequence: Sequence, held: int) -> bool:
        # Chained drafts write the drafter's cache ahead of the accepted text: they need room in its blocks.
        has_room = held + self._n_drafts <= len(sequence.blocks) * KV_BLOCK
        return not sequence.is_prefilling and has_room and sequence.max_tokens - sequence.n_generated > 1

    def landed(self, plan: DraftPlan, tokens: Iterable[Iterable[int]]) -> None:
        """The drafter's answer: guesses of each span that drafts, in order. None at all: it can't guess for that one."""
        for span, guesses in zip(plan.drafting, tokens, strict=True):
            drafts = list(takewhile(lambda token: token < self._vocab, guesses))
            if not drafts:
                self._stop(span.sequence)
            elif self.held(span.sequence) != GAP:
                span.sequence.drafts = drafts

    def failed(self, plan: DraftPlan, n_pass: int, layer: int, rows: Iterable[int]) -> None:
        """Rows of a pass have no true result: what is guessed from them is worth nothing."""
        for span in plan.owners(n_pass, layer, rows):
            self._stop(span.sequence)

    def lost(self, plan: DraftPlan) -> None:
        """A draft step will not be finished: nobody knows what of it reached the cache."""
        for span in plan.spans:
            self._stop(span.sequence)

    def ended(self, sequence: Sequence) -> None:
        """Forget a request that is over."""
        self._held.pop(sequence.request, None)

    def _stop(self, sequence: Sequence) -> None:
        if not sequence.is_over:
            self._held[sequence.request] = GAP
