"""``colibri bench store``: the read pool alone, as the expert store uses it, beside the drive's ceiling of the same seconds.

No group is started. Random records of all expert files go into slots of huge pages that were touched before, with the setting
the store itself would choose for this drive.

The JSON document, schema 1; fields are only ever added:

    schema      1
    model       path; record_bytes: of the largest expert record; n_files
    setting     engine, is_direct, depth, piece_bytes
    cases       "plain", "checksums" -> rounds[] {gb_s, ceiling_gb_s, share} and medians {name: {median, least, most}};
                ceiling_gb_s is the mean of the samples before and after
    delay       of a demand read by guesses that are read meanwhile: rounds[] {alone_ms, beside_ms, ideal_ms, guess_gb_s} and
                medians; ideal_ms is the record's size over the ceiling; delay_ms = beside_ms - alone_ms
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.cold import Say, middle_file
from bench.columns import Figure, summary, table
from bench.drive import DriveCeiling
from bench.limits import drop_cache
from bench.roofline import BenchError
from native.memory import HugeBuffer
from native.reader import ReadDone, Reader, open_direct
from shared.container.entries import ExpertFile
from shared.container.reader import Container
from shared.machine.drive import ReadSetting, kept_folder
from shared.planning.drive_probe import drive_profile

SCHEMA = 1
PAUSE_S = 0.004
"""At most, between two demand reads: they shall come at any moment of a guess's read."""
FIRST_GUESS = 1 << 32
"""Tags from here on are guesses."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second of the pool in a round, between two samples of the ceiling."""

    rate: float
    ceiling: float

    @property
    def share(self) -> float:
        return self.rate / self.ceiling

    def as_json(self) -> dict[str, float]:
        return {"gb_s": self.rate / 1e9, "ceiling_gb_s": self.ceiling / 1e9, "share": self.share}


@dataclass(frozen=True)
class Delay:
    """Seconds of a demand read (median of a round), with nothing else in flight and beside guesses."""

    alone_s: float
    beside_s: float
    ideal_s: float
    guess_rate: float
    """Bytes per second that the guesses got meanwhile."""

    @property
    def delay_s(self) -> float:
        return self.beside_s - self.alone_s

    def as_json(self) -> dict[str, float]:
        return {
            "alone_ms": self.alone_s * 1e3, "beside_ms": self.beside_s * 1e3, "ideal_ms": self.ideal_s * 1e3,
            "guess_gb_s": self.guess_rate / 1e9, "delay_ms": self.delay_s * 1e3,
        }  # fmt: skip


@dataclass
class StoreResults:
    model: str
    record_bytes: int
    n_files: int
    setting: ReadSetting
    rates: dict[str, list[Rate]] = field(default_factory=lambda: {"plain": [], "checksums": []})
    delays: list[Delay] = field(default_factory=list)


RATES: tuple[Figure[Rate], ...] = (
    Figure("drive's ceiling, GB/s", lambda r: r.ceiling / 1e9),
    Figure("read pool, GB/s", lambda r: r.rate / 1e9),
    Figure("  of the ceiling", lambda r: r.share, ".0%"),
)
DELAYS: tuple[Figure[Delay], ...] = (
    Figure("record / ceiling, ms", lambda d: d.ideal_s * 1e3, ".1f"),
    Figure("a demand read alone, ms", lambda d: d.alone_s * 1e3, ".1f"),
    Figure("beside guesses, ms", lambda d: d.beside_s * 1e3, ".1f"),
    Figure("  delay, ms", lambda d: d.delay_s * 1e3, ".1f"),
    Figure("guesses meanwhile, GB/s", lambda d: d.guess_rate / 1e9),
)


