"""How one process of ours starts another: which interpreter, with which module path.

Our modules must be found wherever the caller stands, and nothing else may be taken for them: neither a file of the
current directory nor a foreign package of the same name. So children run with ``-P``, and ``PYTHONPATH`` begins with the
directory of our rooms. Entries of the caller's that depend on the current directory are left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The directory that holds ``shared`` and its siblings: the checkout, or the installed package."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Command line of ``module`` as a program; to be started with ``child_environment()``."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment with a module path for children."""
    left_out = {str(ROOT)}
    with contextlib.suppress(OSError):  # a directory that was removed
        left_out.add(os.getcwd())
    theirs = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p) and p not in left_out]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *theirs])}
