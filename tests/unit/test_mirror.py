"""Mirrors: what a manifest may say, which directory fits a model, and what the commands copy, check and refuse."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from cli.main import cli
from conversion import staging
from conversion.staging import StagePlan, choose_records, plan_staging, stage
from shared.container.mirror import MANIFEST_NAME, drive_of, pack_held, total_rate, unpack_held
from shared.container.reader import Container
from shared.errors import CapacityError, ChecksumMismatch, ColibriError, ContainerError
from shared.experts.usage import UsageHistory, save_usage, usage_path

Converted = Callable[[str, str], Path]


@pytest.fixture
def model(converted: Converted, tmp_path: Path) -> Path:
    """A container of its own."""
    return Path(shutil.copytree(converted("deepseek_v3", "int4"), tmp_path / "model"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["mirror", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The sentence of a refusal."""
    result = run(*arguments)
    assert isinstance(result.exception, ColibriError), result.output
    return str(result.exception)


def staged(model: Path, mirror: Path, *more: object) -> Path:
    result = run("stage", model, mirror, *more)
    assert result.exit_code == 0, result.output
    return mirror


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir() if path.is_file()}


# ---- the manifest ---------------------------------------------------------------------------------------------------


def test_sets_of_records_come_back() -> None:
    rng = random.Random(0)
    for n in (1, 7, 8, 9, 64, 256):
        for _ in range(20):
            held = frozenset(rng.sample(range(n), rng.randrange(n)))
            assert unpack_held(pack_held(held, n), n) == held
        assert pack_held(frozenset(range(n)), n) is None and unpack_held(None, n) is None
    for text in ("", "ff", "00000", "zz", "000001", "-1"):
        with pytest.raises(ValueError):
            unpack_held(text, 9)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"format_version": 2}, "format version 2"),
    ({"format_version": None}, "format version None"),
    ({"fingerprint": "0" * 16}, "fingerprint '0000000000000000'"),
    ({"fingerprint": 7}, "malformed"),
    ({"extra": 1}, "malformed"),
    ({"files": {"../model/experts-001.safetensors": {"bytes": 1, "held": None}}}, "lists '../model/experts-001"),
    ({"files": {"/etc/passwd": {"bytes": 1, "held": None}}}, "lists '/etc/passwd'"),
    ({"files": {"experts-099.safetensors": {"bytes": 1, "held": None}}}, "which this model does not have"),
    ({"files": {"experts-001.safetensors": {"bytes": 1, "held": None}}}, "it is listed with 1"),
    ({"files": {"experts-001.safetensors": {"bytes": 10**40, "held": None}}}, "it is listed with 10,000"),
    ({"files": {"experts-001.safetensors": {"bytes": -(2**63), "held": None}}}, "it is listed with -"),
    ({"files": {"experts-001.safetensors": {"bytes": None, "held": "f" * 64}}}, "malformed"),
    ({"files": {"experts-001.safetensors": {"bytes": "BYTES", "held": "f" * 64}}}, "are not a set of 16"),
    ({"files": {"experts-001.safetensors": {"bytes": "BYTES", "held": "zz00"}}}, "are not a set of 16"),
    ({"files": []}, "malformed"),
]


def test_a_hostile_manifest_is_refused_in_a_sentence(model: Path) -> None:
    mirror = staged(model, model.with_name("mirror"))
    path = mirror / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    n_bytes = manifest["files"]["experts-001.safetensors"]["bytes"]
    for change, words in CHANGES:
        path.write_text(json.dumps({**manifest, **change}).replace('"BYTES"', str(n_bytes)))
        before = tree(mirror)
        for command in ("plan", "stage", "verify"):
            assert words in refused(command, model, mirror), change
        with pytest.raises(ContainerError, match=str(mirror)):
            Container.open(model, (mirror,))
        assert tree(mirror) == before


def test_no_bytes_of_a_manifest_do_worse_than_a_refusal(model: Path) -> None:
    mirror = staged(model, model.with_name("mirror"))
    path = mirror / MANIFEST_NAME
    good = path.read_bytes()
    rng = random.Random(5)
    cases = [
        b"",
        b"[",
        b"null",
        b"[" * 100_000,
        b'{"format_version": 1' + b"0" * 5000 + b"}",
        b"\xff\xfe",
        os.urandom(200),
    ]
    for _ in range(80):
        broken = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(good))] = rng.randrange(256)
        cases.append(bytes(broken))
    for data in cases:
        path.write_bytes(data)
        with contextlib.suppress(ContainerError):
            Container.open(model, (mirror,))


# ---- which directory fits -------------------------------------------------------------------------------------------


