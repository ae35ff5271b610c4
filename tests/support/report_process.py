"""A program that says what it finds itself to be, and ends with 7: ``python -m tests.support.report_process FILE``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    found = {
        "argv": sys.argv[1:],
        "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "environment": dict(os.environ),
        "is_fork": "deploy.forking" in sys.modules,
        "n_threads": len(os.listdir("/proc/self/task")),
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "int": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
    sys.exit(7)
