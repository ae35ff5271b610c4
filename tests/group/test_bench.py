"""``colibri bench decode`` and ``prefill`` from end to end on a tiny model. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conversion.presets import preset_config
from conversion.synth import Synthesis

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.group, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    Synthesis(preset_config("tiny", 4), "int4").run(path, n_threads=1)
    return path


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", "bench", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if "can't be opened for direct reads" in done.stderr:
        pytest.skip("this file system has no direct reads")
    return done


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == 1
    return found


def test_start_of_the_embedded_model() -> None:
    found = document(bench("start", "--rounds", "1", "--json"))
    (one,) = found["rounds"]
    assert all(seconds > 0 for seconds in one.values())


def test_decode_with_and_without_the_pilot(model: Path) -> None:
    found = document(
        bench("decode", model, "--tokens", "240", "--rounds", "1", "--slots", "16", "--pilot", "both", "--json")
    )
    assert [setting["pilot"] for setting in found["settings"]] == ["on", "off"]
    assert found["ratio"]["median"] > 0
    for setting in found["settings"]:
        assert (setting["place"]["n_slots"], setting["place"]["n_experts"]) == (16, 48)
        (one,) = setting["rounds"]
        reads = one["reads"]
        # At most four experts in each of three layers; the client sees tokens of so small a model in bursts.
        assert 0 < reads["hits"] + reads["late_hits"] + reads["misses"] <= 241 * 3 * 4
        assert reads["demand_bytes"] > 0
        assert 0 < reads["share"] < 1
        assert one["moe_ms"] > 0
        assert 0 < one["compute_ms"] < 1000
    assert found["settings"][1]["rounds"][0]["reads"]["speculative_bytes"] == 0


def test_prefill_reads_each_expert_once(model: Path) -> None:
    found = document(bench("prefill", model, "--prompt", "48", "--rounds", "1", "--slots", "16", "--json"))
    assert found["is_read_once"] is True
    (one,) = found["rounds"]
    assert one["asked"] == 48  # every expert of three layers
    assert 0 < one["read"] <= 48
    assert one["n_chunks"] == 1
    assert one["reads"]["seconds"] == pytest.approx(one["first_token_s"], rel=0.2)


def test_what_does_not_fit_is_refused_in_sentences(model: Path) -> None:
    done = bench("decode", model, "--ram", "1M")
    assert done.returncode == 70
    assert "colibri-up ended with 78" in done.stderr
    assert "Traceback" not in done.stderr
    done = bench("prefill", model, "--prompt", "99999999")
    assert done.returncode == 70
    assert "the model has room for" in done.stderr


def test_resident_measures_beside_memory(model: Path) -> None:
    found = document(bench("resident", model, "--prompt", "24", "--tokens", "8", "--rounds", "1", "--json"))
    one = found["rounds"][0]
    assert len(one["touches_s"]) >= 2
    assert one["bandwidth_gb_s"] > 0
    assert 0 < one["bound_share"] < 1
    assert 0 < one["rest_share"] < 1
