"""Watchdogs that stood still themselves: the clock that leaves pauses out, and everybody who measures by it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway import patience
from services.gateway.engine import GatewayEngine
from services.gateway.http_connection import Connection
from services.gateway.patience import PatientTimeout
from shared.awake import WAKE_GRACE_S, AwakeClock, Countdown
from shared.messages.gateway import GroupState, RequestAccepted, RequestDone, TokenOut
from shared.messages.router import Submit
from shared.run import client
from tests.support import inside


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_time_passes_while_awake_and_stands_still_in_a_pause() -> None:
    hands = Hands()
    clock = AwakeClock(1.0, hands)
    assert clock.now() == 1000.0
    hands.at += 0.9
    assert clock.now() == pytest.approx(1000.9)
    assert (clock.n_pauses, clock.is_waking) == (0, False)
    hands.at += 70
    assert clock.now() == pytest.approx(1001.9)
    assert clock.slept_s == pytest.approx(69)
    assert (clock.n_pauses, clock.is_waking) == (1, True)
    for _ in range(int(WAKE_GRACE_S) + 1):
        hands.at += 1
        clock.now()
    assert (clock.n_pauses, clock.is_waking) == (1, False)


def test_a_long_piece_of_work_is_no_pause() -> None:
    hands = Hands()
    clock = AwakeClock(1.0, hands)
    hands.at += 300
    clock.skip()
    hands.at += 0.5
    assert clock.now() == pytest.approx(1000.5)
    assert (clock.n_pauses, clock.is_waking) == (0, False)


def test_a_clock_that_is_set_back_costs_nothing() -> None:
    hands = Hands()
    clock = AwakeClock(1.0, hands)
    hands.at -= 3600
    assert clock.now() == 1000.0
    hands.at += 0.5
    assert clock.now() == pytest.approx(1000.5)


def test_a_countdown_goes_on_where_it_was_before_the_pause() -> None:
    hands = Hands()
    limit = Countdown(30.0, hands)
    hands.at += 3600
    assert not limit.is_over
    assert limit.left_s == pytest.approx(28.0)
    assert limit.step_s == 0.5
    for _ in range(19):
        assert not limit.is_over
        hands.at += 1.5
    assert limit.is_over
    assert limit.step_s == 0


def test_a_running_answer_survives_a_pause_longer_than_the_gateways_patience() -> None:
    hands = Hands()
    table = GatewayEngine(lambda msg: True, clock=AwakeClock(1.0, hands).now)
    table.hear(GroupState(True, "ready", "m", 64, 0, 0, 1, ()), 1)
    ticket = table.begin(Submit("r1", "completion", prompt="x"))
    table.hear(RequestAccepted("r1", 1, 7), 1)
    hands.at += 3 * table.table.limits.grace_s
    table.tick()
    table.hear(TokenOut("r1", 0, (5,), "a"), 1)
    table.hear(RequestDone("r1", "stop", 1, 1), 1)
    events = inside.queued(ticket)
    assert [type(event) for event in events] == [RequestAccepted, TokenOut, RequestDone]
    assert events[-1].reason == "stop"
    assert table.is_ready


def test_supervisors_limits_move_with_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are moments: of a process that is stopping, or starting too fast."""
    process = SimpleNamespace(delay=1006.0, laststart=999.0)
    idle = SimpleNamespace(delay=0, laststart=0)
    hands = Hands()
    keeper = inside.keeper_of({"a": process, "b": idle}, hands, {77: 998.0})
    hands.at += 1
    inside.polled(keeper)
    assert (process.delay, process.laststart) == (1006.0, 999.0)
    hands.at += 73
    inside.polled(keeper)
    assert (process.delay, process.laststart) == (1076.0, 1069.0)
    assert (idle.delay, idle.laststart) == (0, 0)
    assert not inside.stopped_pids(keeper)
    monkeypatch.setattr("deploy.keeper.is_stopped", lambda pid: pytest.fail("others may still be waking"))
    inside.ticked(keeper)


def test_a_client_that_slept_still_reads_what_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own time limit of a socket runs on while a program is stopped."""
    hands = Hands()

    class Jumping(Countdown):
        def __init__(self, seconds: float) -> None:
            super().__init__(seconds, hands)
            hands.at += 3600

    monkeypatch.setattr(client, "Countdown", Jumping)
    left, right = socket.socketpair()
    patient = client._PatientSocket(fileno=left.detach())
    patient.settimeout(60)
    late = threading.Timer(0.05, right.sendall, [b"here"])
    late.start()
    buffer = bytearray(4)
    assert patient.recv_into(buffer) == 4
    assert buffer == b"here"
    late.join()
    monkeypatch.setattr(client, "Countdown", lambda seconds: Countdown(0.05))
    with pytest.raises(TimeoutError):
        patient.recv_into(buffer)
    patient.close()
    right.close()


def test_a_body_that_waits_at_the_door_is_read_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "STEP_S", 0.02)
    monkeypatch.setattr(patience, "LATE_S", 0.05)

    async def body(pause_s: float, wait_s: float) -> None:
        async with PatientTimeout(0.2):
            time.sleep(pause_s)  # as if the whole process stood still
            await asyncio.sleep(wait_s)

    asyncio.run(body(0.4, 0.05))
    with pytest.raises(TimeoutError):
        asyncio.run(body(0, 5))


@pytest.mark.parametrize(("late_s", "is_closed"), [(0.01, True), (30.0, False)])
def test_an_idle_connection_gets_its_time_again_after_a_pause(late_s: float, is_closed: bool) -> None:
    closed: list[bool] = []
    again: list[float] = []

    def call_later(seconds: float, _callback: Any) -> object:
        again.append(seconds)
        return object()

    protocol = Connection.__new__(Connection)
    protocol.timeout_keep_alive = 75
    protocol.timeout_keep_alive_task = SimpleNamespace(when=lambda: 500.0)  # type: ignore[assignment]
    protocol.loop = SimpleNamespace(time=lambda: 500.0 + late_s, call_later=call_later)  # type: ignore[assignment]
    protocol.transport = SimpleNamespace(is_closing=lambda: False, close=lambda: closed.append(True))  # type: ignore[assignment]
    protocol.timeout_keep_alive_handler()
    assert (bool(closed), again) == (is_closed, [] if is_closed else [75])
