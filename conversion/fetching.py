"""Converts a model while it is fetched: shard by shard, in an order in which few of them lie on the disk at once.

Everything is planned from ``config.json`` and the headers of the shards. Then each shard comes to ``OUT/.unfinished/shards``,
what it completes is made and written, and it is deleted when nothing needs it any more; the next one is on its way meanwhile.
The result is that of a conversion of the downloaded checkpoint, byte by byte. Run by ``colibri convert hf:...``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from conversion.checkpoint import INDEX_FILE, Checkpoint, shards_of
from conversion.convert import Conversion
from conversion.hub import Hub, HubName
from conversion.sources import COPIED_FILES, TEMPLATES_DIR
from conversion.window import Need, order_of, peak_bytes, releases
from conversion.writer import ContainerWriter, Evidence, Group
from shared.container.checksum import checksum
from shared.container.format import Index
from shared.container.recognise import UNFINISHED_DIR
from shared.container.safetensors_file import FileHeader, header_of
from shared.errors import CapacityError, ColibriError, ContainerError, DownloadError
from shared.files import open_file, read_file
from shared.kept import replace_file

_SHARDS_DIR = "shards"
_EQUAL_NAME = "equal.json"
_PLAN_LIMIT_BYTES = 256 << 20
_HEADERS_AT_ONCE = 8

Progress = Callable[[int], None]


class HubCheckpoint(Checkpoint):
    """Shards of which the headers are known, and the bytes once ``directory`` has the file."""

    def __init__(
        self, hub: Hub, headers: dict[str, FileHeader], weight_map: dict[str, str] | None, directory: Path
    ) -> None:
        super().__init__(Path(str(hub.name)), headers, weight_map)
        self._headers, self._shards = headers, directory
        self._hub_states = {
            file: f"{file} {hub.file(file).n_bytes} {hub.file(file).digest or hub.commit}" for file in headers
        }

    def state_of(self, names: Any) -> str:
        """What the hub says of the files that hold these tensors."""
        return checksum(repr(sorted({self._hub_states[self.tensors[name].file] for name in names})).encode())

    def require_unchanged(self) -> None:
        """Each shard was compared with its checksum, and nobody else writes to it."""

    def place_shards(self, directory: Path) -> None:
        """Where shards lie once they are fetched."""
        self._shards = directory

    def release(self, file: str) -> None:
        """The shard is needed no more."""
        with self._lock:
            fd = self._fds.pop(file, -1)
        if fd >= 0:
            os.close(fd)
        (self._shards / file).unlink(missing_ok=True)

    def require_header(self, file: str) -> None:
        """DownloadError unless the shard that came has the header that everything was planned from."""
        path = self._shards / file
        fd = open_file(path)
        try:
            if header_of(fd, path) != self._headers[file]:
                raise DownloadError(
                    f"{self.directory / file} came with another header than was shown before. Delete what was made from it "
                    "(the output directory) and run the same command again."
                )
        finally:
            os.close(fd)

    def _open_shard(self, name: str) -> int:
        return open_file(self._shards / self.tensors[name].file)


class Listeners(NamedTuple):
    """Who is told of what: bytes fetched, bytes made, and each shard that came ("NAME, 3 of 142")."""

    fetched: Progress = lambda _: None
    made: Progress = lambda _: None
    shard: Callable[[str], None] = lambda _: None


class FetchPlan(NamedTuple):
    """What is still to be fetched. ``window_bytes``: the most of it that lies on the disk at once."""

    order: list[str]
    released: list[list[str]]
    ready: list[list[Group]]
    n_bytes: int
    window_bytes: int
    n_ahead: int


class HubConversion:
    """One model at a hub and one precision: planned completely before anything is written. A context manager."""

    def __init__(self, hub: Hub, precision: str, *, has_mtp: bool = True) -> None:
        """ContainerError, ConfigError or DownloadError; all of config.json, tokenizer and headers is fetched."""
        self.hub = hub
        self._folder = tempfile.TemporaryDirectory(prefix="colibri-hub-")
        try:
            with self._named():
                self.conversion = self._planned(Path(self._folder.name), precision, has_mtp)
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> HubConversion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.conversion.checkpoint.close()
        self._folder.cleanup()

    def _planned(self, folder: Path, precision: str, has_mtp: bool) -> Conversion:
        hub = self.hub
        if "config.json" not in hub.files:
            raise ContainerError(
                f"{hub.name} has no config.json: it is no checkpoint of a model (GGUF files and adapters have none). Choose "
                "the repository as the makers of the model published it."
            )
        templates = [name for name in hub.files if name.startswith(f"{TEMPLATES_DIR}/") and name.endswith(".jinja")]
        for name in (*COPIED_FILES, INDEX_FILE, *templates):
            if name in hub.files:
                hub.download(name, folder)
        names, weight_map = shards_of(folder, [name for name in hub.files if "/" not in name])
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            headers = dict(zip(names, pool.map(hub.header, names)))
        checkpoint = HubCheckpoint(hub, headers, weight_map, folder)
        return Conversion(folder, precision, has_mtp=has_mtp, checkpoint=checkpoint)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Sentences name the model instead of the folder that its small files are in."""
        try:
            yield
        except ColibriError as error:
            error.args = (str(error).replace(self._folder.name, str(self.hub.name)), *error.args[1:])
            raise

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the first one."""
        return {**self.conversion.identity, "source": str(self.hub.name), "commit": self.hub.commit}

    @property
    def without_checksum(self) -> list[str]:
        """Shards of which the hub gives no checksum: only their sizes and headers can be compared."""
        return [name for name in self.conversion.checkpoint.files if not self.hub.file(name).digest]

    def source_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.hub.file(name).n_bytes for name in self.conversion.checkpoint.files)

    def window_bytes(self) -> int:
        """The most bytes of shards on the disk at once, when everything has to be fetched."""
        plan = self.conversion.plan
        sources: list[Any] = [item for file in plan.dense for item in file.items]
        sources += [(file, expert) for file in plan.experts for expert in range(file.n_experts)]
        needs = {self._need(self.conversion.names_of(source)) for source in sources}
        firsts = [self._need(pair) for pair in self.conversion.copies]
        order = order_of(needs, firsts)
        return peak_bytes(order, [*needs, *firsts], self._sizes(order), 1)

    def run(self, out: Path, start: Callable[[FetchPlan, int], Listeners], n_threads: int = 2) -> Index:
        """Writes the container (or what is missing of it). ``start`` is told what is to be fetched, and bytes already made.

        What ``Conversion.run`` raises, and DownloadError; whatever ends it, the same call goes on from there.
        """
        with self._named(), ContainerWriter(out, self.conversion.plan, self.identity) as writer:
            kept = 0

            def count(n_bytes: int) -> None:
                nonlocal kept
                kept += n_bytes

            pending = writer.resume(count, self._witness_of_leftovers)
            shards = out / UNFINISHED_DIR / _SHARDS_DIR
            shards.mkdir(exist_ok=True)
            self._checkpoint.place_shards(shards)
            equal = _Equal(out / UNFINISHED_DIR / _EQUAL_NAME, self.conversion)
            plan = self._plan(writer, pending, equal, shards)
            report = start(plan, kept)
            self._fetch_and_make(writer, plan, equal, shards, report, n_threads)
            return self.conversion.finish(writer)

    @property
    def _checkpoint(self) -> HubCheckpoint:
        checkpoint = self.conversion.checkpoint
        assert isinstance(checkpoint, HubCheckpoint)
        return checkpoint

    def _need(self, names: Any) -> Need:
        return frozenset(self._checkpoint.tensors[name].file for name in names)

    def _sizes(self, order: list[str]) -> dict[str, int]:
        return {name: self.hub.file(name).n_bytes for name in order}

    def _witness_of_leftovers(self, source: Any, earlier: Evidence | None) -> Evidence:
        """Without the shards at hand: what was made from files that the hub describes as it does now."""
        state = self._checkpoint.state_of(self.conversion.names_of(source))
        return earlier if earlier and earlier.state == state else Evidence("other", state)

    def _plan(self, writer: ContainerWriter, pending: list[Group], equal: _Equal, shards: Path) -> FetchPlan:
        of_group = [(group, self._need(self.conversion.names_of(group.source))) for group in pending]
        firsts = [self._need(pair) for pair in equal.left]
        needs = {need for _, need in of_group}
        order = order_of(needs, firsts)
        place = {shard: i for i, shard in enumerate(order)}
        ready: list[list[Group]] = [[] for _ in order]
        for group, need in of_group:
            ready[max(place[shard] for shard in need)].append(group)
        left = 0
        for path in shards.iterdir():
            if path.name.removesuffix(".partial") not in place:
                path.unlink()
            else:
                left += path.stat().st_size
        all_needs = [*needs, *firsts]
        sizes = self._sizes(order)
        for n_ahead in (1, 0):  # one ahead is faster, none needs less room
            window = peak_bytes(order, all_needs, sizes, n_ahead)
            try:
                writer.require_space(max(window - left, 0), "shards of the checkpoint that are being converted")
                break
            except CapacityError:
                if not n_ahead:
                    raise
        return FetchPlan(order, releases(order, all_needs), ready, sum(sizes.values()), window, n_ahead)

    def _fetch_and_make(
        self, writer: ContainerWriter, plan: FetchPlan, equal: _Equal, shards: Path, report: Listeners, n_threads: int
    ) -> None:
        conversion, n = self.conversion, len(plan.order)

        def fetch(i: int) -> None:
            if i < n:
                self.hub.download(plan.order[i], shards, report.fetched)
                self._checkpoint.require_header(plan.order[i])

        held: set[str] = set()
        with ThreadPoolExecutor(1) as pool, conversion.making(n_threads) as make_experts:
            try:
                coming = pool.submit(fetch, 0)
                for i, shard in enumerate(plan.order):
                    coming.result()
                    held.add(shard)
                    report.shard(f"{shard}, {i + 1} of {n}")
                    if plan.n_ahead:
                        coming = pool.submit(fetch, i + 1)
                    equal.compare(lambda pair: self._need(pair) <= held)
                    writer.write_groups(
                        plan.ready[i], conversion.make_dense, make_experts, report.made, conversion.witness
                    )
                    for gone in plan.released[i]:
                        self._checkpoint.release(gone)
                    if not plan.n_ahead:
                        coming = pool.submit(fetch, i + 1)
            except BaseException:
                self.hub.stop.set()
                raise


class _Equal:
    """Tensors that must have the same values, and those of which an earlier run has seen that they do."""

    def __init__(self, path: Path, conversion: Conversion) -> None:
        self._path, self._conversion = path, conversion
        self._seen: list[tuple[str, str]] = []
        with suppress(OSError, msgspec.MsgspecError):
            self._seen = msgspec.json.decode(read_file(path, _PLAN_LIMIT_BYTES), type=list[tuple[str, str]])
        self.left = [pair for pair in conversion.copies if pair not in self._seen]

    def compare(self, can_be_read: Callable[[tuple[str, str]], bool]) -> None:
        for pair in [pair for pair in self.left if can_be_read(pair)]:
            self._conversion.require_equal(*pair)
            self.left.remove(pair)
            self._seen.append(pair)
            replace_file(self._path, msgspec.json.encode(self._seen))


def begun_commit(out: Path, name: HubName) -> str:
    """The commit of ``name`` that ``out`` holds unfinished work of; "" when it holds none of it."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        plan = msgspec.json.decode(
            read_file(out / UNFINISHED_DIR / "plan.json", _PLAN_LIMIT_BYTES), type=dict[str, Any]
        )
        if plan.get("source") == str(name):
            return str(plan.get("commit", ""))
    return ""
