"""``colibri bench store``: one quick run on a tiny model, and its arithmetic. No figure is judged here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.drive import DriveCeiling
from bench.roofline import BenchError
from bench.store import Delay, Rate, Records, StoreResults, as_json, as_text
from cli.main import cli
from conversion.presets import preset_config
from conversion.synth import Synthesis
from shared.container.reader import Container
from shared.machine.drive import DEFAULT
from tests.support import inside


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    Synthesis(preset_config("tiny", 4), "int4").run(path, n_threads=1)
    file = Container.open(path).experts[1]
    try:
        DriveCeiling(file.path, file.record_bytes).__exit__(None, None, None)
    except BenchError as error:
        pytest.skip(str(error))
    return path


def test_a_quick_run_measures_everything(model: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", "store", str(model), "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == 1
    assert found["record_bytes"] == 8192
    assert found["n_files"] == 3
    assert found["setting"]["engine"] in ("threads", "uring")
    assert set(found["cases"]) == {"plain", "checksums"}
    for case in found["cases"].values():
        assert len(case["rounds"]) == 2
        for one in case["rounds"]:
            assert one["gb_s"] > 0
            assert one["share"] == pytest.approx(one["gb_s"] / one["ceiling_gb_s"])
    for one in found["delay"]["rounds"]:
        assert min(one["alone_ms"], one["beside_ms"], one["ideal_ms"], one["guess_gb_s"]) > 0


def test_what_is_read_lies_in_the_slot(model: Path) -> None:
    container = Container.open(model)
    files = list(container.experts.values())
    wanted = set()
    for file in files:
        data = file.path.read_bytes()
        wanted |= {data[file.offset_of(e) : file.offset_of(e) + file.record_bytes] for e in range(file.n_experts)}
    with Records(files, DEFAULT) as records, records.reader() as reader:
        n_bytes = records.submit(reader, 1, 1)
        while not reader.take():
            pass
        slot = records.buffer.array[records.slot_bytes : records.slot_bytes + n_bytes]
        assert slot.tobytes() in wanted


def test_a_failed_read_is_no_rate(model: Path, tmp_path: Path) -> None:
    (file, *_) = Container.open(model).experts.values()
    with Records([file], DEFAULT) as records:
        null = os.open(tmp_path, os.O_RDONLY)
        right = inside.replace_descriptor(records, file.layer, null)
        with pytest.raises(BenchError, match="failed"):
            records.rate(0.01, has_checksum=False)
        os.close(inside.replace_descriptor(records, file.layer, right))


def test_shares_and_delays() -> None:
    report = StoreResults("m", 20_000_000, 6, DEFAULT)
    report.rates = {"plain": [Rate(1e9, 2e9), Rate(3e9, 4e9)], "checksums": [Rate(1e9, 4e9)]}
    report.delays = [Delay(0.010, 0.012, 0.008, 5e8)]
    document = as_json(report)
    assert document["cases"]["plain"]["medians"]["share"] == {"median": 0.625, "least": 0.5, "most": 0.75}
    assert document["delay"]["medians"]["delay_ms"]["median"] == pytest.approx(2.0)
    text = as_text(report)
    assert "62% (50% to 75%)" in text
    assert "4 pieces of 2 MiB" in text
