"""The one table of addresses: who binds, who connects. Every process uses it; it opens nothing.

Per service, bound by it, the sockets for data messages that its senders use (``links``): a path for datagrams (``direct``), a
ZeroMQ PULL socket (``data``). One ROUTER socket (``control``), bound by the router.
The paths lie below the run directory, so groups can coexist. A Unix socket path has at most 107 bytes: under a deep run
directory the sockets move to a short directory that is derived from the run id.
"""

from __future__ import annotations

import os
from pathlib import Path

GATEWAY, ROUTER, ATTENTION, EXPERT_IO, DRAFTER = "gateway", "router", "attention", "expert_io", "drafter"

SERVICES: tuple[str, ...] = (GATEWAY, ROUTER, ATTENTION, EXPERT_IO, DRAFTER)
"""In the order of ``cb_service``: the place in this tuple is the service's block in a frame."""

SENDS_TO: dict[str, tuple[str, ...]] = {
    GATEWAY: (ROUTER,),
    ROUTER: (GATEWAY, ATTENTION, EXPERT_IO, DRAFTER),
    ATTENTION: (ROUTER, EXPERT_IO, DRAFTER),
    EXPERT_IO: (ATTENTION, ROUTER, DRAFTER),
    DRAFTER: (ROUTER, ATTENTION, EXPERT_IO),
}
"""Who may send data messages to whom; the sockets a service connects."""


MAX_PATH_BYTES = 107
_LONGEST_NAME = "supervisor.sock.99999999"  # supervisor first binds a name with its pid behind


def default_run_dir(name: str = "default") -> Path:
    """$XDG_RUNTIME_DIR/colibri/<name>, else /tmp/colibri-<uid>/<name>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(base) / "colibri" if base else Path(f"/tmp/colibri-{os.getuid()}")) / name


def state_dir() -> Path:
    """$XDG_STATE_HOME/colibri, else ~/.local/state/colibri: what a user's groups remember from run to run."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "colibri"


class Endpoints:
    """Addresses of one group. ``socket_dir`` is made and removed by ``colibri-up``."""

    def __init__(self, run_dir: str | Path, run_id: str) -> None:
        beside = Path(run_dir).absolute() / "sock"
        fits = len(os.fsencode(beside / _LONGEST_NAME)) <= MAX_PATH_BYTES
        self.socket_dir = beside if fits else Path(f"/tmp/colibri-{os.getuid()}-{run_id}")
        self.control = f"ipc://{self.socket_dir}/control"

    def data(self, service: str) -> str:
        """The address ``service`` binds for its data messages."""
        return f"ipc://{self.socket_dir}/{service}"

    def direct(self, service: str) -> str:
        """The path ``service`` binds for datagrams."""
        return f"{self.socket_dir}/{service}.direct"
