"""From a Hugging Face checkpoint to a container: which tensor is made from which, and the loop that does it.

Bounded memory: matrices are read, packed and written in pieces of a few thousand rows, experts one at a time.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from conversion.arrangement import arranged
from conversion.checkpoint import Checkpoint
from conversion.gguf.kept import AS_IT_IS, formats_of, is_held
from conversion.layouts import find_foreign
from conversion.names import HubNames
from conversion.sources import COPY_LIMIT_BYTES, open_source
from conversion.writer import ContainerWriter, Evidence, Produce
from native.matrix import TILE_ROWS
from shared.container.c_engine import is_c_engine
from shared.container.checksum import checksum
from shared.container.format import (
    INDEX_NAME,
    PRECISIONS,
    ROLES,
    ContainerPlan,
    Converter,
    DenseItem,
    ExpertFilePlan,
    Index,
    plan_container,
)
from shared.container.pack import F32, SCALED, pack_codes, pack_matrix, quantise_rows, to_bf16, unpack_matrix
from shared.container.reader import TOKENIZER_NAME, Container, no_tokenizer
from shared.container.recognise import is_gguf, why_no_checkpoint
from shared.errors import ConfigError, ContainerError
from shared.files import read_file
from shared.model.config_reader import MTP_KEYS
from shared.model.tensors import Source
from shared.model.tokenizer_file import parse_tokenizer

VERSION = "0.3.0"
"""Raised whenever the same checkpoint would give other bytes; unfinished work of another version is refused."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "vocab.json")
_CHUNK_VALUES = 8 << 20
_MTP_WORDS = " or ".join(f'"{key}"' for key in MTP_KEYS)
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class Conversion:
    """One checkpoint and one precision: checked completely before anything is written.

    ``has_mtp``: False leaves the MTP layer out, whatever config.json promises and the shards hold of one. ``checkpoint``: of
    shards that are not in ``source`` (a hub has them): copies of tensors are then left to the caller to compare.
    """

    def __init__(
        self, source: Path, precision: str, *, has_mtp: bool = True, checkpoint: Checkpoint | None = None
    ) -> None:
        known = [*PRECISIONS, *([AS_IT_IS] if checkpoint is None and is_gguf(source) else [])]
        if precision not in known:
            what = f" ({AS_IT_IS} is for GGUF files)" if precision == AS_IT_IS else ""
            raise ConfigError(f"--precision must be one of {', '.join(known)}, found {precision!r}{what}.")
        if (source / INDEX_NAME).exists():
            raise ContainerError(f"{source} is already a container; give the directory of the original checkpoint.")
        if is_c_engine(source):
            raise ContainerError(
                f"{source} is a container of the C engine, which is not converted (its weights are rounded already) but opened "
                f"as it lies: colibri-up {source}"
            )
        if checkpoint is None and (complaint := why_no_checkpoint(source)):
            raise ContainerError(complaint)
        self.source, self.precision, self.has_mtp = source, precision, has_mtp
        found = open_source(source, has_mtp=has_mtp, checkpoint=checkpoint)
        self.spec, self.names, self.checkpoint, self.copied = found.spec, found.names, found.checkpoint, found.copied
        self.plan: ContainerPlan = plan_container(self.spec, PRECISIONS.get(precision, PRECISIONS["f32"]))
        self.losses = Losses() if precision == AS_IT_IS else None
        self._digests: dict[tuple[str, ...], str] = {}
        self.copies: list[tuple[str, str]] = []
        """Tensors that are left out because they equal another one: (copy, original)."""
        if isinstance(self.names, HubNames):
            self._refuse_foreign_layouts()
        self._check_tensors()
        if precision == AS_IT_IS:
            self.plan = plan_container(self.spec, formats_of(self._types(), ROLES))
        else:
            self.plan = plan_container(self.spec, self.formats_for(precision))
        if checkpoint is None:
            for pair in self.copies:
                self.require_equal(*pair)

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the first one."""
        config = checksum(self.copied["config.json"])
        return {
            "command": "convert",
            "version": VERSION,
            "precision": self.precision,
            "config": config,
            "files": self.checkpoint.files,
        }

    @property
    def n_parameters(self) -> int:
        matrices = sum(item.stack * int(np.prod(item.shape)) for file in self.plan.dense for item in file.items)
        layouts = [(file.n_experts, file.layout) for file in self.plan.experts]
        return matrices + sum(n * (3 * layout.inner * layout.hidden + sum(layout.bias_widths)) for n, layout in layouts)

    def describe(self) -> str:
        """The plan line."""
        spec, plan = self.spec, self.plan
        dtypes = sorted({tensor.entry.dtype for tensor in self.checkpoint.tensors.values()})
        formats = ", ".join(f"{role} {fmt}" for role, fmt in plan.precision.items())
        return (
            f"plan: {spec.family}, {spec.n_layers} layers{' + MTP' if spec.n_mtp else ''}, "
            f"{self.n_parameters / 1e9:.3f} billion parameters in {len(self.checkpoint.files)} files ({', '.join(dtypes)}) -> "
            f"{self.precision} ({formats}); dense part {plan.dense_bytes:,} bytes, "
            f"experts {plan.expert_bytes:,} bytes in {len(plan.experts)} files"
        )

    def is_finished(self, out: Path) -> bool:
        """Whether ``out`` already is the container of this checkpoint in this precision, as far as can be told cheaply."""
        index = Container.open(out)
        same_config = read_file(out / "config.json", COPY_LIMIT_BYTES) == self.copied["config.json"]
        return same_config and index.precision == self.plan.precision

    def notes(self) -> list[str]:
        """What the user should know before hours are spent."""
        if TOKENIZER_NAME in self.copied:
            try:
                parse_tokenizer(self.copied[TOKENIZER_NAME], self.source / TOKENIZER_NAME)
            except ContainerError as error:
                return [f"{error} No group starts with it as it is."]
            return []
        if not isinstance(self.names, HubNames):
            return [
                f"{self.source} has no vocabulary: requests must give token ids, text is refused. Copy the model's "
                f"{TOKENIZER_NAME} (and tokenizer_config.json) into the container."
            ]
        other = next((name for name in _OTHER_TOKENIZERS if name in self.copied), None)
        return [no_tokenizer(self.source) + (f" Its {other} is not read." if other else "")]

    def run(self, out: Path, progress: Callable[[int], None] = lambda _: None, n_threads: int = 2) -> Index:
        """Writes the container (or what is missing of it). The caller's thread writes; packing runs beside it."""
        if os.path.realpath(out) == os.path.realpath(self.source):
            raise ContainerError("The output must be another directory than the checkpoint.")
        with ContainerWriter(out, self.plan, self.identity) as writer:
            writer.require_space()
            with self.making(n_threads) as make_experts:
                writer.write(self.make_dense, make_experts, progress, self.witness)
            self.checkpoint.require_unchanged()
            return self.finish(writer)

    @contextmanager
    def making(self, n_threads: int) -> Iterator[Produce]:
        """What makes experts for a ``ContainerWriter``, in threads of its own."""
        with ThreadPoolExecutor(n_threads) as pool:
            ahead = Ahead(pool, self._make_expert, depth=n_threads + 1)
            try:
                yield ahead.each
            finally:
                ahead.cancel()

    def finish(self, writer: ContainerWriter) -> Index:
        """Copies what lies beside the weights, and makes the container one."""
        for name, data in self.copied.items():
            writer.put_file(name, data)
        arguments = {"precision": self.precision} | ({} if self.has_mtp else {"mtp": "left out"})
        return writer.finish(self.spec.family, Converter(VERSION, arguments))

    def names_of(self, source: DenseItem | tuple[ExpertFilePlan, int]) -> list[str]:
        """The checkpoint's tensors that an item or an expert is made from, with their scales."""
        if isinstance(source, DenseItem):
            named = [self._source(source).name]
        else:
            named = [part.name for part in self._expert_sources(*source)]
        return [part for name in named for part in self.checkpoint.parts_of(name)]

    def witness(self, source: DenseItem | tuple[ExpertFilePlan, int], earlier: Evidence | None) -> Evidence:
        """Of the checkpoint's bytes that an item or an expert is made from."""
        names = self.names_of(source)
        state = self.checkpoint.state_of(names)
        if earlier and earlier.state and earlier.state == state:
            return earlier
        # Several experts may lie in one tensor: it is hashed once.
        digest = self._digests.get(tuple(names)) or self.checkpoint.digest(names)
        if not isinstance(source, DenseItem):
            self._digests = {tuple(names): digest}
        return Evidence(digest, state)

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _refuse_foreign_layouts(self) -> None:
        tensors = self.checkpoint.tensors
        # A config.json may call for more tensors than memory has room for; those of the shards can't be more than there are.
        wanted = set(itertools.islice(self._wanted_names(), 2 * len(tensors)))
        used = {name: tensor.entry for name, tensor in tensors.items() if not self._is_ignored(name)}
        found = find_foreign(used, wanted)
        if found:
            raise ContainerError(
                f"{self.checkpoint.where(found.tensor)}: this checkpoint is in a layout that is not understood: {found.what}. "
                f"{found.remedy}"
            )

    def _wanted_names(self) -> Iterator[str]:
        """The checkpoint's tensors that the model is made from, without scales."""
        for file in self.plan.dense:
            for name in (self._source(item).name for item in file.items):
                yield from dict.fromkeys([name, *self.checkpoint.parts_of(name)])
        for layer in self.plan.experts:
            for expert in range(layer.n_experts):
                sources = self._expert_sources(layer, expert)
                if expert == 0 or sources[0].index is None:
                    yield from (name for part in sources for name in self.checkpoint.parts_of(part.name))

    def formats_for(self, precision: str) -> dict[str, str]:
        """The format of each role under one of ``PRECISIONS``: what is in 4 bits already stays so, unless floats are wanted.

        ContainerError where that can't be.
        """
        formats = dict(PRECISIONS[precision])
        if formats["expert"] in ("bf16", "f32"):
            return formats
        kept: dict[str, set[str]] = {}
        for role, source in self._matrices():
            fmt = self.checkpoint.kept_format(source.name)
            if fmt and (role == "embed" or source.is_transposed):
                stored = "the embedding row by row in int8" if role == "embed" else "this matrix transposed"
                raise ContainerError(
                    f"{self.checkpoint.where(self.checkpoint.parts_of(source.name)[0])} is in int4, and the container stores "
                    f"{stored}: it would be rounded once more. Convert with --precision bf16, or use the bf16 repository."
                )
            kept.setdefault(role, set()).add(fmt)
        for role in ("expert", "shared", "attention", "head"):
            found = kept.get(role, set())
            if found in (set(), {""}):
                continue
            # int4 in larger groups fits smaller ones, and what is in floats is rounded to int4 where that is asked for.
            fits = {"q4", "q4g32", *([""] if precision == "int4" else [])}
            if len(found) > 1 and not found <= fits:
                raise ContainerError(
                    f"{self.source}: of the {role} matrices some are in {', '.join(sorted(found - {''}))}, others are not, and "
                    f"a container has one format for all of them. Convert with --precision "
                    f"{'int4' if found <= fits | {''} else 'bf16'}."
                )
            formats[role] = next(iter(found)) if len(found) == 1 else "q4g32" if "q4g32" in found else "q4"
        return formats

    def _matrices(self) -> Iterator[tuple[str, Source]]:
        """(role, what it is made from) of all but vectors, and but an MTP layer's experts, which only help to guess."""
        for file in self.plan.dense:
            yield from ((item.role, self._source(item)) for item in file.items if item.kind != "vector")
        for layer in self.plan.experts:
            if layer.layer < self.spec.n_layers:
                for expert in range(layer.n_experts):
                    yield from (("expert", source) for source in self._expert_sources(layer, expert)[:3])

    def _is_mtp(self, name: str) -> bool:
        return name.startswith((self.names.layer(self.spec.mtp_layer), "mtp."))

    def _check_tensors(self) -> None:
        names = self.checkpoint.tensors
        if self.spec.n_mtp and not any(map(self._is_mtp, names)):
            raise ContainerError(
                f"{self.source}: config.json promises an MTP layer ({_MTP_WORDS}), but no tensor "
                f"'{self.names.layer(self.spec.mtp_layer)}*' or 'mtp.*' is there. Complete the checkpoint, or convert it "
                "without that layer: --no-mtp (the same text, but no drafts)."
            )
        used: set[str] = set()
        for file in self.plan.dense:
            for item in file.items:
                source = self._source(item)
                used.update(self._require(source.name, source.shape))
        for layer in self.plan.experts:
            for expert in range(layer.n_experts):
                for part in self._expert_sources(layer, expert):
                    used.update(self._require(part.name, part.shape))
        self._check_copies(used)
        unknown = sorted(name for name in set(names) - used if not self._is_ignored(name))
        if unknown and not self.spec.n_mtp and all(map(self._is_mtp, unknown)):
            raise ContainerError(
                f"{self.checkpoint.where(unknown[0])}: the shards hold an MTP layer ({len(unknown)} tensors), which has no "
                f"place in a model whose config.json has no {_MTP_WORDS}. Use the config.json that belongs "
                "to them, or convert without that layer: --no-mtp."
            )
        if unknown:
            others = ", ".join(repr(self.checkpoint.prefix + name) for name in unknown[1:4])
            raise ContainerError(
                f"{self.checkpoint.where(unknown[0])} has no place in a {self.spec.family} model with this config.json"
                f"{f', nor has {others}' if others else ''}{', ...' if len(unknown) > 4 else ''} ({len(unknown)} in all). "
                "Leaving weights out would change the model; use the config.json that belongs to them."
            )

    def _require(self, name: str, shape: tuple[int, ...]) -> list[str]:
        if self.checkpoint.shape_of(name) is None and self._is_mtp(name):
            raise ContainerError(
                f"{self.source} has no tensor {self.checkpoint.prefix + name!r}, part of the MTP layer that its config.json "
                "promises. Complete the checkpoint, or convert it without that layer: --no-mtp (the same text, but no drafts)."
            )
        return self.checkpoint.require(name, shape)

    def _check_copies(self, used: set[str]) -> None:
        """Copies of the embedding and the head (in the MTP layer, or under tied weights) are left out if they are equal."""
        spec, name = self.spec, self.names.tensor
        prefix = f"model.layers.{spec.mtp_layer}."
        embedding, head = name(EMBEDDING), name(HEAD)
        pairs = []
        if spec.n_mtp:
            pairs = [
                (name(prefix + "embed_tokens.weight"), embedding),
                (name(prefix + "shared_head.head.weight"), head if head in self.checkpoint else embedding),
            ]
        if spec.tie_embeddings:
            pairs.append((head, embedding))
        for copy, original in pairs:
            if copy not in self.checkpoint or copy == original:
                continue
            used.update(self.checkpoint.require(copy, (spec.vocab, spec.hidden)))
            self.copies.append((copy, original))

    def require_equal(self, copy: str, original: str) -> None:
        """ContainerError unless two tensors have the same values: the container has room for one of them."""
        n_rows = chunk_rows(self.spec.hidden)
        pieces = zip(self.checkpoint.row_chunks(copy, n_rows), self.checkpoint.row_chunks(original, n_rows))
        if not all(np.array_equal(x, y) for x, y in pieces):
            raise ContainerError(
                f"{self.source}: {copy!r} differs from {original!r}; the container shares one matrix for both. "
                "A model whose MTP layer has an embedding or head of its own is not supported; --no-mtp leaves it out."
            )

    def _is_ignored(self, name: str) -> bool:
        """Tensors that the layer's attention says it has no use for, and buffers that are no weights."""
        if name.endswith(_IGNORED_SUFFIXES) or (not self.has_mtp and self._is_mtp(name)):
            return True
        if self.names.ignores(name):
            return True
        parts = self.names.ours(name).split(".", 3)
        if parts[:2] != ["model", "layers"] or not parts[2].isdigit() or len(parts) < 4:
            return False
        layer = int(parts[2])
        return layer < self.spec.n_layers and self.spec.attention[layer].ignores(parts[3])

    def _source(self, item: DenseItem) -> Source:
        """The checkpoint tensor that an item is made from, under the checkpoint's name."""
        if item.name == HEAD and self.spec.tie_embeddings:
            item = msgspec.structs.replace(item, name=EMBEDDING)
        return self.names.dense(item)

    def _types(self) -> dict[str, set[str]]:
        """Of each role, what its matrices are in."""
        found: dict[str, set[str]] = {}
        for file in self.plan.dense:
            for item in file.items:
                if item.kind != "vector":
                    found.setdefault(item.role, set()).add(self._dtype(self._source(item)))
        for layer in self.plan.experts:
            role = "expert" if layer.layer < self.spec.n_layers else "mtp"
            found.setdefault(role, set()).update(self._dtype(part) for part in self._expert_sources(layer, 0)[:3])
        return found

    def _dtype(self, source: Source) -> str:
        return self.checkpoint.tensors[source.name].entry.dtype

    def _is_kept(self, source: Source, fmt: str) -> bool:
        """Whether a matrix's codes are stored as they are."""
        if source.is_transposed or fmt not in SCALED:
            return False
        if self.losses is not None:
            return is_held(self._dtype(source), fmt)
        return fmt != "q8" and bool(self.checkpoint.kept_format(source.name))

    # ---- making ---------------------------------------------------------------------------------------------------

    def dense_pieces(self, item: DenseItem) -> Iterator[F32]:
        """What an item is made from, unrounded: f32[n] of a vector, matrices in pieces of rows, a stack one by one."""
        source = self._source(item)
        if item.kind == "vector":
            values, more = self.checkpoint.rows(source.name), np.float32(self.names.added(item.name))
            yield values + more if more else values
        elif source.n_rows and item.stack > 1:
            yield from self._stacked(item, source)
        elif source.n_rows:
            yield from self._gathered(item, source)
        else:
            rows = self.checkpoint.row_chunks(source.name, chunk_rows(item.shape[1]))
            yield from (part.reshape(len(part), -1) for part in rows)

    def embedding_rows(self, ids: Sequence[int]) -> F32:
        """f32[len(ids), hidden] of the embedding, without reading the rest of it."""
        name = self.names.tensor(EMBEDDING)
        return np.concatenate([self.checkpoint.rows(name, i, i + 1) for i in ids])

    def _kept_pieces(self, item: DenseItem) -> Iterator[tuple[Any, Any]]:
        """As ``dense_pieces``, codes and scales."""
        source, read = self._source(item), self.checkpoint.kept_rows
        if source.n_rows:
            starts = [i * source.stride + source.start for i in range(item.stack)]
            yield from (read(source.name, item.format, at, at + source.n_rows) for at in starts)
            return
        step = chunk_rows(item.shape[1])
        for start in range(0, item.shape[0], step):
            yield read(source.name, item.format, start, start + step)

    def expert_matrices(self, layer: ExpertFilePlan, expert: int) -> Iterator[tuple[str, F32]]:
        """(name, values f32[out, in]) of an expert's gate, up and down projection, unrounded."""
        for source in self._expert_sources(layer, expert)[:3]:
            yield source.name, self._values(source)

    def expert_biases(self, layer: ExpertFilePlan, expert: int) -> Iterator[tuple[str, F32]]:
        """(name, values f32[out]) of their biases, if there are any. ContainerError when a value is not finite."""
        for source in self._expert_sources(layer, expert)[3:]:
            values = self._values(source)
            if not np.isfinite(values).all():
                raise ContainerError(
                    f"{self.source}: tensor {source.name!r} can't be converted: a value is NaN or infinite."
                )
            yield source.name, values

    def _values(self, source: Source) -> F32:
        """A whole tensor, or its rows that belong to one expert."""
        if source.index is None:
            return self.checkpoint.rows(source.name)
        values: F32 = _rows_of(source, self.checkpoint.rows(source.name, source.index, source.index + 1)[0])
        return values

    def _kept_values(self, source: Source, fmt: str) -> tuple[Any, Any]:
        """As ``_values``, codes and scales."""
        if source.index is None:
            return self.checkpoint.kept_rows(source.name, fmt)
        q, scale = self.checkpoint.kept_rows(source.name, fmt, source.index, source.index + 1)
        return _rows_of(source, q[0]), _rows_of(source, scale[0])

    def make_dense(self, items: Sequence[DenseItem]) -> Iterator[Iterator[Any]]:
        """The bytes of some items, in pieces: what a ``ContainerWriter`` wants."""
        return map(self._make_dense, items)

    def _make_dense(self, item: DenseItem) -> Iterator[Any]:
        pieces = self.dense_pieces(item)
        try:
            if item.kind == "vector":
                for vector in pieces:
                    if not np.isfinite(vector).all():
                        raise ValueError("a value is NaN or infinite")
                    yield vector
            elif item.kind == "table":
                yield from table_chunks(self._watched(item, pieces), item.format)
            elif self._is_kept(self._source(item), item.format):
                yield from pack_chunks(self._kept_pieces(item), item.format)
            else:
                yield from pack_chunks(self._watched(item, pieces), item.format)
        except ValueError as error:
            raise ContainerError(
                f"{self.source}: tensor {self._source(item).name!r} can't be converted: {error}."
            ) from None

    def _watched(self, item: DenseItem, pieces: Iterator[F32]) -> Iterator[F32]:
        """The same pieces, with what their format takes of them noted."""
        for values in pieces:
            if self.losses is not None and item.format in SCALED:
                weight, scale = pack_matrix(values, item.format)
                self.losses.add(item.role, self._dtype(self._source(item)), values,
                                unpack_matrix(weight, scale, item.format, *values.shape))  # fmt: skip
            yield values

    def _stacked(self, item: DenseItem, source: Source) -> Iterator[F32]:
        """The matrices of a stack, each from rows of its own."""
        for i in range(item.stack):
            start = i * source.stride + source.start
            rows = self.checkpoint.rows(source.name, start, start + source.n_rows)
            yield np.ascontiguousarray(rows.T) if source.is_transposed else rows

    def _gathered(self, item: DenseItem, source: Source) -> Iterator[F32]:
        """One matrix out of blocks of rows, in pieces."""
        n_rows, step = item.shape[0], chunk_rows(item.shape[1])
        for start in range(0, n_rows, step):
            stop, parts = min(start + step, n_rows), []
            while start < stop:
                block, within = divmod(start, source.n_rows)
                n = min(source.n_rows - within, stop - start)
                at = block * source.stride + source.start + within
                parts.append(self.checkpoint.rows(source.name, at, at + n))
                start += n
            yield np.concatenate(parts)

    def _expert_sources(self, layer: ExpertFilePlan, expert: int) -> list[Source]:
        """Of the three matrices, then of their biases."""
        inner, hidden = layer.layout.inner, layer.layout.hidden
        parts: list[tuple[str, tuple[int, ...]]] = [
            ("gate_proj.weight", (inner, hidden)), ("up_proj.weight", (inner, hidden)), ("down_proj.weight", (hidden, inner)),
        ]  # fmt: skip
        names = ("gate_proj.bias", "up_proj.bias", "down_proj.bias")
        parts += [(name, (width,)) for name, width in zip(names, layer.layout.bias_widths)]
        found = []
        for part, shape in parts:
            own = self.names.expert(layer.layer, expert, layer.n_experts, part, shape)
            found.append(arranged(own, expert, layer.n_experts, part, shape, self.checkpoint.shape_of))
        return found

    def _make_expert(self, source: tuple[ExpertFilePlan, int]) -> Any:
        layer, expert = source
        matrices = []
        for part in self._expert_sources(layer, expert)[:3]:
            try:
                matrices.append(self._packed(layer, part))
            except ValueError as error:
                raise ContainerError(f"{self.source}: tensor {part.name!r} can't be converted: {error}.") from None
        return expert_record(layer, matrices, [values for _, values in self.expert_biases(layer, expert)])

    def _packed(self, layer: ExpertFilePlan, part: Source) -> Any:
        """(weight, scale) of one of an expert's matrices."""
        fmt = layer.layout.format
        if self._is_kept(part, fmt):
            return pack_codes(*self._kept_values(part, fmt), fmt)
        values = self._values(part)
        weight, scale = pack_matrix(values, fmt)
        if self.losses is not None and fmt in SCALED:
            role = "expert" if layer.layer < self.spec.n_layers else "mtp"
            self.losses.add(role, self._dtype(part), values, unpack_matrix(weight, scale, fmt, *values.shape))
        return weight, scale


