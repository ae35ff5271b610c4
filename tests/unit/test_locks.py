"""A file system without locks is not another process."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.staging import lock_of as lock_mirror
from deploy.rundir import take_lock
from shared.experts.traces import TraceHeader, TraceWriter
from shared.locks import LocksMissing, try_lock
from shared.run.config import is_locked


def mirror(directory: Path) -> None:
    with lock_mirror(directory):
        pytest.fail("locked")


def trace(directory: Path) -> None:
    header = TraceHeader(model="m", fingerprint="f", n_experts=4, gate_k=2, record_bytes={1: 8})
    TraceWriter(directory / "trace", header)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
@pytest.mark.parametrize("use", [take_lock, is_locked, mirror, trace])
def test_missing_locks_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object], code: int
) -> None:
    (tmp_path / "lock").touch()

    def flock(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(LocksMissing, match=f"gives no locks .{os.strerror(code)}"):
        use(tmp_path)


def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ours, theirs = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_lock(ours, path)
    assert not try_lock(theirs, path)
    assert not try_lock(theirs, path, is_shared=True)
    os.close(ours)
    assert try_lock(theirs, path)
    os.close(theirs)
