"""``colibri inspect``: what a container holds, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from cli.options import PATH, PATH_TEXT
from cli.show import Column, Table, show
from shared.container.reader import Container
from shared.run.terminal import say, say_json


@click.command("inspect")
@click.argument("directory", type=PATH)
@click.option(
    "--mirror", "mirrors", multiple=True, metavar="DIR", type=PATH_TEXT, help="Expert files may also lie in DIR."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(directory: Path, mirrors: tuple[str, ...], as_json: bool) -> None:
    """Show the model, the precision and the files of the container in DIRECTORY. Headers are checked, weights are not read."""
    container = Container.open(directory, mirrors)
    facts = describe(container)
    if as_json:
        say_json(facts, indent=1)
        return
    spec = container.spec
    rows = [
        ("family", f"{spec.family}, {spec.n_layers} layers{' + MTP layer' if spec.n_mtp else ''}"),
        ("hidden / vocabulary", f"{spec.hidden:,} / {spec.vocab:,}"),
        ("attention", _attention(container)),
        ("dense layers", f"{spec.layer_kinds.count('dense')}, inner {spec.dense_inner:,}"),
        (
            "experts",
            f"{spec.n_experts} a layer, {spec.gate_k} chosen, {spec.n_shared} shared, inner {spec.expert_inner:,}",
        ),
        *([("beside the experts", f"a dense branch, inner {spec.branch.width:,}")] if spec.branch else []),
        ("context", f"{spec.max_context:,}"),
        ("end ids", ", ".join(map(str, spec.eos_ids)) or "none"),
        ("precision", ", ".join(f"{role} {fmt}" for role, fmt in container.precision.items())),
        ("dense part", f"{facts['dense_bytes']:,} bytes in {facts['n_dense_tensors']} tensors"),
        ("expert records", ", ".join(f"{n} x {size:,} bytes" for size, n in facts["records"])),
        ("all experts", f"{facts['expert_bytes']:,} bytes of {len(container.experts)} layers"),
        ("parameters", f"{facts['n_parameters']:,}, of which {facts['n_active']:,} active for a token"),
        ("fingerprint", container.fingerprint),
        ("converter", f"{container.converter.version} {container.converter.arguments}"),
    ]
    for note in container.notes:
        say(f"note: {note}")
    show([Table((Column("", 20, False), Column("", 0, False, " ")), rows, has_head=False)])


def describe(container: Container) -> dict[str, Any]:
    """The facts as plain values."""
    spec = container.spec
    sizes: dict[int, int] = {}
    for file in container.experts.values():
        sizes[file.record_bytes] = sizes.get(file.record_bytes, 0) + file.n_experts
    dense = sum(_values(entry.shape) * entry.stack for entry in container.dense.values())
    mtp = sum(
        _values(e.shape) * e.stack
        for name, e in container.dense.items()
        if name.startswith(f"model.layers.{spec.mtp_layer}.")
    )
    expert = spec.expert_values
    n_main = sum(kind == "moe" for kind in spec.layer_kinds)
    return {
        "path": str(container.path),
        "family": spec.family,
        "fingerprint": container.fingerprint,
        "precision": container.precision,
        "converter": msgspec.to_builtins(container.converter),
        "spec": msgspec.to_builtins(spec),
        "notes": list(container.notes),
        "n_dense_tensors": len(container.dense),
        "dense_bytes": sum(entry.bytes + entry.scale_bytes for entry in container.dense.values()),
        "expert_bytes": sum(size * n for size, n in sizes.items()),
        "records": sorted(sizes.items()),
        "n_parameters": dense + expert * spec.n_experts * len(spec.moe_layers),
        "n_active": dense - mtp - spec.vocab * spec.hidden + expert * spec.gate_k * n_main,
    }


def _values(shape: tuple[int, ...]) -> int:
    n = 1
    for dim in shape:
        n *= dim
    return n


def _attention(container: Container) -> str:
    """Each kind of attention in the main layers, with their number where there are several."""
    kinds = Counter(attention.describe() for attention in container.spec.main_attention)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{n} layers: {text}" for text, n in kinds.items())
