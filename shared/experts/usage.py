"""Which experts a model's gates ask for, remembered from run to run: the order in which a fresh store fills its slots.

Two rates per expert, both in uses per visit of its layer: a *slow* one over thousands of visits, and a *fast* one over the
last few (after a crash the conversation goes on). They are kept in one small file per model fingerprint in the state directory,
written whole and atomically, at most once a minute and at the end of the process: ``8 * layers * experts`` bytes and a header.
A file that is damaged or of another version or model counts as none. Several groups may share the file: who finds that another
has written since adds the own visits to what lies there.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from native.memory import hash64
from shared.awake import Countdown
from shared.experts.residency import HALF_LIFE_STEPS, Key
from shared.files import read_file
from shared.kept import replace_file
from shared.locks import LocksMissing, try_lock
from shared.wire.endpoints import state_dir

FORMAT = "colibri expert usage"
VERSION = 1
SLOW_VISITS = 6000
"""Visits over which the slow rate is a mean; until then it is the mean of all."""
WRITE_EVERY_S = 60.0
MAX_FILE_BYTES = 1 << 28
LOCK_WAIT_S = 0.2
MIN_RATE = 1e-4
"""Expected uses per visit below which an expert is not worth reading ahead of demand."""


class _Row(NamedTuple):
    slow: NDArray[np.float32]
    fast: NDArray[np.float32]
    n_visits: int


class UsageHistory:
    """The rates, f32[L, E]. ``layers`` are the rows' layers. Pure; ``load_usage`` and ``save_usage`` do the files."""

    def __init__(self, layers: Sequence[int], n_experts: int) -> None:
        self.layers = tuple(layers)
        self.slow = np.zeros((len(self.layers), n_experts), np.float32)
        self.fast = np.zeros_like(self.slow)
        self.n_visits = np.zeros(len(self.layers), np.int64)
        # What was counted here since the file was last read or written, and the checksum it had then.
        self._new_uses = np.zeros_like(self.slow)
        self._new_visits = np.zeros_like(self.n_visits)
        self.seen_checksum = 0
        self.carried: dict[int, _Row] = {}
        """Layers of the file that are not ours (drafting groups have one more): written back as they are."""
        self._row = {layer: i for i, layer in enumerate(self.layers)}
        self._keep = float(2.0 ** (-1.0 / HALF_LIFE_STEPS))

    def count(self, layer: int, experts: Sequence[int], weights: Sequence[float] | float = 1.0) -> None:
        """One visit: the distinct ``experts`` it wanted; ``weights`` below 1 for those that only a prompt's rows chose."""
        i = self._row[layer]
        self.n_visits[i] += 1
        new = 1.0 / min(int(self.n_visits[i]), SLOW_VISITS)
        self.slow[i] *= 1.0 - new
        self.slow[i, experts] += np.multiply(weights, new)
        self.fast[i] *= self._keep
        self.fast[i, experts] += np.multiply(weights, 1.0 - self._keep)
        self._new_visits[i] += 1
        self._new_uses[i, experts] += np.asarray(weights, np.float32)

    @property
    def has_news(self) -> bool:
        """Whether anything was counted since the file was last read or written."""
        return bool(self._new_visits.any())

    def rebase(self, other: UsageHistory) -> None:
        """Somebody else wrote the file meanwhile: from now on this is ``other`` with the visits counted here since added."""
        self.carried = dict(other.carried)
        for j, layer in enumerate(other.layers):
            theirs = _Row(other.slow[j], other.fast[j], int(other.n_visits[j]))
            if layer not in self._row:
                self.carried[layer] = theirs
                continue
            i = self._row[layer]
            n_new = int(self._new_visits[i])
            self.n_visits[i] = theirs.n_visits + n_new
            share = min(1.0, n_new / min(int(self.n_visits[i]), SLOW_VISITS)) if n_new else 0.0
            self.slow[i] = theirs.slow + share * (self._new_uses[i] / max(n_new, 1) - theirs.slow)
            self.fast[i] = (theirs.fast + self.fast[i]) / 2 if n_new else theirs.fast

    def written(self, checksum: int) -> None:
        """The file now says what this says."""
        self.seen_checksum = checksum
        self._new_visits[:] = 0
        self._new_uses[:] = 0

    def expected(self) -> dict[Key, float]:
        """Uses per visit to be expected of each expert, those that are hardly ever used left out, the warmest first."""
        rate = (self.slow + self.fast) / 2
        order = np.argsort(-rate, axis=None, kind="stable")
        n_experts = rate.shape[1]
        out: dict[Key, float] = {}
        for place in order.tolist():
            i, expert = divmod(place, n_experts)
            if rate[i, expert] < MIN_RATE:
                break
            out[self.layers[i], expert] = float(rate[i, expert])
        return out


