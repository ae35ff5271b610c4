"""Placement decides speed, never text (promise 1): tokens and logits, bit for bit, over every knob."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native.library import available_isas, isa_current, isa_limit
from shared.messages.router import DraftReady
from shared.model.kv_layout import KV_BLOCK, group_kv
from tests.oracle import MTP_ORACLES, ORACLES, oracle_array
from tests.support.ring import Ring, read_record
from tests.support.sweeps import sparse

Converted = Callable[[str, str], Path]
Force = Callable[[str], None]

VARIANTS: dict[str, dict[str, Any]] = {
    "half the slots": {"n_slots": "half"},
    "gate_k + 1 slots": {"n_slots": "least"},
    "segmented LRU": {"n_slots": "half", "cache_policy": "slru", "prefill_chunk": 7},
    "chunks of 1": {"prefill_chunk": 1},
    "chunks of 7": {"prefill_chunk": 7},
    "2 threads": {"n_threads": 2},
    "4 threads": {"n_threads": 4},
    "pilot": {"pilot": "on", "n_slots": "half"},
    "pilot at random": {"pilot": "random", "n_slots": "half"},
    "drafts": {"n_drafts": 1},
    "3 drafts": {"n_drafts": 3},
    "embedding on disk": {"embedding_on_disk": True, "n_drafts": 1},
    "shuffled messages": {"shuffle": 7},
    "everything at once": {
        "n_slots": "least",
        "prefill_chunk": 7,
        "n_threads": 2,
        "pilot": "random",
        "cache_policy": "lru",
        "n_drafts": 2,
        "embedding_on_disk": True,
        "shuffle": 11,
    },
}


def knobs(variant: dict[str, Any], model: Path) -> dict[str, Any]:
    from shared.model.family import load_spec

    spec = load_spec(model)
    if not spec.n_mtp:
        variant = {key: value for key, value in variant.items() if key != "n_drafts"}
    slots = {"half": len(spec.moe_layers) * spec.n_experts // 2, "least": spec.gate_k + 1}
    return {key: slots.get(value, value) if key == "n_slots" else value for key, value in variant.items()}


def run(
    model: Path, tmp: Path, prompts: list[list[int]], n: int, variant: dict[str, Any], **sampling: Any
) -> list[Any]:
    """[(tokens, {position: logits of the accepted row})] of prompts submitted together."""
    record = tmp / "record"
    record.unlink(missing_ok=True)
    with Ring(model, tmp, record_logits=str(record), **knobs(variant, model)) as ring:
        for i, prompt in enumerate(prompts):
            ring.submit(f"r{i}", prompt, max_tokens=n, ignore_eos=True, **({"seed": i + 1} | sampling))
        ring.run()
        answers = [ring.answers[f"r{i}"] for i in range(len(prompts))]
    rows = read_record(record)
    out = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.done is not None and answer.done.reason == "length", answer.done
        whole = prompt + answer.tokens
        logits = {
            row["position"]: row["logits"].tobytes()
            for row in rows
            if row["request"] == f"r{i}" and row["token"] == whole[row["position"]]
        }
        assert sorted(logits) == list(range(len(whole) - 1))
        out.append((answer.tokens, logits))
    return out


@pytest.mark.parametrize("name", ORACLES)
def test_prompt_logits_and_greedy_tokens_equal_the_oracle(name: str, converted: Converted, tmp_path: Path) -> None:
    prompt = oracle_array(name, "prompt_ids").tolist()
    expected = oracle_array(name, "logits")
    greedy = oracle_array(name, "greedy_tokens").tolist()
    [(tokens, logits)] = run(converted(name, "f32"), tmp_path, [prompt], len(greedy), {})
    assert tokens == greedy
    got = np.stack([np.frombuffer(logits[p], np.float32) for p in range(len(prompt))])
    np.testing.assert_allclose(got, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", MTP_ORACLES)
def test_drafts_equal_the_mtp_oracle(name: str, converted: Converted, tmp_path: Path) -> None:
    prompt = oracle_array(name, "prompt_ids").tolist()
    chain = oracle_array(name, "mtp_chain_tokens").tolist()
    drafts = []

    def watch(sender: str, receiver: str, msg: Any) -> bool:
        if isinstance(msg, DraftReady) and msg.tokens:
            drafts.append(list(msg.tokens[0]))
        return True

    for chunk in (64, 7):
        drafts.clear()
        with Ring(converted(name, "f32"), tmp_path, n_drafts=len(chain), prefill_chunk=chunk) as ring:
            ring.on_deliver = watch
            ring.generate(prompt, 6)
        assert drafts[0] == chain


@pytest.fixture
def force() -> Iterator[Force]:
    """force(rung): no kernel of a higher one; the usual table afterwards."""
    usual = isa_current()
    yield isa_limit
    isa_limit(usual)


LOWEST, HIGHEST = available_isas()[0], available_isas()[-1]
TURNED = [
    *(("glm_moe_dsa", precision, 0.0, HIGHEST) for precision in ("f32", "int8", "int4")),
    *(("glm_moe_dsa", precision, 1.0, isa) for precision in ("f32", "int8", "int4") for isa in available_isas()),
    *((name, "int4", 1.0, HIGHEST) for name in ("glm4_moe", "gpt_oss", "gemma4", "qwen3_5_moe")),
    *(("qwen3_5_moe", precision, 1.0, HIGHEST) for precision in ("f32", "int8")),
]
"""All knobs on the highest rung, and once on the lowest; on the others in a full run. With everything turned at once
``test_every_rung_gives_the_same_bits`` has each of them always."""


@pytest.mark.parametrize(
    ("name", "precision", "temperature", "isa"),
    sparse(TURNED, [case for case in TURNED if case[3] == HIGHEST or case[1:] == ("int4", 1.0, LOWEST)]),
)
def test_no_knob_moves_a_bit(
    name: str, precision: str, temperature: float, isa: str, force: Force, converted: Converted, tmp_path: Path
) -> None:
    force(isa)
    model = converted(name, precision)
    prompt = oracle_array(name, "prompt_ids").tolist()
    [base] = run(model, tmp_path, [prompt], 12, {}, temperature=temperature)
    for title, variant in VARIANTS.items():
        [got] = run(model, tmp_path, [prompt], 12, variant, temperature=temperature)
        assert got[0] == base[0], f"tokens moved with {title}"
        assert got[1] == base[1], f"logits moved with {title}"


def test_every_rung_gives_the_same_bits(force: Force, converted: Converted, tmp_path: Path) -> None:
    """Each rung of this machine in turn, alone and with knobs turned, in weights of every precision: one recording."""
    name = "deepseek_v32"
    prompt = oracle_array(name, "prompt_ids").tolist()
    for precision, kv_dtype in (("f32", "f32"), ("int8", "bf16"), ("int4", "int8")):
        model = converted(name, precision)
        base: list[Any] = []
        for isa in available_isas():
            force(isa)
            for variant in ({}, VARIANTS["everything at once"]):
                [got] = run(model, tmp_path, [prompt], 6, {"kv_dtype": kv_dtype, **variant}, temperature=1.0)
                base = base or got
                assert got[0] == base[0], f"{precision}: tokens moved with {isa}, {variant}"
                assert got[1] == base[1], f"{precision}: logits moved with {isa}, {variant}"


@pytest.mark.parametrize("precision", ["f32", "int4"])
def test_rungs_may_meet_in_one_group(precision: str, force: Force, converted: Converted, tmp_path: Path) -> None:
    """Attention on one rung and experts on another: each service's work runs with the table that its name asks for."""
    model = converted("glm_moe_dsa", precision)
    prompt = oracle_array("glm_moe_dsa", "prompt_ids").tolist()
    [base] = run(model, tmp_path, [prompt], 6, {"n_drafts": 1})
    low, high = available_isas()[0], available_isas()[-1]
    for rungs in ({"attention": low, "drafter": low}, {"expert_io": low}):
        used: set[tuple[str, str]] = set()

        def choose(service: str, rungs: dict[str, str] = rungs, used: set[tuple[str, str]] = used) -> None:
            isa = rungs.get(service, high)
            used.add((service, isa))
            force(isa)

        [got] = run(model, tmp_path, [prompt], 6, {"n_drafts": 1, "before": choose})
        assert {("attention", rungs.get("attention", high)), ("expert_io", rungs.get("expert_io", high))} <= used
        assert got == base, f"bits moved with {rungs}"


