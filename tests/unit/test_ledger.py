"""The ledger: nothing is given out twice, nothing beyond the budget, and the refusal shows its arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conversion.presets import preset_config
from shared.container.format import PRECISIONS, Facts, plan_container, plan_facts
from shared.errors import CapacityError, ConfigError
from shared.machine.memory_probe import probe_memory
from shared.model.family import spec_of
from shared.model.kv_layout import KV_BLOCK, kv_layout
from shared.model.spec import ModelSpec
from shared.planning.ledger import BUDGET_SHARE, Ledger, make_ledger
from shared.planning.slot_share import change_budget
from shared.run.config import GroupConfig, Settings
from tests.oracle import oracle_config

MIB = 1 << 20
GIB = 1 << 30


def frames(spec: ModelSpec, rows: int, logit_rows: int, sequences: int, blocks: int) -> int:
    """Close enough to the C layout, and needs no native library."""
    return rows * spec.hidden * 16 + logit_rows * spec.vocab * 4 + sequences * blocks * 4


def model(preset: str, layers: int = 4, mtp: bool = False, precision: str = "int4") -> tuple[ModelSpec, Facts]:
    spec = spec_of(preset_config(preset, layers, mtp))
    return spec, plan_facts(spec, plan_container(spec, PRECISIONS[precision]))


def ledger(spec: ModelSpec, facts: Facts, available: int, shm: int | None = None, **settings: Any) -> Ledger:
    return make_ledger(spec, facts, Settings(**settings), available, shm, frames)


@pytest.mark.parametrize("available", [8, 16, 24, 64, 512])
@pytest.mark.parametrize("layers", [4, 12])
def test_never_more_than_the_budget(available: int, layers: int) -> None:
    spec, facts = model("glm-5.2", layers, mtp=True)
    made = ledger(spec, facts, available * GIB)
    assert made.total_bytes <= made.budget_bytes == int(available * GIB * BUDGET_SHARE)
    assert spec.gate_k + 1 <= made.n_slots <= made.n_experts
    # What is left would not hold one more slot, unless every expert has one.
    assert made.n_slots == made.n_experts or made.budget_bytes - made.total_bytes < made.slot_bytes
    assert made.n_kv_blocks * KV_BLOCK >= made.max_sequences * made.max_context


def test_every_part_of_the_model_is_in_it() -> None:
    spec, facts = model("glm-5.2", 4, mtp=True)
    made = ledger(spec, facts, 512 * GIB)
    by_owner: dict[str, list[int]] = {}
    for line in made.lines:
        by_owner.setdefault(line.owner, []).append(line.bytes)
    assert facts.dense_bytes in by_owner["attention"]
    assert facts.gate_bytes in by_owner["router"]
    assert facts.shared_bytes in by_owner["expert_io"]
    assert facts.mtp_bytes in by_owner["drafter"]
    assert made.n_slots * made.slot_bytes in by_owner["expert_io"]
    kv = kv_layout(spec.main_attention, "bf16", made.n_kv_blocks).total_bytes
    mtp_kv = kv_layout(spec.mtp_attention, "bf16", made.n_kv_blocks).total_bytes
    assert {kv, mtp_kv} <= set(by_owner["shared"])
    assert made.segment_bytes == sum(by_owner["shared"])
    assert {"gateway", "group"} <= set(by_owner)


def test_slots_hold_the_largest_record_in_use() -> None:
    """Without drafting the MTP layer's larger (int8) records need no slot."""
    spec, facts = model("glm-5.2", 4, mtp=True)
    assert max(facts.record_bytes) > facts.record_bytes[0]
    with_drafts = ledger(spec, facts, 512 * GIB, draft=2)
    without = ledger(spec, facts, 512 * GIB, draft="off")
    assert with_drafts.slot_bytes >= max(facts.record_bytes) > without.slot_bytes >= facts.record_bytes[0]
    assert with_drafts.n_experts == 4 * 256
    assert without.n_experts == 3 * 256
    assert without.slot_bytes % (2 << 20) == 0  # 4 % lost to whole huge pages
    tiny_spec, tiny_facts = model("tiny")
    assert ledger(tiny_spec, tiny_facts, GIB).slot_bytes == 8192  # a huge page would waste nearly all of itself


