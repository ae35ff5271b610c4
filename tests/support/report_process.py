"""A program that says what it finds itself to be, and ends with 7: ``python -m tests.support.report_process FILE``.

With more arguments, of which the last two are numbers of descriptors, it writes its session, what stdin holds, its umask and
whether it has these descriptors.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def has(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    found = {
        "argv": sys.argv[1:],
        "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "environment": dict(os.environ),
        "is_fork": "shared.run.forks" in sys.modules,
        "n_threads": len(os.listdir("/proc/self/task")),
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "int": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
    if len(sys.argv) > 2:
        kept, other = map(int, sys.argv[-2:])
        umask = os.umask(0)
        print("", os.getsid(0), sys.stdin.read(), oct(umask), has(kept), has(other))
    sys.exit(7)
