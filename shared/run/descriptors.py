"""How many files and sockets this process may have open."""

from __future__ import annotations

import contextlib
import os
import resource


def raise_descriptor_limit() -> int:
    """Takes what the system allows (the hard limit of RLIMIT_NOFILE); returns the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # an odd system: what we have must do
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _limit()


def free_descriptors() -> int:
    """How many more can be opened."""
    return max(0, _limit() - len(os.listdir("/proc/self/fd")))


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
