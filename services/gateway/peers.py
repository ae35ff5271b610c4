"""Whether the other end of a half-closed connection still listens.

A client may close its sending side after the request (``nc -N``) and wait for the answer, or be gone: both look the same
from here until something is sent. For a client of this machine the kernel's table of sockets tells: one that nobody holds
open has no inode. Of others nothing is known. Linux only, as the whole of the product. Runs in the gateway.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
CLOSE_WAIT = 8
"""State of a TCP socket whose peer has closed its sending side (RFC 9293's CLOSE-WAIT), as TCP_INFO says it."""

Address = tuple[str, int]
Pair = tuple[Address, Address]
"""(our address, the client's) of one connection."""


class Peer(Enum):
    LISTENS = "listens"
    GONE = "gone"
    UNKNOWN = "unknown"


def look(pairs: Iterable[Pair]) -> dict[Pair, Peer]:
    """What the kernel's tables say of the clients of these connections."""
    return judge(pairs, "".join(_read(path) for path in TABLES))


def judge(pairs: Iterable[Pair], tables: str) -> dict[Pair, Peer]:
    """As ``look``, from the text of the tables. Believed only where they show our own end as well."""
    wanted = {}
    for pair in pairs:
        ours, theirs = pair
        for a, b in zip(_spellings(ours), _spellings(theirs), strict=False):
            wanted[(a, b)] = (pair, False)
            wanted[(b, a)] = (pair, True)
    is_known: set[Pair] = set()
    verdicts: dict[Pair, Peer] = {}
    for line in tables.splitlines():
        fields = line.split()
        found = wanted.get((fields[1], fields[2])) if len(fields) > 9 else None
        if found is None:
            continue
        pair, is_client = found
        is_held = fields[9] != "0"
        if is_client:
            verdicts[pair] = Peer.LISTENS if is_held else Peer.GONE
        elif is_held:
            is_known.add(pair)
    return {pair: verdicts.get(pair, Peer.UNKNOWN) if pair in is_known else Peer.UNKNOWN for pair in pairs}


def is_half_closed(connection: socket.socket) -> bool:
    """The peer's sending side is closed and the connection is not broken otherwise."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT
    except OSError:
        return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except OSError:
        return ""


def _spellings(address: Address) -> list[str]:
    """How the tables write it: as IPv4, and as IPv6 (a socket of either family may hold an IPv4 connection)."""
    host, port = address
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if isinstance(ip, ipaddress.IPv4Address):
        return [_hex(ip.packed, port), _hex(ipaddress.ip_address(f"::ffff:{ip}").packed, port)]
    return [_hex(ip.packed, port)]


def _hex(packed: bytes, port: int) -> str:
    words = [packed[k : k + 4] for k in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
