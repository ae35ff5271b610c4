"""Matrices that a checkpoint holds in int4: compressed-tensors, GPTQ, AWQ. Pure: decodes arrays that others read.

All three keep eight codes of 4 bits in an I32 word, and a scale per group of inputs; what differs is along which side words and
groups run, in which order codes lie in a word, and how zero points are kept. A value is (code - zero point) * scale.

Layouts as the tools write them: compressed-tensors' ``pack_to_int32`` (codes + 8, along the inputs), AutoGPTQ's and GPTQModel's
linear layers (words along the inputs, zero points less one in the first version), AutoAWQ's GEMM layer (words along the
outputs, codes 0 2 4 6 1 3 5 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.container.pack import F32, SCALED, from_bf16
from shared.container.safetensors_file import TensorEntry
from shared.errors import ContainerError

PER_WORD = 8
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_SCALE_DTYPES = ("F16", "BF16", "F32")
_PARTS = {"weight_packed": ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
          "qweight": ("scales", "qzeros", "g_idx")}  # fmt: skip
_REMEDY = (
    "Use the model's bf16 repository (`colibri convert --precision int4` quantises itself), or convert with --precision bf16, "
    "which reads these values and rounds them once more."
)
_ANOTHER = "Use the model's bf16 repository (`colibri convert --precision int4` quantises itself)."

I8 = npt.NDArray[np.int8]
Read = Callable[[str], npt.NDArray[Any]]
"""A whole tensor by its name, in its own dtype; bf16 as u16."""


class Codes(NamedTuple):
    """q i8[rows, in], codes less their zero points; scale f32[rows, groups], group ``i * in / groups`` onwards."""

    q: I8
    scale: F32

    def values(self) -> F32:
        size = self.q.shape[1] // self.scale.shape[1]
        values: F32 = self.q.astype(np.float32) * np.repeat(self.scale, size, axis=1)
        return values


class Packed(NamedTuple):
    """One matrix [out, in]. ``kind``: "compressed-tensors", "GPTQ" or "AWQ"."""

    kind: str
    stem: str
    shape: tuple[int, int]
    n_groups: int
    zero_offset: int
    parts: tuple[str, ...]

    @property
    def group(self) -> int:
        return self.shape[1] // self.n_groups

    @property
    def format(self) -> str:
        """The container's format that holds it as it is; "" if there is none."""
        if self.n_groups == 1 or self.group % 64 == 0:
            return "q4"
        return "q4g32" if self.group % 32 == 0 else ""

    def codes(self, read: Read, start: int, stop: int, where: str) -> Codes:
        """Rows ``start`` .. ``stop``. ContainerError, naming ``where``, for scales that can't be and inputs out of order."""
        self._require_order(read, where)
        inputs = self.shape[1]
        if self.kind == "compressed-tensors":
            q = _along_rows(read(f"{self.stem}weight_packed")[start:stop])[:, :inputs]
            scale = _f32(read(f"{self.stem}weight_scale")).reshape(self.shape[0], -1)[start:stop]
            zero = np.full((1, 1), 8, np.int16)
            if f"{self.stem}weight_zero_point" in self.parts:
                zero = _along_rows(read(f"{self.stem}weight_zero_point").T).T[start:stop].astype(np.int16)
        else:
            scale = _f32(read(f"{self.stem}scales")).T[start:stop]
            words, zeros = read(f"{self.stem}qweight"), read(f"{self.stem}qzeros")
            if self.kind == "GPTQ":
                q = _along_rows(words.T[start:stop])[:, :inputs]
                zero = (_along_rows(zeros).T[start:stop].astype(np.int16) + self.zero_offset) & 15
            else:
                q = _along_rows(words, _AWQ_ORDER).T[start:stop]
                zero = _along_rows(zeros, _AWQ_ORDER).T[start:stop].astype(np.int16)
        if not np.isfinite(scale).all() or (scale < 0).any():
            raise ContainerError(
                f"{where}: a scale of its int4 groups is negative, NaN or infinite. Copy the checkpoint again from where it "
                "came from."
            )
        wide = np.repeat(zero, inputs // zero.shape[1], axis=1)
        return Codes((q.astype(np.int16) - wide).astype(np.int8), np.ascontiguousarray(scale))

    def _require_order(self, read: Read, where: str) -> None:
        name = next((part for part in self.parts if part.endswith("g_idx")), "")
        if name and not np.array_equal(read(name).reshape(-1), np.arange(self.shape[1]) // self.group):
            raise ContainerError(
                f"{where}: the inputs of its int4 groups are in an order of their own (`g_idx`, act-order), expected "
                f"{self.group} neighbours in each. {_ANOTHER}"
            )


def as_stored(codes: Codes, fmt: str, where: str) -> tuple[I8, npt.NDArray[np.float16]]:
    """The same values as ``q4`` or ``q4g32`` of the container keeps them, nothing rounded. ContainerError says why not."""
    q, scale = codes
    if q.size and (q.min() < -8 or q.max() > 7):
        raise ContainerError(
            f"{where}: its int4 groups have zero points of their own (asymmetric), the container's have none: expected 8 in "
            f"each. {_REMEDY}"
        )
    size, inputs = SCALED[fmt].group, q.shape[1]
    if codes.scale.shape[1] > 1:
        scale = np.repeat(scale, inputs // scale.shape[1] // size, axis=1)
    else:
        scale = np.repeat(scale, -(-inputs // size), axis=1)
    with np.errstate(over="ignore"):
        narrow = scale.astype(np.float16)
    differs = narrow.astype(np.float32) != scale
    if differs.any():  # of a group of zeros the scale is nothing
        used = np.add.reduceat(np.abs(q.astype(np.int16)), np.arange(0, inputs, size), axis=1) > 0
        if (differs & used).any():
            raise ContainerError(
                f"{where}: the scale {scale[differs & used][0]:g} of an int4 group is no f16 number, which the container "
                f"keeps. {_REMEDY}"
            )
        narrow[differs] = 0
    return q, narrow


def find_packed(
    name: str, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], shape: tuple[int, ...] | None = None
) -> Packed | None:
    """The matrix ``name`` ("....weight") if it lies in packed int4. ``config``: config.json's "quantization_config".

    ``shape``: what it must have; ContainerError when the parts don't fit it, or each other. Without it nothing is checked.
    """
    if not name.endswith(".weight") or name in tensors:
        return None
    stem = name.removesuffix("weight")
    first = next((part for part in _PARTS if stem + part in tensors), "")
    if not first or tensors[stem + first].dtype != "I32" or len(tensors[stem + first].shape) != 2:
        return None
    if first == "qweight" and stem + "scales" not in tensors:
        return None
    parts = (stem + first, *(stem + part for part in _PARTS[first] if stem + part in tensors))
    rows, columns = tensors[stem + first].shape
    if first == "weight_packed":
        out, inputs = shape or (rows, columns * PER_WORD)
        scale = tensors.get(f"{stem}weight_scale")
        n_groups = scale.shape[-1] if scale is not None and scale.shape else 0
        made = Packed("compressed-tensors", stem, (out, inputs), max(n_groups, 1), 0, parts)
    else:
        n_groups = tensors[f"{stem}scales"].shape[0] if tensors[f"{stem}scales"].shape else 0
        n_outputs = tensors[f"{stem}scales"].shape[-1] if tensors[f"{stem}scales"].shape else 0
        out, inputs = shape or ((n_outputs, rows * PER_WORD) if columns == n_outputs else (n_outputs, rows))
        kind = "GPTQ" if columns == out else "AWQ"
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        made = Packed(kind, stem, (out, inputs), max(n_groups, 1), offset, parts)
    if shape is not None:
        _require_fit(made, tensors, config)
    return made


def _require_fit(made: Packed, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> None:
    (out, inputs), n_groups, stem = made.shape, made.n_groups, made.stem
    bits = config.get("bits", 4)
    if bits != 4:
        raise ContainerError(
            f"{stem}*: {made.kind} with {bits} bits; what can be read is int4. {_REMEDY.partition(', or')[0]}."
        )
    if made.kind == "compressed-tensors":
        wanted: dict[str, tuple[tuple[int, ...], ...]] = {
            "weight_packed": ((out, -(-inputs // PER_WORD)),),
            "weight_scale": ((out, n_groups), *(((out,),) if n_groups in (1, out) else ())),
            "weight_zero_point": ((-(-out // PER_WORD), n_groups),),
            "weight_shape": ((2,),),
            "weight_g_idx": ((inputs,),),
        }
        needed: tuple[str, ...] = ("weight_packed", "weight_scale")
    else:
        packed = (inputs // PER_WORD, out) if made.kind == "GPTQ" else (inputs, out // PER_WORD)
        wanted = {
            "qweight": (packed,),
            "scales": ((n_groups, out),),
            "qzeros": ((n_groups, out // PER_WORD),),
            "g_idx": ((inputs,),),
        }
        needed = ("qweight", "scales", "qzeros")
    for part, shapes in wanted.items():
        entry = tensors.get(stem + part)
        if entry is None:
            if part in needed:
                raise ContainerError(
                    f"{stem}{part}: {made.kind} int4 needs this tensor, and it is not there. Complete the checkpoint."
                )
            continue
        if entry.shape not in shapes:
            raise ContainerError(
                f"{stem}{part} has shape {list(entry.shape)}, {made.kind} int4 of {[out, inputs]} has {list(shapes[0])}. "
                "Use the config.json and the weights of the same model."
            )
        if part.endswith(("scale", "scales")) and entry.dtype not in _SCALE_DTYPES:
            raise ContainerError(
                f"{stem}{part} is {entry.dtype}, expected one of {', '.join(_SCALE_DTYPES)}. Copy the checkpoint again."
            )
    if inputs % n_groups:
        raise ContainerError(
            f"{stem}*: {inputs} inputs in {n_groups} groups; groups must be of one size. Copy the checkpoint again."
        )


def no_format_for(made: Packed) -> str:
    """Why the container can't keep it."""
    return f"groups of {made.group} inputs; the container keeps int4 in groups of 32, or of multiples of it. {_REMEDY}"


def _along_rows(words: npt.NDArray[Any], order: npt.NDArray[Any] | None = None) -> npt.NDArray[np.uint8]:
    """I32 [rows, n] -> codes u8[rows, 8 n], the lowest bits first; ``order``: the place of each of them among its eight."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = ((np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32(15)).astype(np.uint8)
    if order is not None:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(len(words), -1)


def _f32(x: npt.NDArray[Any]) -> F32:
    return from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)