@pytest.mark.parametrize("precision", ["f32", "int4"])
def test_neighbours_do_not_move_a_bit(precision: str, converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v32", precision)
    prompt = oracle_array("deepseek_v32", "prompt_ids").tolist()
    prompts = [prompt, prompt[5:], prompt[:1], prompt[::-1]]
    alone = [run(model, tmp_path, [p], 10, {}, temperature=1.0, seed=i + 1)[0] for i, p in enumerate(prompts)]
    for variant in ({}, {"n_drafts": 2}, VARIANTS["everything at once"]):
        together = run(model, tmp_path, prompts, 10, variant, temperature=1.0)
        assert [t for t, _ in together] == [t for t, _ in alone]
        assert [x for _, x in together] == [x for _, x in alone]


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_chunks_do_not_move_a_bit_in_any_cache_precision(kv_dtype: str, converted: Converted, tmp_path: Path) -> None:
    model = converted("deepseek_v3", "int8")
    prompt = oracle_array("deepseek_v3", "prompt_ids").tolist()
    results = [
        run(model, tmp_path, [prompt * 4], 8, {"prefill_chunk": chunk, "kv_dtype": kv_dtype, "n_drafts": 1})
        for chunk in (1, 7, 104)
    ]
    assert results[0] == results[1] == results[2]


def guesses(answer: list[int], vocab: int, n: int) -> Callable[[str, int], list[int]]:
    """``n`` guesses behind any number of tokens: as many right ones as that number says, then a wrong one, then right again."""

    def guess(_: str, n_tokens: int) -> list[int]:
        found = answer[n_tokens : n_tokens + n]
        wrong = n_tokens % (n + 1)
        return [(token + 1) % vocab if i == wrong else token for i, token in enumerate(found)]

    return guess


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_drafts_right_and_wrong_leave_no_trace(name: str, chunk: int, converted: Converted, tmp_path: Path) -> None:
    """Rejected after any number of accepted ones, with attention lost after many a message: the state is that of plain
    decoding."""
    model, prompt, n = converted(name, "int8"), oracle_array(name, "prompt_ids").tolist(), 24
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, n).tokens
    for n_steps in (None, *range(100, 220, 17)):
        with Ring(model, tmp_path, n_drafts=3, prefill_chunk=chunk) as ring:
            ring.guess = guesses(expected, ring.spec.vocab, 3)
            ring.submit("r", prompt, max_tokens=n, ignore_eos=True)
            if n_steps:
                for _ in range(n_steps):
                    ring.step()
                ring.kill("attention")
                ring.start("attention")
            ring.run()
            done = ring.answers["r"].done
            assert ring.answers["r"].tokens == expected, n_steps
            assert done is not None and (n_steps or 0 < done.n_accepted < done.n_draft), done


