from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.oracle import convert_oracle


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """converted(oracle, precision) -> container directory, made once per session. Read only."""
    base = tmp_path_factory.mktemp("containers")
    return lambda name, precision: convert_oracle(name, precision, base / f"{name}-{precision}")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A private directory in memory: these tests sync every file they write, which a busy disk makes slow."""
    base = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="convert-test-", dir=base if base.is_dir() else None))
    yield made
    shutil.rmtree(made, ignore_errors=True)
