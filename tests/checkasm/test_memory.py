"""Huge-page memory and the tie to the parent process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from native.library import NativeError
from native.memory import HugeBuffer, MappedFile
from native.process import die_with_parent

HUGE = 2 << 20


def mapping_of(address: int) -> str:
    """The paragraph of /proc/self/smaps that holds an address; empty when nothing is mapped there."""
    for paragraph in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(part, 16) for part in paragraph.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return paragraph
    return ""


@pytest.mark.parametrize("n_bytes", [1, 4096, HUGE - 1, HUGE, 5 * HUGE + 12345])
def test_buffers_are_aligned_zeroed_and_given_back(n_bytes: int) -> None:
    buffer = HugeBuffer(n_bytes)
    address = buffer.address
    assert address % HUGE == 0
    assert buffer.array.shape == (n_bytes,)
    assert not buffer.array.any()
    buffer.array[:] = 255
    assert mapping_of(address)
    buffer.close()
    buffer.close()
    assert not mapping_of(address)


def test_huge_pages_are_asked_for_and_come_where_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no transparent huge pages")
    with HugeBuffer(4 * HUGE) as buffer:
        buffer.array[:] = 1
        flags = re.search(r"VmFlags:(.*)", mapping_of(buffer.address))
        assert flags
        assert " hg" in flags[1], "MADV_HUGEPAGE is not set on the mapping"


@pytest.mark.parametrize("n_bytes", [0, -1, 1 << 62])
def test_impossible_sizes_are_refused(n_bytes: int) -> None:
    with pytest.raises(NativeError, match="cb_huge_alloc"):
        HugeBuffer(n_bytes)


def test_a_child_ends_with_its_parent() -> None:
    child = (
        "import os, signal, sys, time\n"
        "from native.process import die_with_parent\n"
        "die_with_parent(signal.SIGKILL)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline().strip(), flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True)
    pid = int(ended.stdout)
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlives its parent"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_the_tie_can_be_undone_and_nonsense_is_refused() -> None:
    die_with_parent(0)
    with pytest.raises(NativeError, match="signal 1000"):
        die_with_parent(1000)


def test_a_part_is_given_back_and_the_rest_stays() -> None:
    with HugeBuffer(3 * HUGE) as buffer:
        buffer.array[:] = 7
        before = held(buffer.address)
        buffer.release(HUGE, HUGE)
        assert held(buffer.address) <= before - HUGE
        assert not buffer.array[HUGE : 2 * HUGE].any()
        assert (buffer.array[:HUGE] == 7).all() and (buffer.array[2 * HUGE :] == 7).all()
        with pytest.raises(NativeError, match="cb_huge_release"):
            buffer.release(1, 4096)


def held(address: int) -> int:
    """Bytes of the mapping that lie in memory."""
    found = re.search(r"Rss:\s+(\d+) kB", mapping_of(address))
    assert found
    return int(found[1]) * 1024


@pytest.fixture
def file() -> Iterator[int]:
    """A file of two huge pages in /dev/shm, without a name."""
    fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
    os.ftruncate(fd, 2 * HUGE)
    yield fd
    os.close(fd)


def test_a_mapped_file_is_aligned_and_outlives_its_mapping(file: int) -> None:
    first = MappedFile(file, HUGE + 12345)
    assert first.address % HUGE == 0 and first.array.shape == (HUGE + 12345,)
    assert "hg" in re.findall(r"\w\w", mapping_of(first.address).rpartition("VmFlags:")[2])
    first.array[:] = 7
    address = first.address
    first.close()
    first.close()
    assert not mapping_of(address)
    again = MappedFile(file, HUGE, is_writable=False)
    assert (again.array == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        again.array[0] = 1
    again.close()


def test_released_pages_are_zero_and_given_back(file: int) -> None:
    mapped = MappedFile(file, 2 * HUGE)
    assert mapped.populate(0, 2 * HUGE)
    with HugeBuffer(2 * HUGE) as private:
        for memory in (mapped, private):
            memory.array[:] = 9
            memory.release(HUGE, HUGE)
            assert memory is private or os.fstat(file).st_blocks * 512 <= HUGE
            assert not memory.array[HUGE:].any() and memory.array[:HUGE].all()
    mapped.close()


def test_what_has_no_room_is_said_before_it_is_touched(file: int) -> None:
    """A page beyond the file's end: touching it would end the process with SIGBUS."""
    mapped = MappedFile(file, 2 * HUGE)
    os.ftruncate(file, HUGE)
    assert mapped.populate(0, HUGE)
    assert not mapped.populate(HUGE, HUGE)
    mapped.close()


def test_files_that_cannot_be_mapped_are_refused() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(NativeError, match="cb_huge_map"):
        MappedFile(read_end, HUGE)
    with pytest.raises(NativeError, match="cb_huge_map"):
        MappedFile(-1, HUGE)
    os.close(read_end)
    os.close(write_end)
