"""Predicted speeds and the chunk that covers its reads: against arithmetic done by hand."""

from __future__ import annotations

import pytest

from conversion.presets import preset_config
from shared.container.format import PRECISIONS, Facts, plan_container, plan_facts
from shared.model.family import spec_of
from shared.model.spec import ModelSpec
from shared.planning.ledger import DEFAULT_CHUNK, MAX_CHUNK, Ledger, make_ledger
from shared.planning.speed import COMPUTE_SHARE, covering_chunk, predict_speed
from shared.run.config import Settings

GIB = 1 << 30


@pytest.fixture(scope="module")
def glm() -> tuple[ModelSpec, Facts]:
    spec = spec_of(preset_config("glm-5.2", 78) | {"first_k_dense_replace": 3})
    return spec, plan_facts(spec, plan_container(spec, PRECISIONS["int4"]))


def ledger(spec: ModelSpec, facts: Facts, gib: int, **more: int) -> Ledger:
    return make_ledger(spec, facts, Settings(), gib * GIB, None, lambda *_: 1 << 20, **more)


def test_speed_of_glm_5_2(glm: tuple[ModelSpec, Facts]) -> None:
    """600 experts of 20 MB a token: 6 seconds at 2 GB/s, and 0.4 s to read everything else at 28 GB/s."""
    spec, facts = glm
    made = ledger(spec, facts, 32)
    speed = predict_speed(spec, facts, made, 2e9, 28e9)
    assert speed.routed_bytes == 600 * 20_054_016
    assert speed.cold[1] == pytest.approx(2e9 / (600 * 20_054_016))
    others_s = speed.resident_bytes / 28e9
    assert 0.3 < others_s < 0.5
    assert 1 / speed.cold[0] == pytest.approx(600 * 20_054_016 / 2e9 + others_s)
    assert speed.resident_tokens_s == pytest.approx(1.26, abs=0.05)
    assert speed.hit_rate == pytest.approx(made.n_slots / 19200)
    assert speed.cold < speed.warm < (speed.resident_tokens_s, speed.resident_tokens_s)


def test_with_every_expert_in_memory_the_drive_does_not_matter(glm: tuple[ModelSpec, Facts]) -> None:
    spec, facts = glm
    speed = predict_speed(spec, facts, ledger(spec, facts, 1024), 1e6, 28e9)
    assert speed.hit_rate == 1.0
    assert speed.warm == pytest.approx((speed.resident_tokens_s, speed.resident_tokens_s))


def test_a_chunk_is_long_enough_that_computing_covers_its_reads(glm: tuple[ModelSpec, Facts]) -> None:
    """A layer's 256 experts are 5.1 GB: 2 s at 2.57 GB/s. A row is 1 G operations in it."""
    spec, facts = glm
    for peak, expected in ((480e9, 512), (900e9, 1024), (1900e9, 2048), (13e12, MAX_CHUNK)):
        rows = covering_chunk(spec, facts, 2.57e9, peak)
        assert rows == expected
        compute_s = rows * 1.01e9 / (peak * COMPUTE_SHARE)
        assert rows == MAX_CHUNK or compute_s >= 1.99
        assert rows == DEFAULT_CHUNK or compute_s / 2 < 2.0, "half of it would not do"


def test_a_longer_chunk_is_taken_where_memory_allows(glm: tuple[ModelSpec, Facts]) -> None:
    spec, facts = glm
    assert ledger(spec, facts, 64, chunk=2048).prefill_chunk == 2048
    assert ledger(spec, facts, 64).prefill_chunk == DEFAULT_CHUNK
    assert make_ledger(spec, facts, Settings(prefill_chunk=100), 64 * GIB, chunk=2048).prefill_chunk == 100
    assert ledger(spec, facts, 18, chunk=2048).prefill_chunk < 2048


def test_a_model_without_experts_has_nothing_to_cover() -> None:
    spec = spec_of(preset_config("tiny", 3))
    facts = plan_facts(spec, plan_container(spec, PRECISIONS["int4"]))
    assert covering_chunk(spec, Facts(0, 0, 0, 0, 0, ()), 1e9, 1e12) == DEFAULT_CHUNK
    assert covering_chunk(spec, facts, 1e9, 1e15) == MAX_CHUNK
