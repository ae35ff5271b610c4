"""One layer of absorbed latent attention, the embedding, and top-k. T rows, D hidden, H heads, R latent rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from native.library import OK, NativeError, Pool, address, check_struct, checked, declare, fail, lib
from native.matrix import BF16, F32, Q8, Matrix, absent_matrix, format_code

INDEX_NONE, INDEX_FULL, INDEX_SHARED = 0, 1, 2
INDEX_KINDS: dict[str, int] = {"none": INDEX_NONE, "full": INDEX_FULL, "shared": INDEX_SHARED}
KV_F32, KV_BF16 = 0, 1
KV_FORMATS: dict[str, int] = {"f32": KV_F32, "bf16": KV_BF16}
KV_BLOCK = 64

_f32, _i32 = np.dtype(np.float32), np.dtype(np.int32)
_int32, _float, _ptr, _i64 = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64


class AttnLayer(ctypes.Structure):
    """cb_attn_layer. Make one with `attn_layer`, which keeps the arrays behind it alive."""

    _fields_ = (
        *((name, _int32) for name in ("hidden", "n_heads", "q_rank", "kv_rank", "nope", "rope", "v_dim")),
        ("rope_interleave", _int32),
        *((name, _float) for name in ("rms_eps", "latent_eps", "softmax_scale")),
        *((name, _int32) for name in ("index_kind", "index_heads", "index_dim", "index_topk", "index_rope_interleave")),
        ("pad_", _int32),
        ("inv_freq", _ptr),
        ("rope_amplitude", _float),
        ("index_norm_eps", _float),
        *((name, _ptr) for name in ("input_norm", "q_a_norm", "kv_a_norm", "post_norm")),
        *((name, Matrix) for name in ("q_a", "q_b", "kv_a", "k_b", "v_b", "o")),
        *((name, Matrix) for name in ("index_wq_b", "index_wk", "index_weights")),
        ("index_k_norm_w", _ptr),
        ("index_k_norm_b", _ptr),
    )
    keep: tuple[object, ...] = ()


class AttnStep(ctypes.Structure):
    """cb_attn_step. Make one with `attn_step`; fields may be set again for the next layer of the same rows."""

    _fields_ = (
        ("n_rows", _i64),
        ("position", _ptr),
        ("seq", _ptr),
        ("block_table", _ptr),
        ("table_stride", _i64),
        ("n_blocks", _i64),
        ("kv", _ptr),
        ("index_k", _ptr),
        ("kv_format", _int32),
        ("pad_", _int32),
        ("selected", _ptr),
        ("n_selected", _ptr),
        ("x", _ptr),
        ("hidden", _ptr),
    )
    keep: tuple[object, ...] = ()
    topk: int = 0
    width: int = 0


check_struct(AttnLayer, "cb_attn_layer")
check_struct(AttnStep, "cb_attn_step")
declare("cb_attn_forward", ctypes.c_int, [_ptr, ctypes.POINTER(AttnLayer), ctypes.POINTER(AttnStep)])
declare("cb_embed", ctypes.c_int, [_ptr, _ptr, ctypes.c_int, _i64, _i64, _ptr, _i64, _ptr])
declare("cb_topk", _i64, [_ptr, _i64, _i64, _ptr])


def attn_layer(
    *,
    hidden: int,
    n_heads: int,
    kv_rank: int,
    nope: int,
    rope: int,
    v_dim: int,
    rope_interleave: bool,
    rms_eps: float,
    latent_eps: float,
    softmax_scale: float,
    inv_freq: np.ndarray | Sequence[float],
    rope_amplitude: float,
    input_norm: np.ndarray,
    kv_a_norm: np.ndarray,
    post_norm: np.ndarray,
    q_b: Matrix,
    kv_a: Matrix,
    k_b: Matrix,
    v_b: Matrix,
    o: Matrix,
    q_rank: int = 0,
    q_a: Matrix | None = None,
    q_a_norm: np.ndarray | None = None,
    index_kind: int | str = INDEX_NONE,
    index_heads: int = 0,
    index_dim: int = 0,
    index_topk: int = 0,
    index_rope_interleave: bool = False,
    index_norm_eps: float = 1e-6,
    index_wq_b: Matrix | None = None,
    index_wk: Matrix | None = None,
    index_weights: Matrix | None = None,
    index_k_norm_w: np.ndarray | None = None,
    index_k_norm_b: np.ndarray | None = None,
) -> AttnLayer:
    """One layer's weights. Norms f32 of their own width, inv_freq [rope / 2]; k_b and v_b are stacks of n_heads matrices.

    q_rank 0: no q_a, q_b maps hidden directly. The index matrices belong to "full" layers alone. NativeError names what
    does not fit.
    """
    kind = INDEX_KINDS.get(index_kind) if isinstance(index_kind, str) else index_kind
    if kind not in INDEX_KINDS.values():
        raise NativeError(f"attn_layer: index_kind {index_kind!r}: expected one of {', '.join(INDEX_KINDS)}")
    frequencies = np.ascontiguousarray(inv_freq, np.float32)
    keep: list[object] = [frequencies]

    def vector(array: np.ndarray | None, n: int, what: str) -> int:
        if array is None:
            raise NativeError(f"attn_layer: {what} is missing")
        keep.append(array)
        return checked(array, _f32, (n,), f"attn_layer: {what}")

    def stacked(m: Matrix | None, out: int, in_: int, what: str) -> Matrix:
        if m is None or (m.out, m.in_) != (out, in_):
            found = "nothing" if m is None else f"[{m.out}, {m.in_}]"
            raise NativeError(f"attn_layer: {what}: expected [{out}, {in_}], found {found}")
        keep.append(m.keep)
        return m

    absent = absent_matrix()
    full = kind == INDEX_FULL
    q_width = q_rank or hidden
    made = AttnLayer(
        hidden=hidden,
        n_heads=n_heads,
        q_rank=q_rank,
        kv_rank=kv_rank,
        nope=nope,
        rope=rope,
        v_dim=v_dim,
        rope_interleave=int(rope_interleave),
        rms_eps=rms_eps,
        latent_eps=latent_eps,
        softmax_scale=softmax_scale,
        index_kind=kind,
        index_heads=index_heads,
        index_dim=index_dim,
        index_topk=index_topk,
        index_rope_interleave=int(index_rope_interleave),
        inv_freq=checked(frequencies, _f32, (rope // 2,), "attn_layer: inv_freq"),
        rope_amplitude=rope_amplitude,
        index_norm_eps=index_norm_eps,
        input_norm=vector(input_norm, hidden, "input_norm"),
        q_a_norm=vector(q_a_norm, q_rank, "q_a_norm") if q_rank else None,
        kv_a_norm=vector(kv_a_norm, kv_rank, "kv_a_norm"),
        post_norm=vector(post_norm, hidden, "post_norm"),
        q_a=stacked(q_a, q_rank, hidden, "q_a") if q_rank else absent,
        q_b=stacked(q_b, n_heads * (nope + rope), q_width, "q_b"),
        kv_a=stacked(kv_a, kv_rank + rope, hidden, "kv_a"),
        k_b=stacked(k_b, kv_rank, nope, "k_b"),
        v_b=stacked(v_b, v_dim, kv_rank, "v_b"),
        o=stacked(o, hidden, n_heads * v_dim, "o"),
        index_wq_b=stacked(index_wq_b, index_heads * index_dim, q_width, "index_wq_b") if full else absent,
        index_wk=stacked(index_wk, index_dim, hidden, "index_wk") if full else absent,
        index_weights=stacked(index_weights, index_heads, hidden, "index_weights") if full else absent,
        index_k_norm_w=vector(index_k_norm_w, index_dim, "index_k_norm_w") if full else None,
        index_k_norm_b=vector(index_k_norm_b, index_dim, "index_k_norm_b") if full else None,
    )
    made.keep = tuple(keep)
    return made


def attn_step(
    *,
    position: np.ndarray,
    seq: np.ndarray,
    block_table: np.ndarray,
    n_blocks: int,
    kv: np.ndarray | int,
    kv_format: int | str,
    x: np.ndarray,
    hidden: np.ndarray,
    index_k: np.ndarray | int | None = None,
    selected: np.ndarray | None = None,
    n_selected: np.ndarray | None = None,
) -> AttnStep:
    """The rows of one call: position i32[T], seq i32[T] (rows of block_table i32[S, B]), x and hidden f32[T, D].

    kv and index_k are this layer's caches (array or address). selected i32[T, index_topk] and n_selected i32[T] carry
    the selection from a full layer to the shared ones after it; layers without an indexer need neither. Set `step.kv`
    and `step.index_k` (addresses) to go on with the next layer.
    """
    n_rows = len(position)
    code = KV_FORMATS.get(kv_format) if isinstance(kv_format, str) else kv_format
    if code not in KV_FORMATS.values():
        raise NativeError(f"attn_step: kv_format {kv_format!r}: expected one of {', '.join(KV_FORMATS)}")
    if n_rows and (int(seq.min()) < 0 or int(seq.max()) >= len(block_table)):
        raise NativeError(f"attn_step: seq {seq.min()}..{seq.max()} names rows outside block_table's {len(block_table)}")

    def cache(data: np.ndarray | int | None) -> int | None:
        return address(data) if isinstance(data, np.ndarray) else data

    made = AttnStep(
        n_rows=n_rows,
        position=checked(position, _i32, (n_rows,), "attn_step: position"),
        seq=checked(seq, _i32, (n_rows,), "attn_step: seq"),
        block_table=checked(block_table, _i32, (None, None), "attn_step: block_table"),
        table_stride=block_table.shape[1],
        n_blocks=n_blocks,
        kv=cache(kv),
        index_k=cache(index_k),
        kv_format=code,
        selected=None if selected is None else checked(selected, _i32, (n_rows, None), "attn_step: selected"),
        n_selected=None if n_selected is None else checked(n_selected, _i32, (n_rows,), "attn_step: n_selected"),
        x=checked(x, _f32, (n_rows, None), "attn_step: x"),
        hidden=checked(hidden, _f32, x.shape, "attn_step: hidden"),
    )
    made.topk = 0 if selected is None else selected.shape[1]
    made.width = x.shape[1]
    made.keep = (position, seq, block_table, kv, index_k, selected, n_selected, x, hidden)
    return made


def attn_forward(pool: Pool, layer: AttnLayer, step: AttnStep) -> None:
    """x += attention(RMSNorm(x)) and hidden = RMSNorm(x) for the rows of `step`; writes their cache entries first."""
    if step.n_rows and (step.width != layer.hidden or (layer.index_kind and step.topk != layer.index_topk)):
        raise NativeError(
            f"attn_forward: the step has width {step.width} and index_topk {step.topk}, "
            f"the layer {layer.hidden} and {layer.index_topk}"
        )
    status = lib.cb_attn_forward(pool.handle, ctypes.byref(layer), ctypes.byref(step))
    if status != OK:
        raise fail(
            "cb_attn_forward",
            status,
            f"{step.n_rows} rows, {step.n_blocks} blocks, table width {step.table_stride}, hidden {layer.hidden}, "
            f"{layer.n_heads} heads, rank {layer.kv_rank} + {layer.rope}, index kind {layer.index_kind}; positions must "
            "rise within a sequence and every block number must be in the cache",
        )


def embed(
    table: np.ndarray | int,
    scale: np.ndarray | int | None,
    fmt: int | str,
    ids: np.ndarray,
    out: np.ndarray,
    vocab: int | None = None,
) -> None:
    """out f32[T, D] = rows ids i32[T] of a row-major table [V, D] (f32, bf16 as u16, or q8 as i8 with scale f32[V]).

    `vocab` is needed when the table is given by its address. NativeError when an id is outside 0..V-1.
    """
    code = format_code(fmt)
    item = {F32: 4, BF16: 2, Q8: 1}.get(code)
    if item is None:
        raise NativeError(f"embed: format {fmt!r}: expected f32, bf16 or q8")
    n_rows, hidden = out.shape
    if isinstance(table, np.ndarray):
        if not table.flags.c_contiguous or not hidden or table.nbytes % (hidden * item):
            raise NativeError(f"embed: {table.nbytes} bytes are no contiguous table of rows of {hidden} x {item} bytes")
        n_vocab = table.nbytes // (hidden * item)
        if vocab is not None and vocab > n_vocab:
            raise NativeError(f"embed: the table has {n_vocab} rows, {vocab} expected")
        vocab = n_vocab if vocab is None else vocab
        table = address(table)
    if vocab is None:
        raise NativeError("embed: a table given by address needs `vocab`")
    scale_at: Any = checked(scale, _f32, (vocab,), "embed: scale") if isinstance(scale, np.ndarray) else scale
    ids_at = checked(ids, _i32, (n_rows,), "embed: ids")
    out_at = checked(out, _f32, (n_rows, hidden), "embed: out")
    status = lib.cb_embed(table, scale_at, code, vocab, hidden, ids_at, n_rows, out_at)
    if status != OK:
        bounds = f"ids {ids.min()}..{ids.max()}" if n_rows else "no ids"
        raise fail("cb_embed", status, f"format {code}, vocabulary {vocab}, hidden {hidden}, {bounds}")


def topk(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions i32[min(k, n)], ascending, of the k largest of scores f32[n]; ties prefer the lower position."""
    at = checked(scores, _f32, (None,), "topk: scores")
    out = np.empty(max(0, min(k, len(scores))), np.int32)
    n = lib.cb_topk(at, len(scores), k, address(out))
    return out[:n]
