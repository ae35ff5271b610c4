"""One layer of absorbed latent attention, the embedding, and top-k. T rows, D hidden, H heads, R latent rank."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from native.library import OK, NativeError, Pool, address, check_struct, checked, constant, declare, fail, lib
from native.matrix import BF16, F32, NONE, Q8, Matrix, format_code, require_shapes, set_vectors

INDEX_NONE, INDEX_FULL, INDEX_SHARED = 0, 1, 2
INDEX_KINDS: dict[str, int] = {"none": INDEX_NONE, "full": INDEX_FULL, "shared": INDEX_SHARED}
KV_FORMATS: dict[str, int] = {"f32": 0, "bf16": 1, "int8": 2}
KV_BLOCK = constant("CB_KV_BLOCK")

_f32, _i32 = np.dtype(np.float32), np.dtype(np.int32)
_int32, _float, _ptr, _i64 = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64


class AttnLayer(ctypes.Structure):
    """cb_attn_layer: one layer's weights, given by keyword. Keeps arrays alive, but not what addresses point to.

    Norms f32 of their own width, inv_freq f32[rope / 2], k_b [R, nope] and v_b [v, R] stacks of n_heads matrices.
    q_a absent: q_b maps hidden directly. The index matrices belong to layers of kind "full" alone. NativeError names
    what does not fit.
    """

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

    def __init__(self, **values: Any) -> None:
        kind = values.get("index_kind", INDEX_NONE)
        values["index_kind"] = code = INDEX_KINDS.get(kind, -1) if isinstance(kind, str) else kind
        if code not in INDEX_KINDS.values():
            raise NativeError(f"AttnLayer: index_kind {kind!r}: expected one of {', '.join(INDEX_KINDS)}")
        super().__init__(**{k: v for k, v in values.items() if not isinstance(v, np.ndarray)})
        self.keep = tuple(values.values())
        lengths = {
            "inv_freq": self.rope // 2,
            "input_norm": self.hidden,
            "post_norm": self.hidden,
            "q_a_norm": self.q_rank,
            "kv_a_norm": self.kv_rank,
            "index_k_norm_w": self.index_dim,
            "index_k_norm_b": self.index_dim,
        }
        set_vectors(self, values, lengths)
        self._check_matrices()

    def _check_matrices(self) -> None:
        has_q_a, full = self.q_a.format != NONE, self.index_kind == INDEX_FULL
        q_width = self.q_rank if has_q_a else self.hidden
        shapes = {
            "q_b": (self.n_heads * (self.nope + self.rope), q_width),
            "kv_a": (self.kv_rank + self.rope, self.hidden),
            "k_b": (self.kv_rank, self.nope),
            "v_b": (self.v_dim, self.kv_rank),
            "o": (self.hidden, self.n_heads * self.v_dim),
        }
        if has_q_a:
            shapes["q_a"] = (self.q_rank, self.hidden)
        if full:
            shapes["index_wq_b"] = (self.index_heads * self.index_dim, q_width)
            shapes["index_wk"] = (self.index_dim, self.hidden)
            shapes["index_weights"] = (self.index_heads, self.hidden)
        require_shapes(self, shapes)


class AttnStep(ctypes.Structure):
    """cb_attn_step: one layer's caches and the rows of a step. `set_rows` before every call.

    kv and index_k are this layer's caches (array or address; index_k None unless the layer is "full"), kv_format one of
    KV_FORMATS. x f32[N, D] is the residual stream; selected i32[N, index_topk] and n_selected i32[N] carry the selection
    from a full layer to the shared ones after it (None without an indexer). N is the largest number of rows. Keeps the
    arrays alive.
    """

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
        ("n_sequences", _int32),
        ("selected", _ptr),
        ("n_selected", _ptr),
        ("x", _ptr),
        ("hidden", _ptr),
        ("state", _ptr),
        ("records", _ptr),
        ("state_of", _ptr),
        ("n_states", _int32),
        ("n_drafts", _int32),
    )

    def __init__(
        self,
        *,
        kv: np.ndarray | int,
        index_k: np.ndarray | int | None,
        kv_format: int | str,
        n_blocks: int,
        selected: np.ndarray | None,
        n_selected: np.ndarray | None,
        x: np.ndarray,
    ) -> None:
        code = KV_FORMATS.get(kv_format, -1) if isinstance(kv_format, str) else kv_format
        if code not in KV_FORMATS.values():
            raise NativeError(f"AttnStep: kv_format {kv_format!r}: expected one of {', '.join(KV_FORMATS)}")
        self.capacity, self.width = x.shape
        self.topk = 0 if selected is None else selected.shape[1]
        n = self.capacity
        super().__init__(
            n_blocks=n_blocks,
            kv=address(kv) if isinstance(kv, np.ndarray) else kv,
            index_k=address(index_k) if isinstance(index_k, np.ndarray) else index_k,
            kv_format=code,
            selected=None if selected is None else checked(selected, _i32, (n, None), "AttnStep: selected"),
            n_selected=None if n_selected is None else checked(n_selected, _i32, (n,), "AttnStep: n_selected"),
            x=checked(x, _f32, (n, None), "AttnStep: x"),
        )
        # Both know their bytes: a cache smaller than n_blocks blocks is found before it is overrun.
        self.kv_bytes = kv.nbytes if isinstance(kv, np.ndarray) else None
        self.index_bytes = index_k.nbytes if isinstance(index_k, np.ndarray) else None
        self.keep = (kv, index_k, selected, n_selected, x)
        self.rows: tuple[np.ndarray, ...] = ()
        self.table: np.ndarray | None = None
        self._whole = 0, n_blocks  # address of the table, blocks of the cache
        self._rings: dict[int, np.ndarray] = {}

    def set_rows(
        self, n_rows: int, position: np.ndarray, seq: np.ndarray, block_table: np.ndarray, hidden: np.ndarray
    ) -> None:
        """The first n_rows of position i32, seq i32 (rows of block_table i32[S, B]) and hidden f32[., D] (out)."""
        if not 0 <= n_rows <= self.capacity:
            raise NativeError(f"AttnStep: {n_rows} rows, x has {self.capacity}")
        rows = (position, seq, hidden)
        if any(new is not old for new, old in zip(rows, self.rows)) or not self.rows:
            # The same arrays come layer after layer: look at them once.
            self.position = checked(position, _i32, (None,), "AttnStep: position")
            self.seq = checked(seq, _i32, (None,), "AttnStep: seq")
            self.hidden = checked(hidden, _f32, (None, self.width), "AttnStep: hidden")
            self.rows = rows
        if n_rows > min(map(len, rows)):
            raise NativeError(
                f"AttnStep: {n_rows} rows, position, seq and hidden have {', '.join(map(str, map(len, rows)))}"
            )
        self.block_table = checked(block_table, _i32, (None, None), "AttnStep: block_table")
        self.n_sequences, self.table_stride = block_table.shape
        self.table = block_table
        self._whole = self.block_table, self._whole[1]
        self._rings.clear()
        self.n_rows = n_rows

    def set_states(self, state_of: np.ndarray, n_states: int, n_drafts: int) -> None:
        """state_of i32[S]: which of ``n_states`` states each table row's sequence has, for layers that keep one."""
        self.state_of = checked(state_of, _i32, (None,), "AttnStep: state_of")
        if len(state_of) < self.n_sequences:
            raise NativeError(f"AttnStep: {len(state_of)} states for {self.n_sequences} sequences")
        self.keep_states, self.n_states, self.n_drafts = state_of, n_states, n_drafts
        self._rings.clear()

    def use_ring(self, n: int) -> None:
        """The next calls' caches have ``n`` blocks of each state's sequence, used in turn; 0: those of the block table.

        A row must see no position that a later one, of this step or of one before, has taken the place of.
        """
        if not n:
            self.block_table, self.n_blocks = self._whole
            return
        table = self._rings.get(n)
        if table is None:
            first = self.keep_states[: self.n_sequences, None] * np.int32(n)
            table = self._rings[n] = first + np.arange(self.table_stride, dtype=np.int32) % np.int32(n)
        self.block_table, self.n_blocks = address(table), self.n_states * n


