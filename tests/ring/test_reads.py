"""Reads that go wrong, and places that are read otherwise: the same text, or a request that ends with a named error."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from native.library import lib
from native.reader import ENDED_FN, ENGINES, uring_refusal
from services.expert_io import sources
from shared.container.reader import Container
from tests.oracle import oracle_array
from tests.support.ring import Ring

Converted = Callable[[str, str], Path]
NAME = "glm_moe_dsa"
PIECE = 4096


def prompt_of() -> list[int]:
    prompt: list[int] = oracle_array(NAME, "prompt_ids").tolist()
    return prompt


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and (why := uring_refusal()):
        pytest.skip(f"io_uring: {why}")
    return str(request.param)


@pytest.fixture
def answers() -> Iterator[Callable[[Callable[[int, int, int], int]], None]]:
    """Has a function (offset, bytes asked, result) -> result decide what the system seems to have said."""
    hooks = []

    def install(judge: Callable[[int, int, int], int]) -> None:
        def ended(offset: int, n: int, target: int, result: int) -> int:
            said = judge(offset, n, result)
            ctypes.memset(target + max(0, said), 0xEE, n - max(0, said))
            return said

        hooks.append(ENDED_FN(ended))
        lib.cb_reader_hooks_for_test(None, ctypes.cast(hooks[-1], ctypes.c_void_p))

    yield install
    lib.cb_reader_hooks_for_test(None, None)


def test_a_short_read_and_an_error_are_invisible_and_a_lasting_one_ends_the_request(
    engine: str,
    converted: Converted,
    tmp_path: Path,
    answers: Callable[[Callable[[int, int, int], int]], None],
) -> None:
    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 6).tokens
    seen: Counter[int] = Counter()

    def twice_wrong(offset: int, n: int, result: int) -> int:
        seen[offset] += 1
        if seen[offset] == 1:
            return n // 2
        return -errno.EIO if seen[offset] == 2 else result

    with Ring(model, tmp_path, read_engine=engine, read_piece_bytes=PIECE, n_slots=7) as ring:
        service = ring.store
        answers(twice_wrong)
        assert ring.generate(prompt, 6).tokens == expected
        service.publish()
        assert service.engines[0].reads.readers[0].engine == engine
        assert service.counters.get("retries") >= 2 * len(seen) > 0
        assert service.counters.get("read_errors") == 0

        file = service.engines[0].reads.sources.files[ring.spec.moe_layers[0]]
        bad = file.offset_of(3)
        answers(lambda offset, n, result: -errno.EIO if offset == bad + PIECE else result)
        errors = {}
        for first in prompt:
            done = ring.generate([first, *prompt], 3).done
            assert done is not None
            if done.reason == "error":
                errors[done.error_code] = done.error
        assert set(errors) == {"expert_read_failed"}
        text = errors["expert_read_failed"]
        layer = int(re.search(r"of layer (\d+) ", text)[1])  # type: ignore[index]  # the first that an accepted row reached
        file = service.engines[0].reads.sources.files[layer]
        assert f"at offset {bad}" in text and str(file.path) in text
        assert f"expected {file.record_bytes} bytes, received " in text and os.strerror(errno.EIO) in text
        lib.cb_reader_hooks_for_test(None, None)
        assert ring.generate(prompt, 6).tokens == expected, "the drive is well again"


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory on a file system in memory."""
    path = Path("/dev/shm") / f"colibri-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError:
        pytest.skip("no /dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_model_on_a_file_system_in_memory(
    direct_io: str, engine: str, converted: Converted, tmp_path: Path, memory_dir: Path
) -> None:
    model = converted(NAME, "int4")
    shutil.copytree(model, memory_dir / "model")
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt_of(), 6).tokens
    with Ring(memory_dir / "model", tmp_path, direct_io=direct_io, read_engine=engine, n_slots=7) as ring:
        assert ring.generate(prompt_of(), 6).tokens == expected


def test_records_of_odd_sizes_are_read_whole(engine: str, converted: Converted, tmp_path: Path) -> None:
    """Records are multiples of 4096 and of nothing else; pieces are not multiples of them."""
    model = converted(NAME, "int4")
    sizes = {file.record_bytes for file in Container.open(model).experts.values()}
    assert any(size % 65536 for size in sizes) and all(size % 4096 == 0 for size in sizes)
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt_of(), 6).tokens
    for piece in (4096, 3 * 4096, 65536):
        with Ring(model, tmp_path, read_engine=engine, read_piece_bytes=piece, n_slots=7, pilot="on") as ring:
            assert ring.generate(prompt_of(), 6).tokens == expected


def test_a_file_system_without_direct_reads_is_read_buffered_with_a_note(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = converted(NAME, "int4")
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt_of(), 6).tokens
    assert "reads_buffered" not in capsys.readouterr().err

    def refuse(path: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(sources, "open_direct", refuse)
    with Ring(model, tmp_path, n_slots=7) as ring:
        assert not ring.engine.reads.sources.is_direct
        assert ring.generate(prompt_of(), 6).tokens == expected
    [line] = [line for line in capsys.readouterr().err.splitlines() if "reads_buffered" in line]
    assert "has no direct reads" in line
    with Ring(model, tmp_path, n_slots=7, direct_io="off", read_note="/m is in memory") as ring:
        assert ring.generate(prompt_of(), 6).tokens == expected
    assert "/m is in memory" in capsys.readouterr().err
