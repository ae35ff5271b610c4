"""Decoding under memory limits that count page cache: llama.cpp, which maps its file, and our group, in turn, each from cold.

llama.cpp lives off the page cache, so the kernel's read-ahead decides how much it reads: it runs with the setting found here
and with 128 KiB, Linux's own default, which reads least beyond what is needed. Everything else is as in ``bench.peers``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.group import SHORT_PROMPT, run_group
from bench.limits import LimitedGroup, drop_cache, memory_limit
from bench.peers.engines import run_llama
from bench.roofline import BenchError
from shared.errors import ColibriError

OURS = "colibri"
FOUND, SMALL = "llama.cpp mmap, read-ahead as found", "llama.cpp mmap, read-ahead 128 KiB"
SMALL_KB = 128
START_BYTES = 48 << 20
"""Of the limit are not our group's: colibri-up is there before it can ask what is left. llama.cpp has all of it."""
WARM_TOKENS = 2
Say = Callable[[str], None]


@dataclass
class Limit:
    """What happened under one limit. ``rates``: decode tokens per second; ``faults``: why an engine has none."""

    n_bytes: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {OURS: [], FOUND: [], SMALL: []})
    faults: dict[str, str] = field(default_factory=dict)
    n_slots: int = 0

    def median(self, engine: str) -> float | None:
        return statistics.median(self.rates[engine]) if self.rates[engine] else None

    def ratio(self, engine: str) -> float | None:
        """Ours over this setting of llama.cpp."""
        ours, peer = self.median(OURS), self.median(engine)
        return ours / peer if ours and peer else None

    @property
    def best_ratio(self) -> float | None:
        """Ours over the better of llama.cpp's settings."""
        found = [ratio for ratio in (self.ratio(FOUND), self.ratio(SMALL)) if ratio is not None]
        return min(found, default=None)


@dataclass
class Comparison:
    shape: str
    n_tokens: int
    n_threads: int
    read_ahead_kb: int
    """As found on this machine."""
    peer_version: str = ""
    limits: list[Limit] = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    """The files and how to run them."""

    gguf: Path
    container: Path
    n_vocab: int
    n_threads: int
    n_tokens: int
    n_rounds: int
    llama_python: str
    log: Path
    private_dir: Callable[[], contextlib.AbstractContextManager[Path]]


def compare_limited(shape: str, limits: list[int], setup: Setup, say: Say) -> Comparison:
    """Each limit in turn, in each every engine in turn, ``n_rounds`` times. What does not run is said, not hidden."""
    knob = read_ahead_file(setup.gguf)
    found = Comparison(shape, setup.n_tokens, setup.n_threads, int(knob.read_text()))
    with _sigterm_raises():
        for n_bytes in limits:
            limit = Limit(n_bytes)
            found.limits.append(limit)
            for turn in range(setup.n_rounds):
                for engine in (OURS, FOUND, SMALL) if turn % 2 == 0 else (SMALL, FOUND, OURS):
                    if engine not in limit.faults:
                        _turn(found, limit, engine, knob, setup, turn, say)
    return found


def _turn(found: Comparison, limit: Limit, engine: str, knob: Path, setup: Setup, turn: int, say: Say) -> None:
    drop_cache([setup.gguf, setup.container])
    try:
        with memory_limit(limit.n_bytes) as group:
            if engine == OURS:
                rate = _ours(limit, group, setup, turn)
            else:
                with read_ahead(knob, SMALL_KB if engine == SMALL else found.read_ahead_kb):
                    rate, found.peer_version = _llama(group, setup, turn)
            if group.n_killed:
                raise BenchError(f"the kernel ended {group.n_killed} of its processes at this limit")
    except ColibriError as error:
        limit.faults[engine] = str(error)
        say(f"{limit.n_bytes / 2**30:.3g} GiB, {engine}: {error}")
        return
    limit.rates[engine].append(rate)
    say(f"{limit.n_bytes / 2**30:.3g} GiB, {engine}: {rate:.2f} tokens/s")


