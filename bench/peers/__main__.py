"""llama.cpp and our process group on the same machine, the same dimensions and the same bits, in turn.

    python -m bench.peers --shape glm-5.2 --layers 4 --dense 1 --dir DIR [--prompt 512] [--tokens 16] [--keep]

Writes a GGUF file and a container of random weights into DIR (18 GB each at GLM-5.2's width, four layers), then lets each
engine run alone with all weights in memory, in turn, at least twice, with the memory's read bandwidth measured in between.
With --limits 8G,4G,2G the engines decode under these memory limits instead, page cache counted, each from a cold start;
llama.cpp from a mapped file with the read-ahead found here and with 128 KiB (needs root; restored afterwards).
Needs the extra `peers` in this environment, or in the one of --llama-python. The best of llama.cpp's settings counts.
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.group import run_group
from bench.limits import drop_cache
from bench.measure import MIB
from bench.peers import limited
from bench.peers.architectures import SHAPES
from bench.peers.engines import Engine, require_llama, run_llama
from bench.peers.gguf_file import write_gguf
from bench.peers.report import OURS, Comparison, Rates, as_json, as_text
from bench.peers.shapes import HEAD_TYPES, make_model
from bench.roofline import BenchError
from bench.warmth import is_cold, warm_text, warm_up
from native.library import Pool, default_threads
from native.memory import HugeBuffer
from native.probe import read_rate
from shared.container.format import INDEX_NAME
from shared.errors import ColibriError
from shared.run.program import run_program
from shared.run.sizes import parse_bytes
from shared.run.terminal import complain, say, say_json

PLAIN_BYTES = 256 * MIB
READ_BYTES = 8 * MIB
MODES = {"mmap": ("mmap", False), "none": ("none", False), "repack": ("none", True)}
"""llama.cpp's settings: how it loads, and whether it changes the weights' layout to one of its own while doing so."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="glm-5.2")
    add("--layers", type=int, default=0, metavar="N", help="0: as `colibri synth` has them")
    add(
        "--dense",
        type=int,
        metavar="N",
        help="of the layers: the first N have no experts (default: 1 where there are such)",
    )
    add("--dir", type=Path, required=True, help="where the two models are written, or found from an earlier run")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of the prefill (default %(default)s)")
    add("--tokens", type=int, default=16, metavar="N", help="tokens of the decode (default %(default)s)")
    add("--rounds", type=int, default=2, metavar="N", help="turns of each engine, at least 2")
    add("--repeats", type=int, default=3, metavar="N", help="measurements in each turn")
    add("--threads", type=int, default=0, metavar="N", help="of each engine (0: one per usable CPU)")
    add("--head-type", choices=list(HEAD_TYPES), default="q8_0",
        help="llama.cpp's embedding and head: q8_0 has our bits, q4_0 is how such files are often made")  # fmt: skip
    add("--modes", type=modes_of, default="mmap,repack", metavar="LIST",
        help="llama.cpp's settings, in turn: mmap (file pages), none (private memory), repack (its own layout)")  # fmt: skip
    add("--ram", help='for our group, e.g. "20G" (default: colibri-up\'s own)')
    add("--limits", type=limits_of, metavar="LIST", help='decode under memory limits instead, e.g. "8G,4G,2G"')
    add("--llama-python", default=sys.executable, metavar="PATH", help="an interpreter that has llama-cpp-python")
    add("--write-only", action="store_true", help="write the models and stop")
    add("--keep", action="store_true", help="leave the models in --dir")
    add("--json", action="store_true", help="one JSON document instead of the table")
    return parser


def modes_of(text: str) -> list[str]:
    """argparse: a list of MODES."""
    found = text.split(",")
    if unknown := set(found) - set(MODES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(MODES)}")
    return found


