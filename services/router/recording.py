"""Record of logits for tests and quality measurements: one MessagePack map per row, in the order of computation.

Switched on by ``record_logits = FILE``; then every prompt row has its logits computed too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from services.router.scheduler import Plan
from shared.errors import ConfigError


class LogitRecorder:
    """Appends ``{request, position, token, n_prompt, logits}``; ``logits`` are the row's f32 bytes, ``token`` its input."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"record_logits: {path} can't be written: {error.strerror}") from None

    def record(self, plan: Plan, logits: Any) -> None:
        """logits f32[L, V] of a finished step."""
        for span in plan.spans:
            skipped = span.n_rows - span.n_logits
            for i in range(span.n_logits):
                self._file.write(
                    msgpack.packb(
                        {
                            "request": span.sequence.request,
                            "position": span.position + skipped + i,
                            "token": span.tokens[skipped + i],
                            "n_prompt": span.sequence.n_prompt,
                            "logits": np.ascontiguousarray(logits[span.logit_first + i]).tobytes(),
                        }
                    )
                )
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
