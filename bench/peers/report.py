"""What a comparison says. Pure: rates in, text or JSON out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

OURS = "colibri"


@dataclass
class Rates:
    """Tokens per second of one engine with one setting, every measurement."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Everything one run found out."""

    shape: str
    head_type: str
    n_threads: int
    n_prompt: int
    n_tokens: int
    peer_version: str
    peer_bytes_per_token: int
    our_bytes_per_token: int
    bandwidth_bytes_s: float
    rates: dict[str, Rates]
    """By engine and setting; OURS is one of them."""

    def median(self, engine: str, what: str) -> float:
        values: list[float] = getattr(self.rates[engine], what)
        return statistics.median(values)

    def best_peer(self, what: str) -> str:
        """The setting in which the peer is fastest at this."""
        return max((name for name in self.rates if name != OURS), key=lambda name: self.median(name, what))

    def ratio(self, what: str) -> float:
        """Our median over the best peer's."""
        return self.median(OURS, what) / self.median(self.best_peer(what), what)

    def bound(self, engine: str) -> float:
        """Tokens per second of a decode that only waits for memory."""
        n_bytes = self.our_bytes_per_token if engine == OURS else self.peer_bytes_per_token
        return self.bandwidth_bytes_s / n_bytes


def as_json(c: Comparison) -> dict[str, Any]:
    """Schema 1: what Comparison holds, medians, decode's bound and share for each engine, our ratios to the best peer."""
    return {
        "schema": 1,
        "shape": c.shape,
        "head_type": c.head_type,
        "n_threads": c.n_threads,
        "n_prompt": c.n_prompt,
        "n_tokens": c.n_tokens,
        "peer_version": c.peer_version,
        "bandwidth_gb_s": c.bandwidth_bytes_s / 1e9,
        "bytes_per_token": {"peer": c.peer_bytes_per_token, "ours": c.our_bytes_per_token},
        "engines": {
            name: {
                "prefill_tok_s": rates.prefill,
                "decode_tok_s": rates.decode,
                "prefill_median": c.median(name, "prefill"),
                "decode_median": c.median(name, "decode"),
                "decode_bound": c.bound(name),
                "decode_share": c.median(name, "decode") / c.bound(name),
            }
            for name, rates in c.rates.items()
        },
        "ratio": {"prefill": c.ratio("prefill"), "decode": c.ratio("decode")},
    }


def as_text(c: Comparison) -> str:
    """A table and the sentence it amounts to."""
    lines = [
        f"{c.shape}; {c.n_threads} threads; prompt of {c.n_prompt}, then {c.n_tokens} tokens after a short prompt",
        f"llama-cpp-python {c.peer_version}",
        f"memory {c.bandwidth_bytes_s / 1e9:.1f} GB/s (median of this run); bytes per token: llama.cpp "
        f"{c.peer_bytes_per_token / 1e6:,.1f} MB (head {c.head_type}), ours {c.our_bytes_per_token / 1e6:,.1f} MB (head int8)",
        "",
        f"{'engine':16} {'prefill tok/s':>26} {'decode tok/s':>26} {'bound':>8} {'share':>6}",
    ]
    for name in c.rates:
        cells = [_spread(getattr(c.rates[name], what)) for what in ("prefill", "decode")]
        share = c.median(name, "decode") / c.bound(name)
        lines.append(f"{name:16} {cells[0]:>26} {cells[1]:>26} {c.bound(name):8.2f} {share:6.0%}")
    lines += [
        "",
        f"ours over the best of llama.cpp: prefill {c.ratio('prefill'):.2f} x, decode {c.ratio('decode'):.2f} x; per byte read "
        f"(decode's shares of the bound) {c.ratio('decode') * c.our_bytes_per_token / c.peer_bytes_per_token:.2f} x",
    ]
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
