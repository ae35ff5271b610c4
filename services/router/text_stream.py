"""From sampled tokens to text that may be sent. Pure: no sockets, no tokenizer.

The rule for characters: the bytes of all tokens are one UTF-8 text. A character split over tokens waits for its last byte;
bytes that are no UTF-8 are one U+FFFD for each longest beginning of a character, as soon as that is certain. So the text
after n tokens begins that after n + 1, but for the mark of a character that was still open.

The rule for stop strings: the answer ends before the stop string that *begins* first. One that is complete waits while an
earlier beginning may still become another one. Neither rule depends on where tokens are cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

PieceOf = Callable[[int, bool], bytes]
"""(token, whether it begins the text) -> its bytes."""


class TextStream:
    """Text of a growing list of tokens. ``piece_of`` None: there is no tokenizer, and no text.

    ``is_start``: the answer is a text of its own, not the continuation of another: tokenizers that spell words with a blank
    before them leave out the first blank. The work per token does not depend on what came before it.
    """

    def __init__(self, piece_of: PieceOf | None, stop: SequenceOf[str] = (), *, is_start: bool = False) -> None:
        self._piece_of = piece_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finder = StopFinder(stop)
        self.begins_with_first = is_start
        """The first token begins a text; see ``is_start``."""
        self._is_start = is_start

    @property
    def is_stopped(self) -> bool:
        """A stop string ends the text; nothing comes any more."""
        return self._finder.is_stopped

    def push(self, token: int) -> str:
        """Text that this token completed and that may be sent."""
        if self._piece_of is None or self.is_stopped:
            return ""
        piece = self._piece_of(token, self._is_start)
        if piece:
            self._is_start = False
        text = self._decoder.decode(piece)
        pending = self._decoder.getstate()[0]
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            # Half a surrogate: Python waits for the third byte, although no character begins so.
            text += self._decoder.decode(b"", final=True)
        return self._finder.push(text)

    def finish(self) -> str:
        """The rest: an unfinished character as one U+FFFD, text that waited for the end of a stop string."""
        if self._piece_of is None or self.is_stopped:
            return ""
        return self._finder.push(self._decoder.decode(b"", final=True)) + self._finder.finish()


@dataclass(slots=True)
class _Pattern:
    """A stop string and how much of its beginning ends the text so far (Knuth, Morris and Pratt)."""

    stop: str
    borders: list[int]
    n_matched: int = 0
    begin: int = -1
    """Where it was found."""

    def feed(self, text: str, n_before: int) -> None:
        stop, borders, k = self.stop, self.borders, self.n_matched
        for idx, char in enumerate(text):
            while k and stop[k] != char:
                k = borders[k - 1]
            if stop[k] == char:
                k += 1
                if k == len(stop):
                    self.begin = n_before + idx + 1 - k
                    return
        self.n_matched = k


class StopFinder:
    """Holds text back while it may belong to a stop string, and cuts it at the one that begins first."""

    def __init__(self, stops: SequenceOf[str]) -> None:
        self._patterns = [_Pattern(stop, _borders(stop)) for stop in stops if stop]
        self._n_seen = 0
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Takes ``text``; returns what is certainly part of the answer."""
        if not self._patterns:
            return text
        if not text or self.is_stopped:
            return ""
        for pattern in self._patterns:
            if pattern.begin < 0:
                pattern.feed(text, self._n_seen)
        self._n_seen += len(text)
        self._held += text
        found = self._found
        maybe = min((self._n_seen - p.n_matched for p in self._patterns if p.begin < 0), default=self._n_seen)
        if found >= 0 and maybe >= found:
            return self._cut(found)
        return self._release(maybe)

    def finish(self) -> str:
        """No text follows: what was only a beginning is text."""
        if self.is_stopped:
            return ""
        return self._cut(self._found) if self._found >= 0 else self._release(self._n_seen)

    @property
    def _found(self) -> int:
        return min((p.begin for p in self._patterns if p.begin >= 0), default=-1)

    def _cut(self, at: int) -> str:
        self.is_stopped = True
        out = self._release(at)
        self._held = ""
        return out

    def _release(self, until: int) -> str:
        """What is held up to the character ``until`` of the whole text."""
        n = len(self._held) - (self._n_seen - until)
        out, self._held = self._held[:n], self._held[n:]
        return out


def _borders(text: str) -> list[int]:
    """For each beginning of ``text``: how long its longest proper beginning is that also ends it."""
    borders = [0] * len(text)
    k = 0
    for idx in range(1, len(text)):
        while k and text[idx] != text[k]:
            k = borders[k - 1]
        if text[idx] == text[k]:
            k += 1
        borders[idx] = k
    return borders
