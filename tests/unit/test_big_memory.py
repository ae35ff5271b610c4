"""Named memory: what a successor believes of a file that its predecessor left, and what it refuses."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from native.memory import HUGE_PAGE, hash64
from services.expert_io.slab import Slab
from shared.experts.residency import Key
from shared.log import Log
from shared.machine.memory_probe import file_bytes
from shared.memory import big_memory, named_file
from shared.memory.big_memory import Home, NamedMemory
from shared.memory.huge_pages import huge_bytes
from shared.memory.named_file import DENSE, PAGE_BYTES, SLAB, Head, Unfit, parse_header, run_path

SHM = Path("/dev/shm")
FINGERPRINT = "0123456789abcdef"
SLOT = 3 * 4096
N_SLOTS = 6
N_EXPERTS = 10
LAYERS = (1, 2)


class HeardLog(Log):
    """What was said stays in ``heard``."""

    def __init__(self) -> None:
        self.heard = StringIO()
        super().__init__("test", stream=self.heard)


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home(SHM, os.urandom(4).hex(), FINGERPRINT, HeardLog())
    yield made
    for kind in named_file.KINDS:
        run_path(SHM, made.run_id, kind).unlink(missing_ok=True)


def said(home: Home) -> str:
    assert isinstance(home.log, HeardLog)
    return home.log.heard.getvalue()


def slab_of(home: Home, n_slots: int = N_SLOTS, content: int = 7, slot_bytes: int = SLOT) -> Slab:
    return Slab(n_slots, slot_bytes, home, 20, content)


def fill(slab: Slab, index: int, key: Key, value: int) -> None:
    slab.reading(index, key)
    bytes_of(slab, index)[:] = value
    slab.holds(index, key)


def bytes_of(slab: Slab, index: int) -> np.ndarray:
    """u8[slot_bytes], where a kernel would look."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * slab.slot_bytes).from_address(slab.address(index)))


def test_a_dense_part_is_adopted_once_it_is_complete(home: Home) -> None:
    memory = home.open(DENSE, 5, 10_000)
    assert isinstance(memory, NamedMemory) and not memory.is_complete
    path = run_path(SHM, home.run_id, DENSE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert memory.address % 64 == 0 and memory.array.shape == (10_000,)
    memory.array[:] = np.arange(10_000) % 251
    memory.close()

    again = home.open(DENSE, 5, 10_000)  # its maker died before the checksums were compared
    assert again and not again.is_complete and not again.array.any()
    assert "not completely filled" in said(home)
    again.array[:] = np.arange(10_000) % 251
    again.set_complete()
    again.close()

    adopted = home.open(DENSE, 5, 10_000)
    assert adopted and adopted.is_complete and adopted.generation == 2
    assert (adopted.array == np.arange(10_000) % 251).all()
    with pytest.raises(ValueError, match="read-only"):
        adopted.array[0] = 1
    adopted.close()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dict(content=6), "content"),
        (dict(n_bytes=10_001), "size"),
        (dict(fingerprint="f" * 16), "model"),
    ],
)
def test_what_belongs_to_another_model_is_dropped(home: Home, other: dict[str, object], reason: str) -> None:
    memory = home.open(DENSE, 5, 10_000)
    assert memory
    memory.set_complete()
    memory.close()
    asks = Home(SHM, home.run_id, str(other.get("fingerprint", FINGERPRINT)), home.log)
    found = asks.open(DENSE, int(str(other.get("content", 5))), int(str(other.get("n_bytes", 10_000))))
    assert found and not found.is_complete and found.generation == 1
    assert f"its {reason} is" in said(home)
    found.close()


def test_two_processes_never_share_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big_memory, "LOCK_WAIT_S", 0.05)
    memory = home.open(DENSE, 5, 10_000)
    assert memory
    memory.set_complete()
    assert home.open(DENSE, 5, 10_000) is None
    assert "another process holds it" in said(home)
    memory.close()