check_struct(AttnLayer, "cb_attn_layer")
check_struct(AttnStep, "cb_attn_step")
declare("cb_kv_row_bytes", _i64, [ctypes.c_int, _i64])
declare("cb_attn_forward", ctypes.c_int, [_ptr, ctypes.POINTER(AttnLayer), ctypes.POINTER(AttnStep)])
declare("cb_embed", ctypes.c_int, [_ptr, _ptr, ctypes.c_int, _i64, _i64, _ptr, _i64, _ptr])
declare("cb_topk", _i64, [_ptr, _i64, _i64, _ptr])


def kv_row_bytes(kv_format: int | str, n_values: int) -> int:
    """Bytes that one position of ``n_values`` values takes in a cache of this format."""
    code = KV_FORMATS.get(kv_format, -1) if isinstance(kv_format, str) else kv_format
    n_bytes: int = lib.cb_kv_row_bytes(code, n_values)
    if n_bytes < 0:
        raise NativeError(
            f"KV format {kv_format!r}, {n_values} values: expected one of {', '.join(KV_FORMATS)} and 1 or more"
        )
    return n_bytes


def _check_cache(layer: AttnLayer, step: AttnStep) -> None:
    for what, found, width in (
        ("kv", step.kv_bytes, layer.kv_rank + layer.rope),
        ("index_k", step.index_bytes, layer.index_dim if layer.index_kind == INDEX_FULL else 0),
    ):
        wanted = step.n_blocks * KV_BLOCK * kv_row_bytes(step.kv_format, width) if width else 0
        if found is not None and found < wanted:
            raise NativeError(f"attn_forward: {what} has {found} bytes, {step.n_blocks} blocks need {wanted}")


