"""Whether the model can be talked to: text needs a tokenizer."""

from __future__ import annotations

from cli.doctor.finding import Case, Finding
from shared.container.reader import TOKENIZER_NAME, no_tokenizer
from shared.errors import ContainerError
from shared.model.tokenizer_file import load_tokenizer


def look(case: Case) -> list[Finding]:
    container = case.container
    if container is None:
        return []
    if container.facts().has_tokenizer:
        try:
            load_tokenizer(container.path / TOKENIZER_NAME)
        except ContainerError as error:
            return [
                Finding("tokenizer", "there, but no start will accept it", "poor", str(error), facts={"present": True})
            ]
        return [Finding("tokenizer", "there: text and chat are served", "good", facts={"present": True})]
    advice = no_tokenizer(container.path)
    return [Finding("tokenizer", "none: token ids only", "poor", advice, facts={"present": False})]
