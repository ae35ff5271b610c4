"""The two engines as a comparison sees them: start, make a prompt of n tokens, decode n tokens, stop."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bench.roofline import BenchError
from shared.client import Answer, Client, find_group
from shared.errors import ConfigError

LLAMA = Path(__file__).with_name("llama.py")
SHORT_PROMPT = 16
"""Tokens in front of decoding."""
STOP_WAIT_S = 120


class Engine(Protocol):
    """Rates in tokens per second. Tokens are random, so experts are chosen close to uniformly: the same load for both."""

    def prefill(self, n_tokens: int, seed: int) -> float: ...

    def decode(self, n_tokens: int, seed: int) -> float: ...


class Llama:
    """llama.cpp in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.facts = self._hear()

    def prefill(self, n_tokens: int, seed: int) -> float:
        return n_tokens / float(self._ask("prefill", n_tokens, seed)["ns"]) * 1e9

    def decode(self, n_tokens: int, seed: int) -> float:
        self._ask("prefill", SHORT_PROMPT, seed)
        times = self._ask("decode", n_tokens, seed + 1)["ns"]
        return n_tokens / float(sum(times)) * 1e9

    def _ask(self, what: str, n: int, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {n} {seed}\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise BenchError(f"llama.cpp ended with {self._process.wait()}; its last words ({self._log}):\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found


def require_llama(python: str) -> None:
    """ConfigError, before anything large is written, when this interpreter has no llama-cpp-python."""
    try:
        found = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
        said = "".join(found.stderr.splitlines()[-1:])
    except OSError as error:
        found, said = None, str(error)
    if found is None or found.returncode:
        raise ConfigError(
            f"{python} can't import llama_cpp ({said}); install the extra: pip install 'colibri-moe[peers]', "
            "or name an interpreter that has it with --llama-python"
        )


@contextmanager
def run_llama(python: str, settings: dict[str, Any], log: Path) -> Iterator[Llama]:
    """BenchError when it can't be started or breaks off, with its last words."""
    with log.open("a") as words:
        process = subprocess.Popen(
            [python, str(LLAMA), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
        )  # fmt: skip
        try:
            yield Llama(process, log)
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()


class Group:
    """Our process group, asked over HTTP as any user would: gateway, router and hops are part of the time."""

    def __init__(self, url: str, n_vocab: int) -> None:
        self._client, self._n_vocab = Client(url), n_vocab

    def prefill(self, n_tokens: int, seed: int) -> float:
        """Time to the first token: its head and the request's way in and out included."""
        return n_tokens / self._answer(n_tokens, 1, seed).first_token_s

    def decode(self, n_tokens: int, seed: int) -> float:
        answer = self._answer(SHORT_PROMPT, n_tokens + 1, seed)
        later = len(answer.token_ids) - answer.n_first
        if later < 1:
            raise BenchError(f"all {n_tokens + 1} tokens came at once; a decode of more tokens is needed to time them")
        return later / (answer.total_s - answer.first_token_s)

    def _answer(self, n_prompt: int, max_tokens: int, seed: int) -> Answer:
        prompt = random.Random(seed).choices(range(self._n_vocab), k=n_prompt)
        answer = Answer()
        # Sampled at temperature 1, so that an answer does not end in a circle of the same experts.
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for _ in self._client.stream("/v1/completions", body, answer):
            pass
        if len(answer.token_ids) != max_tokens:
            raise BenchError(f"the group answered with {len(answer.token_ids)} tokens instead of {max_tokens}")
        return answer


@contextmanager
def run_group(container: Path, run_dir: Path, n_vocab: int, arguments: list[str]) -> Iterator[Group]:
    """A group of our own on any free port, stopped at the end. BenchError when it does not start (its words go to stderr)."""
    up = [sys.executable, "-m", "deploy.up", "--run-dir", str(run_dir)]
    started = subprocess.run(
        [*up, str(container), "--port", "0", "--daemon", *arguments], stdout=sys.stderr, check=False
    )
    if started.returncode:
        raise BenchError(f"colibri-up ended with {started.returncode} (its words are above)")
    try:
        found = find_group(run_dir)
        if found is None:
            raise BenchError(f"no group answers in {run_dir}")
        yield Group(found[1], n_vocab)
    finally:
        subprocess.run([*up, "--stop"], stdout=sys.stderr, timeout=STOP_WAIT_S, check=False)
