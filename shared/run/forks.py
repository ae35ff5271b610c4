"""One process of ours begins another as a fork of itself: what it has loaded, the other has at once, in shared memory.

An interpreter with our modules takes a quarter of a second of processor time; eight of them would be most of a start. So
``colibri run`` forks colibri-up, that the keeper, and that the services. Allowed where a fork is clean: one thread, hence no
context of ZeroMQ, no kernels' pool, no running event loop; no random state that counts. Where that does not hold, a new program
is started. After the fork a process is one like any other: its own descriptors, environment, signals, streams and command line.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from shared.run.child import python_command

_FLAGS = ("-P", "-m")


def is_clean() -> bool:
    """Whether this process has nothing that a fork would break."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def is_module_command(argv: list[str]) -> bool:
    """Whether ``become`` can carry it out."""
    return argv[:1] == [sys.executable] and tuple(argv[1:3]) == _FLAGS


def forget_parent() -> None:
    """In a fork, at once: signals are the child's own affair from now on, as they are in a new program."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def become(argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """Goes on as the program ``python -P -m MODULE ARGUMENTS`` would, and ends the process with its exit code."""
    exit_code = 1
    try:
        from native.process import rename_process

        gc.freeze()  # collections here must not touch, and so copy, what is shared with others
        gc.enable()
        if not rename_process(argv):  # who looks for the processes of a group knows them by their command lines
            os.execve(argv[0], argv, env)
        os.environ.clear()
        os.environ.update(env)
        _open_streams()
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
        os._exit(exit_code)  # not through the frames of the parent, whose files and handlers are not ours


def _open_streams() -> None:
    """Standard streams of our own, as the interpreter opens them: the parent's may be wrapped."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        first = getattr(sys, f"__{name}__") or getattr(sys, name)
        raw = os.fdopen(fd, "wb", 0 if is_unbuffered else -1, closefd=False)
        is_line = fd == 2 or (os.isatty(fd) and not is_unbuffered)
        new = io.TextIOWrapper(raw, first.encoding, first.errors, line_buffering=is_line, write_through=is_unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115


class Forked:
    """A child that ``start_module`` forked: what we use of ``subprocess.Popen``, but ``wait`` returns at once when it ends."""

    def __init__(self, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code (negative: the signal), None while it runs."""
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and wait_readable(self._fd, timeout):
            self._reap(0)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing is sent to a process that has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._fd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # somebody else has asked for it
            pid, status = self.pid, 0
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._fd)


Process = subprocess.Popen[bytes] | Forked


def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Whether ``fd`` became readable within that time; a pidfd does when its process ends."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def start_module(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    new_session: bool = False,
    pass_fds: Sequence[int] = (),
    before: Callable[[], None] | None = None,
) -> Process:
    """``python_command(module, *arguments)`` as a fork where that is clean, else as a new program. Raises OSError.

    ``stdin``, ``stdout``, ``stderr``: a descriptor, subprocess.PIPE or DEVNULL, None for ours. ``before`` runs in the child.
    """
    argv = python_command(module, *arguments)
    if not is_clean():
        return subprocess.Popen(
            argv,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=new_session,
            pass_fds=pass_fds,
            preexec_fn=before,
        )
    theirs, ours = {}, {}
    for fd, wanted in enumerate((stdin, stdout, stderr)):
        if wanted == subprocess.PIPE:
            read, write = os.pipe()
            theirs[fd], ours[fd] = (read, write) if fd == 0 else (write, read)
        elif wanted == subprocess.DEVNULL:
            theirs[fd] = os.open(os.devnull, os.O_RDWR)
        elif wanted is not None:
            theirs[fd] = os.dup(wanted)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is still in them would be written twice
    pid = os.fork()
    if pid == 0:
        _begin(argv, env, theirs, new_session, pass_fds, before)
    for fd in theirs.values():
        os.close(fd)
    return Forked(
        pid,
        os.fdopen(ours[0], "wb", 0) if 0 in ours else None,
        os.fdopen(ours[1], "rb") if 1 in ours else None,
    )


def _begin(
    argv: list[str],
    env: Mapping[str, str],
    descriptors: Mapping[int, int],
    new_session: bool,
    pass_fds: Sequence[int],
    before: Callable[[], None] | None,
) -> NoReturn:
    try:
        forget_parent()
        if new_session:
            os.setsid()
        if before is not None:
            before()
        for fd, source in descriptors.items():
            os.dup2(source, fd)
        first = 3
        for kept in sorted(pass_fds):
            os.set_inheritable(kept, True)
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        become(argv, env)
    except BaseException:  # noqa: BLE001  (nothing may return into the parent's frames)
        traceback.print_exc()
        os._exit(1)
