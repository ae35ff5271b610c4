"""What the keeper loads for the services before it forks them, and when it may stop."""

from __future__ import annotations

import gc
import importlib
import select

COMMON_MODULES = ("native.process", "shared.run.lifecycle", "numpy", "services.attention.service")
"""What nearly every service needs: loaded in any case, once instead of five times."""
SINGLE_MODULES = (
    "services.router.service",
    "services.gateway.service",
    "services.expert_io.service",
    "services.drafter.service",
    "uvloop",
)
"""What one service needs: loaded until the keeper is told to start, for then services load beside each other."""


def load_for_services(fd: int) -> None:
    """Until there is something to read from ``fd``. A module that can't be loaded is its service's affair."""
    gc.disable()  # next to nothing of what loading makes is garbage
    try:
        for name in COMMON_MODULES:
            importlib.import_module(name)
        for name in SINGLE_MODULES:
            if select.select([fd], [], [], 0)[0]:
                break
            importlib.import_module(name)
    except Exception:  # noqa: BLE001  (said with all details when the service needs it)
        return
    finally:
        gc.enable()
        gc.freeze()  # collections must not touch, and so copy, what is shared with the services