class Records:
    """Random records of a model's expert files, read into slots of huge pages through a pool of its own."""

    def __init__(self, files: Sequence[ExpertFile], setting: ReadSetting, seed: int = 0) -> None:
        if any(file.raw for file in files):
            raise BenchError(
                "records of the C engine's containers do not lie whole: their reads are measured by bench decode"
            )
        self._random = random.Random(seed)
        self._setting = setting
        self._choices = [(file, e) for file in files for e in range(file.n_experts) if file.copies[0].holds(e)]
        self.slot_bytes = max(file.record_bytes for file in files)
        self.n_waiting = max(2, -(-2 * setting.depth * setting.piece_bytes // self.slot_bytes))
        """Reads in the pool at a time: enough that it never runs dry."""
        self._fds: dict[int, int] = {}
        try:
            for file in files:
                path = file.path
                self._fds[file.layer] = (
                    open_direct(path) if setting.is_direct else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                )
        except OSError as error:
            self._close_files()
            raise BenchError(f"{path} can't be opened ({error.strerror})") from None
        self.buffer = HugeBuffer(2 * self.n_waiting * self.slot_bytes)
        self.buffer.array[:] = 0

    def submit(self, reader: Reader, tag: int, slot: int, *, is_guess: bool = False, has_checksum: bool = False) -> int:
        """Starts the read of a random record; returns its bytes."""
        file, expert = self._random.choice(self._choices)
        fd, offset = self._fds[file.layer], file.offset_of(expert)
        if not self._setting.is_direct:
            os.posix_fadvise(fd, offset, file.record_bytes, os.POSIX_FADV_DONTNEED)
        target = self.buffer.address + slot * self.slot_bytes
        reader.submit(tag, fd, offset, file.record_bytes, target, speculative=is_guess, checksum=has_checksum)
        return file.record_bytes

    def reader(self) -> Reader:
        return Reader(self._setting.depth, self._setting.piece_bytes, engine=self._setting.engine)

    def rate(self, seconds: float, has_checksum: bool) -> float:
        """Bytes per second with the pool never empty."""
        free, slots = list(range(self.n_waiting)), dict[int, int]()
        n_bytes = tag = 0
        with self.reader() as reader:
            begin = time.perf_counter()
            while slots or time.perf_counter() < begin + seconds:
                while free and time.perf_counter() < begin + seconds:
                    slots[tag] = free.pop()
                    self.submit(reader, tag, slots[tag], has_checksum=has_checksum)
                    tag += 1
                for done in take(reader):
                    n_bytes += done.bytes
                    free.append(slots.pop(done.tag))
            return n_bytes / (time.perf_counter() - begin)

    def delay(self, seconds: float, ceiling: float) -> Delay:
        """Demand reads one by one, first alone, then while guesses are always in flight."""
        with self.reader() as reader:
            alone, _ = self._demand(reader, seconds, n_guesses=0)
            beside, guess_rate = self._demand(reader, seconds, n_guesses=self.n_waiting)
        return Delay(statistics.median(alone), statistics.median(beside), self.slot_bytes / ceiling, guess_rate)

    def _demand(self, reader: Reader, seconds: float, n_guesses: int) -> tuple[list[float], float]:
        """(seconds of each demand read, bytes per second of guesses). Slot 0 is for demand."""
        free, slots = list(range(1, 1 + n_guesses)), dict[int, int]()
        times: list[float] = []
        tag, n_bytes = FIRST_GUESS, 0
        begin = time.perf_counter()
        while not times or time.perf_counter() < begin + seconds:
            asked, since = False, time.perf_counter()
            pause = self._random.uniform(0, PAUSE_S)
            while True:  # a pause in which guesses go on, then one demand read
                while free:
                    slots[tag] = free.pop()
                    self.submit(reader, tag, slots[tag], is_guess=True)
                    tag += 1
                if not asked and time.perf_counter() - since >= pause:
                    asked, since = True, time.perf_counter()
                    self.submit(reader, 0, 0)
                is_there = False
                for done in take(reader, timeout=None if asked else pause):
                    if done.tag < FIRST_GUESS:
                        is_there = True
                        times.append(time.perf_counter() - since)
                    else:
                        n_bytes += done.bytes
                        free.append(slots.pop(done.tag))
                if is_there:
                    break
        elapsed = time.perf_counter() - begin
        for left in slots:
            reader.cancel(left)
        while slots:
            for done in take(reader):
                slots.pop(done.tag)
        return times, n_bytes / elapsed

    def _close_files(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_files()
        self.buffer.close()


def take(reader: Reader, timeout: float | None = None) -> list[ReadDone]:
    """Waits for the next reads that end, at most ``timeout`` seconds. BenchError when one failed."""
    select.select([reader.fd], [], [], timeout)
    found = reader.take()
    for done in found:
        if done.error:
            raise BenchError(f"a read of {done.wanted:,} bytes failed: {os.strerror(done.error)}")
    return found


def run_store(model: Path, is_quick: bool = False, say: Say = lambda _: None) -> StoreResults:
    """Ten seconds, or three with ``is_quick``. BenchError where the drive can't be read past the page cache."""
    container = Container.open(model)
    middle = middle_file(container)
    files = [file for file in container.experts.values() if file.copies]
    with contextlib.suppress(OSError):
        drop_cache([file.path for file in files])
    profile = drive_profile(files, kept_folder(), may_write=False, report=say)
    report = StoreResults(str(model), max(file.record_bytes for file in files), len(files), profile.setting)
    n_rounds, seconds = (2, 0.25) if is_quick else (5, 0.6)
    with DriveCeiling(middle.path, middle.record_bytes) as drive, Records(files, profile.setting) as records:
        for i in range(n_rounds):
            before = drive.sample(seconds)
            for name in ("plain", "checksums") if i % 2 == 0 else ("checksums", "plain"):
                rate = records.rate(seconds, name == "checksums")
                after = drive.sample(seconds)
                report.rates[name].append(Rate(rate, (before + after) / 2))
                before = after
            report.delays.append(records.delay(seconds, before))
            say(f"round {i + 1}: {report.rates['plain'][-1].share:.0%} of the ceiling")
    return report


def as_json(report: StoreResults) -> dict[str, Any]:
    """The document described above."""
    rates = {"gb_s": lambda r: r.rate / 1e9, "ceiling_gb_s": lambda r: r.ceiling / 1e9, "share": lambda r: r.share}
    delays = {name: (lambda d, name=name: d.as_json()[name]) for name in report.delays[0].as_json()}
    return {
        "schema": SCHEMA,
        "model": report.model,
        "record_bytes": report.record_bytes,
        "n_files": report.n_files,
        "setting": {name: getattr(report.setting, name) for name in report.setting.__struct_fields__},
        "cases": {
            name: {"rounds": [r.as_json() for r in found], "medians": summary(rates, found)}
            for name, found in report.rates.items()
        },
        "delay": {"rounds": [d.as_json() for d in report.delays], "medians": summary(delays, report.delays)},
    }


def as_text(report: StoreResults) -> str:
    """Two tables."""
    return "\n".join(
        [
            f"{report.model}; records of {report.record_bytes / 1e6:.1f} MB in {report.n_files} files; {report.setting}",
            "",
            *table(RATES, {"plain": report.rates["plain"], "with checksums": report.rates["checksums"]}),
            "",
            *table(DELAYS, {"one read": report.delays}),
        ]
    )
