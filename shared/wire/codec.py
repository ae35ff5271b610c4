"""Frames <-> messages: a 24-byte header, then the MessagePack body. Used by ``bus`` alone; knows no socket.

    offset  type  field
    0       u16   schema version
    2       u8    sender (place in ``endpoints.SERVICES``)
    3       u8    0
    4       u32   size of the body in bytes
    8       i64   incarnation of the sender
    16      u64   sequence number, per sender and receiver

The header lets a receiver drop what a dead predecessor left in a queue, and see a gap. Both parts are one frame:
a second frame costs a system call's worth of Python on each side and carries no information.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Union

import msgspec

from shared.messages import SCHEMA_VERSION
from shared.messages.base import Msg
from shared.wire.endpoints import SERVICES

HEADER = struct.Struct("<HBBIqQ")
HEADER_BYTES = HEADER.size
MAX_BYTES = 256 << 20
"""No message is larger; a long prompt with its history is a few megabytes."""


class Received(NamedTuple):
    """A data message with its origin."""

    sender: str
    incarnation: int
    msg: Any


class BadMessage(Exception):
    """A frame that is not a message of this group. Logged and dropped by the receiver."""


class Encoder:
    """Encodes the messages of one sender into one reused buffer."""

    def __init__(self, sender: str, incarnation: int) -> None:
        self._sender = SERVICES.index(sender)
        self._incarnation = incarnation
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._buffer = bytearray(4096)

    def encode(self, msg: Msg, sequence: int) -> bytearray:
        """The frame; valid until the next call."""
        buffer = self._buffer
        self._encode_into(msg, buffer, HEADER_BYTES)
        HEADER.pack_into(
            buffer, 0, SCHEMA_VERSION, self._sender, 0, len(buffer) - HEADER_BYTES, self._incarnation, sequence
        )
        return buffer


class Decoder:
    """Decodes what one receiver may be told (``receives``)."""

    def __init__(self, receives: tuple[type[Msg], ...]) -> None:
        kind: Any = Union[receives] if receives else msgspec.Raw  # noqa: UP007  (built at run time)
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def decode(self, frame: bytes | memoryview) -> tuple[Received, int]:
        """(message with its origin, sequence number). Raises BadMessage with the reason."""
        n_bytes = len(frame)
        if n_bytes < HEADER_BYTES or n_bytes > MAX_BYTES:
            raise BadMessage(f"a frame of {n_bytes} bytes; expected {HEADER_BYTES} to {MAX_BYTES}")
        version, sender, _, body_bytes, incarnation, sequence = HEADER.unpack_from(frame)
        if version != SCHEMA_VERSION:
            raise BadMessage(f"schema version {version}; this process speaks {SCHEMA_VERSION}")
        if sender >= len(SERVICES) or body_bytes != n_bytes - HEADER_BYTES:
            raise BadMessage(f"header names sender {sender} and {body_bytes} of {n_bytes - HEADER_BYTES} body bytes")
        try:
            msg = self._decode(memoryview(frame)[HEADER_BYTES:])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BadMessage(f"body from {SERVICES[sender]}: {error}") from None
        return Received(SERVICES[sender], incarnation, msg), sequence
