"""Routing traces: what the gates chose, step by step and layer by layer, for ``colibri cache-sim`` and other tools.

A trace file is a stream of MessagePack values. The first is the header, a map (``TraceHeader``). Then come arrays:

    [0, step, kind, [[request, n_rows, position, is_prefill], ...]]   the rows of a step, in order
    [1, step, layer, ids, weights]                                    one layer of it, in the order of execution
    [2, n]                                                            n records are missing here

``kind`` is a ``StepKind``; ``ids`` are little-endian u16[T, K], ``weights`` f16[T, K], both as bytes. Values are appended only,
so a file whose writer died ends in part of a value at worst: readers stop before it, a writer that goes on cuts it off.
A trace holds no text, but the ids of requests and which experts they used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError, SchemaError
from shared.files import open_file
from shared.locks import try_lock
from shared.step.stages import StepKind

FORMAT = "colibri routing trace"
VERSION = 1
STEP, LAYER, LOST = 0, 1, 2
MAX_VALUE_BYTES = 1 << 28
READ_BYTES = 1 << 20


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Which model the trace is of. ``record_bytes``: layer -> bytes of one expert on disk."""

    format: str = FORMAT
    version: int = VERSION
    model: str
    fingerprint: str
    n_experts: int
    gate_k: int
    record_bytes: dict[int, int]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending."""
        return tuple(sorted(self.record_bytes))


@dataclass(frozen=True)
class SpanNote:
    """Consecutive rows of one request in a step."""

    request: str
    n_rows: int
    position: int
    is_prefill: bool


@dataclass(frozen=True)
class LayerChoice:
    """ids u16[T, K], weights f16[T, K] of one layer."""

    layer: int
    ids: NDArray[np.uint16]
    weights: NDArray[np.float16]


@dataclass
class TraceStep:
    """One step as far as it was recorded: ``layers`` in the order of execution, fewer than all if it was abandoned."""

    step: int
    kind: StepKind
    spans: tuple[SpanNote, ...]
    layers: list[LayerChoice] = field(default_factory=list)

    @property
    def n_prefill(self) -> int:
        """Rows that belong to a prompt; they are the last ones of the step."""
        return sum(span.n_rows for span in self.spans if span.is_prefill)


def step_record(step: int, kind: StepKind, spans: Iterable[SpanNote]) -> bytes:
    """The bytes of a step's beginning."""
    rows = [[s.request, s.n_rows, s.position, s.is_prefill] for s in spans]
    packed: bytes = msgpack.packb([STEP, step, int(kind), rows])
    return packed


