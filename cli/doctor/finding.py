"""What a subject says: found, verdict, and what would make it better."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.container.reader import Container

Verdict = Literal["good", "fair", "poor"]
"""good: nothing to do. fair: works, something would be faster. poor: costs much, or something will fail."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    subject: str
    found: str
    verdict: Verdict
    advice: str = ""
    """The command or the step that improves it; empty when there is none."""
    details: tuple[str, ...] = ()
    """Lines of figures below."""
    facts: dict[str, Any] = {}
    """For ``--json``: the same as plain values."""


@dataclass(frozen=True)
class Case:
    """What the subjects look at. ``root`` is another file system root, for tests."""

    container: Container | None
    must_measure: bool = False
    root: Path = Path("/")

    def read(self, path: str) -> str:
        """A file of the system without surrounding blanks; "" when it can't be read."""
        try:
            return (self.root / path.lstrip("/")).read_text().strip()
        except OSError:
            return ""
