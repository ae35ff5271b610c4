"""Sizes as people write them. Standard library alone."""

from __future__ import annotations

import re

from shared.errors import ConfigError

_SIZE = re.compile(r"\s*(\d{1,40})(?:\.(\d{1,40}))?\s*(?:([KMGT])i?B?|(B))?\s*", re.IGNORECASE | re.ASCII)
_FACTORS = {"K": 10, "M": 20, "G": 30, "T": 40}
_MAX_BYTES = 1 << 60
_LEAST_BYTES = 1 << 20
"""A smaller number without a unit is asked back: nobody means 24 bytes."""


def parse_bytes(text: object, key: str) -> int:
    """``"12G"``, ``"1.5GiB"``, ``"800M"``, or a number of bytes from a MiB on; K, M, G, T are powers of 1024.

    0 is 0. Raises ConfigError with ``key``, the setting or flag, in front: not a size, a small number that lacks a unit, or
    more than there is.
    """
    is_taken = isinstance(text, (str, int)) and not isinstance(text, bool)
    match = _SIZE.fullmatch(str(text)) if is_taken else None
    if match is None:
        if (isinstance(text, int) and is_taken) or re.fullmatch(r"\d{41,}\D{0,3}", str(text), re.ASCII):
            raise _out_of_range(text, key)
        raise ConfigError(f"{key}: {text!r} is not a size; write for example 12G or 800M")
    whole, part, unit, is_bytes = match[1], match[2] or "", match[3], match[4]
    scale: int = 10 ** len(part)
    scaled = int(whole + part) << (_FACTORS[unit.upper()] if unit else 0)
    if not (unit or is_bytes) and 0 < scaled < _LEAST_BYTES * scale:
        number = f"{whole}.{part}" if part else whole
        raise ConfigError(
            f"{key}: {number} bytes? Did you mean {number}{'G' if int(whole) < 1024 else 'M'}? A size has a unit, "
            f"for example 12G or 800M; write {number}B if bytes are meant."
        )
    if 0 < scaled < scale or scaled > _MAX_BYTES * scale:
        raise _out_of_range(text, key)
    return scaled // scale


def _out_of_range(text: object, key: str) -> ConfigError:
    return ConfigError(f"{key} = {str(text)[:60]}: allowed are 0 to {_MAX_BYTES:,} bytes, for example 12G or 800M")