def test_drafting_is_on_where_everything_is_resident() -> None:
    spec, facts = model("glm-5.2", 4, mtp=True)
    assert ledger(spec, facts, 512 * GIB).n_drafts == 2
    assert ledger(spec, facts, 16 * GIB).n_drafts == 0
    assert ledger(spec, facts, 16 * GIB, draft=1).n_drafts == 1
    assert ledger(spec, facts, 512 * GIB, draft="off").n_drafts == 0
    no_mtp, no_mtp_facts = model("glm-5.2", 4)
    assert ledger(no_mtp, no_mtp_facts, 512 * GIB).n_drafts == 0
    with pytest.raises(ConfigError, match="no MTP layer"):
        ledger(no_mtp, no_mtp_facts, 512 * GIB, draft=2)


@pytest.mark.parametrize("family", ["latent", "grouped"])
def test_an_int8_cache_is_half_of_a_bf16_one(family: str) -> None:
    spec, facts = model("glm-5.2", 4, mtp=True)
    of_bf16 = 594 / 1152  # a byte a value and a scale for each 64
    if family == "grouped":
        spec = spec_of(oracle_config("glm4_moe"))
        facts = plan_facts(spec, plan_container(spec, PRECISIONS["int4"]))
        dim = spec.attention[0].rows[0].n_values
        of_bf16 = (4 * -(-dim // 4) + 2 * -(-dim // 64)) / (2 * dim)

    def kv_bytes(kv_dtype: str) -> list[int]:
        made = ledger(spec, facts, 512 * GIB, kv_dtype=kv_dtype, max_context=128, draft=int(family == "latent"))
        return [line.bytes for line in made.lines if line.what.startswith("KV")]

    halves = kv_bytes("int8")
    assert halves
    for half, whole in zip(halves, kv_bytes("bf16"), strict=True):
        assert half == pytest.approx(whole * of_bf16, rel=0.02)


def test_asked_for_values_are_kept() -> None:
    spec, facts = model("tiny", mtp=True)
    made = ledger(
        spec,
        facts,
        8 * GIB,
        ram_bytes=GIB,
        slots=7,
        threads=3,
        kv_dtype="f32",
        prefill_chunk=5,
        draft=1,
        max_context=100,
        max_sequences=2,
    )
    assert made.budget_bytes == GIB
    assert (made.n_slots, made.n_threads, made.kv_dtype, made.prefill_chunk) == (7, 3, "f32", 5)
    assert (made.n_drafts, made.max_context, made.max_sequences, made.n_kv_blocks) == (1, 100, 2, 4)
    assert made.logit_rows == 4
    assert ledger(spec, facts, 8 * GIB, prefill_chunk=5, max_sequences=2, draft=1, record_logits="x").logit_rows == 9


def test_fewest_slots() -> None:
    spec, facts = model("tiny")
    assert ledger(spec, facts, 8 * GIB, slots=spec.gate_k + 1).n_slots == spec.gate_k + 1
    with pytest.raises(ConfigError, match=r"slots = 4: at least 5"):
        ledger(spec, facts, 8 * GIB, slots=spec.gate_k)


def test_a_context_that_holds_no_answer() -> None:
    spec, facts = model("tiny")
    assert ledger(spec, facts, 8 * GIB, max_context=2).max_context == 2
    with pytest.raises(ConfigError, match=r"max_context = 1: at least 2"):
        ledger(spec, facts, 8 * GIB, max_context=1)


def test_context_has_a_sensible_default() -> None:
    spec, facts = model("glm-5.2", 12)
    assert ledger(spec, facts, 512 * GIB).max_context == 8192
    small = ledger(spec, facts, 12 * GIB)
    assert 256 <= small.max_context <= 8192
    tiny_spec, tiny_facts = model("tiny")
    assert ledger(tiny_spec, tiny_facts, GIB).max_context == tiny_spec.max_context
    with pytest.raises(ConfigError, match="max_context"):
        ledger(tiny_spec, tiny_facts, GIB, max_context=tiny_spec.max_context + 1)


def test_refusal_shows_the_arithmetic() -> None:
    spec, facts = model("glm-5.2", 4)
    with pytest.raises(CapacityError) as caught:
        ledger(spec, facts, 2 * GIB)
    text = str(caught.value)
    assert "does not fit" in text
    assert "Give more memory" in text
    numbers = {
        what: int(size.replace(",", "")) for what, size in re.findall(r"^(\w+) .*? ([\d,]+)$", text, re.MULTILINE)
    }
    rows = [int(size.replace(",", "")) for _, size in re.findall(r"^(\w+) .*? ([\d,]+)$", text, re.MULTILINE)]
    assert sum(rows[:-3]) == numbers["sum"]
    assert numbers["sum"] - numbers["budget"] == numbers["missing"] > 0
    assert f"{facts.dense_bytes - facts.embed_bytes:,}" in text  # it does not fit with the embedding on disk either
    assert "9 expert slots" in text


def test_the_embedding_stays_on_disk_where_there_are_few_slots() -> None:
    """A token reads one row of it: its memory is a few more slots. Never against what was asked for."""
    spec, facts = model("glm-5.2", 4)
    same: dict[str, Any] = {"max_context": 2048, "prefill_chunk": 64}
    few, many = (ledger(spec, facts, size * GIB, **same) for size in (4, 12))
    assert (few.embedding_on_disk, many.embedding_on_disk) == (True, False)
    assert many.n_slots >= many.n_experts / 4
    kept = ledger(spec, facts, 4 * GIB, embedding="memory", **same)
    assert not kept.embedding_on_disk
    assert few.n_slots - kept.n_slots == pytest.approx(facts.embed_bytes / few.slot_bytes, abs=1)
    assert ledger(spec, facts, 12 * GIB, embedding="disk").embedding_on_disk
    assert not ledger(spec, facts, 12 * GIB, slots=10).embedding_on_disk
    for made in (few, many, kept):
        assert made.total_bytes <= made.budget_bytes


def test_an_embedding_that_is_most_of_the_model_needs_its_memory_while_it_is_verified() -> None:
    spec, facts = model("tiny", 4)
    facts = msgspec.structs.replace(facts, dense_bytes=1000 * MIB, embed_bytes=900 * MIB)
    made = ledger(spec, facts, 8 * GIB, embedding="disk")
    assert next(line.bytes for line in made.lines if line.what.startswith("dense part")) == 900 * MIB


def test_two_gib_hold_four_layers_of_glm_5_2() -> None:
    """Without a tokenizer, as made-up models are: nine slots are left."""
    spec, facts = model("glm-5.2", 4)
    facts = msgspec.structs.replace(facts, has_tokenizer=False)
    settings: dict[str, Any] = {"draft": "off", "max_sequences": 1, "max_context": 96, "ram_bytes": 1990 * MIB}
    made = ledger(spec, facts, 2 * GIB, **settings)
    assert made.embedding_on_disk
    assert made.n_slots >= spec.gate_k + 1
    with pytest.raises(CapacityError, match="does not fit"):
        ledger(spec, facts, 2 * GIB, embedding="memory", **settings)


def test_who_does_not_run_needs_no_memory() -> None:
    spec, facts = model("glm-5.2", 4, mtp=True)
    without, with_drafts = (ledger(spec, facts, 64 * GIB, draft=draft) for draft in ("off", 2))
    assert not [line for line in without.lines if line.owner == "drafter"]
    assert {"process", "MTP layer without its experts"} <= {
        line.what for line in with_drafts.lines if line.owner == "drafter"
    }
    bare = ledger(spec, msgspec.structs.replace(facts, has_tokenizer=False), 64 * GIB)
    assert not [line for line in bare.lines if line.what.startswith("tokenizer")]


def test_slots_that_do_not_fit() -> None:
    spec, facts = model("glm-5.2", 4)
    with pytest.raises(CapacityError, match="at least 700 expert slots"):
        ledger(spec, facts, 12 * GIB, slots=700)


def test_as_many_slots_as_possible() -> None:
    spec, facts = model("glm-5.2", 4)
    assert ledger(spec, facts, 12 * GIB, slots="all") == ledger(spec, facts, 12 * GIB)
    made = ledger(spec, facts, 512 * GIB, slots=5000)
    assert made.n_slots == made.n_experts == 768


def test_drafting_costs_the_slots_what_its_lines_say() -> None:
    """G5: the same budget, the same sum; what the drafter, its cache and its rows take is missing from the slots."""
    spec, facts = model("glm-5.2", 4, mtp=True)
    settings: dict[str, Any] = {"prefill_chunk": 256, "max_context": 4096, "embedding": "memory"}
    without = ledger(spec, facts, 16 * GIB, draft="off", **settings)
    with_drafts = ledger(spec, facts, 16 * GIB, draft=2, **settings)
    assert without.budget_bytes == with_drafts.budget_bytes
    more = sum(line.bytes for line in with_drafts.fixed) - sum(line.bytes for line in without.fixed)
    drafter = sum(line.bytes for line in with_drafts.lines if line.owner == "drafter")
    assert more > drafter > facts.mtp_bytes
    assert not any(line.owner == "drafter" for line in without.lines)
    left_without = without.n_slots * without.slot_bytes
    left_with = with_drafts.n_slots * with_drafts.slot_bytes
    assert left_without - more - with_drafts.slot_bytes < left_with <= left_without - more + without.slot_bytes
    for made in (without, with_drafts):
        assert made.budget_bytes - made.total_bytes < made.slot_bytes


def test_what_is_recorded_is_in_it() -> None:
    spec, facts = model("tiny")
    plain = ledger(spec, facts, 4 * GIB)
    recording = ledger(spec, facts, 4 * GIB, record_routing="x")
    assert recording.total_bytes - plain.total_bytes >= 8 << 20


@pytest.mark.parametrize("wanted", [0.5, 0.9, 1.0, 1.1])
def test_another_budget_for_a_running_group(wanted: float) -> None:
    """The running group's arithmetic is the start's."""
    spec, facts = model("glm-5.2", 4)
    settings: dict[str, Any] = {"draft": "off", "prefill_chunk": 128, "max_context": 1024, "embedding": "memory"}
    made = make_ledger(spec, facts, Settings(**settings), 14 * GIB, None, frames, reservable_bytes=24 * GIB)
    config = running(made)
    n_bytes = int(wanted * made.budget_bytes)
    changed = change_budget(config, spec.gate_k, made.budget_bytes, n_bytes, made.n_slots, 4 * GIB)
    anew = make_ledger(spec, facts, Settings(ram_bytes=n_bytes, **settings), 14 * GIB, None, frames)
    assert changed == anew.n_slots
    assert (changed - made.n_slots) * (wanted - 1.0) >= 0


def test_a_running_group_refuses_what_can_not_be() -> None:
    spec, facts = model("glm-5.2", 4)
    made = make_ledger(spec, facts, Settings(draft="off"), 14 * GIB, None, frames, reservable_bytes=24 * GIB)
    config = running(made)
    least = sum(line.bytes for line in made.fixed) + 9 * made.slot_bytes
    assert change_budget(config, 8, made.budget_bytes, least, made.n_slots, 0) == 9
    with pytest.raises(CapacityError, match=r"at least 9 expert slots(.|\n)*missing"):
        change_budget(config, 8, made.budget_bytes, least - 1, made.n_slots, 0)
    with pytest.raises(CapacityError, match=r"14\.00 GiB are asked for, but only"):
        change_budget(config, 8, made.budget_bytes, 14 * GIB, made.n_slots, GIB)
    # The machine may have become short of memory since: that is no reason to refuse to give some back.
    assert change_budget(config, 8, made.budget_bytes, made.budget_bytes - GIB, 0, 0) < made.n_slots


def running(made: Ledger) -> GroupConfig:
    return GroupConfig(
        run_id="x",
        run_dir="/x",
        model_dir="/m",
        host="",
        port=0,
        ram_bytes=made.budget_bytes,
        n_slots=made.n_slots,
        slot_bytes=made.slot_bytes,
        reserved_slots=made.reserved_slots,
        n_experts=made.n_experts,
        memory=made.fixed,
        n_threads=1,
        kv_dtype="bf16",
        prefill_chunk=made.prefill_chunk,
        pilot="off",
        n_drafts=0,
        max_sequences=made.max_sequences,
        max_context=made.max_context,
        n_kv_blocks=made.n_kv_blocks,
        n_frames=2,
        logit_rows=made.logit_rows,
    )


def test_more_than_there_is() -> None:
    spec, facts = model("tiny")
    with pytest.raises(CapacityError, match=r"ram = 9\.00 GiB .* 8\.00 GiB are available"):
        ledger(spec, facts, 8 * GIB, ram_bytes=9 * GIB)


def test_shared_memory_that_is_too_small() -> None:
    """Containers often have a /dev/shm of 64 MiB."""
    spec, facts = model("glm-5.2", 4)
    with pytest.raises(CapacityError, match=r"/dev/shm has 64\.00 MiB free.*shm-size"):
        ledger(spec, facts, 64 * GIB, 64 << 20)


def test_frame_size_comes_from_the_native_library() -> None:
    pytest.importorskip("native.frame")
    spec, facts = model("tiny", mtp=True)
    made = make_ledger(spec, facts, Settings(), 4 * GIB)
    from shared.step.frame import FrameDims, frame_bytes, stage_rows

    rows = made.prefill_chunk + made.max_sequences * (1 + made.n_drafts)
    blocks = made.n_kv_blocks // made.max_sequences
    dims = FrameDims(
        rows,
        made.logit_rows,
        made.max_sequences,
        blocks,
        spec.hidden,
        spec.gate_k,
        spec.vocab,
        stage_rows(spec),
        0,
    )
    assert made.n_frames * frame_bytes(dims) in [line.bytes for line in made.lines]


@pytest.mark.parametrize("draft", ["off", 2])
def test_segments_of_a_group_are_what_the_ledger_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: Any
) -> None:
    """What colibri-up creates in shared memory is covered, line by line in sum, by the ledger."""
    from conversion.synth import Synthesis
    from deploy.launch import create_segments, make_plan
    from shared.memory.segments import Segment

    Synthesis(preset_config("tiny", 3, has_mtp=True), "int4").run(tmp_path / "model")
    created: dict[str, int] = {}

    class NoSegment:
        def close(self) -> None:
            pass

    def create(run_id: str, name: str, n_bytes: int) -> NoSegment:
        created[name] = n_bytes
        return NoSegment()

    monkeypatch.setattr(Segment, "create", staticmethod(create))
    plan = make_plan(Settings(model=str(tmp_path / "model"), draft=draft, max_sequences=3), tmp_path, 0)
    create_segments(plan)
    assert len(created) >= 4
    assert sum(created.values()) <= plan.ledger.segment_bytes < sum(created.values()) + (8 << 20)
    assert plan.config.slot_bytes >= max(plan.ledger.slot_bytes, 8192)


# ---- the probe ----------------------------------------------------------------------------------------------------


def machine(root: Path, available_kb: int, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "dev/shm").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_probe_without_limits(tmp_path: Path) -> None:
    probe = probe_memory(
        machine(tmp_path, 1000, "0::/user\n", {"user/memory.max": "max\n", "user/memory.current": "5\n"})
    )
    assert (probe.available_bytes, probe.source) == (1000 * 1024, "MemAvailable")


def test_probe_version_2_takes_the_tightest_group(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "800000\n",
        "a/memory.current": "500000\n",
        "a/memory.stat": "anon 1\ninactive_file 100000\n",
        "a/b/memory.max": "900000\n",
        "a/b/memory.current": "100000\n",
        "a/b/memory.stat": "",
    }
    probe = probe_memory(machine(tmp_path, 10_000, "0::/a/b\n", files))
    assert probe.available_bytes == 400_000
    assert probe.source.endswith("a/memory.max")


def test_probe_version_1(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "2000000\n",
        "memory/job/memory.usage_in_bytes": "1500000\n",
        "memory/job/memory.stat": "cache 9\ntotal_inactive_file 300000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1500000\n",
    }
    probe = probe_memory(machine(tmp_path, 10_000, "4:memory:/job\n3:cpu:/x\n", files))
    assert probe.available_bytes == 800_000


def test_probe_inside_a_container_sees_the_mounted_group(tmp_path: Path) -> None:
    files = {"memory.max": "700000\n", "memory.current": "200000\n"}
    probe = probe_memory(machine(tmp_path, 10_000, "0::/docker/0123abcd\n", files))
    assert probe.available_bytes == 500_000


def test_probe_of_a_full_group_is_zero_not_negative(tmp_path: Path) -> None:
    files = {"memory.max": "100\n", "memory.current": "200\n"}
    assert probe_memory(machine(tmp_path, 10_000, "0::/\n", files)).available_bytes == 0


def test_probe_here() -> None:
    probe = probe_memory()
    assert 0 < probe.available_bytes < 1 << 50
