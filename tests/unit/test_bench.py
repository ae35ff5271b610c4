"""``colibri bench``: the arithmetic of bounds and shares, and one run at tiny sizes. No figure is judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import measure
from bench.attention import attention_work, keys_seen
from bench.gqa import gqa_work
from bench.kernels import KernelResults, Machine
from bench.kernels_report import as_text
from bench.measure import Case, Measurement, Meter, last_cache_bytes, limits_of
from bench.products import expert_bytes, expert_cases
from bench.roofline import BenchError, Limits, Work, bound_of
from bench.sharing import Sharing
from bench.sizes import SIZES
from cli.main import cli
from native.library import Pool, available_isas, isa_current
from native.memory import HugeBuffer

GLM = SIZES["glm-5.2"]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_the_slower_limit_is_the_bound() -> None:
    limits = Limits(10e9, {"f32": 100e9, "int8": 1000e9})
    assert bound_of(Work(1000, {"f32": 1000}), limits).by == "memory"
    assert bound_of(Work(1000, {"f32": 1000}), limits).ns == pytest.approx(100)
    computing = bound_of(Work(1000, {"f32": 20_000, "int8": 50_000}), limits)
    assert computing.by == "f32"
    assert computing.ns == pytest.approx(200 + 50)  # both kinds need the same units
    assert bound_of(Work(0, {"int8": 1}), limits).by == "int8"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_broken_limits_are_refused(rate: float) -> None:
    with pytest.raises(BenchError, match="memory"):
        Limits(rate, {})
    with pytest.raises(BenchError, match="int8"):
        Limits(1e9, {"int8": rate})


def test_work_without_a_limit_or_without_content_is_refused() -> None:
    with pytest.raises(BenchError, match="int4"):
        bound_of(Work(1, {"int4": 5}), Limits(1e9, {"f32": 1e9}))
    with pytest.raises(BenchError, match="no bound"):
        bound_of(Work(0, {}), Limits(1e9, {}))


def test_limits_are_chosen_name_by_name() -> None:
    samples = [{"memory": [1.0, 3.0], "f32": [9.0]}, {"memory": [2.0], "f32": [7.0, 8.0]}]
    assert limits_of(samples, max) == Limits(3.0, {"f32": 9.0})


def test_work_of_experts_is_that_of_the_model() -> None:
    assert expert_bytes(GLM) == 3 * 6144 * 2048 * (64 // 2 + 2) // 64  # a nibble each, an f16 for each 64
    with Pool(1) as pool:
        cases = expert_cases(pool, SIZES["tiny"], 1 << 16)
        case: Case = next(cases)
        cases.close()
    assert case.work.ops == {"int4": 2 * 3 * 128 * 64 * 4}


def test_work_of_attention_counts_keys_and_projections() -> None:
    assert keys_seen(10, 1) == 11
    assert keys_seen(10, 3) == 11 + 12 + 13
    near, far = attention_work(GLM, 511, 1), attention_work(GLM, 4095, 1)
    assert far.n_bytes - near.n_bytes == 3584 * 1152
    assert far.ops["f32"] - near.ops["f32"] == 3584 * 64 * (2 * 512 + 64) * 2
    assert far.ops["int4"] == near.ops["int4"] == 2 * 165_019_648


def test_work_of_grouped_queries_reads_each_key_once_for_its_group() -> None:
    near, far = (gqa_work(2048, 32, 4, 128, context, 1) for context in (511, 4095))
    assert far.n_bytes - near.n_bytes == 3584 * 2 * 4 * 128 * 2
    assert far.ops["f32"] - near.ops["f32"] == 3584 * 32 * 2 * 128 * 2
    assert near.ops["int4"] == 2 * 2048 * 128 * (32 + 4 + 4 + 32)


def test_last_caches_are_counted_once_each(tmp_path: Path) -> None:
    for cpu, (shared, size) in enumerate([("0-1", "32768K"), ("0-1", "32768K"), ("2", "8M")]):
        for index, text in ((0, "32K"), (3, size)):
            directory = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            directory.mkdir(parents=True)
            (directory / "size").write_text(f"{text}\n")
            (directory / "shared_cpu_list").write_text(f"{shared}\n")
    assert last_cache_bytes(root=tmp_path) == (32 + 8) << 20
    assert last_cache_bytes([2], root=tmp_path) == 8 << 20
    assert last_cache_bytes([7], root=tmp_path) == 32 << 20  # unknown: a guess


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    before = isa_current()
    done = CliRunner().invoke(cli, ["bench", "kernels", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert isa_current() == before
    return done.stdout


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--json", "--quick", "--size", "tiny", "--threads", "2"))
    return found


def test_the_document_is_complete_and_consistent(document: dict[str, Any]) -> None:
    assert document["schema"] == 1
    assert document["machine"]["n_threads"] == 2
    assert document["machine"]["available_isas"] == available_isas()
    assert set(document["limits"]) == {"read_gb_s", "f32_gop_s", "int8_gop_s", "int4_gop_s"}
    assert all(math.isfinite(rate) and rate > 0 for rate in document["limits"].values())
    families = {row["family"] for row in document["kernels"]}
    assert families >= {"expert_ffn", "linear", "head", "gate", "mla_decode", "mla_keys", "mla_prefill", "indexer"}
    assert families >= {"gqa_decode", "gqa_keys", "gqa_prefill", "delta_decode", "delta_state", "delta_prefill"}
    for row in document["kernels"]:
        memory_ns = row["bytes"] / row["limits"]["read_gb_s"]
        compute_ns = sum(n / row["limits"][f"{kind}_gop_s"] for kind, n in row["ops"].items() if n)
        assert row["bound_ns"] == pytest.approx(max(memory_ns, compute_ns))
        assert (row["bound"] == "memory") == (memory_ns >= compute_ns)
        assert row["share"] == pytest.approx(row["bound_ns"] / row["ns"])
        assert row["memory_share"] == pytest.approx(memory_ns / row["ns"])
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["ns"])
        assert row["gop_s"] == pytest.approx(sum(row["ops"].values()) / row["ns"])
        assert 0 < row["best_ns"] <= row["ns"]
        assert row["n_runs"] >= 3


def test_the_head_is_measured_as_it_runs(document: dict[str, Any]) -> None:
    heads = [row for row in document["kernels"] if row["family"] == "head"]
    assert [row["case"].split(" x ")[-1] for row in heads] == ["1 rows", "2 rows", "4 rows", "8 rows"]
    assert all(set(row["ops"]) == {"int8"} for row in heads)


def test_memory_is_touched_before_and_a_slow_first_touch_is_told() -> None:
    times = iter([4e9, 1e9, 1e9, 1e9])  # bytes a second: a first pass, the next one; then the other array

    def rates(pool: Pool, array: np.ndarray, ahead: bool) -> float:
        return 1 / next(times)

    with Pool(1) as pool, HugeBuffer(1 << 16) as plain, pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "read_rate", rates)
        arrays = (plain.array[:4096], plain.array[4096:8192])
        assert Meter(pool, plain).touch(arrays) == pytest.approx((4 + 1) / (1 + 1))
        assert not list(times)
    limits, work = Limits(1e9, {}), Work(10)
    bound = bound_of(work, limits)
    machine = Machine("a processor", 1, "ref", ("ref",), "", 1, 0.0)
    for first_touch, is_told in ((1.1, False), (4.5, True)):
        row = Measurement("head", "q8", work, 20.0, 3, limits, bound, 20.0, bound, first_touch)
        text = as_text(KernelResults(machine, "tiny", limits, (row,), Sharing({"experts": 1.0}, 1.0, 1)))
        assert ("took 4.5 times as long at first" in text) == is_told


def test_two_processes_take_turns(document: dict[str, Any]) -> None:
    sharing = document["sharing"]
    assert set(sharing["alone_ns"]) == {"experts", "attention"}
    assert sharing["ratio"] == pytest.approx(sharing["pair_ns"] / sum(sharing["alone_ns"].values()))
    assert sharing["n_pairs"] >= 3


def test_the_table_shows_every_case_and_a_rung_can_be_forced(document: dict[str, Any]) -> None:
    text = run("--quick", "--size", "tiny", "--isa", "ref", "--threads", "1")
    assert "1 threads, ref" in text
    for row in document["kernels"]:
        assert row["case"] in text


def test_a_rung_that_is_not_there_is_refused_with_a_sentence() -> None:
    missing = [isa for isa in ("amx", "avx512vnni") if isa not in available_isas()]
    if not missing:
        pytest.skip("this machine has every rung")
    done = CliRunner().invoke(cli, ["bench", "kernels", "--isa", missing[0]])
    assert done.exit_code
    assert "this machine offers" in str(done.exception)