class Losses:
    """What roundings took of matrices, by role: the root mean square of the error beside that of the values."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, frozenset[str]]] = {}
        self._lock = threading.Lock()

    def add(self, role: str, dtype: str, values: F32, stored: F32) -> None:
        error = float(np.square(stored - values, dtype=np.float64).sum())
        square = float(np.square(values, dtype=np.float64).sum())
        with self._lock:
            e, s, types = self._sums.get(role, (0.0, 0.0, frozenset()))
            self._sums[role] = (e + error, s + square, types | {dtype})

    def describe(self) -> str:
        """A sentence."""
        if not self._sums:
            return "no weight was rounded"
        parts = [
            f"{role} {100 * (e / s) ** 0.5 if s else 0.0:.2g} % ({', '.join(sorted(types))})"
            for role, (e, s, types) in sorted(self._sums.items())
        ]
        return f"rounded once more, relative root mean square of the error: {', '.join(parts)}; others are as they were"


class Ahead:
    """Makes the next experts in other threads while the caller writes this one."""

    def __init__(self, pool: ThreadPoolExecutor, make: Callable[[tuple[ExpertFilePlan, int]], Any], depth: int) -> None:
        self._pool, self._make, self._depth = pool, make, depth
        self._pending: deque[Future[Any]] = deque()

    def each(self, sources: Sequence[tuple[ExpertFilePlan, int]]) -> Iterator[list[Any]]:
        """The record of each, in turn."""
        left = iter(sources)
        while True:
            self._pending.extend(
                self._pool.submit(self._make, source)
                for source in itertools.islice(left, self._depth - len(self._pending))
            )
            if not self._pending:
                return
            yield [self._pending.popleft().result()]

    def cancel(self) -> None:
        for future in self._pending:
            future.cancel()


def expert_record(layer: ExpertFilePlan, matrices: Any, biases: Sequence[F32] = ()) -> Any:
    """u8[record_bytes] from the packed (weight, scale) of gate, up and down, and their biases."""
    layout = layer.layout
    record = np.zeros(layout.record_bytes, np.uint8)
    at = [(layout.gate_w, layout.gate_s), (layout.up_w, layout.up_s), (layout.down_w, layout.down_s)]
    for (weight, scale), (weight_at, scale_at) in zip(matrices, at):
        record[weight_at : weight_at + weight.size] = weight
        if scale is not None and scale_at is not None:
            record[scale_at : scale_at + scale.size] = scale
    for bias, start in zip(biases, layout.biases, strict=True):
        record[start : start + bias.nbytes] = np.ascontiguousarray(bias).view(np.uint8)
    return record


def _rows_of(source: Source, values: Any) -> Any:
    """Those that ``source`` names of [out, ...], or of [in, out] if it is transposed."""
    plain = values.T if source.is_transposed else values
    return np.ascontiguousarray(plain[source.start :: source.step][: source.n_rows or None])


def pack_chunks(chunks: Iterator[Any], fmt: str) -> Iterator[Any]:
    """Packed weights of matrices (or of row pieces of one) as they come, all scales at the end.

    Chunks: f32[rows, in], or what ``pack_codes`` takes, codes and scales.
    """
    scales = []
    for chunk in chunks:
        weight, scale = pack_codes(chunk[0], chunk[1], fmt) if isinstance(chunk, tuple) else pack_matrix(chunk, fmt)
        if scale is not None:
            scales.append(scale)
        yield weight
    yield from scales


def table_chunks(chunks: Iterator[F32], fmt: str) -> Iterator[Any]:
    """The row-major embedding: f32, bf16, or int8 with one f32 scale per row at the end."""
    scales = []
    for chunk in chunks:
        if fmt == "q8":
            q, scale = quantise_rows(chunk)
            scales.append(scale)
            yield q
        else:
            if not np.isfinite(chunk).all():
                raise ValueError("a weight is NaN or infinite")
            yield to_bf16(chunk) if fmt == "bf16" else np.ascontiguousarray(chunk)
    yield from scales


def chunk_rows(width: int) -> int:
    """Rows of a piece: a multiple of a tile and of an fp8 block."""
    return max(_CHUNK_VALUES // width // 128, 1) * 128


assert 128 % TILE_ROWS == 0