def layer_record(step: int, layer: int, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> bytes:
    """The bytes of one layer's choice. ids i32[T, K], weights f32[T, K]; both are copied."""
    packed: bytes = msgpack.packb([LAYER, step, layer, ids.astype("<u2").tobytes(), weights.astype("<f2").tobytes()])
    return packed


def lost_record(n: int) -> bytes:
    """The bytes that say that ``n`` records are missing."""
    packed: bytes = msgpack.packb([LOST, n])
    return packed


class TraceWriter:
    """Appends to a trace; a new file gets the header, an old one must be of the same model. One writer at a time.

    Raises ConfigError when the file can't be written, is no trace, is of another model or is being written already.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        try:
            self._file = os.fdopen(open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")
        except OSError as error:
            raise ConfigError(f"record_routing: {path} can't be written: {error.strerror}") from None
        try:
            if not try_lock(self._file.fileno(), path):
                raise ConfigError(f"record_routing: {path} is being written by another group; name another file")
            self._continue(path, header)
        except BaseException:
            self._file.close()
            raise

    def _continue(self, path: Path, header: TraceHeader) -> None:
        self._file.seek(0)
        values = _Values(path, self._file)
        first = values.next()
        if first is None:
            if self._file.seek(0, os.SEEK_END):
                raise ConfigError(f"record_routing: {path} is not empty and no routing trace; name another file")
            self._file.write(msgpack.packb(msgspec.to_builtins(header)))
            self._file.flush()
            return
        found = _header_of(path, first)
        if found != header:
            raise ConfigError(
                f"record_routing: {path} is a trace of {found.model} ({found.fingerprint}), this is {header.model} "
                f"({header.fingerprint}); name another file"
            )
        while values.next() is not None:
            pass
        self._file.truncate(values.end)
        self._file.seek(0, os.SEEK_END)

    def write(self, records: Iterable[bytes]) -> None:
        """Appends whole records and hands them to the kernel. Raises OSError."""
        self._file.writelines(records)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TraceReader:
    """Opens a trace: ``header``, then iterate over its steps, once. Steps without any layer are left out.

    ``n_lost`` grows by the records that the writer could not keep. Raises ConfigError or SchemaError, also while iterating.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.n_lost = 0
        try:
            self._file = os.fdopen(open_file(path), "rb")
        except OSError as error:
            raise ConfigError(f"trace {path}: {error.strerror}") from None
        self._values = _Values(path, self._file)
        try:
            first = self._values.next()
            if first is None:
                raise ConfigError(f"{path} is not a routing trace: it is empty or ends within its first value")
            self.header = _header_of(path, first)
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[TraceStep]:
        try:
            yield from self._steps()
        finally:
            self._file.close()

    def _steps(self) -> Iterator[TraceStep]:
        current: TraceStep | None = None
        n_rows = 0
        while (value := self._values.next()) is not None:
            try:
                kind = value[0]
                if kind == STEP:
                    if current and current.layers:
                        yield current
                    current = _step_of(value)
                    n_rows = 0
                elif kind == LAYER:
                    choice = self._choice_of(value)
                    if current is None or value[1] != current.step:
                        continue  # its step's beginning was lost
                    if n_rows and len(choice.ids) != n_rows:
                        raise ValueError
                    n_rows = len(choice.ids)
                    current.layers.append(choice)
                elif kind == LOST:
                    self.n_lost += int(value[1])
            except (ValueError, TypeError, IndexError, KeyError):
                raise ConfigError(
                    f"trace {self._path} is damaged before byte {self._values.end:,}: a value there is no record of a trace; "
                    "record it again"
                ) from None
        if current and current.layers:
            yield current

    def _choice_of(self, value: list[Any]) -> LayerChoice:
        _, _, layer, ids, weights = value
        shape = (-1, self.header.gate_k)
        choice = LayerChoice(
            layer, np.frombuffer(ids, "<u2").reshape(shape), np.frombuffer(weights, "<f2").reshape(shape)
        )
        if layer not in self.header.record_bytes or choice.ids.shape != choice.weights.shape or not choice.ids.size:
            raise ValueError
        if int(choice.ids.max()) >= self.header.n_experts:
            raise ValueError
        return choice


class _Values:
    """The MessagePack values of a file. ``end``: the offset behind the last complete one."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._unpacker = msgpack.Unpacker(
            file, read_size=READ_BYTES, max_buffer_size=MAX_VALUE_BYTES, strict_map_key=False
        )
        self.end = 0

    def next(self) -> Any:
        """The next value, None at the end and before a value that is cut off."""
        try:
            value = self._unpacker.unpack()
        except msgpack.OutOfData:
            return None
        except (ValueError, msgpack.UnpackException) as error:
            raise ConfigError(
                f"{self._path} is not a routing trace, or damaged behind byte {self.end:,} "
                f"({error or type(error).__name__}); record it again"
            ) from None
        self.end = self._unpacker.tell()
        return value


def _header_of(path: Path, value: Any) -> TraceHeader:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a routing trace; --record-routing of colibri-up writes them")
    if value.get("version") != VERSION:
        raise SchemaError(
            f"{path} has trace version {value.get('version')}, this program reads {VERSION}; record it again"
        )
    try:
        header = msgspec.convert(value, TraceHeader)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the header of trace {path} is damaged: {error}") from None
    if header.gate_k < 1 or not 1 <= header.n_experts <= 1 << 16 or not header.record_bytes:
        raise ConfigError(
            f"the header of trace {path} is damaged: {header.n_experts} experts, {header.gate_k} per token"
        )
    return header


def _step_of(value: list[Any]) -> TraceStep:
    _, step, kind, spans = value
    return TraceStep(
        int(step), StepKind(kind), tuple(SpanNote(str(r), int(n), int(p), bool(f)) for r, n, p, f in spans)
    )
