"""Rates of this machine that a plan needs: memory and arithmetic, measured in some tens of milliseconds."""

from __future__ import annotations

from native.library import Pool
from native.memory import HugeBuffer
from native.probe import ops_rate, read_rate
from shared.container.format import Facts
from shared.container.pack import SCALED
from shared.container.reader import Container
from shared.planning.ledger import DEFAULT_CHUNK
from shared.planning.speed import covering_chunk

MEMORY_BYTES = 256 << 20
ROUNDS = 3
ITEMS_PER_THREAD = 25
KIND_OF = {fmt: f"int{kind.bits}" for fmt, kind in SCALED.items()}
"""Format of the weights -> arithmetic of ``native.probe``; floats use f32."""


def memory_rate(n_threads: int) -> float:
    """Bytes per second of reading memory far larger than the caches: the best of a few passes."""
    with Pool(n_threads) as pool, HugeBuffer(MEMORY_BYTES) as buffer:
        buffer.array[:] = 1
        return max(read_rate(pool, buffer.array, ahead) for _ in range(ROUNDS) for ahead in (False, True))


def arithmetic_rate(weight_format: str, n_threads: int) -> float:
    """Peak operations per second with weights of this format (a multiply-add is two): the best of a few."""
    kind = KIND_OF.get(weight_format, "f32")
    with Pool(n_threads) as pool:
        return max(ops_rate(pool, kind, ITEMS_PER_THREAD * n_threads) for _ in range(ROUNDS))


def chunk_for(container: Container, facts: Facts, disk_bytes_s: float, n_threads: int) -> int:
    """Prompt rows per step that are worth having here; the default where the drive's rate is not known (0)."""
    if not disk_bytes_s or not container.experts:
        return DEFAULT_CHUNK
    weight_format = next(iter(container.experts.values())).format
    return covering_chunk(container.spec, facts, disk_bytes_s, arithmetic_rate(weight_format, n_threads))
