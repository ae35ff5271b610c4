"""How often experts were used: counted per visit, kept in a file from run to run. Off in a group without a usage path."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from shared.experts.residency import Key
from shared.experts.usage import WRITE_EVERY_S, UsageHistory, load_usage, save_usage
from shared.log import Log
from shared.run.config import GroupConfig


class History:
    """See the module docstring. Writes at most once a minute, and at the end."""

    def __init__(self, config: GroupConfig, log: Log, layers: tuple[int, ...], n_experts: int) -> None:
        self._config, self._log = config, log
        self.usage: UsageHistory | None = None
        self._save_at = float("inf")
        if config.usage_path is None or not layers:
            return
        self.usage, why_empty = load_usage(Path(config.usage_path), config.fingerprint, layers, n_experts)
        if why_empty:
            log.warning("usage_history_ignored", path=config.usage_path, reason=why_empty)
        self._save_at = time.monotonic() + WRITE_EVERY_S

    def expected(self) -> dict[Key, float]:
        """Uses per step by experience, most used first."""
        return self.usage.expected() if self.usage else {}

    def count(self, layer: int, rows: Mapping[int, int], passing: Mapping[int, float]) -> None:
        """A visit ended: the experts it wanted, and of those that only a prompt wanted, the share of its rows."""
        if self.usage:
            self.usage.count(layer, list(rows), [passing.get(e, 1.0) for e in rows] if passing else 1.0)

    def tick(self) -> None:
        """Called several times a second."""
        if time.monotonic() >= self._save_at:
            self.save()

    def save(self) -> None:
        """Writes the history if there is anything new in it."""
        if self.usage is None:
            return
        self._save_at = time.monotonic() + WRITE_EVERY_S
        if not self.usage.has_news:
            return
        path = self._config.usage_path
        assert path is not None
        try:
            save_usage(Path(path), self._config.fingerprint, self.usage)
        except OSError as error:
            self._log.warning("usage_history_off", path=path, reason=error.strerror or str(error))
            self.usage = None
