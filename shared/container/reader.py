"""A container: opened after every check that needs no weights (``opening``), then read.

``read_dense`` fills one buffer and verifies checksums. Experts are read by expert_io itself, from the
offsets given here; ``verify`` reads everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from native.reader import SECTOR
from shared.container.c_engine import is_c_engine, open_c_engine
from shared.container.checked_reads import OpenFiles
from shared.container.dense_reads import ALIGN, Part, Run, place, read_runs
from shared.container.entries import DenseEntry, ExpertFile, Tensor
from shared.container.format import (
    INDEX_NAME,
    ContainerPlan,
    Converter,
    Facts,
    Index,
    check_precision,
    plan_container,
    plan_facts,
)
from shared.container.opening import expert_files, find_copies, fingerprint_of, open_dense, read_index
from shared.container.raw import make_dense, make_record
from shared.errors import ConfigError, ContainerError
from shared.files import is_file
from shared.model.family import load_spec
from shared.model.spec import ModelSpec

_N_READERS = 4
TOKENIZER_NAME = "tokenizer.json"


class Container:
    """A validated container. ``experts`` has one file per MoE layer, the MTP layer included.

    ``places`` are the directories with copies of expert files: the model's own, then the mirrors.
    """

    def __init__(
        self, path: Path, spec: ModelSpec, plan: ContainerPlan, dense: dict[str, DenseEntry],
        experts: dict[int, ExpertFile], places: tuple[Path, ...], fingerprint: str, converter: Converter,
        index: Index | None, notes: tuple[str, ...] = (), exact_context: int = 0,
    ) -> None:  # fmt: skip
        self.path, self.spec, self.dense, self.experts, self.places = path, spec, dense, experts, places
        self.plan = plan
        """What this model in this precision consists of."""
        self.fingerprint, self.converter = fingerprint, converter
        self.precision: dict[str, str] = plan.precision
        self.notes = notes
        """What the user should know of it."""
        self._exact_context = exact_context
        self._index = index

    @property
    def has_checksums(self) -> bool:
        """Whether damage would be noticed."""
        return self._index is not None

    @property
    def index(self) -> Index:
        """``colibri.json``. ContainerError for a container that has none."""
        if self._index is None:
            raise ContainerError(
                f"{self.path} has no {INDEX_NAME}: the C engine's containers hold no checksums and do not say what they were "
                "made from. Convert the model's checkpoint to have them."
            )
        return self._index

    @staticmethod
    def open(
        path: Path | str,
        mirrors: Iterable[Path | str] = (),
        *,
        with_copies: bool = True,
        on_bad_mirror: Callable[[ContainerError], None] | None = None,
    ) -> Container:
        """ContainerError or ConfigError names the file and what does not fit; no weights are read.

        Expert files may be missing in ``path`` if ``mirrors`` hold them. A mirror that does not fit is an error, or passed to
        ``on_bad_mirror`` and left out. ``with_copies``: False for who reads no experts; their files are not looked at.
        A directory of the C engine is opened as it lies.
        """
        path = Path(path)
        others = [Path(mirror) for mirror in mirrors]
        places: tuple[Path, ...] = ()
        if is_c_engine(path):
            if others:
                raise ContainerError(
                    f"{path} is a container of the C engine: its experts are not read from mirrors. Leave {others[0]} out, or "
                    "convert the model's checkpoint."
                )
            found = open_c_engine(path)
            places = (path,) if with_copies else ()
            return Container(
                path, found.spec, found.plan, found.dense, found.experts, places, found.fingerprint, found.converter,
                None, found.notes, found.exact_context,
            )  # fmt: skip
        index = read_index(path)
        spec = load_spec(path)
        if index.family != spec.family:
            raise ContainerError(
                f"{path}: {INDEX_NAME} says family {index.family!r}, config.json says {spec.family!r}. Convert "
                "the checkpoint again."
            )
        try:
            check_precision(index.precision)
        except ContainerError as error:
            raise ContainerError(f"{path}: {error}") from None
        plan = plan_container(spec, index.precision)
        dense = open_dense(path, spec, plan, index.dense)
        experts = expert_files(path, plan, index.experts)
        if with_copies:
            places = find_copies(path, plan, experts, index.fingerprint, others, on_bad_mirror)
        return Container(path, spec, plan, dense, experts, places, index.fingerprint, index.converter, index)

    def spec_for(self, attention: str) -> ModelSpec:
        """The model with the context that it may have under the setting ``attention``: "auto", or "dense", which takes
        attention over all keys where the files have no sparse indexer. ConfigError where they have it."""
        if attention == "dense":
            if not self._exact_context and self.spec.n_selected:
                raise ConfigError(
                    f"attention = dense: {self.path} has the sparse indexer that belongs to its model; dense attention would "
                    "be another one. Leave it out."
                )
            return self.spec
        if not self._exact_context:
            return self.spec
        return msgspec.structs.replace(self.spec, max_context=min(self.spec.max_context, self._exact_context))

    def facts(self) -> Facts:
        """Bytes by owner, for the ledger."""
        facts = plan_facts(self.spec, self.plan)
        stage_bytes = max((file.raw.stage_bytes for file in self.experts.values() if file.raw), default=0)
        return msgspec.structs.replace(facts, has_tokenizer=_has_tokenizer(self.path), stage_bytes=stage_bytes)

    def shares(self, drives: Sequence[int]) -> dict[frozenset[int], float]:
        """Sets of drives -> share of the experts' bytes with copies exactly there. ``drives``: of each of ``places``."""
        found: dict[frozenset[int], float] = {}
        total = sum(file.record_bytes * file.n_experts for file in self.experts.values())
        for file in self.experts.values():
            for expert in range(file.n_experts):
                where = frozenset(drives[copy.place] for copy in file.copies if copy.holds(expert))
                found[where] = found.get(where, 0.0) + file.record_bytes / total
        return found

    def only_in(self, place: int) -> list[ExpertFile]:
        """The expert files as this place alone has them."""
        return [
            msgspec.structs.replace(file, copies=(copy,))
            for file in self.experts.values()
            for copy in file.copies
            if copy.place == place
        ]

    def read_dense(
        self,
        wanted: Collection[str] | Callable[[DenseEntry], bool],
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        is_filled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Tensor]:
        """Reads the wanted tensors (names, or a predicate) into one buffer and verifies their checksums.

        ``allocate(n_bytes)`` gives a u8 array of at least that size, 64-byte aligned, that outlives the tensors; aligned to
        4096 it can be filled by direct reads.
        ``is_filled``, asked after it: whether an earlier call for the same tensors has filled it (``dense_content``).
        ShortRead, ChecksumMismatch, or ContainerError for a name that does not exist.
        """
        if callable(wanted):
            entries = [entry for entry in self.dense.values() if wanted(entry)]
        else:
            missing = sorted(set(wanted) - set(self.dense))
            if missing:
                raise ContainerError(f"{self.path} has no tensor {missing[0]!r}; convert the checkpoint again.")
            entries = [entry for name, entry in self.dense.items() if name in set(wanted)]
        runs, made_at, n_bytes = _placed(entries)
        buffer = allocate(n_bytes)
        if buffer.ctypes.data % ALIGN:
            raise ValueError(f"allocate() must give memory aligned to {ALIGN} bytes")
        found = {part.what: buffer[run.place_of(part) :][: part.n_bytes] for run in runs for part in run.parts}
        for entry, (at, scale_at) in made_at:
            found[entry.name] = buffer[at : at + entry.bytes]
            if entry.scale_bytes:
                found[f"{entry.name}.scale"] = buffer[scale_at : scale_at + entry.scale_bytes]
        if not is_filled():
            read_runs(runs, buffer)
            make_dense([(e, found[e.name], found.get(f"{e.name}.scale", buffer[:0])) for e, _ in made_at])
        tensors = {e.name: _as_tensor(e, found[e.name], found.get(f"{e.name}.scale")) for e in entries}
        return {name: tensors[name] for name in self.dense if name in tensors}

    def read_scale(self, name: str) -> npt.NDArray[np.float32] | None:
        """The scales f32[V] of a table alone, verified; None when its format has none."""
        entry = self.dense[name]
        if not entry.scale_bytes:
            return None
        (part,) = [part for part in entry.parts() if part.what == f"{name}.scale"]
        with OpenFiles() as files:
            return files.fill(part).view(np.float32)

    def dense_content(self, wanted: Callable[[DenseEntry], bool]) -> Iterator[str]:
        """What ``read_dense`` would put into the buffer, and where: equal strings, equal bytes."""
        runs, made_at, _ = _placed([entry for entry in self.dense.values() if wanted(entry)])
        for run in runs:
            for part in run.parts:
                yield f"{part.what} {run.place_of(part)} {part.n_bytes} {part.checksum or self.fingerprint}"
        for entry, (at, scale_at) in made_at:
            yield f"{entry.name} {at} {entry.bytes} {scale_at} {entry.scale_bytes} {entry.format} {self.fingerprint}"

    def experts_content(self) -> Iterator[str]:
        """What the experts' records are: equal strings, equal bytes."""
        for layer, file in sorted(self.experts.items()):
            yield f"{layer} {file.format} {file.record_bytes}"
            yield from file.checksums or (self.fingerprint,)

    def fingerprint_complaint(self) -> str | None:
        """None when the fingerprint is that of the checksums in ``colibri.json``, else what is wrong."""
        if self._index is None:
            return None
        found = fingerprint_of(self.plan, self.index.dense, self.index.experts)
        if found == self.fingerprint:
            return None
        return (
            f"{self.path / INDEX_NAME} has fingerprint {self.fingerprint!r}, its checksums give {found!r}: it was changed "
            "since it was written. Copy it again, or convert the checkpoint again."
        )

    def verify(self, place: int | None = None) -> Iterator[tuple[str, int, str | None]]:
        """Reads everything: yields (what, bytes, None or the complaint) per tensor and per expert, in order.

        ``place``: only the experts, and those copies of them that lie there.
        """
        with OpenFiles(drops_cache=True) as files, ThreadPoolExecutor(_N_READERS) as pool:
            pending: deque[tuple[Part, Future[str | None]]] = deque()
            for part in self._all_parts() if place is None else self._parts_in(place):
                pending.append((part, pool.submit(files.complaint, part)))
                if len(pending) > 2 * _N_READERS:
                    done, future = pending.popleft()
                    yield done.what, done.n_bytes, future.result()
            for done, future in pending:
                yield done.what, done.n_bytes, future.result()

    def _all_parts(self) -> Iterator[Part]:
        for entry in self.dense.values():
            yield from entry.parts()
        for _, file in sorted(self.experts.items()):
            for expert in range(file.n_experts):
                yield from file.parts(expert)

    def _parts_in(self, place: int) -> Iterator[Part]:
        for _, file in sorted(self.experts.items()):
            for copy in file.copies:
                if copy.place == place:
                    yield from (part for e in range(file.n_experts) if copy.holds(e) for part in file.parts(e, copy))

    def read_expert(self, layer: int, expert: int, *, drops_cache: bool = False) -> npt.NDArray[np.uint8]:
        """One record, checksum verified: for tests and tools, not for the hot path."""
        file = self.experts[layer]
        if file.raw is not None:
            return make_record(file, expert)
        with OpenFiles(drops_cache) as files:
            return files.fill(*file.parts(expert))


