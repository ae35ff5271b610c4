"""What a start's timeline takes from the logs."""

from __future__ import annotations

import calendar
import time

from bench.start import Moment, moments_of

SERVICE = """\
2026-11-30T23:55:49.892Z INFO router/1 service_starting pid=21556
2026-11-30T23:55:50.146Z INFO router/1 service_ready kernels="x"
2026-11-30T23:55:50.160Z INFO router/1 peer_ready peer=attention peer_incarnation=1
2026-11-30T23:55:50.196Z INFO router/1 request request=cmpl-1
"""


def test_moments_of_a_start_are_found_and_older_ones_are_not() -> None:
    began = calendar.timegm((2026, 11, 30, 23, 55, 50)) + 0.1
    found = [(round(moment.at_s, 3), moment.process, moment.event) for moment in moments_of(SERVICE, "router", began)]
    assert found == [(0.046, "router", "service_ready"), (0.06, "router", "peer_ready peer=attention")]


def test_the_keeper_writes_in_local_time() -> None:
    now = int(time.time())
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    lines = f"{stamp},250 INFO spawned: 'gateway' with pid 5\n{stamp},260 WARN received SIGTERM\nno line of its own\n"
    assert moments_of(lines, "keeper", now) == [Moment(0.25, "keeper", "spawned: 'gateway'")]