def test_a_directory_that_does_not_fit_is_refused_with_what_to_do(
    model: Path, converted: Converted, tmp_path: Path
) -> None:
    mirror = staged(model, tmp_path / "mirror")

    def words(*mirrors: Path) -> str:
        with pytest.raises(ContainerError) as caught:
            Container.open(model, mirrors)
        return str(caught.value)

    assert "is its drive mounted" in words(tmp_path / "absent")
    assert "is the model directory itself" in words(model)
    assert "given twice" in words(mirror, mirror)
    (tmp_path / "empty").mkdir()
    assert "colibri mirror stage" in words(tmp_path / "empty")
    other = Path(shutil.copytree(mirror, tmp_path / "other"))
    with pytest.raises(ContainerError, match="is a mirror of the container with fingerprint"):
        Container.open(converted("deepseek_v3", "int8"), (other,))
    file = Container.open(model).experts[1]
    (other / file.name).write_bytes((mirror / file.name).read_bytes()[:-1])
    assert "is truncated" in words(other)
    (other / file.name).unlink()
    assert f"{other / file.name} is missing" in words(other)
    header = bytearray((mirror / file.name).read_bytes())
    at = header.index(b"experts.3")
    header[at : at + 9] = b"experts.9"
    (other / file.name).write_bytes(header)
    assert str(other / file.name) in words(other)
    assert Container.open(model, (mirror, other), on_bad_mirror=lambda error: None).places == (model, mirror)


