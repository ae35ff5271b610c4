"""``colibri inspect``: what a container or a GGUF file holds, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from cli.options import PATH, PATH_TEXT
from cli.show import Column, Table, show
from shared.container.reader import Container
from shared.container.recognise import is_gguf
from shared.run.terminal import say, say_json


@click.command("inspect")
@click.argument("directory", metavar="MODEL|FILE.gguf", type=PATH)
@click.option(
    "--mirror", "mirrors", multiple=True, metavar="DIR", type=PATH_TEXT, help="Expert files may also lie in DIR."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(directory: Path, mirrors: tuple[str, ...], as_json: bool) -> None:
    """Show the model, the precision and the files of the container MODEL. Headers are checked, weights are not read.

    Of FILE.gguf: what it is, and what `colibri convert` makes of it.
    """
    if is_gguf(directory):
        _inspect_gguf(directory, as_json)
        return
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


def _inspect_gguf(path: Path, as_json: bool) -> None:
    from conversion.convert import Conversion
    from conversion.gguf.kept import AS_IT_IS

    conversion = Conversion(path, AS_IT_IS)
    spec, plan = conversion.spec, conversion.plan
    types = Counter(tensor.entry.dtype for tensor in conversion.checkpoint.tensors.values())
    facts = {
        "path": str(path),
        "files": sorted(conversion.checkpoint.files),
        "family": spec.family,
        "spec": msgspec.to_builtins(spec),
        "types": dict(types),
        "n_parameters": conversion.n_parameters,
        "copied": sorted(conversion.copied),
        "kept_precision": plan.precision,
        "kept_bytes": plan.dense_bytes + plan.expert_bytes,
    }
    if as_json:
        say_json(facts, indent=1)
        return
    rows = [
        ("format", f"GGUF, {len(conversion.checkpoint.files)} files"),
        ("family", f"{spec.family}, {spec.n_layers} layers{' + MTP layer' if spec.n_mtp else ''}"),
        ("hidden / vocabulary", f"{spec.hidden:,} / {spec.vocab:,}"),
        ("experts", f"{spec.n_experts} a layer, {spec.gate_k} chosen, inner {spec.expert_inner:,}"),
        ("context", f"{spec.max_context:,}"),
        ("end ids", ", ".join(map(str, spec.eos_ids)) or "none"),
        ("types", ", ".join(f"{n} x {name}" for name, n in types.most_common())),
        ("parameters", f"{conversion.n_parameters:,}"),
        ("becomes", ", ".join(f"{role} {fmt}" for role, fmt in plan.precision.items())),
        ("of", f"{facts['kept_bytes']:,} bytes (colibri convert {path} OUT)"),
        ("beside the weights", ", ".join(sorted(conversion.copied))),
    ]
    for note in conversion.notes():
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
