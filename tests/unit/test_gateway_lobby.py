"""Which connections have to go, and whether a client still listens; no sockets but one pair."""

from __future__ import annotations

import socket
import sys

import pytest

from services.gateway.lobby import Lobby, LobbyLimits
from services.gateway.peers import Pair, Peer, is_half_closed, judge, look


def test_the_one_that_was_silent_longest_makes_room() -> None:
    lobby: Lobby[str] = Lobby(LobbyLimits(max_open=10, max_silent=3))
    for now, name in enumerate("abc"):
        assert lobby.enter(name, now) == []
    lobby.begin("a")
    assert lobby.enter("d", 3) == []  # one is busy: three silent ones are left
    lobby.rest("a", 4)
    assert lobby.enter("e", 5) == ["b"]
    assert lobby.enter("f", 6) == ["c"]
    assert lobby.enter("g", 7) == ["d"]
    assert lobby.enter("h", 8) == ["a"]  # silent since its answer ended


def test_a_flood_of_silence_never_ends_one_that_waits_for_an_answer() -> None:
    lobby: Lobby[int] = Lobby(LobbyLimits(max_open=8, max_silent=4))
    for name in range(6):
        lobby.enter(name, 0)
        lobby.begin(name)
    for name in range(6, 1000):
        gone = lobby.enter(name, name)
        assert all(other >= 6 for other in gone)
        assert lobby.n_open <= 8
    assert set(range(6)) <= set(lobby)


def test_a_newcomer_is_refused_when_all_others_are_busy() -> None:
    lobby: Lobby[int] = Lobby(LobbyLimits(max_open=3, max_silent=2))
    for name in range(3):
        assert lobby.enter(name, 0) == []
        lobby.begin(name)
    assert lobby.enter(3, 1) == [3]
    assert 3 not in list(lobby)
    lobby.leave(0)
    assert lobby.enter(4, 2) == []


@pytest.mark.parametrize("n_free", [0, 10, 100, 180, 10_000, 1 << 20])
def test_limits_follow_the_descriptors(n_free: int) -> None:
    limits = LobbyLimits.of_descriptors(n_free)
    assert limits.max_open <= max(16, n_free)
    assert 0 < limits.max_silent < limits.max_open
    assert 0 < limits.max_busy < limits.max_open


def spelt(host: str, port: int) -> str:
    packed = socket.inet_aton(host)
    return f"{int.from_bytes(packed, sys.byteorder):08X}:{port:04X}"


def row(ours: str, theirs: str, inode: int) -> str:
    return f"   1: {ours} {theirs} 01 00000000:00000000 00:00000000 00000000  1000        0 {inode} 1 0 20 4 30 10 -1\n"


def test_the_tables_tell_who_listens() -> None:
    pair: Pair = (("127.0.0.1", 8484), ("127.0.0.1", 40000))
    ours, theirs = spelt("127.0.0.1", 8484), spelt("127.0.0.1", 40000)
    own = row(ours, theirs, 7)
    assert judge([pair], own + row(theirs, ours, 9)) == {pair: Peer.LISTENS}
    assert judge([pair], own + row(theirs, ours, 0)) == {pair: Peer.GONE}
    assert judge([pair], own) == {pair: Peer.UNKNOWN}  # another machine, or another namespace
    assert judge([pair], row(theirs, ours, 0)) == {pair: Peer.UNKNOWN}  # a table that does not even show us
    assert judge([pair], "") == {pair: Peer.UNKNOWN}
    mapped: Pair = (("::ffff:127.0.0.1", 8484), ("::ffff:127.0.0.1", 40000))
    assert judge([mapped], own + row(theirs, ours, 0)) == {mapped: Peer.GONE}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_closed_and_a_half_closed_client_are_told_apart(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with listener:
        client = socket.create_connection(listener.getsockname()[:2])
        server, address = listener.accept()
        with server:
            pair: Pair = (server.getsockname()[:2], address[:2])
            assert not is_half_closed(server)
            assert look([pair]) == {pair: Peer.LISTENS}
            client.shutdown(socket.SHUT_WR)
            assert server.recv(1) == b""
            assert is_half_closed(server)
            assert look([pair]) == {pair: Peer.LISTENS}
            client.close()
            assert look([pair]) == {pair: Peer.GONE}
