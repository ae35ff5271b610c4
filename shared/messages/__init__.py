"""What the processes say to each other: one module per receiver, MessagePack arrays, no tensors.

``SCHEMA_VERSION`` is in every hello and must be equal in all processes. Within a version fields are only appended, with
defaults; ``tests/contract`` holds the golden bytes. This package imports msgspec, the standard library
and the error codes of ``shared.errors`` alone.
"""

from __future__ import annotations

SCHEMA_VERSION = 3
