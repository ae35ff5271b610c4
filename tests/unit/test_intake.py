"""Who is let in, and why others are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.router.intake import MAX_WAITING, Intake
from shared.errors import Refused
from shared.messages.router import Sampling, Submit

SPEC: Any = SimpleNamespace(vocab=10, eos_ids=(9,))


def make_intake(*, has_tokenizer: bool = True, max_context: int = 8) -> Intake:
    return Intake(SPEC, (lambda token, is_start: b"x") if has_tokenizer else None, max_context)


def submit(**fields: Any) -> Submit:
    return Submit("r", Sampling(0.5, 0.9, 7), **({"prompt_ids": (1, 2)} | fields))


@pytest.mark.parametrize(
    ("is_draining", "is_in_use", "n_waiting", "status", "code"),
    [
        (True, True, MAX_WAITING, 503, "shutting_down"),
        (False, True, MAX_WAITING, 409, "duplicate_request"),
        (False, False, MAX_WAITING, 429, "queue_full"),
        (False, False, MAX_WAITING - 1, 400, "no_tokenizer"),
    ],
)
def test_who_may_not_even_wait_is_told_why(
    is_draining: bool, is_in_use: bool, n_waiting: int, status: int, code: str
) -> None:
    intake = make_intake(has_tokenizer=False)
    intake.is_draining = is_draining
    with pytest.raises(Refused) as refusal:
        intake.admit(submit(prompt_ids=None, prompt="text"), is_in_use=is_in_use, n_waiting=n_waiting)
    assert (refusal.value.status, refusal.value.code) == (status, code)


def test_ids_need_no_tokenizer() -> None:
    make_intake(has_tokenizer=False).admit(submit(), is_in_use=False, n_waiting=0)


def test_a_sequence_has_the_sampling_that_was_submitted_and_the_room_that_is_left() -> None:
    sequence = make_intake().accept(submit(max_tokens=100, resume_ids=(3, 4)), [1, 2])
    assert sequence.sampling == Sampling(0.5, 0.9, 7)
    assert (sequence.max_tokens, sequence.n_prompt, sequence.tokens) == (6, 2, [1, 2, 3, 4])
