"""A process group of our own as a thing to measure: started as a user would, asked over HTTP, watched from outside."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from bench.roofline import BenchError
from shared.memory.segments import COUNTERS, TRACE, Segment
from shared.run.child import child_environment, python_command
from shared.run.client import Answer, Client, find_group
from shared.run.config import GroupConfig
from shared.step.counters import read_all
from shared.step.stages import TraceRing
from shared.wire.endpoints import EXPERT_IO

SHORT_PROMPT = 16
"""Tokens in front of decoding."""
STOP_WAIT_S = 120
SETTLE_S = 3.0
Wrap = Callable[[list[str]], list[str]]
"""Changes a command, for example into one under a memory limit."""


class Group:
    """Our process group, asked over HTTP as any user would: gateway, router and hops are part of the time.

    Tokens are random, so experts are chosen close to uniformly; sampled, so that no answer ends in a circle of the same ones.
    """

    def __init__(self, url: str, n_vocab: int, config: GroupConfig | None = None) -> None:
        self._client, self._n_vocab = Client(url), n_vocab
        self._config = config

    @property
    def config(self) -> GroupConfig:
        """What the group runs with."""
        assert self._config is not None
        return self._config

    def prefill(self, n_tokens: int, seed: int) -> float:
        """Tokens per second up to the first token: its head and the request's way in and out included."""
        return n_tokens / self.answer(n_tokens, 1, seed).first_token_s

    def decode(self, n_tokens: int, seed: int) -> float:
        """Tokens per second after the first."""
        answer = self.answer(SHORT_PROMPT, n_tokens + 1, seed)
        later = len(answer.token_ids) - answer.n_first
        if later < 1:
            raise BenchError(f"all {n_tokens + 1} tokens came at once; a decode of more tokens is needed to time them")
        return later / (answer.total_s - answer.first_token_s)

    def answer(
        self, n_prompt: int, max_tokens: int, seed: int, on_event: Callable[[Answer], None] = lambda _: None
    ) -> Answer:
        """A whole answer; ``on_event`` sees it grow. BenchError when tokens are missing."""
        answer = Answer()
        body = {
            "prompt": random.Random(seed).choices(range(self._n_vocab), k=n_prompt),
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for _ in self._client.stream("/v1/completions", body, answer):
            on_event(answer)
        if len(answer.token_ids) != max_tokens:
            raise BenchError(f"the group answered with {len(answer.token_ids)} tokens instead of {max_tokens}")
        return answer


@contextmanager
def run_group(
    container: Path, run_dir: Path, n_vocab: int, arguments: list[str], wrap: Wrap = lambda command: command
) -> Iterator[Group]:
    """A group of our own on any free port, stopped at the end, by SIGTERM too. BenchError when it does not start (its words
    go to stderr)."""
    up = python_command("deploy.up", "--run-dir", str(run_dir))
    started = subprocess.run(
        wrap([*up, str(container), "--port", "0", "--daemon", *arguments]),
        env=child_environment(),
        stdout=sys.stderr,
        check=False,
    )
    if started.returncode:
        raise BenchError(f"colibri-up ended with {started.returncode} (its words are above)")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        found = find_group(run_dir)
        if found is None:
            raise BenchError(f"no group answers in {run_dir}")
        yield Group(found[1], n_vocab, found[0])
    finally:
        signal.signal(signal.SIGTERM, before)
        subprocess.run([*up, "--stop"], env=child_environment(), stdout=sys.stderr, timeout=STOP_WAIT_S, check=False)


def _end(number: int, _frame: object) -> None:
    """What was started has to be stopped: by default a signal ends a program without its ``finally``."""
    sys.exit(128 + number)


@dataclass(frozen=True)
class Moment:
    """expert_io's counters at a time (CLOCK_MONOTONIC, ns)."""

    ns: int
    counters: dict[str, int]

    def since(self, before: Moment) -> dict[str, int]:
        return {name: value - before.counters.get(name, 0) for name, value in self.counters.items()}


class Watch:
    """Reads a running group's counters and stage rows without disturbing it."""

    def __init__(self, config: GroupConfig) -> None:
        self._segments = [Segment.attach(config.run_id, name, is_readonly=True) for name in (TRACE, COUNTERS)]
        self._ring: TraceRing | None = TraceRing(self._segments[0].buf)
        self._count = self._ring.n_written
        self._blocks: list[np.ndarray] = []
        self.n_lost = 0
        """Rows that the ring overwrote before they were taken."""

    def now(self) -> Moment:
        return Moment(time.monotonic_ns(), dict(read_all(self._segments[1].buf)[EXPERT_IO]))

    def take(self) -> None:
        """Copies the rows written since the last call; call it more often than the ring goes round."""
        assert self._ring is not None
        self._count, rows, n_lost = self._ring.read_since(self._count)
        self.n_lost += n_lost
        if len(rows):
            self._blocks.append(rows)

    def rows(self) -> np.ndarray:
        """All rows since the last call of this method, when the last step has been written down."""
        assert self._ring is not None
        deadline, before = time.monotonic() + SETTLE_S, -1
        while time.monotonic() < deadline and before != self._ring.n_written:
            before = self._ring.n_written
            time.sleep(0.15)
        self.take()
        found = np.concatenate(self._blocks) if self._blocks else np.zeros(0, self._ring.dtype)
        self._blocks.clear()
        return found

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ring = None
        for segment in self._segments:
            segment.close()
