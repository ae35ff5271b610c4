"""The one name under which a wheel installs everything, and its console scripts.

A wheel puts the rooms of the checkout (``shared``, ``services``, ``cli`` ...) below this package. Their names stay what
they are in the checkout, because the console scripts put the directory that holds them first on the module path, and
``shared.run.child`` does the same for every process that ours start. Nobody else's path is touched, so a foreign package
called ``shared`` in the same environment and ours do not meet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = HERE if os.path.isdir(os.path.join(HERE, "shared")) else os.path.dirname(HERE)
"""The directory of our rooms: this package's own when installed, the checkout's when not."""


def _use_rooms() -> None:
    sys.path.insert(0, ROOT)
    import shared.run.first  # noqa: F401


@contextmanager
def _quiet_interrupt(name: str) -> Iterator[None]:
    """Ctrl-C while modules are loaded is no traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: stopped\n")
        sys.exit(130)


def colibri() -> None:
    """Console script ``colibri``."""
    _use_rooms()
    with _quiet_interrupt("colibri"):
        from cli.main import main
    main()


def colibri_up() -> None:
    """Console script ``colibri-up``."""
    _use_rooms()
    with _quiet_interrupt("colibri-up"):
        from deploy.up import main
    main()
