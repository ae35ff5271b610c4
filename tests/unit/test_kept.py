"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.kept import put_in_place, replace_file


def test_a_file_is_replaced_whole_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace_file(path, b"one")
    replace_file(path, b"two", is_durable=True, by_way_of=tmp_path / "f.partial")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    old = os.umask(0o022)
    try:
        replace_file(tmp_path / "g", b"", mode=0o666)
    finally:
        os.umask(old)
    assert (tmp_path / "g").stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "g"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if call == "write":
        monkeypatch.setattr(os, "fdopen", fail)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", is_durable=True)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_what_lies_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x")
    way = tmp_path / "f.partial"
    way.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        replace_file(tmp_path / "f", b"new", by_way_of=way)
    assert (tmp_path / "precious").read_bytes() == b"x"
    os.mkfifo(tmp_path / "p")
    with pytest.raises(OSError, match="named pipe"):
        replace_file(tmp_path / "f", b"new", by_way_of=tmp_path / "p")


def test_a_finished_file_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "f.partial").write_bytes(b"x")
    put_in_place(tmp_path / "f.partial", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"x"
