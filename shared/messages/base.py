"""The common base of all messages and the bounded integer types their fields use."""

from __future__ import annotations

from typing import Annotated

import msgspec

Step = Annotated[int, msgspec.Meta(ge=0)]
Layer = Annotated[int, msgspec.Meta(ge=0, le=4095)]
Frame = Annotated[int, msgspec.Meta(ge=0, le=63)]
Rows = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class Msg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message: an array with its tag first. Subclasses name their route in the first docstring line."""
