"""Which experts a model's gates ask for, remembered from run to run: the order in which a fresh store fills its slots.

Two rates per expert, both in uses per visit of its layer: a *slow* one over thousands of visits, and a *fast* one over the
last few (after a crash the conversation goes on). They are kept in one small file per model fingerprint in the state directory,
written whole and atomically, at most once a minute and at the end of the process: ``8 * layers * experts`` bytes and a header.
A file that is damaged or of another version or model counts as none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgpack
import numpy as np
from numpy.typing import NDArray

from native.memory import hash64
from shared.residency import HALF_LIFE_STEPS, Key

FORMAT = "colibri expert usage"
VERSION = 1
SLOW_VISITS = 6000
"""Visits over which the slow rate is a mean; until then it is the mean of all."""
WRITE_EVERY_S = 60.0
MAX_FILE_BYTES = 1 << 28
MIN_RATE = 1e-4
"""Expected uses per visit below which an expert is not worth reading ahead of demand."""


class UsageHistory:
    """The rates, f32[L, E]. ``layers`` are the rows' layers. Pure; ``load_usage`` and ``save_usage`` do the files."""

    def __init__(self, layers: Sequence[int], n_experts: int) -> None:
        self.layers = tuple(layers)
        self.slow = np.zeros((len(self.layers), n_experts), np.float32)
        self.fast = np.zeros_like(self.slow)
        self.n_visits = np.zeros(len(self.layers), np.int64)
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


def load_usage(path: Path, fingerprint: str, layers: Sequence[int], n_experts: int) -> tuple[UsageHistory, str]:
    """(the history, why it starts empty or ''). No file is no reason. Layers that the file lacks start empty."""
    history = UsageHistory(layers, n_experts)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return history, "it is too large"
        data = path.read_bytes()
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
        found = tuple(head["layers"])
        rates = np.frombuffer(body, "<f4").reshape(2, len(found), n_experts)
        visits = np.array(head["n_visits"], np.int64)
        if visits.shape != (len(found),) or not (
            np.isfinite(rates).all() and (rates >= 0).all() and (visits >= 0).all()
        ):
            return history, "its numbers are impossible"
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.UnpackException):
        return history, "it is damaged"
    for i, layer in enumerate(history.layers):
        if layer in found:
            at = found.index(layer)
            history.slow[i], history.fast[i] = rates[:, at]
            history.n_visits[i] = visits[at]
    return history, ""


def save_usage(path: Path, fingerprint: str, history: UsageHistory) -> None:
    """Replaces the file at once or not at all. Raises OSError."""
    rates: NDArray[np.float32] = np.stack([history.slow, history.fast]).astype("<f4")
    body = rates.tobytes()
    data: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "n_experts": history.slow.shape[1],
            "layers": list(history.layers),
            "n_visits": history.n_visits.tolist(),
            "checksum": hash64(body),
            "rates": body,
        }
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
