"""docs/models.md says what the code computes."""

from __future__ import annotations

import re

import pytest

from bench import models
from shared.model.family import names

TEXT = models.DOCUMENT.read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_the_tables_are_those_of_the_code() -> None:
    stored = TEXT.partition(models.BEGIN)[2].partition(models.END)[0].strip()
    made = models.tables()
    assert NUMBER.sub("0", stored) == NUMBER.sub("0", made), "python -m bench.models --write"
    for old, new in zip(NUMBER.findall(stored), NUMBER.findall(made), strict=True):
        # A MiB more in a line of the ledger is no reason to write the document anew.
        assert float(old) == pytest.approx(float(new), rel=0.03, abs=0.011 if "." in new else 1), (
            "python -m bench.models --write"
        )


def test_writing_twice_changes_nothing() -> None:
    made = "| a |\n| --- |"
    once = models.replaced(TEXT, made)
    assert models.replaced(once, made) == once
    assert once.endswith(TEXT.partition(models.END)[2])


def test_every_family_has_its_line() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == set(names())
