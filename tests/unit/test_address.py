"""Where the server listens and how that is written."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.run.address import is_loopback, listen, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("", "http://127.0.0.1:80"),
        ("localhost", "http://localhost:80"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:80"),
    ],
)
def test_url_of_a_host(host: str, url: str) -> None:
    assert url_of(host, 80) == url


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
    ],
)
def test_who_can_reach_it(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


IPV6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
IPV4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))


@pytest.mark.parametrize("named", [[IPV6, IPV4], [IPV6], [IPV4]], ids=["both", "one", "the other"])
def test_localhost_is_both_families_on_one_port(named: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them the table of hosts names."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: named)
    sockets = listen("localhost", 0)
    try:
        assert {s.family for s in sockets} == {socket.AF_INET6, socket.AF_INET}
        (port,) = {s.getsockname()[1] for s in sockets}
        with pytest.raises(ConfigError, match=f"port {port} of localhost is in use by another program"):
            listen("localhost", port)
    finally:
        for s in sockets:
            s.close()


def test_a_family_that_the_kernel_has_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.7", 0))  # an address of nobody
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [absent, IPV4])
    (only,) = listen("here", 0)
    assert only.getsockname()[0] == "127.0.0.1"
    only.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [absent])
    with pytest.raises(ConfigError, match="can't be used"):
        listen("203.0.113.7", 0)


def test_a_name_of_nothing_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="can't be resolved"):
        listen("no such host", 0)
