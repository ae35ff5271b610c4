"""Fixtures for tests with real process groups. Every group gets a private run directory and is checked for leftovers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group.harness import Group, wait_clean


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path (socket paths are limited), removed afterwards."""
    base = Path(tempfile.mkdtemp(prefix="cbt-"))
    yield base / "run"
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def start_group(run_dir: Path) -> Iterator[Callable[..., Group]]:
    """start_group(model, **options) -> a ready Group; stopped and checked for leftovers at the end of the test."""
    groups: list[Group] = []

    def start(model: Path, **options: Any) -> Group:
        group = Group(model, run_dir.with_name(f"run{len(groups)}"), **options)
        groups.append(group)
        return group.start()

    yield start
    failures = []
    for group in groups:
        try:
            if group.process is not None and group.process.poll() is None:
                assert group.stop() == 0, f"{group.said}\n{group.logs()}"
            wait_clean(group)
        except AssertionError as error:
            group.kill_all()
            failures.append(str(error))
    assert not failures, "\n".join(failures)