def _ours(limit: Limit, group: LimitedGroup, setup: Setup, turn: int) -> float:
    arguments = {
        "--draft": "off", "--threads": setup.n_threads, "--max-sequences": 1, "--ram": limit.n_bytes - START_BYTES,
        "--max-context": SHORT_PROMPT + setup.n_tokens + 64,
    }  # fmt: skip
    words = [str(word) for pair in arguments.items() for word in pair]
    with (
        setup.private_dir() as run_dir,
        run_group(setup.container, run_dir, setup.n_vocab, [*words, "--no-usage-history"], group.command) as ours,
    ):
        limit.n_slots = ours.config.n_slots
        ours.decode(WARM_TOKENS, turn + 100)
        return ours.decode(setup.n_tokens, turn)


def _llama(group: LimitedGroup, setup: Setup, turn: int) -> tuple[float, str]:
    settings = {
        "model": str(setup.gguf), "mode": "mmap", "repack": False, "n_threads": setup.n_threads, "n_vocab": setup.n_vocab,
        "n_ctx": SHORT_PROMPT + setup.n_tokens + 64, "n_batch": SHORT_PROMPT,
    }  # fmt: skip
    with run_llama(setup.llama_python, settings, setup.log, group.command) as llama:
        llama.decode(WARM_TOKENS, turn + 100)
        return llama.decode(setup.n_tokens, turn), str(llama.facts["version"])


# ---- the kernel's read-ahead -------------------------------------------------------------------------------------------


def read_ahead_file(path: Path, root: Path = Path("/sys/dev/block")) -> Path:
    """Where the kernel's read-ahead (KiB) of this file's drive stands. BenchError where that is no block device."""
    device = path.stat().st_dev
    place = root / f"{os.major(device)}:{os.minor(device)}"
    for directory in (place, place.resolve().parent):  # of a partition: its disk's
        if (directory / "queue/read_ahead_kb").is_file():
            return directory / "queue/read_ahead_kb"
    raise BenchError(f"{path} lies on no block device; its read-ahead can't be set. Use another --dir.")


@contextlib.contextmanager
def read_ahead(knob: Path, kb: int) -> Iterator[None]:
    """Sets it for files that are opened inside; as before at the end, whatever the end."""
    before = knob.read_text()
    try:
        _write(knob, str(kb))
        yield
    finally:
        _write(knob, before)


def _write(knob: Path, text: str) -> None:
    if knob.read_text().strip() == text.strip():
        return
    try:
        knob.write_text(text)
    except OSError as error:
        raise BenchError(f"{knob} can't be set to {text.strip()} ({error.strerror}); that takes root") from None


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """So that an end from outside restores the read-ahead too."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what it says ------------------------------------------------------------------------------------------------------


def as_json(c: Comparison) -> dict[str, Any]:
    """Schema 1: the run, and for each limit its engines' rates, medians, faults and our ratios."""
    return {
        "schema": 1,
        "shape": c.shape,
        "n_tokens": c.n_tokens,
        "n_threads": c.n_threads,
        "read_ahead_kb": c.read_ahead_kb,
        "peer_version": c.peer_version,
        "limits": [
            {
                "bytes": limit.n_bytes,
                "slots": limit.n_slots,
                "engines": {
                    name: {"decode_tok_s": rates, "median": limit.median(name), "fault": limit.faults.get(name)}
                    for name, rates in limit.rates.items()
                },
                "ratio": {"as_found": limit.ratio(FOUND), "small": limit.ratio(SMALL), "best": limit.best_ratio},
            }
            for limit in c.limits
        ],
    }


def as_text(c: Comparison) -> str:
    """A table, and below it why a figure is missing."""
    lines = [
        f"{c.shape}; {c.n_threads} threads; decode of {c.n_tokens} tokens from a cold start; llama-cpp-python {c.peer_version}",
        f"memory limits count page cache; read-ahead found here: {c.read_ahead_kb} KiB",
        "",
        f"{'limit':>8} {'engine':38} {'decode tok/s':>24} {'ours is':>8}",
    ]
    faults = []
    for limit in c.limits:
        for name, rates in limit.rates.items():
            text = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})" if rates else "-"
            ratio = None if name == OURS else limit.ratio(name)
            who = f"{name}, {limit.n_slots} slots" if name == OURS and limit.n_slots else name
            times = "" if ratio is None else f"{ratio:.1f} x"
            lines.append(f"{limit.n_bytes / 2**30:>4.3g} GiB {who:38} {text:>24} {times:>8}".rstrip())
            if name in limit.faults:
                faults.append(f"{limit.n_bytes / 2**30:.3g} GiB, {name}: {limit.faults[name]}")
    return "\n".join([*lines, *(["", *faults] if faults else [])])
