"""The exceptions of the project, used in every process; imports nothing.

    ColibriError
      ConfigError            a setting is unknown, of a wrong type or impossible; nothing was started
      SchemaError            two processes (or a file and its reader) speak different versions
      ContainerError         a model directory is incomplete, damaged or of an unknown family
      CapacityError          something does not fit into its budget; carries the arithmetic
      StoreError             reading weights failed while running
        ShortRead            fewer bytes than the index promises
        ChecksumMismatch     the bytes are not those that were written
      PeerLost               another process of the group is gone or has been replaced
      Refused                a request is not accepted; carries what the HTTP answer needs

``native.errors.NativeError`` stands outside, because native imports nothing of ours. Messages are sentences: what was
expected, what was found, what to change.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAULT = 70
EXIT_CONFIG = 78


class ColibriError(Exception):
    """Base of all errors this project raises on purpose. ``exit_code`` is what a process ends with because of it."""

    exit_code = EXIT_FAULT


class ConfigError(ColibriError):
    """A setting is unknown, of a wrong type or impossible. Trying again without a change is useless."""

    exit_code = EXIT_CONFIG


class SchemaError(ColibriError):
    """Two sides speak different versions."""

    exit_code = EXIT_CONFIG


class ContainerError(ColibriError):
    """A model directory can't be used."""

    exit_code = EXIT_CONFIG


class CapacityError(ColibriError):
    """Something does not fit into its budget."""

    exit_code = EXIT_CONFIG


class StoreError(ColibriError):
    """Reading weights failed."""


class ShortRead(StoreError):
    """A read returned fewer bytes than the index promises."""


class ChecksumMismatch(StoreError):
    """Bytes differ from those that were written."""


class PeerLost(ColibriError):
    """Another process of the group is gone or was replaced."""


class Refused(ColibriError):
    """A request is not accepted. ``status``: HTTP status; ``code``: machine-readable; ``param``: the culprit or ''."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
