"""What speed to expect of a model on a machine, from bytes per token and measured rates; and how long a chunk should be.

Pure. ``colibri plan`` prints it beforehand, ``colibri-up`` takes its chunk from it.
"""

from __future__ import annotations

import msgspec

from shared.container.format import Facts
from shared.model.kv_layout import STATE_ITEM_BYTES
from shared.model.spec import ModelSpec
from shared.planning.ledger import DEFAULT_CHUNK, MAX_CHUNK, Ledger

COMPUTE_SHARE = 0.5
"""Of the peak of their arithmetic the kernels reach about this much with many rows (docs/performance.md)."""


class Speed(msgspec.Struct, frozen=True):
    """Decoding one sequence, tokens per second.

    At best, everything overlaps: 1 / max(disk, memory). Expected is what the ring allows: a layer's reads wait for its gate, so
    the disk idles while attention and head read their weights: 1 / (other weights + max(disk, experts from memory)).
    Both without the gain of PILOT, which fills a part of that time.
    """

    routed_bytes: int
    """Expert records a token uses."""
    resident_bytes: int
    """Dense weights, gates and shared experts that a token reads from memory, and its sequence's states, read and rewritten."""
    hit_rate: float
    """Slots over experts: what uniform routing would hit. Real routing is more skewed, hence better."""
    cold: tuple[float, float]
    """(expected, at best) when every expert comes from disk."""
    warm: tuple[float, float]
    """The same with ``hit_rate``."""
    resident_tokens_s: float


def bytes_per_token(spec: ModelSpec, facts: Facts) -> tuple[int, int]:
    """(``routed_bytes``, ``resident_bytes``) of ``Speed``. What attention reads of its cache grows and is not counted."""
    main = [size for size, layer in zip(facts.record_bytes, spec.moe_layers) if layer < spec.n_layers]
    states = sum(2 * STATE_ITEM_BYTES * layer.state.n_values for layer in spec.main_attention if layer.state)
    resident = facts.dense_bytes - facts.embed_bytes + facts.gate_bytes + facts.shared_bytes + states
    return spec.gate_k * sum(main), resident


def predict_speed(spec: ModelSpec, facts: Facts, ledger: Ledger, disk_bytes_s: float, memory_bytes_s: float) -> Speed:
    """``disk_bytes_s``: of expert-sized reads; ``memory_bytes_s``: of reading with all threads."""
    routed, resident = bytes_per_token(spec, facts)
    n_moe = sum(layer < spec.n_layers for layer in spec.moe_layers)
    hit_rate = min(ledger.n_slots / max(n_moe * spec.n_experts, 1), 1.0)

    def rates(miss_rate: float) -> tuple[float, float]:
        disk_s, experts_s = routed * miss_rate / disk_bytes_s, routed / memory_bytes_s
        others_s = resident / memory_bytes_s
        return 1 / (others_s + max(disk_s, experts_s)), 1 / max(disk_s, experts_s + others_s)

    return Speed(routed, resident, hit_rate, rates(1.0), rates(1.0 - hit_rate), memory_bytes_s / (routed + resident))


def covering_chunk(spec: ModelSpec, facts: Facts, disk_bytes_s: float, ops_s: float) -> int:
    """The smallest power of two of prompt rows whose computing takes as long as reading the experts they choose.

    ``ops_s``: peak of the experts' arithmetic, a multiply-add being two. Between DEFAULT_CHUNK and MAX_CHUNK. Shorter chunks
    than this let the processors wait for the disk; longer ones gain nothing more.
    """
    if not spec.n_experts or not facts.record_bytes:
        return DEFAULT_CHUNK
    row_s = 2.0 * _weights_per_row(spec) / (ops_s * COMPUTE_SHARE)
    rows = DEFAULT_CHUNK
    while rows < MAX_CHUNK:
        union = spec.n_experts * (1.0 - (1.0 - spec.gate_k / spec.n_experts) ** rows)
        if rows * row_s >= union * max(facts.record_bytes) / disk_bytes_s:
            break
        rows *= 2
    return rows


def _weights_per_row(spec: ModelSpec) -> int:
    """Weights that a row is multiplied with in a MoE layer: its experts, what is beside them, the attention's (on average)."""
    experts = 3 * spec.hidden * (spec.gate_k * spec.expert_inner + spec.shared_inner)
    beside = spec.branch.weights_per_row if spec.branch else 0
    return experts + beside + sum(layer.weights_per_row for layer in spec.main_attention) // spec.n_layers
