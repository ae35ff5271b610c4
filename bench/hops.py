"""What a message between two processes costs: ``python -m bench.hops [--hops 2000]``.

Three ways in turn: a byte through a pipe (the wake-up alone, nothing can be faster between sleepers), the bus as the engine's
services use it among themselves (datagrams), and the bus as to and from the gateway (ZeroMQ). A hop is half a round trip of
two processes that sleep in between, from ``send`` to the message in the other's hands.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable

from shared.messages.layer import HiddenReady
from shared.wire.bus import Bus
from shared.wire.endpoints import ATTENTION, GATEWAY, ROUTER, Endpoints

ROUNDS = 8
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


def bus_end(directory: str, me: str, other: str) -> End:
    bus = Bus(Endpoints(directory, "hops"), me, 1, (HiddenReady,), peers=(other,))
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
    for name, other in (("datagrams", ATTENTION), ("ZeroMQ", GATEWAY)):
        with tempfile.TemporaryDirectory(prefix="hops-") as directory:
            Endpoints(directory, "hops").socket_dir.mkdir(parents=True, exist_ok=True)
            ends = (ROUTER, other)
            found[name] = hop_us(lambda is_child: bus_end(directory, *(ends[::-1] if is_child else ends)), n_hops)  # noqa: B023
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hops", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hops", type=int, default=2000, metavar="N", help="in all, per way (default %(default)s)")
    rounds = [one_round(max(1, parser.parse_args().hops // ROUNDS)) for _ in range(ROUNDS)]
    floor = statistics.median(r["pipe"] for r in rounds)
    for name in rounds[0]:
        of_way = sorted(r[name] for r in rounds)
        middle = statistics.median(of_way)
        print(
            f"{name:10} {middle:7.1f} us a hop ({of_way[0]:.1f} to {of_way[-1]:.1f}), {middle / floor:.1f} x a pipe's"
        )


if __name__ == "__main__":
    main()
