"""Several copies of the experts: same text whatever happens to one of them, and two drives read at the same time."""

from __future__ import annotations

import ctypes
import errno
import select
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from native.library import lib
from native.reader import ENDED_FN, Reader
from services.expert_io import sources
from services.expert_io.events import ReadLanded
from services.expert_io.reads import SlotReads
from shared.container.reader import Container
from tests.oracle import oracle_array
from tests.support.ring import Ring

Converted = Callable[[str, str], Path]
PROMPT = oracle_array("deepseek_v3", "prompt_ids").tolist()


class Drives:
    """Makes each directory of a running ring a drive with a rate in bytes per second, that can be unplugged."""

    def __init__(self, store: SlotReads, rates: list[float]) -> None:
        self._store = store
        self.rates = rates
        self.unplugged: set[int] = set()
        self.bytes: Counter[int] = Counter()
        self.most_at_once = 0
        self._busy: Counter[int] = Counter()
        self._drive_of_slot: dict[int, int] = {}
        self._locks = [threading.Lock() for _ in rates]
        self._count = threading.Lock()
        self._hook = ENDED_FN(self._ended)
        assert len(store.readers) == len(rates)
        for drive, reader in enumerate(store.readers):
            reader.submit = self._noting(drive, reader.submit)

    def _noting(self, drive: int, submit: Callable[..., None]) -> Callable[..., None]:
        def noted(tag: int, fd: int, offset: int, n_bytes: int, target: int, **options: Any) -> None:
            self._drive_of_slot[self._slot_of(target)] = drive
            submit(tag, fd, offset, n_bytes, target, **options)

        return noted

    def _slot_of(self, address: int) -> int:
        return (address - self._store.slab.address(0)) // self._store.slab.slot_bytes

    def _ended(self, offset: int, n: int, target: int, result: int) -> int:
        drive = self._drive_of_slot[self._slot_of(target)]
        if drive in self.unplugged:
            ctypes.memset(target, 0xEE, n)
            return -errno.EIO
        with self._count:
            self._busy[drive] += 1
            self.most_at_once = max(self.most_at_once, sum(n > 0 for n in self._busy.values()))
        with self._locks[drive]:
            time.sleep(n / self.rates[drive])
        with self._count:
            self._busy[drive] -= 1
            self.bytes[drive] += n
        return result

    def __enter__(self) -> Drives:
        lib.cb_reader_hooks_for_test(None, ctypes.cast(self._hook, ctypes.c_void_p))
        return self

    def __exit__(self, *_: object) -> None:
        lib.cb_reader_hooks_for_test(None, None)


