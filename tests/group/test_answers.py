"""The process group against the oracles, and promise 1 over real processes: the same bytes whatever the knobs.

``tests/ring`` turns each knob alone, without processes; here every value of every knob appears in one of three groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native.library import available_isas
from shared.model.family import load_spec
from shared.model.spec import ModelSpec
from tests.group.harness import Group, event_tokens
from tests.oracle import MTP_ORACLES, ORACLES, oracle_array, oracle_dir
from tests.support.ring import read_record
from tests.support.sweeps import sparse

Converted = Callable[[str, str], Path]
StartGroup = Callable[..., Group]
MODEL = Path(__file__).parents[2] / "models" / "fledgling"


def structures() -> list[str]:
    """The first oracle of each kind of attention, expert function and number of MTP layers; ``tests/ring`` has them all."""
    found: dict[object, str] = {}
    for name in ORACLES:
        spec = load_spec(oracle_dir(name))
        kinds = frozenset(type(attention) for attention in spec.attention)
        found.setdefault((kinds, spec.inner.function, spec.branch is None, spec.n_mtp), name)
    return list(found.values())


@pytest.mark.parametrize("name", sparse(ORACLES, structures()))
def test_the_group_reproduces_the_oracle(
    name: str, converted: Converted, start_group: StartGroup, tmp_path: Path
) -> None:
    """Prompt logits within the stated tolerance, greedy tokens exactly, first drafts equal to the MTP oracle's."""
    prompt = oracle_array(name, "prompt_ids").tolist()
    greedy = oracle_array(name, "greedy_tokens").tolist()
    chain = oracle_array(name, "mtp_chain_tokens").tolist() if name in MTP_ORACLES else []
    record = tmp_path / "logits"
    group = start_group(converted(name, "f32"), kv_dtype="f32", draft=len(chain) or "off", record_logits=record)
    assert group.tokens(prompt, len(greedy)) == greedy
    rows = read_record(record)
    logits = np.stack([row["logits"] for row in rows if row["position"] < len(prompt)])
    np.testing.assert_allclose(logits, oracle_array(name, "logits"), atol=2e-3, rtol=0)
    # The first step after the prompt verifies the drafts: its rows are the sampled token and they.
    first = [row["token"] for row in rows[len(prompt) : len(prompt) + 1 + len(chain)]]
    assert first == [greedy[0], *chain]
    decoded = {row["position"]: row["logits"] for row in rows if row["position"] >= len(prompt)}
    expected = oracle_array(name, "greedy_logits")
    assert np.abs(decoded[len(prompt)] - expected[1]).max() < 2e-3


def knob_sets(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Three groups in which every value of every knob appears."""
    n_experts = len(spec.moe_layers) * spec.n_experts
    return {
        "plain": dict(slots=n_experts, prefill_chunk=512, threads=1, pilot="off", draft="off"),
        "halved": dict(slots=n_experts // 2, prefill_chunk=7, threads=2, pilot="on", draft=1),
        "starved": dict(slots=spec.gate_k + 1, prefill_chunk=1, threads=4, pilot="random", draft=3, transport="zmq"),
    }


def test_no_knob_changes_an_answer(start_group: StartGroup) -> None:
    """Of the embedded model, by token ids and in words; ``tests/ring`` turns one knob at a time in all precisions."""
    n = 12
    prompt = oracle_array("glm_moe_dsa", "prompt_ids").tolist()
    prompts = [prompt, prompt[3:], prompt[:2], prompt[::-1] + prompt]
    answers: dict[str, tuple[list[list[int]], list[str]]] = {}
    for title, knobs in knob_sets(load_spec(MODEL)).items():
        group = start_group(MODEL, **knobs)
        alone = [group.tokens(prompts[0], n)]
        alone += [group.tokens(p, n, temperature=1, seed=i) for i, p in enumerate(prompts)]
        together = ask_together(group, prompts, n)
        assert together == alone[1:], f"{title}: neighbours changed an answer"
        answers[title] = alone, [chat(group, temperature=0), chat(group, temperature=1, seed=7)]
        assert group.stop() == 0
    ids, texts = answers["plain"]
    assert len({tuple(a) for a in ids}) > 1 and texts[0] != texts[1], "the questions must lead to different answers"
    for title, got in answers.items():
        assert got == answers["plain"], f"{title} changed an answer"


def chat(group: Group, **fields: Any) -> str:
    """80 tokens of a story, through the chat template."""
    body = {"messages": [{"role": "user", "content": "Tell me a story about a small bird."}], "max_tokens": 80}
    answer = group.post("/v1/chat/completions", body | fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_states_outlive_every_service(converted: Converted, start_group: StartGroup) -> None:
    """A kind of attention that keeps a state per sequence, in one answer with drafts: the tokens are those of a calm run. What
    a step had written of a state when it was cut off is not read again."""
    prompt = oracle_array("qwen3_5_moe", "prompt_ids").tolist()
    group = start_group(converted("qwen3_5_moe", "int4"), draft=2, slots=40, max_context=512)
    calm = group.tokens(prompt, 430, temperature=1, seed=3)
    doomed, got, n_at_death = ["attention", "expert_io", "router"], [], -20
    for event in group.stream(prompt, 430, temperature=1, seed=3):
        assert "error" not in event, f"{event}\n{group.logs()}"
        got += event_tokens(event)
        if doomed and len(got) >= n_at_death + 40:
            n_at_death = len(got)
            group.kill(doomed.pop(0))
            group.wait_ready()
    assert not doomed, "all died while the answer was made"
    assert got == calm


def ask_together(group: Group, prompts: list[list[int]], n: int) -> list[list[int]]:
    """The same requests as alone, all at once."""
    results: list[list[int]] = [[] for _ in prompts]

    def ask(i: int) -> None:
        results[i] = group.tokens(prompts[i], n, temperature=1, seed=i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_no_rung_changes_an_answer(
    converted: Converted, start_group: StartGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COLIBRI_ISA reaches every process; text and logits of the lowest and the highest rung are the same bytes."""
    name = "glm_moe_dsa"
    model = converted(name, "int4")
    prompt = oracle_array(name, "prompt_ids").tolist()
    answers = {}
    for isa in (available_isas()[0], available_isas()[-1]):
        monkeypatch.setenv("COLIBRI_ISA", isa)
        record = tmp_path / isa
        group = start_group(model, record_logits=record, draft=1)
        tokens = group.tokens(prompt, 12, temperature=1, seed=3)
        assert group.stop() == 0
        for service in ("attention", "expert_io", "drafter"):
            log = (group.run_dir / "log" / f"{service}.log").read_text()
            assert f"linear_q4={isa}" in log, f"{service} did not take {isa}"
        rows = [(row["position"], row["token"], row["logits"].tobytes()) for row in read_record(record)]
        answers[isa] = (tokens, rows)
    first, *others = answers.values()
    assert len(first[1]) >= len(prompt) + 11
    for other in others:
        assert other[0] == first[0], "tokens moved"
        assert other[1] == first[1], "logits moved"