def test_files_that_were_moved_serve_without_a_manifest_but_not_those_of_another_model(
    model: Path, converted: Converted, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = Container.open(model).experts[2].name
    (model / moved).rename(elsewhere / moved)
    with pytest.raises(ContainerError, match=rf"{moved} is missing; looked in {model}\..*--mirror"):
        Container.open(model)
    container = Container.open(model, (elsewhere,))
    assert [copy.path for copy in container.experts[2].copies] == [elsewhere / moved]
    assert all(complaint is None for _, _, complaint in container.verify())
    assert "holds expert files but no mirror.json" in refused("stage", model, elsewhere, "--mirror", elsewhere)
    second = staged(model, tmp_path / "second", "--mirror", elsewhere)
    shutil.rmtree(elsewhere)
    assert Container.open(model, (second,)).experts[2].path == second / moved
    data = bytearray((second / moved).read_bytes())
    data[-5000] ^= 1
    data[container.experts[2].data_offset + 9] ^= 1
    elsewhere.mkdir()
    (elsewhere / moved).write_bytes(data)
    with pytest.raises(ContainerError, match="are not this model's, or damaged"):
        Container.open(model, (elsewhere,))
    shutil.rmtree(second)
    with pytest.raises(ContainerError, match="is missing; looked in"):
        Container.open(model, (second,), on_bad_mirror=lambda error: None)


def test_two_paths_of_one_file_system_are_one_drive(tmp_path: Path) -> None:
    assert drive_of(tmp_path) == drive_of(tmp_path.parent)
    if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev:
        assert drive_of("/dev/shm") != drive_of(tmp_path)


# ---- what is staged -------------------------------------------------------------------------------------------------


def test_records_are_chosen_by_use_or_evenly_and_what_is_there_stays(model: Path) -> None:
    files = Container.open(model).experts
    layers = sorted(files)
    size = files[layers[0]].record_bytes
    assert {files[layer].record_bytes for layer in layers[:-1]} == {size} != {files[layers[-1]].record_bytes}, "MTP"
    everything = choose_records(files, {}, None, {})
    assert sum(map(len, everything.values())) == sum(file.n_experts for file in files.values())
    few = choose_records(files, {}, 2 * sum(files[layer].record_bytes for layer in layers) + size - 1, {})
    assert {layer: sorted(few[layer]) for layer in layers} == {layer: [0, 1] for layer in layers}
    hot = choose_records(files, {}, 3 * size, {(layers[0], 5): 0.1, (layers[1], 7): 0.5, (99, 1): 1.0})
    assert hot[layers[0]] == {0, 5} and hot[layers[1]] == {7}
    kept = choose_records(files, {layers[0]: frozenset({9, 10})}, 3 * size, {(layers[1], 7): 0.5})
    assert kept[layers[0]] == {9, 10} and kept[layers[1]] == {7}
    assert not any(choose_records(files, {}, size - 1, {}).values())


def test_a_full_mirror_is_the_same_files_and_the_model_stays_as_it_was(model: Path, tmp_path: Path) -> None:
    before = tree(model)
    mirror = tmp_path / "deep" / "mirror"
    shown = run("plan", model, mirror)
    assert shown.exit_code == 0 and "to copy:" in shown.output and "same drive" in shown.output
    assert not mirror.parent.exists(), "planning writes nothing"
    staged(model, mirror)
    for file in Container.open(model).experts.values():
        assert (mirror / file.name).read_bytes() == (model / file.name).read_bytes()
    assert sorted(path.name for path in mirror.iterdir()) == sorted(
        [MANIFEST_NAME, *(file.name for file in Container.open(model).experts.values())]
    )
    assert tree(model) == before
    written = tree(mirror)
    assert "nothing to do" in run("stage", model, mirror).output
    assert tree(mirror) == written
    assert "all checksums agree" in run("verify", model, mirror).output


def test_a_part_is_sparse_names_its_records_and_grows(model: Path, tmp_path: Path) -> None:
    container = Container.open(model)
    layers = sorted(container.experts)
    size = container.experts[layers[0]].record_bytes
    history = UsageHistory(layers, container.experts[layers[0]].n_experts)
    for _ in range(10):
        history.count(layers[1], [3, 11])
    path = usage_path(container.fingerprint)
    assert path is not None
    save_usage(path, container.fingerprint, history)
    try:
        mirror = tmp_path / "mirror"
        result = run("stage", model, mirror, "--size", f"{3 * size}B")
        assert "the most used first" in result.output, result.output
        opened = Container.open(model, (mirror,))
        assert [copy.held for copy in opened.experts[layers[1]].copies] == [None, frozenset({3, 11})]
        assert opened.experts[layers[0]].copies[1].held == frozenset({0})
        assert all(len(opened.experts[layer].copies) == 1 for layer in layers[2:])
        file = opened.experts[layers[1]]
        assert (mirror / file.name).stat().st_size == file.n_bytes
        assert (mirror / file.name).stat().st_blocks * 512 < file.n_bytes // 2, "holes"
        assert "3 experts" in run("verify", model, mirror).output
        shown = run("plan", model, mirror, "--size", f"{3 * size}B", "--disk", "3", "--mirror-disk", "2")
        assert "3 are there" in shown.output and "to copy: 0 bytes" in shown.output
        inode = (mirror / file.name).stat().st_ino
        assert "1 experts copied" in run("stage", model, mirror, "--size", f"{4 * size}B").output
        assert (mirror / file.name).stat().st_ino == inode, "a running group may have it open"
        staged(model, mirror)
        assert all(
            copy.held is None for file in Container.open(model, (mirror,)).experts.values() for copy in file.copies
        )
        for file in container.experts.values():
            assert (mirror / file.name).read_bytes() == (model / file.name).read_bytes()
    finally:
        path.unlink()


def test_a_model_may_live_from_its_mirrors(model: Path, tmp_path: Path) -> None:
    """Half of the records here, the other half there, none in the model directory; one missing record is named."""
    container = Container.open(model)
    half = staged(model, tmp_path / "half", "--size", f"{8 * sum(f.record_bytes for f in container.experts.values())}B")
    whole = staged(model, tmp_path / "whole")
    for file in container.experts.values():
        (model / file.name).unlink()
    assert [copy.place for copy in Container.open(model, (half, whole)).experts[1].copies] == [1, 2]
    with pytest.raises(ContainerError, match=r"expert 8 of experts-001.safetensors is missing; looked in .*half"):
        Container.open(model, (half,))


def test_interrupted_work_goes_on_and_torn_bytes_are_copied_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = Container.open(model)
    mirror = tmp_path / "mirror"
    n_all = sum(file.n_experts for file in container.experts.values())
    names = [file.name for _, file in sorted(container.experts.items())]

    def interrupted(n: int) -> Callable[[int], None]:
        left = [n]

        def progress(n_bytes: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        stage(container, plan_staging(container, mirror, None, {}), interrupted(21))
    assert json.loads((mirror / MANIFEST_NAME).read_text())["files"].keys() == {names[0]}
    partial = mirror / f"{names[1]}.partial"
    assert partial.exists() and not (mirror / names[1]).exists()
    assert Container.open(model, (mirror,)).experts[sorted(container.experts)[1]].copies[0].place == 0
    file = container.experts[sorted(container.experts)[1]]
    with partial.open("r+b") as out:  # a power cut
        out.seek(file.offset_of(2) + 77)
        out.write(b"\0" * 64)
    os.replace(mirror / names[0], mirror / "kept")
    (mirror / "kept").rename(mirror / names[0])
    plan = plan_staging(container, mirror, None, {})
    assert 0 < plan.allocated < plan.n_bytes
    seen: list[int] = []
    n_copied = stage(container, plan, seen.append)
    assert sum(seen) == plan.n_bytes
    assert n_all - 16 - 6 <= n_copied <= n_all - 16 - 4, "five of the second file's were there, one of them torn"
    for name in names:
        assert (mirror / name).read_bytes() == (model / name).read_bytes()
    manifest = msgspec.json.decode((mirror / MANIFEST_NAME).read_bytes())
    del manifest["files"][names[2]]  # renamed, and then the power went
    (mirror / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    assert stage(container, plan_staging(container, mirror, None, {})) == 0
    assert not list(mirror.glob("*.partial"))
    assert "all checksums agree" in run("verify", model, mirror).output


def test_what_can_not_be_staged_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = Container.open(model)
    assert "never written to" in refused("stage", model, model / "mirror")
    assert "never written to" in refused("stage", model, model)
    assert "is not a size" in refused("plan", model, tmp_path / "m", "--size", "much")
    (tmp_path / "file").write_text("")
    assert "can't be used as a mirror" in refused("stage", model, tmp_path / "file" / "x")
    stat = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 100, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    shown = run("plan", model, tmp_path / "m").output
    assert "more than are free" in shown and "free 409,600" in shown
    words = refused("stage", model, tmp_path / "m")
    assert "409,600 free" in words and "another drive" in words and "--size" not in words
    larger = StagePlan(tmp_path, {}, {}, n_bytes=9 << 20, allocated=0, free=4 << 20, is_listed=False)
    with pytest.raises(CapacityError, match="--size 3M"):
        larger.require_room()
    monkeypatch.setattr(os, "statvfs", lambda path: stat)
    assert not (tmp_path / "m").exists()

    def full(out: object, data: object, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "_write_at", full)
    with pytest.raises(CapacityError, match="goes on from there"):
        stage(container, plan_staging(container, tmp_path / "m", None, {}))
    monkeypatch.undo()
    file = container.experts[1]
    with (model / file.name).open("r+b") as out:
        out.seek(file.offset_of(6) + 1)
        out.write(b"\x99" * 64)
    with pytest.raises(ChecksumMismatch, match=r"layer 1 expert 6"):
        stage(container, plan_staging(container, tmp_path / "m", None, {}))
    with staging.lock_of(tmp_path / "m"):
        assert "Another process is writing" in refused("stage", model, tmp_path / "m")


def test_verify_names_what_is_damaged_and_exits_with_1(model: Path, tmp_path: Path) -> None:
    mirror = staged(model, tmp_path / "mirror")
    file = Container.open(model).experts[1]
    with (mirror / file.name).open("r+b") as out:
        out.seek(file.offset_of(4) + 50)
        out.write(b"\x11\x22" * 20)
    result = run("verify", model, mirror)
    assert result.exit_code == 1
    assert f"damaged: {mirror / file.name}: layer 1 expert 4" in result.stderr and "1 of" in result.stderr
    (mirror / file.name).unlink()
    staged(model, mirror)
    assert run("verify", model, mirror).exit_code == 0


def test_the_rate_of_several_drives() -> None:
    first, second, either = frozenset({0}), frozenset({1}), frozenset({0, 1})
    for share, rate in ((1.0, 5.0), (0.4, 5.0), (0.2, 3.75), (0.0, 3.0)):
        assert total_rate([3.0, 2.0], {either: share, first: 1 - share}) == pytest.approx(rate)
    assert total_rate([3.0, 2.0], {first: 0.5, second: 0.5}) == pytest.approx(4.0), "split: the slower one decides"
    assert total_rate([3.0, 2.0, 1.0], {either: 0.5, frozenset({2}): 0.5}) == pytest.approx(2.0)
    assert total_rate([3.0, 2.0, 1.0], {frozenset({0, 1, 2}): 1.0}) == pytest.approx(6.0)
    assert total_rate([3.0], {first: 1.0}) == 3.0


def test_shares_are_those_of_the_bytes(model: Path, tmp_path: Path) -> None:
    total = sum(file.n_bytes - file.data_offset for file in Container.open(model).experts.values())
    mirror = staged(model, tmp_path / "mirror", "--size", f"{total // 2}B")
    container = Container.open(model, (mirror,))
    shares = container.shares((0, 1))
    assert shares.keys() == {frozenset({0}), frozenset({0, 1})} and sum(shares.values()) == pytest.approx(1)
    assert shares[frozenset({0, 1})] == pytest.approx(0.5, abs=0.02)
    assert container.shares((0, 0)) == {frozenset({0}): pytest.approx(1)}
