"""What lies where a file should be: anything but a regular file of a sane size is a sentence at once, never a wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.files import is_file, open_file, read_file, strict_json


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # addresses are short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


IN_THE_PLACE: dict[str, tuple[Callable[[Path], object], str]] = {
    "named pipe": (fifo, "it is a named pipe"),
    "directory": (Path.mkdir, "it is a directory"),
    "socket": (bound_socket, "it is a socket"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "it is a link to nowhere, which does not exist"),
    "link to itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_not_a_regular_file(tmp_path: Path, what: str) -> None:
    make, words = IN_THE_PLACE[what]
    path = tmp_path / "file"
    make(path)
    for use in (open_file, is_file, lambda p: read_file(p, 100)):
        with pytest.raises(OSError, match=words) as caught:
            use(path)
        assert not isinstance(caught.value, FileNotFoundError)  # that would be taken for absence


def test_regular_files_and_links_to_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert read_file(tmp_path / name, 3) == b"abc"
        assert is_file(tmp_path / name)
    fd = open_file(tmp_path / "file")
    assert os.get_blocking(fd) and not os.get_inheritable(fd)
    os.close(fd)
    assert not is_file(tmp_path / "absent")
    assert not is_file(tmp_path / "file" / "below")
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "absent")
    os.close(open_file(tmp_path / "new", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "new").read_bytes() == b""


def test_size_is_limited(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    with pytest.raises(OSError, match="it has 4 bytes, more than the 3"):
        read_file(tmp_path / "file", 3)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        read_file(tmp_path / "sparse", 1 << 20)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"x": [{"a": 1, "b": 2, "a": 1}]}', "'a' is there twice"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b'{"a": 1}\0', "Extra data"),
        (b"[1" + b"0" * 5000 + b"]", "digits"),
    ],
)
def test_json_that_two_readers_understand_differently(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strict_json(data)


def test_json_that_people_edit() -> None:
    assert strict_json(b'{"a": [1], "a": [1], "b": Infinity}', is_edited=True) == {"a": [1], "b": float("inf")}
    with pytest.raises(ValueError, match="'a' is there twice"):
        strict_json(b'{"a": 1, "a": 2}', is_edited=True)
