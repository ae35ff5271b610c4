"""Ways to store weights that the converter does not understand: recognised by their tensors' names, and told by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from shared.container.safetensors_file import TensorEntry

_PLAIN = "Use the model's bf16 repository or the one in fp8 with blocks of 128; `colibri convert --precision` quantises itself."
_UNFUSED = (
    "Use the repository as the makers of the model published it, with one tensor per expert and projection; or split the fused "
    "tensors into `experts.N.gate_proj.weight`, `up_proj` and `down_proj`."
)


class Foreign(NamedTuple):
    """A layout that was recognised: by which tensor, what it is called, what to do."""

    tensor: str
    what: str
    remedy: str


def find_foreign(tensors: Mapping[str, TensorEntry], wanted: Collection[str]) -> Foreign | None:
    """The first layout, by the order of what is most telling, that tensors beside the ``wanted`` ones speak of."""
    by_suffix: dict[str, str] = {}
    fused = ""
    for name in tensors:
        if name in wanted:
            continue
        by_suffix.setdefault(name.rpartition(".")[2], name)
        if not fused and re.search(r"\.experts\.(?!\d+\.|shared)", name):
            fused = name
    for suffix, what in _BY_SUFFIX.items():
        if suffix in by_suffix:
            name = by_suffix[suffix]
            return Foreign(name, what(name, tensors), _PLAIN if suffix not in _ADAPTERS else _MERGED)
    if fused:
        kind = (
            _mxfp4(fused) if fused.endswith(("_blocks", "_scales")) else "all experts of a layer fused into one tensor"
        )
        return Foreign(fused, kind, _PLAIN if "MXFP4" in kind else _UNFUSED)
    return None


def _qweight(name: str, tensors: Mapping[str, TensorEntry]) -> str:
    stem = name.removesuffix("qweight")
    if f"{stem}g_idx" in tensors:
        return "GPTQ (packed int4 with `qweight`, `qzeros` and `g_idx`)"
    return "AWQ or GPTQ (packed int4 with `qweight`, `qzeros` and `scales`)"


def _packed(name: str, tensors: Mapping[str, TensorEntry]) -> str:
    if name.removesuffix("weight_packed") + "weight_global_scale" in tensors:
        return "compressed-tensors NVFP4 (packed fp4 in `weight_packed`, a scale per 16 inputs)"
    return "compressed-tensors with packed integers (int4 in `weight_packed`, scales in `weight_scale`)"


def _scaled(name: str, tensors: Mapping[str, TensorEntry]) -> str:
    weight = tensors.get(name.removesuffix("_scale"))
    shape = tensors[name].shape
    dtype = weight.dtype if weight else "weights"
    if all(dim == 1 for dim in shape):
        return f"{dtype} with one scale per tensor (`weight_scale`)"
    if weight and weight.shape and shape in ((weight.shape[0],), (weight.shape[0], 1)):
        return f"{dtype} with one scale per row (`weight_scale`)"
    return f"{dtype} with scales of shape {list(shape)} in `weight_scale`"


def _mxfp4(_name: str, _tensors: object = None) -> str:
    return "MXFP4 (fp4 in `_blocks` with a power of two per 32 values in `_scales`)"


_ADAPTERS = ("lora_A", "lora_B")
_MERGED = "Merge the adapter into its base model (peft's merge_and_unload), save that and convert it."
_BY_SUFFIX = {
    "qweight": _qweight,
    "qzeros": _qweight,
    "weight_packed": _packed,
    "weight_scale_2": lambda *_: "ModelOpt NVFP4 (packed fp4 with `weight_scale` and `weight_scale_2`)",
    "weight_scale": _scaled,
    "SCB": lambda *_: "bitsandbytes int8 (`SCB`)",
    "absmax": lambda *_: "bitsandbytes 4-bit (`absmax`, `quant_map`)",
    "bitsandbytes__nf4": lambda *_: "bitsandbytes 4-bit (nf4)",
    "bitsandbytes__fp4": lambda *_: "bitsandbytes 4-bit (fp4)",
    "W_q": lambda *_: "HQQ (`W_q` with `scale` and `zero`)",
    "codebooks": lambda *_: "AQLM (`codes` and `codebooks`)",
    "scales": lambda *_: "integers in groups with `scales` (of MLX when there are `biases` beside them)",
    "lora_A": lambda *_: "a LoRA adapter (`lora_A`, `lora_B`)",
}
"""Last part of a tensor's name -> what the layout is called; the most telling first."""
