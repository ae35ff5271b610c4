"""The tables of docs/models.md: what known models weigh, and the speed that ``colibri plan``'s arithmetic expects of them.

    python -m bench.models [--write]

Computed from the presets' sizes, not measured: the drive's and the memory's rates are assumed and said in the table. With
--write the tables in docs/models.md are replaced.
"""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from conversion.presets import PRESETS, preset_config
from conversion.synth import Synthesis
from native.attention import kv_row_bytes
from shared.container.format import Facts, plan_facts
from shared.errors import CapacityError
from shared.model.spec import ModelSpec
from shared.planning.ledger import make_ledger
from shared.planning.speed import predict_speed
from shared.run.config import load_settings
from shared.run.program import run_program
from shared.run.terminal import say

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
DISK_BYTES_S, MEMORY_BYTES_S = 3e9, 30e9
MEMORIES = (16, 24, 32, 64)
"""GiB for the whole group."""
BEGIN, END = "<!-- sizes: python -m bench.models --write -->", "<!-- end of sizes -->"


def known(preset: str, precision: str) -> tuple[ModelSpec, Facts, int]:
    """(spec, facts, bytes on disk) of the whole model without its MTP layer."""
    synthesis = Synthesis(preset_config(preset, PRESETS[preset].n_layers), precision)
    return synthesis.spec, plan_facts(synthesis.spec, synthesis.plan), synthesis.n_bytes


def sizes(preset: str) -> list[str]:
    """Cells: name, family, layers, experts a layer, weights in 10^9, GB on disk, resident GB, MB an expert, KiB a position."""
    spec, facts, n_bytes = known(preset, "int4")
    weights = known(preset, "f32")[2] / 4
    resident = facts.dense_bytes + facts.gate_bytes + facts.shared_bytes
    growing = [layer for layer in spec.main_attention if not layer.reach]
    position = sum(part.n_vectors * kv_row_bytes("bf16", part.n_values) for layer in growing for part in layer.rows)
    of_each = [n_bytes, known(preset, "int8")[2], resident]
    return [
        preset, f"`{spec.family}`", f"{spec.n_layers} x {spec.hidden}", f"{spec.gate_k} of {spec.n_experts}",
        f"{weights / 1e9:.1f}", *(f"{size / 1e9:.1f}" for size in of_each), f"{max(facts.record_bytes) / 1e6:.1f}",
        f"{position / 1024:.0f}",
    ]  # fmt: skip


def speeds(preset: str) -> list[str]:
    """Cells: name, then for each memory the expected tokens per second and the share of the experts held; int4."""
    spec, facts, _ = known(preset, "int4")
    cells = [preset]
    for gib in MEMORIES:
        settings = load_settings(
            None, {"ram": f"{gib}G", "threads": 2, "max_sequences": 1, "draft": "off", "max_context": 4096}
        )
        try:
            ledger = make_ledger(spec, facts, settings, gib << 30, gib << 30)
        except CapacityError:
            cells.append("too little")
            continue
        speed = predict_speed(spec, facts, ledger, DISK_BYTES_S, MEMORY_BYTES_S)
        cells.append(f"{speed.warm[0]:.2f} ({min(ledger.n_slots / ledger.n_experts, 1.0):.0%})")
    return cells


def tables() -> str:
    """Both tables in Markdown."""
    head = (
        "model", "family", "layers x width", "experts", "10^9 weights", "GB, int4", "GB, int8", "GB always in memory",
        "MB an expert", "KV, KiB a position",
    )  # fmt: skip
    first = _table(head, [sizes(preset) for preset in _models()])
    second = _table(("model", *(f"{gib} GiB" for gib in MEMORIES)), [speeds(preset) for preset in _models()])
    rates = f"{DISK_BYTES_S / 1e9:.0f} GB/s from the drive and {MEMORY_BYTES_S / 1e9:.0f} GB/s from memory"
    return (
        f"{first}\n\nExpected tokens per second of one sequence at int4 with {rates}, and the share of the experts\n"
        f"that memory holds (as if all were asked for equally often; real routing hits more):\n\n{second}"
    )


def _models() -> Iterator[str]:
    return (preset for preset in PRESETS if preset != "tiny")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def replaced(text: str, made: str) -> str:
    """``text`` with what stands between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/models.md")
    made = tables()
    if parser.parse_args().write:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), made))
    else:
        say(made)
    return 0


if __name__ == "__main__":
    run_program("bench.models", main)
