"""Blocks of llama.cpp as the container's own formats with a scale per 32 inputs: which format holds what, and the codes. Pure.

Q4_0 is ``q4g32``, Q8_0 ``q8g32`` and MXFP4 ``mxfp4``: the same codes and scales in other places. int8 in groups holds them all,
because 4 bits and a scale are 8 bits and that scale, so it is what a role gets whose matrices are of several types. Blocks with
scales of their own within 256 values (the K types) or with an offset are rounded to int8 in groups of 32, the nearest format at
least as precise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from shared.container.pack import E2M1_TWICE, U8

AS_IT_IS = "kept"
"""The precision that takes each role's format from the file."""
_OWN = {"Q4_0": "q4g32", "Q8_0": "q8g32", "MXFP4": "mxfp4"}
_FLOATS = ("F32", "F16", "BF16")
_GROUP = 32


def format_of(role: str, types: Collection[str]) -> str:
    """The format of a role's matrices that are of these types.

    The embedding's rows have no format with groups: what int8 with a scale a row would round once more is kept as f32, unless
    it is of a type that is rounded anyway.
    """
    found = set(types)
    if role == "exact" or not found:
        return "f32"
    if found & set(_FLOATS):
        return "bf16" if found == {"BF16"} else "f32"
    if role == "embed":
        return "f32" if found & set(_OWN) else "q8"
    own = {_OWN.get(name, "") for name in found}
    return own.pop() if own in ({"q4g32"}, {"mxfp4"}) else "q8g32"


def formats_of(types: Mapping[str, Collection[str]], roles: Collection[str]) -> dict[str, str]:
    return {role: format_of(role, types.get(role, ())) for role in roles}


def is_held(dtype: str, fmt: str) -> bool:
    """Whether ``codes_of`` has a format's codes for a type: nothing is rounded then."""
    return dtype in _OWN and fmt in (_OWN[dtype], "q8g32")


def codes_of(raw: U8, dtype: str, fmt: str) -> tuple[Any, Any]:
    """raw u8[..., bytes of a row] -> what ``pack_codes`` takes: codes [..., in] and scales [..., in / 32].

    ValueError when a scale is not finite, or beyond what ``fmt`` has.
    """
    scale_bytes = 1 if dtype == "MXFP4" else 2
    block = scale_bytes + (32 if dtype == "Q8_0" else 16)
    blocks = raw.reshape(*raw.shape[:-1], -1, block)
    scale, codes = np.ascontiguousarray(blocks[..., :scale_bytes]), blocks[..., scale_bytes:]
    if dtype == "Q8_0":
        q: Any = codes.view(np.int8)
    else:  # values i and i + 16 in a byte
        q = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        q = q.view(np.int8) - np.int8(8) if dtype == "Q4_0" else q
    q = np.ascontiguousarray(q).reshape(*raw.shape[:-1], -1)
    if dtype != "MXFP4":
        scales = scale.view(np.float16)[..., 0]
        if not np.isfinite(scales).all():
            raise ValueError("a scale is NaN or infinite")
        return q, scales
    exponents = scale[..., 0]
    if exponents.size and exponents.max() > 252:  # 6 * 2^125 is the last that f32 holds
        raise ValueError("a scale is NaN, or too large for f32")
    if fmt == "mxfp4":
        return q, exponents
    scales = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127).astype(np.float16)
    q = E2M1_TWICE[q]
    is_used = q.reshape(*exponents.shape, _GROUP).any(axis=-1)
    if not np.isfinite(scales).all() or (is_used & (exponents < 128 - 24)).any():
        raise ValueError("a scale of MXFP4 is beyond what f16 holds; --precision bf16 takes it")
    return q, scales
