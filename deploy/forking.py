"""How services begin: as forks of the keeper, which has loaded beforehand what they share.

An interpreter with our modules takes a quarter of a second of processor time; five of them would be most of a start. A fork has
the loaded modules at once and shares their memory. Allowed because the keeper is made for it: one thread, no socket or context
of ZeroMQ, no event loop, no kernels' pool, no random state that counts. Where that does not hold (a module began a thread, say)
the service is started as a new program, as its command says. After the fork a service is a process like any other: its own
process group, descriptors, environment, signals and command line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import sys
import traceback
from typing import NoReturn

SHARED_MODULES = (
    "native.process",
    "shared.run.lifecycle",
    "numpy",
    "services.attention.service",
    "services.expert_io.service",
    "services.router.service",
    "services.drafter.service",
    "services.gateway.service",
    "uvloop",
)
"""What most services need comes first: loading ends when the keeper is told to start."""

_FLAGS = ("-P", "-m")


def load_shared_modules(fd: int) -> None:
    """Loads them until there is something to read from ``fd``. A module that can't be loaded is its service's affair."""
    for name in SHARED_MODULES:
        if select.select([fd], [], [], 0)[0]:
            break
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (said with all details when the service needs it)
            break
    gc.collect()
    gc.freeze()  # collections in a service must not touch, and so copy, what it shares with others


def is_clean() -> bool:
    """Whether a fork of this process has something to share and nothing that a fork would break."""
    return "numpy" in sys.modules and len(os.listdir("/proc/self/task")) == 1


def forget_parent() -> None:
    """In a fork, at once: signals are the child's own affair from now on."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_module_command(filename: str, argv: list[str]) -> bool:
    """Whether ``become`` can carry it out."""
    return filename == sys.executable and tuple(argv[1:3]) == _FLAGS


def become(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Goes on as the program ``python -P -m MODULE ARGUMENTS`` would, and ends the process with its exit code."""
    exit_code = 1
    try:
        from native.process import rename_process

        rename_process(argv)
        os.environ.clear()
        os.environ.update(env)
        module = argv[len(_FLAGS) + 1]
        sys.argv = argv[len(_FLAGS) + 1 :]
        runpy.run_module(module, run_name="__main__")
        exit_code = 0
    except SystemExit as leaving:
        exit_code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:  # noqa: BLE001  (as the interpreter does at its end)
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(exit_code)  # not through the frames of supervisor, whose files and handlers are not ours
