"""What the router and its prompt process say to each other through pipes: a head, then as many bytes as it says."""

from __future__ import annotations

import struct
from typing import Final

JOB: Final = struct.Struct("<QBqII")
"""number, kind, most tokens of use, bytes of the text, bytes of the template's variables; these two follow."""
TEXT, CHAT = 0, 1
"""A raw prompt; messages as JSON."""

ANSWER: Final = struct.Struct("<QBI")
"""number, kind, bytes that follow."""
LOADED: Final = 0
"""The number of the first answer, which nobody asked for: the ids of the tokens that end a turn."""
IDS, REFUSAL, DAMAGE = 0, 1, 2
"""Token ids as u32; a refusal as JSON; what is wrong with the model's files."""
