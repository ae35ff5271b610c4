"""The exceptions of the project and the codes that clients are told, used in every process; imports nothing of ours.

    ColibriError
      ConfigError            a setting is unknown, of a wrong type or impossible; nothing was started
      SchemaError            two processes (or a file and its reader) speak different versions
      ContainerError         a model directory is incomplete, damaged or of an unknown family
      CapacityError          something does not fit into its budget; carries the arithmetic
      StoreError             reading weights failed while running
        ShortRead            fewer bytes than the index promises
        ChecksumMismatch     the bytes are not those that were written
      DownloadError          a hub gives no answer, or other bytes than it promises
      Refused                a request is not accepted; carries what the HTTP answer needs

``native.errors.NativeError`` stands outside, because native imports nothing of ours. Messages are sentences: what was
expected, what was found, what to change.
"""

from __future__ import annotations

from enum import StrEnum

EXIT_OK = 0
EXIT_FAULT = 70
EXIT_OUTPUT = 74
"""Standard output could not be written."""
EXIT_CONFIG = 78


class ErrorCode(StrEnum):
    """What programs read of an error that a client is told; docs/api.md explains each. Travels in messages."""

    # the request
    INVALID_HTTP = "invalid_http"
    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    MISSING_FIELD = "missing_field"
    UNSUPPORTED_CONTENT = "unsupported_content"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    BODY_INCOMPLETE = "body_incomplete"
    BODY_TIMEOUT = "body_timeout"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    DUPLICATE_REQUEST = "duplicate_request"
    # what this model can't do
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    EMPTY_PROMPT = "empty_prompt"
    INVALID_TOKEN = "invalid_token"
    NO_CHAT_TEMPLATE = "no_chat_template"
    NO_TOKENIZER = "no_tokenizer"
    TEMPLATE_ERROR = "template_error"
    # try again
    BUSY = "busy"
    QUEUE_FULL = "queue_full"
    NOT_READY = "not_ready"
    SHUTTING_DOWN = "shutting_down"
    ROUTER_LOST = "router_lost"
    ABORTED = "aborted"
    # an answer that could not be completed
    EMBEDDING_READ_FAILED = "embedding_read_failed"
    EXPERT_READ_FAILED = "expert_read_failed"
    EXPERT_CHECKSUM_MISMATCH = "expert_checksum_mismatch"
    KERNEL_FAILED = "kernel_failed"
    NON_FINITE = "non_finite"
    STEP_LOST = "step_lost"
    STREAM_BROKEN = "stream_broken"
    ENGINE_ERROR = "engine_error"
    FAULT = "fault"


class ColibriError(Exception):
    """Base of all errors this project raises on purpose. ``exit_code`` is what a process ends with because of it."""

    exit_code = EXIT_FAULT


class ConfigError(ColibriError):
    """A setting is unknown, of a wrong type or impossible. Trying again without a change is useless."""

    exit_code = EXIT_CONFIG


class SchemaError(ColibriError):
    """Two sides speak different versions."""

    exit_code = EXIT_CONFIG


def unknown_message(service: str, msg: object, sender: str) -> SchemaError:
    """For the end of a service's ``handle``: what it declared to receive and what it handles have parted."""
    return SchemaError(f"{service} got {type(msg).__name__} from {sender}, which it has no use for; this is a fault.")


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


class DownloadError(ColibriError):
    """Nothing of use comes from a hub. Trying again later may help."""


class Refused(ColibriError):
    """A request is not accepted. ``status``: HTTP status; ``code``: machine-readable; ``param``: the culprit or ''."""

    def __init__(
        self, message: str, *, status: int = 400, code: ErrorCode = ErrorCode.INVALID_REQUEST, param: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
