"""What a profile says about the drive: its rate beside what it was measured to give, and the one change that helps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
NEAR_CEILING = 0.75
"""Reads at this share of the drive's measured rate are as fast as it lets them."""
LARGE_READ_BYTES = 4 << 20
"""Smaller reads end before the drive is at its rate, so that a low one says nothing about it."""
IDLE_SHARE = 0.3


@dataclass(frozen=True)
class StoreFacts:
    """How the running group's store is set up. Zero: not known."""

    drive_bytes_s: int = 0
    """What the drive was measured to give when the group started, or earlier."""
    is_buffered: bool = False
    pilot: str = "on"
    slot_bytes: int = 0
    n_experts: int = 0
    """Experts of all layers."""
    n_slots: int = 0


@dataclass(frozen=True)
class ReadFacts:
    """What was read in the span."""

    n_reads: int
    n_bytes: int
    busy_ns: int
    span_ns: int
    """Steps and what lay between them."""
    n_misses: int = 0
    n_evictions: int = 0

    @property
    def bytes_s(self) -> float:
        """While at least one read was under way."""
        return self.n_bytes * 1e9 / self.busy_ns if self.busy_ns else 0.0

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_ns / self.span_ns) if self.span_ns else 0.0


def of_ceiling(reads: ReadFacts, store: StoreFacts) -> float | None:
    """The rate as a share of what the drive was measured to give. None: never measured, or nothing was read."""
    if not store.drive_bytes_s or not reads.busy_ns:
        return None
    return reads.bytes_s / store.drive_bytes_s


def rate_text(reads: ReadFacts, store: StoreFacts) -> str:
    """Like "2.31 GB/s, 92% of the drive's 2.50"."""
    share = of_ceiling(reads, store)
    text = f"{reads.bytes_s / 1e9:.2f} GB/s"
    return text if share is None else f"{text}, {share:.0%} of the drive's {store.drive_bytes_s / 1e9:.2f}"


def advice(reads: ReadFacts, store: StoreFacts) -> str:
    """The single change that would shorten the waiting for storage most."""
    if reads.n_misses and not reads.n_evictions:
        return "No expert had to leave: the slots are still filling, and the next answers will be faster."
    if store.is_buffered:
        return (
            "Reads go through the page cache, which costs most of a core: a model on a local file system with direct reads "
            "would help most (colibri doctor MODEL)."
        )
    share = of_ceiling(reads, store)
    is_large = reads.n_bytes >= LARGE_READ_BYTES * max(1, reads.n_reads)
    if share is not None and share < NEAR_CEILING and is_large:
        return (
            "That is far below what the drive was measured to give: something else uses it, or it has become slower; ending "
            "that would help most (colibri doctor MODEL --measure)."
        )
    if store.pilot == "off" and reads.busy_share < 1 - IDLE_SHARE:
        return (
            f"The drive was idle for {1 - reads.busy_share:.0%} of the time and guessing ahead is off: --pilot on would help "
            "most."
        )
    if store.slot_bytes and store.n_experts > store.n_slots:
        return (
            f"More slots would help most: {store.n_slots:,} of {store.n_experts:,} experts fit now, each further GiB of --ram "
            f"holds {GIB / store.slot_bytes:,.0f} more (colibri ram); after that, a second drive (colibri mirror)."
        )
    return "More slots (memory) or a faster drive would help most."