def test_no_room_means_private_memory(home: Home) -> None:
    assert home.open(DENSE, 5, 1 << 50) is None
    assert "named_memory_off" in said(home)
    assert not run_path(SHM, home.run_id, DENSE).exists()
    slab = Slab(2, SLOT, Home(Path("/dev"), home.run_id, FINGERPRINT, home.log), 20, 7) if os.getuid() else None
    if slab:
        assert not slab.is_named


def test_a_successor_finds_the_slots_that_were_whole(home: Home) -> None:
    slab = slab_of(home)
    assert slab.is_named and slab.residents(LAYERS, N_EXPERTS) == {}
    fill(slab, 0, (1, 3), 11)
    fill(slab, 1, (2, 9), 12)
    slab.close()

    again = slab_of(home)
    assert again.residents(LAYERS, N_EXPERTS) == {0: (1, 3), 1: (2, 9)}
    assert (bytes_of(again, 1) == 12).all()
    again.empty(0)  # evicted or released
    again.close()
    assert slab_of(home).residents(LAYERS, N_EXPERTS) == {1: (2, 9)}


def test_a_slot_that_was_being_read_is_never_believed_and_its_pages_are_exchanged(home: Home) -> None:
    """Whoever dies between the start and the end of a read: what was in the slot is gone, what should come is not there.
    A late write of the drive goes to the old pages, so they must not be the file's any more."""
    slot_bytes = HUGE_PAGE
    slab = slab_of(home, slot_bytes=slot_bytes)
    for index in range(4):
        fill(slab, index, (1, index), 10 + index)
    slab.reading(2, (2, 2))
    bytes_of(slab, 2)[:100] = 99
    slab.close()

    again = slab_of(home, slot_bytes=slot_bytes)
    assert again.residents(LAYERS, N_EXPERTS) == {0: (1, 0), 1: (1, 1), 3: (1, 3)}
    assert not bytes_of(again, 2).any()
    assert (bytes_of(again, 3) == 13).all()


def test_neighbours_in_an_exchanged_huge_page_go_too(home: Home) -> None:
    slab = slab_of(home)  # slots of 12 KiB: all in one huge page
    for index in range(4):
        fill(slab, index, (1, index), 1)
    slab.reading(3, (2, 2))
    slab.close()
    assert slab_of(home).residents(LAYERS, N_EXPERTS) == {}


@pytest.mark.parametrize(
    "entry",
    [
        (1 << 63) | (3 << 32) | 1,  # a layer that this run does not have
        (1 << 63) | (1 << 32) | N_EXPERTS,  # an expert outside
        (1 << 63) | (1 << 32) | 0,  # the same expert as in slot 0
        (1 << 63) | (1 << 62) | (1 << 32) | 5,
        (1 << 32) | 5,
        (1 << 64) - 1,
    ],
)
def test_directory_entries_that_are_nonsense_are_emptied(home: Home, entry: int) -> None:
    slot_bytes = HUGE_PAGE
    slab = slab_of(home, slot_bytes=slot_bytes)
    fill(slab, 0, (1, 0), 1)
    slab.close()
    with run_path(SHM, home.run_id, SLAB).open("r+b") as file:
        file.seek(PAGE_BYTES + 8 * 4)
        file.write(struct.pack("<Q", entry))
    again = slab_of(home, slot_bytes=slot_bytes)
    assert again.residents(LAYERS, N_EXPERTS) == {0: (1, 0)}
    entries = run_path(SHM, home.run_id, SLAB).read_bytes()[PAGE_BYTES:]
    assert struct.unpack_from("<Q", entries, 8 * 4) == (0,)


def test_another_number_of_slots_keeps_what_fits(home: Home) -> None:
    slab = slab_of(home, n_slots=6, slot_bytes=HUGE_PAGE)
    for index in (0, 2, 5):
        fill(slab, index, (1, index), 20 + index)
    slab.close()
    smaller = slab_of(home, n_slots=3, slot_bytes=HUGE_PAGE)
    assert smaller.residents(LAYERS, N_EXPERTS) == {0: (1, 0), 2: (1, 2)}
    smaller.close()
    assert run_path(SHM, home.run_id, SLAB).stat().st_size == (1 + 3) * HUGE_PAGE
    larger = slab_of(home, n_slots=8, slot_bytes=HUGE_PAGE)
    assert larger.residents(LAYERS, N_EXPERTS) == {0: (1, 0), 2: (1, 2)}
    assert (bytes_of(larger, 2) == 22).all() and not bytes_of(larger, 5).any()


