"""What the router writes into frames: the rows of a step. Layouts are ``native/include/cb_frame.h``'s."""

from __future__ import annotations

from services.router.drafting import DraftPlan
from services.router.scheduler import MainPlan
from shared.step.frame import Frame


def fill_main(frame: Frame, plan: MainPlan) -> None:
    """token, position, seq, logit_row, block_table and state of a main step."""
    for span in plan.spans:
        end = span.first + span.n_rows
        frame.token[span.first : end] = span.tokens
        frame.position[span.first : end] = range(span.position, span.position + span.n_rows)
        frame.seq[span.first : end] = span.table_row
        blocks = span.sequence.blocks
        frame.block_table[span.table_row, : len(blocks)] = blocks
        frame.state[span.table_row] = span.sequence.state
        if span.n_logits:
            frame.logit_row[span.logit_first : span.logit_first + span.n_logits] = range(end - span.n_logits, end)


def fill_draft(frame: Frame, main: Frame, plan: DraftPlan) -> None:
    """The pairs (token, final) that the drafter absorbs, ``final`` taken from the main step's frame."""
    for span in plan.spans:
        end = span.first + span.n_rows
        frame.token[span.first : end] = span.tokens
        frame.position[span.first : end] = range(span.position, span.position + span.n_rows)
        frame.seq[span.first : end] = span.table_row
        blocks = span.sequence.blocks
        frame.block_table[span.table_row, : len(blocks)] = blocks
        frame.final[span.first : end] = main.final[span.main_first : span.main_first + span.n_rows]
    frame.logit_row[: len(plan.drafting)] = [span.last for span in plan.drafting]
