"""``colibri bench resident`` without a group: what counts as cold memory, what a token reads, the table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.resident import ResidentResults, Round, as_json, as_text, touching_tokens
from bench.warmth import MOST_PASSES, is_cold, starts_cold, warm_text, warm_up
from conversion.presets import preset_config
from conversion.synth import Synthesis
from shared.container.reader import Container
from shared.model.family import spec_of
from shared.planning.speed import bytes_per_token


def passes(*times: float) -> list[float]:
    """What ``warm_up`` does when its passes take these times."""
    left = list(times)
    return warm_up(lambda: left.pop(0))


def test_a_first_pass_much_slower_than_a_later_one_was_cold() -> None:
    assert is_cold(20.0, [4.8, 4.9])
    assert not is_cold(5.4, [4.8, 20.0]), "the fastest of the later ones counts"
    assert not is_cold(20.0, []), "nothing to compare with"


def test_memory_is_touched_until_it_is_warm() -> None:
    assert passes(5.0, 4.9, 4.8) == [5.0, 4.9], "warm at once: the second pass shows it"
    assert passes(20.0, 5.0, 4.9, 4.8) == [20.0, 5.0, 4.9]
    assert passes(80.0, 40.0, 20.0, 10.0, 5.0) == [80.0, 40.0, 20.0, 10.0], f"at most {MOST_PASSES} passes"


def test_what_was_cold_is_said() -> None:
    assert warm_text([5.0, 4.9]) == "all weights touched right before (5.00, 4.90 s)"
    assert warm_text([20.0, 5.0, 4.9]).startswith("memory was cold, touched until it no longer was")
    assert warm_text([80.0, 40.0, 20.0, 10.0]).startswith("memory was cold and still is")


def test_an_answer_that_begins_slowly_began_cold() -> None:
    assert starts_cold([0.4] * 4 + [0.08] * 12)
    assert not starts_cold([0.4] + [0.08] * 15), "one slow token is an accident"
    assert not starts_cold([0.08] * 12 + [0.4] * 4)
    assert not starts_cold([0.4, 0.08, 0.08]), "too few to tell"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    path: Path = tmp_path_factory.mktemp("resident") / "tiny"
    Synthesis(preset_config("tiny", 4), "int4").run(path, n_threads=1)
    return Container.open(path)


def test_a_token_reads_all_but_the_embedding_and_the_experts_it_does_not_choose(container: Container) -> None:
    facts, spec = container.facts(), container.spec
    everything = sum(facts.record_bytes) * spec.n_experts + facts.dense_bytes + facts.gate_bytes + facts.shared_bytes
    unread = sum(facts.record_bytes) * (spec.n_experts - spec.gate_k) + facts.embed_bytes
    assert sum(bytes_per_token(container.spec, container.facts())) == everything - unread


def test_enough_tokens_name_every_expert() -> None:
    spec = spec_of(preset_config("tiny", 4))
    n, rng = touching_tokens(spec), np.random.default_rng(1)
    for _ in range(20):
        named = {e for _ in range(n) for e in rng.choice(spec.n_experts, spec.gate_k, replace=False).tolist()}
        assert len(named) == spec.n_experts


def report() -> ResidentResults:
    found = ResidentResults("m", 512, 32, 2, 2_000_000_000)
    found.rounds = [
        Round((20.0, 5.0, 4.9), True, 26e9, 170.0, 11.7, found.bytes_per_token, 0.02),
        Round((5.0, 4.9), False, 28e9, 180.0, 12.6, found.bytes_per_token, 0.03),
    ]
    return found


def test_report_says_share_and_what_was_cold() -> None:
    text = as_text(report())
    assert "90% (90% to 90%)" in text
    assert "memory was cold before 1 of 2 rounds" in text
    assert "1 decodes began cold" in text
    document = json.loads(json.dumps(as_json(report())))
    assert [r["was_cold"] for r in document["rounds"]] == [True, False]
    assert math.isclose(document["medians"]["bound_share"]["median"], 0.9)
