from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A private directory in memory: these tests sync every file they write, which a busy disk makes slow."""
    base = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="convert-test-", dir=base if base.is_dir() else None))
    yield made
    shutil.rmtree(made, ignore_errors=True)
