"""The frame of every program a person starts: what becomes of its errors, and of a standard output that fails.

``run_program`` is the one place where exceptions become a sentence on standard error and an exit code. Standard output gets
a bottom of our own that tells a full disk, a closed descriptor and a reader who left from every other OSError.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from native.errors import LibraryError, NativeError
from shared.errors import EXIT_CONFIG, EXIT_FAULT, EXIT_OUTPUT, ColibriError
from shared.run.terminal import complain, make_streams_safe

EXIT_READER_GONE = 128 + 13
"""As a shell says of a program that SIGPIPE ended: ``| head`` has what it wanted."""
EXIT_INTERRUPTED = 130


class OutputLost(ColibriError):
    """Standard output takes no more. Not an OSError: nobody must take it for a fault of a file or of a connection."""

    exit_code = EXIT_OUTPUT


class ReaderGone(OutputLost):
    """Whoever read standard output has closed it: no fault, and nothing to say."""

    exit_code = EXIT_READER_GONE


class _Out(io.FileIO):
    """Standard output's descriptor. After its first error it swallows what is still to come: one is enough to end with."""

    is_lost = False

    def write(self, data: Any) -> int:
        if self.is_lost:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            self.is_lost = True
            raise ReaderGone("the reader of standard output is gone") from None
        except OSError as error:
            self.is_lost = True
            if error.errno == errno.EBADF:
                raise OutputLost("standard output is closed: there is nowhere to write to") from None
            raise OutputLost(f"standard output can't be written: {error.strerror}") from None


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Inside, what can't be written to standard output raises OutputLost. An output that was replaced is left alone."""
    old = sys.stdout
    if old is not sys.__stdout__ and sys.__stdout__ is not None:
        yield
        return
    raw = io.BufferedWriter(_Out(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, line_buffering=os.isatty(1))
    try:
        yield
    finally:
        with contextlib.suppress(OutputLost):
            sys.stdout.flush()  # what an error kept from being written; after a lost output this writes nothing
        sys.stdout = old


def run_program(name: str, body: Callable[[], int]) -> NoReturn:
    """Runs ``body`` as a program and leaves with its exit code. Errors of ours become ``name: sentence`` on standard error."""
    with guarded_output():
        make_streams_safe()
        code = _exit_code_of(name, body)
    sys.exit(code)


def _exit_code_of(name: str, body: Callable[[], int]) -> int:
    try:
        try:
            code = body()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else EXIT_FAULT if leaving.code else 0
        sys.stdout.flush()
    except ReaderGone as gone:
        code = gone.exit_code
    except ColibriError as error:
        code = error.exit_code
        _complain(name, str(error))
    except NativeError as error:
        code = EXIT_CONFIG if isinstance(error, LibraryError) else EXIT_FAULT
        _complain(name, str(error))
    except OSError as error:  # of the surroundings: whoever knows more about it has said so already
        code = EXIT_FAULT
        _complain(name, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        _complain(name, "stopped")
    return code


def _complain(name: str, sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody can hear it
        complain(f"{name}: {sentence}")
