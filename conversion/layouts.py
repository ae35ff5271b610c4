"""Ways to store weights that the converter does not understand: recognised by their tensors' names, and told by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from shared.container.safetensors_file import TensorEntry

PLAIN_REMEDY = (
    "Use the model's bf16 repository or the one in fp8 with blocks of 128; "
    "`colibri convert --precision` quantises itself."
)
_SPLIT = "Use the repository as the makers of the model published it, with one tensor per projection; or split the fused ones."
_UNFUSED = (
    "Use the repository as the makers of the model published it, with one tensor per expert and projection; or split the fused "
    "tensors into `experts.N.gate_proj.weight`, `up_proj` and `down_proj`."
)


SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Of the multipliers of F8_E4M3, after the weight's name."""
_PLAIN_DTYPES = ("F32", "BF16", "F16")
_FUSED_EXPERTS = re.compile(r"\.experts\.(?!\d+\.|shared)")
_STACKED = frozenset({"switch_mlp", "input_linear", "output_linear"})
_FUSED_PROJECTIONS = frozenset(
    {"qkv_proj", "query_key_value", "Wqkv", "W_pack", "fused_qkv_a_proj_with_mqa", "gate_up_proj"}
)


class Foreign(NamedTuple):
    """A layout that was recognised: by which tensor, what it is called, what to do."""

    tensor: str
    what: str
    remedy: str


def find_foreign(tensors: Mapping[str, TensorEntry], wanted: Collection[str]) -> Foreign | None:
    """The first layout, by the order of what is most telling, that tensors beside the ``wanted`` ones speak of."""
    by_part: dict[str, str] = {}
    experts, projections, parts = "", "", ""
    for name in tensors:
        if name in wanted:
            continue
        # The last ones: `weight.absmax`, `lora_A.default.weight`, `weight.quant_state.bitsandbytes__nf4`.
        last = name.split(".")[-3:]
        for part in last:
            by_part.setdefault(part, name)
        if not experts and (_FUSED_EXPERTS.search(name) or not _STACKED.isdisjoint(last)):
            experts = name
        if not projections and not _FUSED_PROJECTIONS.isdisjoint(last):
            projections = name
        if not parts and _is_part(name, tensors, wanted):
            parts = name
    for part, what in _BY_PART.items():
        if part in by_part:
            name = by_part[part]
            return Foreign(name, what(name, tensors), PLAIN_REMEDY if part not in _ADAPTERS else _MERGED)
    if experts:
        if experts.endswith(("_blocks", "_scales")):
            return Foreign(experts, _mxfp4(experts), PLAIN_REMEDY)
        return Foreign(experts, "all experts of a layer fused into one tensor", _UNFUSED)
    if projections:
        return Foreign(projections, "several projections fused into one tensor", _SPLIT)
    if parts:
        stem, _, part = parts.rpartition(".")
        beside = sorted({name[len(stem) + 1 :] for name in tensors if name.startswith(f"{stem}.")})
        shown = ", ".join(f"`{name}`" for name in (beside if len(beside) <= 4 else [part]))
        return Foreign(parts, f"a quantised weight in a form of its own ({shown})", PLAIN_REMEDY)
    return None


def about_scales(scale: str, weight: TensorEntry, shape: tuple[int, ...]) -> str:
    """What to call a weight whose scales, the last part of their name is ``scale``, are of this shape."""
    if all(dim == 1 for dim in shape):
        return f"{weight.dtype} with one scale per tensor (`{scale}`)"
    if weight.shape and shape in ((weight.shape[0],), (weight.shape[0], 1)):
        return f"{weight.dtype} with one scale per row (`{scale}`)"
    return f"{weight.dtype} with scales of shape {list(shape)} in `{scale}`"


def _is_part(name: str, tensors: Mapping[str, TensorEntry], wanted: Collection[str]) -> bool:
    """Whether a tensor lies beside a weight that is not there, or not in numbers that can be read without it."""
    stem = name.rpartition(".")[0]
    weight = next((found for found in (stem, f"{stem}.weight") if found in wanted), None)
    if weight is None or name.endswith((".bias", SCALE_SUFFIXES[0])):
        return False
    if weight not in tensors:
        return True
    return tensors[weight].dtype not in _PLAIN_DTYPES and not any(
        weight + suffix in tensors for suffix in SCALE_SUFFIXES
    )


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
    return about_scales("weight_scale", weight or TensorEntry("weights", (), 0, 0), shape)


def _mxfp4(_name: str, _tensors: object = None) -> str:
    return "MXFP4 (fp4 in `_blocks` with a power of two per 32 values in `_scales`)"


_ADAPTERS = ("lora_A", "lora_B")
_MERGED = "Merge the adapter into its base model (peft's merge_and_unload), save that and convert it."
_BY_PART = {
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
    "centroids": lambda *_: "VPTQ (`indices` and `centroids`)",
    "Qidxs": lambda *_: "QuIP# (`Qidxs` with `SU` and `SV`)",
    "q_weight": lambda *_: "EXL2 (`q_weight` with `q_scale`)",
    "trellis": lambda *_: "EXL3 (`trellis` with `suh` and `svh`)",
    "_data": lambda *_: "quanto (`weight._data` and `weight._scale`)",
    "input_scale": lambda *_: "scales for activations (`input_scale`), measured beforehand",
    "scales": lambda *_: "integers in groups with `scales` (of MLX when there are `biases` beside them)",
    "lora_A": lambda *_: "a LoRA adapter (`lora_A`, `lora_B`)",
}
"""One of the last parts of a tensor's name -> what the layout is called; the most telling first."""
