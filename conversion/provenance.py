"""Whether a container was made from the weights that a checkpoint holds now. Run by ``colibri verify --against``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conversion.convert import Conversion
from shared.container.format import plan_container
from shared.container.reader import Container
from shared.errors import ContainerError


def compare_sources(container: Container, source: Path) -> Iterator[tuple[int, str | None]]:
    """Reads the checkpoint ``source``: yields (bytes of the container, None or the complaint) per tensor and per expert.

    ContainerError when the two can't be compared: another model, or a container that does not say what it was made from.
    """
    conversion = Conversion(source, "f32", has_mtp=bool(container.spec.n_mtp))
    try:
        if plan_container(conversion.spec, container.precision) != container.plan:
            raise ContainerError(
                f"{container.path} was not made from {source}: their config.json differ in the sizes of the model. Give the "
                "directory it was converted from."
            )
        index = container.index
        records = [*index.dense.values(), *index.experts.values()]
        if not all(getattr(record, "source", None) or getattr(record, "sources", None) for record in records):
            raise ContainerError(
                f"{container.path} does not say which bytes it was made from: it holds random weights, or an older converter "
                "made it. Convert the checkpoint again to be able to compare."
            )
        for file in container.plan.dense:
            for item in file.items:
                found = conversion.witness(item, None).digest
                is_same = found == index.dense[item.name].source
                yield item.n_bytes, None if is_same else _complaint(source, item.name)
        for layer in container.plan.experts:
            recorded = index.experts[str(layer.layer)].sources
            for expert in range(layer.n_experts):
                is_same = conversion.witness((layer, expert), None).digest == recorded[expert]
                name = f"layer {layer.layer} expert {expert}"
                yield layer.layout.record_bytes, None if is_same else _complaint(source, name)
    finally:
        conversion.checkpoint.close()


def _complaint(source: Path, what: str) -> str:
    return (
        f"{what} was made from other bytes than {source} holds now. One of them was damaged or replaced: convert again into "
        "another directory."
    )