def usage_path(fingerprint: str) -> Path | None:
    """Where this model's usage history lies. None when there is no place for one: it is a convenience."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", fingerprint):  # it comes from the model directory and becomes a file name
        return None
    try:
        return state_dir() / "usage" / fingerprint
    except RuntimeError:  # a user without a home
        return None


def load_usage(path: Path, fingerprint: str, layers: Sequence[int] | None, n_experts: int) -> tuple[UsageHistory, str]:
    """(the history, why it starts empty or ''). No file is no reason. Layers that the file lacks start empty.

    ``layers``: None for those of the file.
    """
    history = UsageHistory(layers or (), n_experts)
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return history, ""
    except OSError as error:
        return history, error.strerror or str(error)
    try:
        head = msgpack.unpackb(data, strict_map_key=False)
        if head["format"] != FORMAT or head["version"] != VERSION:
            return history, f"it is of version {head['version']}, this program writes {VERSION}"
        if (head["fingerprint"], head["n_experts"]) != (fingerprint, n_experts):
            return history, f"it is of model {head['fingerprint']}"
        body: bytes = head["rates"]
        if hash64(body) != head["checksum"]:
            return history, "its checksum is wrong"
        found = tuple(map(int, head["layers"]))
        rates = np.frombuffer(body, "<f4").reshape(2, len(found), n_experts)
        visits = np.array(head["n_visits"], np.int64)
        if visits.shape != (len(found),) or not (
            np.isfinite(rates).all() and (rates >= 0).all() and (visits >= 0).all()
        ):
            return history, "its numbers are impossible"
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.UnpackException):
        return history, "it is damaged"
    if layers is None:
        history = UsageHistory(found, n_experts)
    for at, layer in enumerate(found):
        row = _Row(rates[0, at], rates[1, at], int(visits[at]))
        if layer in history.layers:
            i = history.layers.index(layer)
            history.slow[i], history.fast[i], history.n_visits[i] = row
        else:
            history.carried[layer] = row
    history.seen_checksum = head["checksum"]
    return history, ""


def save_usage(path: Path, fingerprint: str, history: UsageHistory) -> None:
    """Replaces the file at once or not at all, adding to what another process has put there meanwhile. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(path.parent):
        found, why_empty = load_usage(path, fingerprint, None, history.slow.shape[1])
        if not why_empty and found.seen_checksum not in (0, history.seen_checksum):
            history.rebase(found)
        _write(path, fingerprint, history)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Keeps other processes from writing; for a moment only, so who has to wait longer than that gives up (OSError)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        limit = Countdown(LOCK_WAIT_S)
        with contextlib.suppress(LocksMissing):  # a file system without locks: the later writer wins
            while not try_lock(fd, directory):
                if limit.is_over:
                    raise BlockingIOError(f"{directory} is locked by another process")
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def _write(path: Path, fingerprint: str, history: UsageHistory) -> None:
    carried = history.carried.values()
    slow = np.concatenate([history.slow, *(row.slow[None] for row in carried)])
    fast = np.concatenate([history.fast, *(row.fast[None] for row in carried)])
    rates: NDArray[np.float32] = np.stack([slow, fast]).astype("<f4")
    body = rates.tobytes()
    data: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "n_experts": history.slow.shape[1],
            "layers": [*history.layers, *history.carried],
            "n_visits": [*history.n_visits.tolist(), *(row.n_visits for row in carried)],
            "checksum": hash64(body),
            "rates": body,
        }
    )
    replace_file(path, data)
    history.written(hash64(body))