@pytest.mark.parametrize("name", ["qwen3_5_moe"])
def test_states_of_neighbours_and_of_former_sequences_do_not_mix(
    name: str, converted: Converted, tmp_path: Path
) -> None:
    """More requests than states: each begins in one that others have left, at any position."""
    model, prompt = converted(name, "int8"), oracle_array(name, "prompt_ids").tolist()
    prompts = [prompt[at : at + n] for at, n in ((0, 72), (5, 40), (9, 3), (20, 41), (1, 1), (30, 40), (2, 44))]
    alone = [run(model, tmp_path, [p], 6, {})[0] for p in prompts]
    for variant in ({"max_sequences": 2}, {"max_sequences": 3, "n_drafts": 2, "prefill_chunk": 7}):
        assert run(model, tmp_path, prompts, 6, variant) == alone


@pytest.mark.parametrize(("name", "context", "chunks"), [("gpt_oss", 256, (7, 60)), ("gemma4", 512, (60, 200))])
def test_a_ring_of_blocks_holds_what_a_window_sees(
    name: str, context: int, chunks: tuple[int, ...], converted: Converted, tmp_path: Path
) -> None:
    """A window of 8 positions behind hundreds: with long chunks a layer holds all, with short ones a ring of blocks, which is
    overwritten. Also after the loss of attention in the middle of a chunk."""
    model, long = converted(name, "int4"), (oracle_array(name, "prompt_ids").tolist() * 20)[: context - 20]
    prompts, base = [long, long[::-1][: context // 2], long[3:9]], {"kv_dtype": "bf16", "max_context": context}
    whole = run(model, tmp_path, prompts, 12, {**base, "prefill_chunk": context})
    for chunk in chunks:
        with Ring(model, tmp_path, **base, prefill_chunk=chunk) as ring:
            assert any(
                0 < layer.ring < context // KV_BLOCK for layer in group_kv(ring.spec.main_attention, ring.config).layers
            )
        assert run(model, tmp_path, prompts, 12, {**base, "prefill_chunk": chunk, "n_threads": 2}) == whole, chunk
    for n_steps in (40, 90):
        with Ring(model, tmp_path, prefill_chunk=chunks[-1], **base) as ring:
            for i, each in enumerate(prompts):
                ring.submit(f"r{i}", each, max_tokens=12, ignore_eos=True)
            for _ in range(n_steps):
                ring.step()
            ring.kill("attention")
            ring.start("attention")
            ring.run()
            assert [ring.answers[f"r{i}"].tokens for i in range(3)] == [tokens for tokens, _ in whole], n_steps


def test_one_changed_weight_is_noticed(converted: Converted, tmp_path: Path) -> None:
    """The comparison above is not blind: one weight of one expert, moved a little, moves the logits."""
    import shutil

    import msgspec

    from native.memory import hash64
    from shared.container.reader import Container

    source = converted("glm_moe_dsa", "f32")
    prompt = oracle_array("glm_moe_dsa", "prompt_ids").tolist()
    [base] = run(source, tmp_path, [prompt], 4, {})
    changed = tmp_path / "changed"
    shutil.copytree(source, changed)
    file = next(iter(Container.open(changed).experts.values()))
    data = bytearray(file.path.read_bytes())
    at = file.offset_of(3)
    weights = np.frombuffer(data, np.float32, offset=at, count=64)
    weights[17] *= 1.01
    file.path.write_bytes(data)
    with Ring(changed, tmp_path) as ring:
        done = ring.generate(prompt, 4).done
        assert done is not None
        assert (done.reason, done.error_code) == ("error", "expert_checksum_mismatch")
        assert "expert 3 of layer" in done.error and "colibri verify" in done.error
    index = msgspec.json.decode((changed / "colibri.json").read_bytes())
    record = data[at : at + file.record_bytes]
    index["experts"][str(file.layer)]["checksums"][3] = f"{hash64(bytes(record)):016x}"
    (changed / "colibri.json").write_bytes(msgspec.json.encode(index))
    [got] = run(changed, tmp_path, [prompt], 4, {})
    assert got[1] != base[1]
