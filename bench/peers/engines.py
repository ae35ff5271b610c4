"""The engines as a comparison sees them (ours is ``bench.group``): start, make a prompt of n tokens, decode n tokens, stop."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bench.group import SHORT_PROMPT, Wrap
from bench.roofline import BenchError
from shared.errors import ConfigError

IMPORT = "import sys; del sys.path[0]; import llama_cpp"  # -P is unknown to older interpreters
LLAMA = Path(__file__).with_name("llama.py")


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
        found = subprocess.run([python, "-c", IMPORT], capture_output=True, text=True, check=False)
        said = "".join(found.stderr.splitlines()[-1:])
    except OSError as error:
        found, said = None, str(error)
    if found is None or found.returncode:
        raise ConfigError(
            f"{python} can't import llama_cpp ({said}); install the extra: pip install 'colibri-moe[peers]', "
            "or name an interpreter that has it with --llama-python"
        )


@contextmanager
def run_llama(
    python: str, settings: dict[str, Any], log: Path, wrap: Wrap = lambda command: command
) -> Iterator[Llama]:
    """BenchError when it can't be started or breaks off, with its last words."""
    with log.open("a") as words:
        process = subprocess.Popen(
            wrap([python, str(LLAMA), json.dumps(settings)]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
        )  # fmt: skip
        try:
            yield Llama(process, log)
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()