def limits_of(text: str) -> list[int]:
    """argparse: sizes."""
    try:
        return [parse_bytes(part, "--limits") for part in text.split(",")]
    except ColibriError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Run:
    """One comparison: files, turns, measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = make_model(options.shape, options.layers, options.dense, options.head_type)
        self.n_threads: int = options.threads or default_threads()
        kinds = self.model.spec.layer_kinds
        self.shape = f"{options.shape}, {len(kinds)} layers, {kinds.count('dense')} of them dense"
        stem = f"{options.shape}-{len(kinds)}-{kinds.count('dense')}"
        self.gguf: Path = options.dir / f"{stem}-{options.head_type}.gguf"
        self.container: Path = options.dir / f"{stem}-container"
        self.log: Path = options.dir / "llama.log"
        self.bandwidths: list[float] = []

    def write(self) -> None:
        """What is not there yet; a file is there only when it is whole."""
        self.options.dir.mkdir(parents=True, exist_ok=True)
        if not self.gguf.exists():
            complain(f"writing {self.gguf} ({self.model.gguf_bytes / 1e9:.1f} GB)")
            write_gguf(self.gguf, self.model)
        if not (self.container / INDEX_NAME).exists():
            complain(f"writing {self.container} ({self.model.synthesis.n_bytes / 1e9:.1f} GB)")
            self.model.synthesis.run(self.container, n_threads=self.n_threads)

    def delete(self) -> None:
        self.gguf.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.container, ignore_errors=True)

    def compare(self) -> Comparison:
        """The engines in turn. Whoever is not measured holds no memory."""
        rates: dict[str, Rates] = {}
        modes: list[str] = self.options.modes
        version = ""
        for turn in range(max(2, self.options.rounds, len(modes))):
            mode = modes[turn % len(modes)]
            complain(f"turn {turn + 1}: llama.cpp ({mode})")
            drop_cache([self.container])
            read_file(self.gguf)
            with (
                self._turn(rates, f"llama.cpp {mode}") as found,
                run_llama(self.options.llama_python, self._llama_settings(mode), self.log) as llama,
            ):
                version = f"{llama.facts['version']} ({llama.facts['system']})"
                self._measure(llama, found, turn)
            drop_cache([self.gguf])
            complain(f"turn {turn + 1}: colibri")
            with (
                self._turn(rates, OURS) as found,
                private_dir() as run_dir,
                run_group(self.container, run_dir, self.model.spec.vocab, self._group_arguments()) as group,
            ):
                self._measure(group, found, turn)
        if OURS not in rates:
            raise BenchError("our group answered in no turn (its words are above)")
        if len(rates) < 2:
            raise BenchError(f"llama.cpp ran with none of the settings {', '.join(modes)}; its words are in {self.log}")
        return Comparison(
            shape=self.shape,
            head_type=self.options.head_type,
            n_threads=self.n_threads,
            n_prompt=self.options.prompt,
            n_tokens=self.options.tokens,
            peer_version=version,
            peer_bytes_per_token=self.model.peer_bytes_per_token,
            our_bytes_per_token=self.model.our_bytes_per_token,
            bandwidth_bytes_s=statistics.median(self.bandwidths),
            rates=rates,
        )

    @contextmanager
    def _turn(self, rates: dict[str, Rates], name: str) -> Iterator[Rates]:
        """What is measured inside counts when it was whole; a turn that breaks off spoils no other."""
        found = Rates()
        try:
            yield found
        except ColibriError as error:
            complain(f"  does not count: {error}")
            return
        whole = rates.setdefault(name, Rates())
        whole.prefill += found.prefill
        whole.decode += found.decode

    def _measure(self, engine: Engine, rates: Rates, turn: int) -> None:
        """The first calls bring every expert into memory (a prompt of some hundred tokens names them all) and don't count."""
        options, seed = self.options, 1000 * (turn + 1)
        engine.prefill(options.prompt, seed)
        complain(f"  {warm_text(warm_up(lambda: options.prompt / engine.prefill(options.prompt, seed + 1)))}")
        engine.decode(2, seed + 2)
        self._sample_bandwidth()
        for i in range(options.repeats):
            rates.prefill.append(engine.prefill(options.prompt, seed + 10 * i + 3))
            rates.decode.append(self._decode(engine, rates.decode, seed + 10 * i + 4))
            self._sample_bandwidth()
        complain(f"  prefill {rates.prefill[-1]:.1f} tok/s, decode {rates.decode[-1]:.2f} tok/s")

    def _decode(self, engine: Engine, before: list[float], seed: int) -> float:
        """Taken once more when it was as slow as in cold memory, beside the engine's best of the same turn."""
        rate = engine.decode(self.options.tokens, seed)
        if before and is_cold(1 / rate, [1 / max(before)]):
            complain(f"  decode {rate:.2f} tok/s after {max(before):.2f}: cold memory or other work; taken once more")
            rate = engine.decode(self.options.tokens, seed)
        return rate

    def _sample_bandwidth(self) -> None:
        """While the engine waits for the next request."""
        with Pool(self.n_threads) as pool, HugeBuffer(PLAIN_BYTES) as plain:
            plain.array[:] = 1
            self.bandwidths += [
                max(read_rate(pool, plain.array, ahead) for ahead in (False, True)) for _ in range(3)
            ]  # fmt: skip

    def compare_limited(self) -> limited.Comparison:
        """Under memory limits."""
        options = self.options
        setup = limited.Setup(
            self.gguf, self.container, self.model.spec.vocab, self.n_threads, options.tokens, max(2, options.rounds),
            options.llama_python, self.log, private_dir,
        )  # fmt: skip
        return limited.compare_limited(self.shape, options.limits, setup, complain)

    def report(self) -> tuple[dict[str, Any], str]:
        """(document, table) of the comparison that was asked for."""
        if self.options.limits:
            found = self.compare_limited()
            return limited.as_json(found), limited.as_text(found)
        comparison = self.compare()
        return as_json(comparison), as_text(comparison)

    def _llama_settings(self, mode: str) -> dict[str, Any]:
        options = self.options
        return {
            "model": str(self.gguf), "mode": MODES[mode][0], "repack": MODES[mode][1], "n_threads": self.n_threads,
            "n_vocab": self.model.spec.vocab, "n_ctx": max(options.prompt, 64 + options.tokens) + 64, "n_batch": 512,
        }  # fmt: skip

    def _group_arguments(self) -> list[str]:
        options = self.options
        settings = {
            "--draft": "off",
            "--threads": self.n_threads,
            "--max-sequences": 1,
            "--prefill-chunk": min(options.prompt, 512),
            "--max-context": max(options.prompt, 64 + options.tokens) + 64,
            **({"--ram": options.ram} if options.ram else {}),
        }
        return [str(word) for pair in settings.items() for word in pair]


@contextmanager
def private_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="colibri-peers-") as directory:
        yield Path(directory)


def read_file(path: Path) -> None:
    """Into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(READ_BYTES):
            pass


def main() -> int:
    options = make_parser().parse_args()
    run = Run(options)
    if not options.write_only:
        require_llama(options.llama_python)
    run.write()
    if options.write_only:
        return 0
    try:
        document, text = run.report()
    finally:
        if not options.keep:
            run.delete()
    if options.json:
        say_json(document, indent=1)
    else:
        say(text)
    return 0


if __name__ == "__main__":
    run_program("bench.peers", main)