def attn_forward(pool: Pool, layer: AttnLayer, step: AttnStep) -> None:
    """x += attention(RMSNorm(x)) and hidden = RMSNorm(x) for the rows of `step`; writes their cache entries first."""
    if step.n_rows and (step.width != layer.hidden or (layer.index_kind and step.topk != layer.index_topk)):
        raise NativeError(
            f"attn_forward: the step has width {step.width} and index_topk {step.topk}, "
            f"the layer {layer.hidden} and {layer.index_topk}"
        )
    _check_cache(layer, step)
    status = lib.cb_attn_forward(pool.handle, ctypes.byref(layer), ctypes.byref(step))
    if status != OK:
        raise fail(
            "cb_attn_forward",
            status,
            f"{step.n_rows} rows, {step.n_blocks} blocks, table [{step.n_sequences}, {step.table_stride}], "
            f"hidden {layer.hidden}, {layer.n_heads} heads, rank {layer.kv_rank} + {layer.rope}, "
            f"index kind {layer.index_kind}; positions must "
            "rise within a sequence, sequences be rows of the table, block numbers be in the cache",
        )


def embed(
    table: np.ndarray | int,
    scale: np.ndarray | int | None,
    fmt: int | str,
    ids: np.ndarray,
    out: np.ndarray,
    vocab: int | None = None,
) -> None:
    """out f32[T, D] = rows ids i32[T] of a row-major table [V, D] (f32, bf16, or q8 = int8 with scale f32[V]).

    `vocab` is needed when the table is given by its address. NativeError when an id is outside 0..V-1.
    """
    code = format_code(fmt)
    item = {F32: 4, BF16: 2, Q8: 1}.get(code)
    if item is None:
        raise NativeError(f"embed: format {fmt!r}: expected f32, bf16 or q8")
    n_rows, hidden = out.shape
    table_at, scale_at = table, scale
    if isinstance(table, np.ndarray):
        if not table.flags.c_contiguous or not hidden or table.nbytes % (hidden * item):
            raise NativeError(f"embed: {table.nbytes} bytes are no contiguous table of rows of {hidden} x {item} bytes")
        n_vocab = table.nbytes // (hidden * item)
        if vocab is not None and vocab > n_vocab:
            raise NativeError(f"embed: the table has {n_vocab} rows, {vocab} expected")
        vocab = n_vocab if vocab is None else vocab
        table_at = address(table)
    if vocab is None:
        raise NativeError("embed: a table given by address needs `vocab`")
    if isinstance(scale, np.ndarray):
        if not scale.flags.c_contiguous or scale.nbytes < 4 * vocab:
            raise NativeError(f"embed: scale: expected {4 * vocab} contiguous bytes, found {scale.nbytes}")
        scale_at = address(scale)
    ids_at = checked(ids, _i32, (n_rows,), "embed: ids")
    out_at = checked(out, _f32, (n_rows, hidden), "embed: out")
    status = lib.cb_embed(table_at, scale_at, code, vocab, hidden, ids_at, n_rows, out_at)
    if status != OK:
        bounds = f"ids {ids.min()}..{ids.max()}" if n_rows else "no ids"
        raise fail("cb_embed", status, f"format {code}, vocabulary {vocab}, hidden {hidden}, {bounds}")


def topk(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions i32[min(k, n)], ascending, of the k largest of scores f32[n]; ties prefer the lower position."""
    at = checked(scores, _f32, (None,), "topk: scores")
    out = np.empty(max(0, min(k, len(scores))), np.int32)
    n = lib.cb_topk(at, len(scores), k, address(out))
    return out[:n]