@pytest.fixture
def two(converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model and a directory with copies of its expert files; each directory counts as a drive."""
    model, mirror = tmp_path / "model", tmp_path / "mirror"
    shutil.copytree(converted("deepseek_v3", "int8"), model)
    mirror.mkdir()
    for path in model.glob("experts-*"):
        shutil.copy(path, mirror)
    monkeypatch.setattr(sources, "number_drives", lambda places: tuple(range(len(places))))
    return model, mirror


def reads_of(ring: Ring) -> SlotReads:
    reads: SlotReads = ring.engine.reads
    return reads


def damage(directory: Path, model: Path, layer: int, expert: int) -> Path:
    file = Container.open(model).experts[layer]
    with (directory / file.name).open("r+b") as out:
        out.seek(file.offset_of(expert) + 100)
        out.write(b"\x55\xaa" * 50)
    return directory / file.name


def expected_tokens(model: Path, tmp_path: Path, n: int = 12) -> list[int]:
    with Ring(model, tmp_path) as ring:
        return ring.generate(PROMPT, n).tokens


def test_two_drives_read_at_the_same_time_in_the_ratio_of_their_rates(two: tuple[Path, Path], tmp_path: Path) -> None:
    model, mirror = two
    expected = expected_tokens(model, tmp_path, 4)
    record = next(iter(Container.open(model).experts.values())).record_bytes
    slow, fast = record * 100.0, record * 300.0  # some milliseconds a record
    with (
        Ring(model, tmp_path, n_slots=8, direct_io="off", mirrors=(str(mirror),)) as ring,
        Drives(reads_of(ring), [slow, fast]) as drives,
    ):
        assert ring.generate(PROMPT, 4).tokens == expected
        drives.bytes.clear()
        before = ring.store_counters()
        ring.generate(PROMPT * 2, 24)
        found = ring.store_counters()
        assert drives.most_at_once == 2
        assert 0.6 < drives.bytes[1] / drives.bytes.total() < 0.9, "three quarters"
        n_read = sum(found[name] - before[name] for name in ("bytes_demand", "bytes_speculative"))
        assert n_read == drives.bytes.total()


@pytest.mark.parametrize("ms", [(30, 30), (60, 20)])
def test_two_drives_together_give_the_sum_of_their_rates(ms: tuple[int, int], two: tuple[Path, Path]) -> None:
    """Reads alone, eight wanted at a time, slow enough that a busy machine does not count."""
    model, mirror = two
    container = Container.open(model, (mirror,))
    layers = container.spec.moe_layers
    file = container.experts[layers[0]]
    keys = [(layer, expert) for layer in layers for expert in range(file.n_experts)][:64]
    slot_bytes = max(f.record_bytes for f in container.experts.values())
    store = SlotReads(container, layers, 64, slot_bytes, "off", lambda: Reader(4, 2 << 20))
    with Drives(store, [slot_bytes / t * 1e3 for t in ms]) as drives:
        begin = time.monotonic()
        n_open = n_done = 0
        while n_done < len(keys):
            while n_open < 8 and n_done + n_open < len(keys):
                slot = n_done + n_open
                store.read(slot, 1, keys[slot], is_speculative=False)
                n_open += 1
            select.select([reader.fd for reader in store.readers], [], [], 5)
            finished = store.take(time.monotonic_ns())
            assert all(type(event) is ReadLanded for event in finished)
            n_open, n_done = n_open - len(finished), n_done + len(finished)
        rate = drives.bytes.total() / (time.monotonic() - begin)
        assert rate > 0.75 * sum(drives.rates)
        assert drives.bytes[0] / drives.bytes.total() == pytest.approx(drives.rates[0] / sum(drives.rates), abs=0.1)
    store.close()


def test_a_drive_that_is_unplugged_costs_no_request_and_is_used_again_when_it_is_back(
    two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, mirror = two
    expected = expected_tokens(model, tmp_path)
    options: dict[str, Any] = {"n_slots": 8, "direct_io": "off", "mirrors": (str(mirror),)}
    with Ring(model, tmp_path, **options) as ring, Drives(reads_of(ring), [1e9, 1e9]) as drives:
        assert ring.generate(PROMPT, 12).tokens == expected
        capfd.readouterr()
        drives.unplugged.add(1)
        assert ring.generate(PROMPT, 12).tokens == expected
        found = ring.store_counters()
        assert found["copy_faults"] >= 3 and found["places_resting"] == 1 and found["read_errors"] == 0
        log = capfd.readouterr().err
        assert 1 <= log.count("copy_failed") < 20 and str(mirror) in log and "rests_s=5" in log
        n_before = drives.bytes[1]
        drives.unplugged.clear()
        ring.end_rests()
        assert ring.generate(PROMPT, 12).tokens == expected
        assert drives.bytes[1] > n_before and ring.store_counters()["places_resting"] == 0
        drives.unplugged |= {0, 1}
        done = ring.generate(PROMPT, 12).done
        assert done is not None and done.error_code == "expert_read_failed"
        assert str(model) in done.error and str(mirror) in done.error


@pytest.mark.parametrize("which", ["model", "mirror"])
def test_a_damaged_copy_is_named_once_and_the_other_one_read(
    which: str, two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, mirror = two
    expected = expected_tokens(model, tmp_path)
    layer = next(iter(Container.open(model).experts))
    n_experts = Container.open(model).experts[layer].n_experts
    for expert in range(1, n_experts):
        path = damage(model if which == "model" else mirror, model, layer, expert)
    with Ring(model, tmp_path, n_slots=8, mirrors=(str(mirror),)) as ring:
        capfd.readouterr()
        assert ring.generate(PROMPT, 12).tokens == expected
        found = ring.store_counters()
        assert 0 < found["copies_damaged"] == found["copy_faults"] < n_experts and found["read_errors"] == 0
        log = capfd.readouterr().err
        assert log.count("copy_damaged") == 1 and str(path) in log
        assert ring.generate(PROMPT, 12).tokens == expected
        again = ring.store_counters()
        assert again["copy_faults"] == again["copies_damaged"], "none was read from the damaged copy twice"


def test_a_record_that_is_damaged_everywhere_names_both_files(two: tuple[Path, Path], tmp_path: Path) -> None:
    model, mirror = two
    layer = next(iter(Container.open(model).experts))
    for expert in range(1, Container.open(model).experts[layer].n_experts):
        damage(model, model, layer, expert)
        damage(mirror, model, layer, expert)
    with Ring(model, tmp_path, mirrors=(str(mirror),)) as ring:
        done = ring.generate(PROMPT, 4).done
        assert done is not None and done.error_code == "expert_checksum_mismatch"
        assert str(model) in done.error and str(mirror) in done.error


def test_files_may_lie_in_several_directories(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Half of the files here, half there."""
    model, mirror = two
    expected = expected_tokens(model, tmp_path)
    names = sorted(path.name for path in mirror.iterdir())
    for i, name in enumerate(names):
        ((model if i % 2 else mirror) / name).unlink()
    with Ring(model, tmp_path, mirrors=(str(mirror),), n_slots=16) as ring:
        assert ring.generate(PROMPT, 12).tokens == expected


def test_expert_io_starts_again_without_a_mirror_that_is_gone(
    two: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, mirror = two
    expected = expected_tokens(model, tmp_path)
    with Ring(model, tmp_path, n_slots=16, mirrors=(str(mirror),)) as ring:
        assert ring.generate(PROMPT, 12).tokens == expected
        shutil.rmtree(mirror)
        assert ring.generate(PROMPT, 12).tokens == expected, "open files stay"
        ring.kill("expert_io")
        ring.start("expert_io")
        assert "mirror_left_out" in capfd.readouterr().err
        assert ring.generate(PROMPT, 12).tokens == expected
