"""Imported before anything else by every program of ours; what it does, it does at that moment.

1. Standard descriptors that came closed are opened, or the next file (a lock, a socket) would become standard output.
2. The current directory is no place to import from, however Python came to search it; our own packages come first.

Needs what a bare interpreter has loaded anyway, and nothing else: it runs before the search path is clean.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The directory that our packages lie in."""


def open_standard_descriptors() -> None:
    """Opens 0 to 2 on /dev/null where they are closed.

    Output is opened for reading: whoever has something to say on a closed standard output gets an error instead of silence.
    ``sys.stdin`` stays None, which says that there is no input.
    """
    for fd, flags in ((0, os.O_RDWR), (1, os.O_RDONLY), (2, os.O_RDWR)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, flags)  # the lowest that is free: this one, as those below are open by now
            assert opened == fd
            os.set_inheritable(fd, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115


def clean_path(path: list[str], pythonpath: str, here: str, stdlib: str) -> list[str]:
    """``sys.path`` with our own packages first, and without the directory ``here`` and what PYTHONPATH names relative to it.

    What stands behind ``stdlib`` is the installation, and stays.
    """
    relative = [entry for entry in pythonpath.split(os.pathsep) if not os.path.isabs(entry)]
    strangers = {here, ROOT, *(os.path.normpath(os.path.join(here, entry)) for entry in relative)}
    n_before = path.index(stdlib) if stdlib in path else 0
    before = [entry for entry in path[:n_before] if os.path.isabs(entry) and entry not in strangers]
    return [ROOT, *before, *path[n_before:]]


def forget_current_directory() -> None:
    """The current directory is no place to import from. (``child`` sees to it for other processes of ours.)"""
    try:
        here = os.getcwd()
    except OSError:  # it is gone, so nothing can be imported from it
        here = ROOT
    sys.path[:] = clean_path(sys.path, os.environ.get("PYTHONPATH", ""), here, os.path.dirname(os.__file__))


open_standard_descriptors()
forget_current_directory()
