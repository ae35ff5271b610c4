"""XXH64: published values, a second implementation in Python, alignment, speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from native.memory import hash64
from tests.checkasm.kit import guarded_copy

MASK = (1 << 64) - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

# As every implementation of the algorithm gives them, seed 0.
KNOWN = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


def rotl(x: int, r: int) -> int:
    return (x << r | x >> (64 - r)) & MASK


def plain_xxh64(data: bytes) -> int:
    """The algorithm written from its description with Python integers."""

    def lane(acc: int, word: int) -> int:
        return rotl((acc + word * P2) & MASK, 31) * P1 & MASK

    def word(at: int, n: int) -> int:
        return int.from_bytes(data[at : at + n], "little")

    at, n = 0, len(data)
    if n >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while at + 32 <= n:
            lanes = [lane(acc, word(at + 8 * i, 8)) for i, acc in enumerate(lanes)]
            at += 32
        h = sum(rotl(acc, r) for acc, r in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for acc in lanes:
            h = ((h ^ lane(0, acc)) * P1 + P4) & MASK
    else:
        h = P5
    h = (h + n) & MASK
    while at + 8 <= n:
        h = (rotl(h ^ lane(0, word(at, 8)), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= n:
        h = (rotl(h ^ word(at, 4) * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    while at < n:
        h = rotl(h ^ data[at] * P5 & MASK, 11) * P1 & MASK
        at += 1
    h = (h ^ h >> 33) * P2 & MASK
    h = (h ^ h >> 29) * P3 & MASK
    return h ^ h >> 32


@pytest.mark.parametrize("data", KNOWN)
def test_published_values(data: bytes) -> None:
    assert hash64(data) == KNOWN[data] == plain_xxh64(data)


def test_every_short_length_against_the_plain_implementation() -> None:
    data = np.random.default_rng(1).integers(0, 256, 300, np.uint8).tobytes()
    for n in range(len(data)):
        assert hash64(data[:n]) == plain_xxh64(data[:n]), f"{n} bytes"


def test_neither_alignment_nor_what_lies_behind_matters() -> None:
    data = np.random.default_rng(2).integers(0, 256, 1000, np.uint8)
    expected = hash64(data[8:])
    for shift in range(8):
        moved = np.empty(2000, np.uint8)[shift : shift + 992]
        moved[:] = data[8:]
        assert hash64(moved) == expected
    assert hash64(guarded_copy(data[8:], 1)) == expected


def test_one_flipped_bit_changes_it() -> None:
    data = np.random.default_rng(3).integers(0, 256, 4096, np.uint8)
    expected = hash64(data)
    for bit in (0, 7, 8 * 2048 + 3, 8 * 4095 + 7):
        data[bit // 8] ^= 1 << bit % 8
        assert hash64(data) != expected
        data[bit // 8] ^= 1 << bit % 8


def test_runs_at_gigabytes_per_second() -> None:
    """A checksum must not be slower than the drive. Time of this thread: other work on the machine does not count."""
    data = np.ones(32 << 20, np.uint8)
    best = min(_seconds(data) for _ in range(5))
    rate = data.nbytes / best / 1e9
    assert rate > 2, f"{rate:.1f} GB/s"


def _seconds(data: np.ndarray) -> float:
    start = time.thread_time()
    hash64(data)
    return time.thread_time() - start
