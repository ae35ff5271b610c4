"""Where the HTTP server listens, and how that is written: the one place that makes an address of a host and a port."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from shared.errors import ConfigError

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_TRIES = 20
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
BACKLOG = 256

_Place = tuple[socket.AddressFamily, tuple[Any, ...]]
_LOCALHOST: tuple[_Place, ...] = ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0, 0, 0)))


def url_of(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on ``host``."""
    host = _ANY.get(host, host)
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens on ``host``."""
    try:
        return all(ipaddress.ip_address(address[0]).is_loopback for _, address in _resolve(host, 0))
    except (ConfigError, ValueError):
        return False


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening TCP sockets, one per address that ``host`` stands for (localhost: both families); all have the same port.

    ``port`` 0: any that is free. Raises ConfigError with what to do.
    """
    for _ in range(_TRIES if port == 0 else 1):
        sockets: list[socket.socket] = []
        try:
            _listen_on_all(_resolve(host, port), port, sockets)
            return sockets
        except OSError as error:
            for opened in sockets:
                opened.close()
            if port == 0 and error.errno == errno.EADDRINUSE:
                continue  # the port that one family gave is taken in the other
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {host} is in use by another program; choose another with --port"
                ) from None
            raise ConfigError(
                f"port {port} of {host} can't be used: {error.strerror}; choose another --host or --port"
            ) from None
    raise ConfigError(f"no port is free in every address family of {host}; choose one with --port")


def _resolve(host: str, port: int) -> list[_Place]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a machine"
        raise ConfigError(f"host {host!r} can't be resolved ({reason}); give an address of this machine") from None
    places: dict[_Place, None] = dict.fromkeys((family, address) for family, _, _, _, address in found)
    if host.lower() == "localhost":  # both families, also where the table of hosts has only one of them
        known = {family for family, _ in places}
        for place in _LOCALHOST:
            if place[0] not in known:
                places[place] = None
    return list(places)


def _listen_on_all(places: list[_Place], port: int, sockets: list[socket.socket]) -> None:
    """Fills ``sockets``. Raises OSError."""
    absent: OSError | None = None
    for family, address in places:
        try:
            listener = _listen_on(family, (address[0], port, *address[2:]), is_alone=len(places) == 1)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            absent = error  # localhost has an IPv6 address in many places where the kernel has none
            continue
        sockets.append(listener)
        port = port or listener.getsockname()[1]
    if absent and not sockets:
        raise absent


def _listen_on(family: socket.AddressFamily, address: tuple[Any, ...], *, is_alone: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port that was just given back is free; one that somebody listens on is still refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not is_alone:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