def test_entries_beyond_a_truncated_file_are_not_believed(home: Home) -> None:
    slab = slab_of(home, n_slots=6, slot_bytes=HUGE_PAGE)
    for index in range(6):
        fill(slab, index, (1, index), 1)
    slab.close()
    os.truncate(run_path(SHM, home.run_id, SLAB), 3 * HUGE_PAGE + 5)
    assert set(slab_of(home, n_slots=6, slot_bytes=HUGE_PAGE).residents(LAYERS, N_EXPERTS)) == {0, 1}


def test_a_slot_that_is_released_gives_its_memory_back(home: Home) -> None:
    for at in (home, None):
        slab = Slab(3, HUGE_PAGE, at, 20, 7)
        for index in range(3):
            fill(slab, index, (1, index), 1)
        before = present_bytes(slab, home)
        slab.release(1)
        assert before - present_bytes(slab, home) == HUGE_PAGE
        assert not bytes_of(slab, 1).any() and bytes_of(slab, 2).all()
        assert 1 not in slab.residents(LAYERS, N_EXPERTS)
        slab.close()


def present_bytes(slab: Slab, home: Home) -> int:
    if slab.is_named:
        return file_bytes(run_path(SHM, home.run_id, SLAB))
    return huge_bytes(slab.address(0), 3 * HUGE_PAGE)[1]


# -- files that are not what they seem ------------------------------------------------------------------------


def header() -> bytearray:
    head = Head(SLAB, FINGERPRINT, 7, 0, 20, SLOT)
    page = bytearray(PAGE_BYTES)
    packed = head.packed()
    page[: len(packed)] = packed
    struct.pack_into("<Q", page, 1024, hash64(packed))
    return page


def test_a_sound_header_is_understood() -> None:
    found = parse_header(bytes(header()))
    assert found.head == Head(SLAB, FINGERPRINT, 7, 0, 20, SLOT) and found.is_usable and not found.is_complete


def test_damaged_headers_are_refused_whatever_is_damaged() -> None:
    """One flipped bit anywhere in what is checked, random pages, short pages: Unfit, nothing else."""
    for bit in range(8 * len(Head(SLAB, FINGERPRINT, 7, 0, 20, SLOT).packed())):
        page = header()
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Unfit):
            parse_header(bytes(page))
    chance = random.Random(1)
    for n in (0, 1, 4095, 4096):
        with pytest.raises(Unfit):
            parse_header(chance.randbytes(n))
    page = header()
    struct.pack_into("<I", page, 8, 2)
    with pytest.raises(Unfit, match="version 2"):
        parse_header(bytes(page))


@pytest.mark.parametrize("damage", ["garbage", "empty", "link", "readable by others", "directory"])
def test_a_file_that_is_not_ours_or_not_whole_is_dropped(home: Home, tmp_path: Path, damage: str) -> None:
    path = run_path(SHM, home.run_id, DENSE)
    target = tmp_path / "elsewhere"
    target.write_bytes(b"mine")
    if damage == "garbage":
        path.write_bytes(random.Random(2).randbytes(3 * HUGE_PAGE))
        path.chmod(0o600)
    elif damage == "empty":
        path.touch(0o600)
    elif damage == "link":
        path.symlink_to(target)
    elif damage == "directory":
        path.mkdir()
    else:
        path.touch(0o644)
    memory = home.open(DENSE, 5, 10_000)
    if damage == "directory":
        assert memory is None
        path.rmdir()
        return
    assert memory and not memory.is_complete and not memory.array.any()
    assert "memory_dropped" in said(home)
    assert target.read_bytes() == b"mine"
    memory.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_a_file_of_another_user_is_left_alone(home: Home) -> None:
    path = run_path(SHM, home.run_id, DENSE)
    path.touch(0o600)
    os.chown(path, 12345, 12345)
    assert home.open(DENSE, 5, 10_000) is None
    assert "belongs to user 12345" in said(home) and path.exists()
