"""The supervisor configuration of one group, written into its run directory with the reason for each value."""

from __future__ import annotations

import os
import shlex

from shared.run.child import python_command
from shared.run.config import FROZEN_NAME, GroupConfig
from shared.wire.endpoints import DRAFTER, SERVICES

WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Of every process of a group. NumPy's own threads are never used: they would cost memory, time and the fork."""
ENVIRONMENT = {**WITHOUT_THREADS, "PYTHONUNBUFFERED": "1"}
"""Of the keeper and so of every service."""
STOP_WAIT_S = 6
START_RETRIES = 3
INTERPRETER = "python"
"""In the file's commands: the interpreter that the keeper itself runs on. Its path may hold what the file's rules can't."""

# The paths are relative to the run directory, where the keeper runs supervisor: so no name of a directory, whatever
# its characters, has to survive supervisor's rules for percent signs, blanks and comments.
_HEAD = """\
; Written by colibri-up for run {run_id}; changes are lost at the next start. Paths are relative to this directory.
[supervisord]
nodaemon=true            ; colibri-up decides what is detached
logfile=log/supervisor.log
logfile_maxbytes=5MB
logfile_backups=1
pidfile=supervisor.pid
childlogdir=log
umask=077                ; sockets, logs and segments belong to this user alone
minfds=256               ; every descriptor up to here is closed in a new service: a small number starts it sooner
{user}
[group:colibri]
programs={programs}
"""

# Services run in the run directory too, so that no module of the caller's directory is imported by accident.
_PROGRAM = """
[program:{service}]
command={command}
autorestart=unexpected
; A configuration error is not retried. Every other end is an accident, exit 0 too: whoever wants the group to stop
; tells supervisor, not a single service.
exitcodes=78
; Shorter lives count as failed starts, and so many of those are tried, 1, 2, 3 s apart.
startsecs=1
startretries={retries}
stopsignal=TERM
; Above the grace of any service after SIGTERM. The drain comes before it, by message.
stopwaitsecs={stop_wait}
stopasgroup=true
killasgroup=true
redirect_stderr=true
stdout_logfile=log/{service}.log
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=1
"""


def services_of(config: GroupConfig) -> tuple[str, ...]:
    """The services of this group: all, or all but the drafter."""
    return tuple(service for service in SERVICES if service != DRAFTER or config.n_drafts)


def render(config: GroupConfig) -> str:
    """The file's text."""
    services = services_of(config)
    parts = [
        _HEAD.format(
            run_id=config.run_id,
            programs=",".join(services),
            user="user=root                ; as started; silences the warning about it\n" if os.getuid() == 0 else "",
        )
    ]
    for service in services:
        _, *arguments = python_command(f"services.{service}", "--config", FROZEN_NAME)
        parts.append(
            _PROGRAM.format(
                service=service,
                command=shlex.join([INTERPRETER, *arguments]),
                retries=START_RETRIES,
                stop_wait=STOP_WAIT_S,
            )
        )
    return "".join(parts)
