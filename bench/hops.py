"""What a message between two processes costs: ``python -m bench.hops [--hops 2000] [--model DIR ...]``.

Three ways in turn: a byte through a pipe (the wake-up alone, nothing can be faster between sleepers), and the bus over each
transport. A hop is half a round trip of two processes that sleep in between, from ``send`` to the message in the other's
hands. With ``--model`` besides: groups of either transport on that model, everything in memory, drafts and guesses off;
what a layer takes when no kernel runs (three hops, the gate's and the store's decisions, the interpreter).
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.group import Watch, run_group
from bench.resident import touching_tokens
from bench.roofline import BenchError
from bench.steps import steps_of
from shared.container.reader import Container
from shared.messages.layer import HiddenReady
from shared.run.program import run_program
from shared.run.terminal import say
from shared.step.stages import StepKind
from shared.wire.bus import Bus
from shared.wire.endpoints import ATTENTION, ROUTER, Endpoints
from shared.wire.links import DATAGRAM, ZMQ

ROUNDS = 8
WAYS = (DATAGRAM, ZMQ)
WARM_TOKENS, TOKENS = 20, 200
PAUSE_S = 0.0005
"""Longer than anybody spins, so that both ends really sleep."""
WAIT_MS = 5000
End = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]
"""(send, receive, close) of one end."""


def pipe_end(reads: int, writes: int) -> End:
    def receive() -> None:
        if not os.read(reads, 1):
            raise SystemExit(0)  # the other end is gone

    return lambda: _sent(os.write(writes, b".")), receive, lambda: None


def _sent(n: int) -> None:
    assert n == 1


def bus_end(directory: str, me: str, other: str, transport: str) -> End:
    bus = Bus(Endpoints(directory, "hops"), me, 1, (HiddenReady,), peers=(other,), transport=transport)
    message = HiddenReady(1, 2, 0, 1)

    def receive() -> None:
        while not bus.poll(WAIT_MS):
            if os.getppid() == 1:
                raise SystemExit(0)

    return lambda: bus.post(other, message), receive, lambda: bus.close(0)


def hop_us(make: Callable[[bool], End], n_hops: int) -> float:
    """Median of half a round trip; ``make(is_child)`` opens one end."""
    child = os.fork()
    if child == 0:
        try:
            send, receive, _ = make(True)
            while True:
                receive()
                send()
        finally:
            os._exit(0)
    send, receive, close = make(False)
    try:
        times = []
        for _ in range(n_hops + 10):
            time.sleep(PAUSE_S)
            begin = time.perf_counter_ns()
            send()
            receive()
            times.append((time.perf_counter_ns() - begin) / 2000)
        return statistics.median(times[10:])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        close()


def one_round(n_hops: int) -> dict[str, float]:
    """Each way once."""
    there, back = os.pipe(), os.pipe()
    found = {
        "pipe": hop_us(lambda is_child: pipe_end(*((there[0], back[1]) if is_child else (back[0], there[1]))), n_hops)
    }
    for fd in (*there, *back):
        os.close(fd)
    for transport in WAYS:
        with tempfile.TemporaryDirectory(prefix="hops-") as directory:
            Endpoints(directory, "hops").socket_dir.mkdir(parents=True, exist_ok=True)
            ends = (ROUTER, ATTENTION)
            found[transport] = hop_us(
                lambda is_child: bus_end(directory, *(ends[::-1] if is_child else ends), transport),  # noqa: B023
                n_hops,
            )
    return found


def outside_us(model: Path, transport: str) -> float:
    """µs of a decode step and layer in which no kernel runs, through a whole group with every expert in memory."""
    container = Container.open(model)
    spec = container.spec
    with tempfile.TemporaryDirectory(prefix="hops-") as base:
        arguments = ["--transport", transport, "--draft", "off", "--pilot", "off", "--max-sequences", "1"]
        with run_group(model, Path(base) / "run", spec.vocab, arguments) as group, Watch(group.config) as watch:
            group.prefill(
                min(touching_tokens(spec), group.config.max_context - 2), 0
            )  # brings every expert into memory: a read would count as a hop
            group.decode(WARM_TOKENS, 0)
            watch.rows()
            group.decode(TOKENS, 1)
            steps = steps_of(watch.rows(), StepKind.DECODE, ())
    if not steps.n_steps:
        raise BenchError("the group's trace holds no decode step")
    return (steps.wall_ns - steps.compute_ns) / steps.n_steps / spec.n_layers / 1000


def report(title: str, unit: str, rounds: list[dict[str, float]], floor: str = "") -> None:
    say(title)
    for way in rounds[0]:
        of_way = sorted(found[way] for found in rounds)
        middle = statistics.median(of_way)
        beside = f", {middle / statistics.median(found[floor] for found in rounds):.1f} x a pipe's" if floor else ""
        say(f"  {way:10} {middle:7.1f} {unit} ({of_way[0]:.1f} to {of_way[-1]:.1f}){beside}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hops", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hops", type=int, default=2000, metavar="N", help="in all, per way (default %(default)s)")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], metavar="DIR", help="and through a group on it"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="groups per way and model (default %(default)s)"
    )
    args = parser.parse_args()
    report("a hop", "us", [one_round(max(1, args.hops // ROUNDS)) for _ in range(ROUNDS)], "pipe")
    for model in args.model:
        rounds = [{way: outside_us(model, way) for way in WAYS} for _ in range(args.rounds)]
        report(f"{model.name}, a layer of a decode step outside of kernels", "us", rounds)
    return 0


if __name__ == "__main__":
    run_program("bench.hops", main)
