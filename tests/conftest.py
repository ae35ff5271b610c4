"""Fixtures for all tests."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.oracle import convert_oracle

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C tests would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_state_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What groups remember from run to run stays out of the user's home."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def huge_dir() -> Iterator[Path]:
    """A directory for named memory. Whether its pages are huge is the machine's affair and changes nothing but speed."""
    path = Path("/dev/shm") / f"colibri-test-{os.urandom(4).hex()}"
    path.mkdir(0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """converted(oracle, precision) -> container directory, made once for all workers of a test run. Read only."""
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "containers"
    base.mkdir(exist_ok=True)

    def convert(name: str, precision: str) -> Path:
        with (base / f"{name}-{precision}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return convert_oracle(name, precision, base / f"{name}-{precision}")

    return convert