def _placed(
    entries: Sequence[DenseEntry],
) -> tuple[list[Run], list[tuple[DenseEntry, tuple[int, int]]], int]:
    """(runs of what lies as it is used, where weights and scales of the others go, bytes of buffer)."""
    runs, n_bytes = place([part for entry in entries if entry.raw is None for part in entry.parts()])
    made_at = []
    for entry in (entry for entry in entries if entry.raw is not None):
        scale_at = -(-(n_bytes + entry.bytes) // ALIGN) * ALIGN
        made_at.append((entry, (n_bytes, scale_at)))
        n_bytes = -(-(scale_at + entry.scale_bytes) // ALIGN) * ALIGN
    return runs, made_at, n_bytes


def no_tokenizer(model_dir: Path) -> str:
    """The sentence about a model without one."""
    return (
        f"{model_dir} has no {TOKENIZER_NAME}: requests must give token ids, text is refused. Copy the model's "
        f"{TOKENIZER_NAME} (and tokenizer_config.json) into it."
    )


def _has_tokenizer(path: Path) -> bool:
    try:
        return is_file(path / TOKENIZER_NAME)
    except OSError as error:
        raise ContainerError(f"{path / TOKENIZER_NAME} can't be read: {error.strerror}.") from None


def aligned_buffer(n_bytes: int) -> npt.NDArray[np.uint8]:
    """A u8 array of ordinary memory, aligned for direct reads: an ``allocate`` for tests and tools."""
    raw = np.empty(n_bytes + SECTOR, np.uint8)
    start = -raw.ctypes.data % SECTOR
    return raw[start : start + n_bytes]


def _as_tensor(entry: DenseEntry, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8] | None) -> Tensor:
    plain: npt.NDArray[Any] = weight
    plain_scale: npt.NDArray[Any] | None = scale
    if entry.kind == "vector":
        plain = weight.view(np.float32)
    elif entry.kind == "table":
        dtype = {"f32": np.float32, "bf16": np.uint16, "q8": np.int8}[entry.format]
        plain = weight.view(dtype).reshape(entry.shape)
        plain_scale = None if scale is None else scale.view(np.float32)
    return Tensor(entry.name, entry.kind, plain, plain_scale, entry.format, entry.shape, entry.stack)
