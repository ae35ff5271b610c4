"""What goes wrong inside a step ends one request with a named error, or nothing at all."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.expert_io.states import SlotState
from shared.container.reader import Container
from shared.errors import SchemaError
from shared.messages.drafter import EmbedReady
from shared.messages.expert_io import ExpertsWanted
from shared.messages.gateway import FinishReason, RequestDone
from shared.messages.layer import HiddenReady, Mixed
from shared.messages.router import Abort
from tests.oracle import oracle_array
from tests.support.ring import Answer, Ring

Converted = Callable[[str, str], Path]
NAME = "glm_moe_dsa"


def prompt_of() -> list[int]:
    prompt: list[int] = oracle_array(NAME, "prompt_ids").tolist()
    return prompt


@pytest.mark.parametrize(
    ("name", "victim", "n_drafts"),
    [
        *((name, victim, n) for name in (NAME, "qwen3_5_moe") for victim in ("attention", "expert_io") for n in (0, 2)),
        (NAME, "drafter", 2),
        ("glm4_moe", "attention", 2),
        ("gpt_oss", "attention", 0),
        ("gemma4", "attention", 0),
    ],
)
def test_a_lost_peer_costs_time_only(
    name: str, victim: str, n_drafts: int, converted: Converted, tmp_path: Path
) -> None:
    """Whatever had been sent to or by the victim is gone; a new one starts; the answer is the same."""
    model, prompt = converted(name, "int4"), oracle_array(name, "prompt_ids").tolist()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 12).tokens
        n_slots = ring.spec.gate_k + 3
    for n_steps in (3, 30, 77, 150, 233):
        with Ring(model, tmp_path, n_drafts=n_drafts, prefill_chunk=9, n_slots=n_slots) as ring:
            ring.submit("r", prompt, max_tokens=12, ignore_eos=True)
            for _ in range(n_steps):
                ring.step()
            ring.kill(victim)
            for _ in range(5):
                ring.step()
            ring.start(victim)
            ring.run()
            assert ring.answers["r"].tokens == expected
            done = ring.answers["r"].done
            assert done is not None and done.reason == "length"


def test_a_row_of_the_embedding_that_cannot_be_read_ends_one_request(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path, embedding_on_disk=True) as ring:
        expected = ring.generate(prompt, 3).tokens
        with monkeypatch.context() as patch:
            patch.setattr("os.preadv", _fail_to_read)
            ring.submit("broken", prompt, max_tokens=3, ignore_eos=True)
            ring.run()
        done = ring.answers["broken"].done
        assert done is not None and done.reason == "error"
        assert done.error_code == "embedding_read_failed"
        assert "model.embed_tokens.weight" in done.error
        assert ring.generate(prompt, 3).tokens == expected


def _fail_to_read(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_step_that_ends_its_peers_each_time_is_given_up(converted: Converted, tmp_path: Path) -> None:
    """A poisonous request ends with a named error; the next one is served."""
    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 3).tokens
        ring.submit("poison", prompt, max_tokens=3, ignore_eos=True)
        n_lost = 0
        while not ring.is_idle:
            for _ in range(4):
                ring.step()
            ring.kill("expert_io")
            ring.start("expert_io")
            n_lost += 1
            assert n_lost < 20, "replayed for ever"
        ring.run()
        done = ring.answers["poison"].done
        assert done is not None and (done.reason, done.error_code) == ("error", "step_lost")
        assert n_lost == 4
        assert ring.generate(prompt, 3).tokens == expected


def test_a_resumed_request_goes_on_to_the_same_end(converted: Converted, tmp_path: Path) -> None:
    """What the gateway does after the loss of a router: it submits again with the tokens it had."""
    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path, n_drafts=1) as ring:
        whole = ring.generate(prompt, 14, temperature=1.0, seed=5).tokens
    for n_had in (0, 1, 7, 13):
        with Ring(model, tmp_path, n_drafts=1) as ring:
            ring.submit(
                "r", prompt, max_tokens=14, ignore_eos=True, temperature=1.0, seed=5, resume_ids=tuple(whole[:n_had])
            )
            ring.answers["r"] = Answer(tokens=whole[:n_had])
            ring.run()
            assert ring.answers["r"].tokens == whole


def test_abort_frees_the_ring_between_layers(converted: Converted, tmp_path: Path) -> None:
    from shared.messages.router import Abort

    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path) as ring:
        expected = ring.generate(prompt, 5).tokens
        for n_steps in (2, 11, 25):
            ring.submit(f"gone{n_steps}", prompt * 3, max_tokens=50, ignore_eos=True)
            for _ in range(n_steps):
                ring.step()
            ring.tell("router", Abort(f"gone{n_steps}", "test"), "gateway")
            assert ring.is_idle
            assert ring.generate(prompt, 5).tokens == expected
            done = ring.answers[f"gone{n_steps}"].done
            assert done is not None and done.reason == "abort"


def test_a_choice_that_overtakes_what_is_left_of_an_abandoned_step_is_kept(
    converted: Converted, tmp_path: Path
) -> None:
    """expert_io hears the router before attention, whose messages were held up: both of the old step and of the new."""
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        expected = ring.generate([3, 9, 200], 6).tokens
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        held: list[HiddenReady] = []
        n_wanted = 0

        def hold(sender: str, receiver: str, msg: Any) -> bool:
            nonlocal n_wanted
            if receiver != "expert_io" or n_wanted == 2:
                return True
            if isinstance(msg, HiddenReady):
                held.append(msg)
                return False
            if isinstance(msg, ExpertsWanted):
                n_wanted += 1
                if n_wanted == 1:
                    return False  # of the step that is abandoned now
                ring.services[receiver].handle(msg, sender)
                for late in held:
                    ring.services[receiver].handle(late, "attention")
                return False
            return True

        ring.on_deliver = hold
        ring.submit("left", [7, 8], max_tokens=6, ignore_eos=True)
        while not n_wanted:
            ring.step()
        ring.services["router"].handle(Abort("left", "test"), "gateway")
        ring.submit("r", [3, 9, 200], max_tokens=6, ignore_eos=True)
        ring.run(n_idle=20)
        assert len(held) == 2 and held[0].step < held[1].step
        assert ring.answers["r"].tokens == expected


def test_a_nan_in_one_expert_ends_only_those_who_use_it(converted: Converted, tmp_path: Path) -> None:
    model = tmp_path / "nan"
    shutil.copytree(converted(NAME, "f32"), model)
    container = Container.open(model)
    layer, file = next(iter(container.experts.items()))
    bad_expert = 5
    data = bytearray(file.path.read_bytes())
    np.frombuffer(data, np.float32, offset=file.offset_of(bad_expert) + file.layout.down_w, count=16)[:] = np.nan
    file.path.write_bytes(data)
    _forget_checksum(model, layer, bad_expert, bytes(data[file.offset_of(bad_expert) :][: file.record_bytes]))
    prompts = [[t] for t in range(0, 200, 9)]
    with Ring(converted(NAME, "f32"), tmp_path) as ring:
        clean = [ring.generate(p, 1).tokens for p in prompts]
    with Ring(model, tmp_path) as ring:
        for i, p in enumerate(prompts):
            ring.submit(f"r{i}", p, max_tokens=1, ignore_eos=True)
        ring.run()
        ended = [ring.answers[f"r{i}"] for i in range(len(prompts))]
    errors = [a for a in ended if a.done and a.done.reason == "error"]
    assert 0 < len(errors) < len(prompts)
    for answer in errors:
        assert answer.done is not None
        assert answer.done.error_code == "non_finite"
        assert f"expert {bad_expert} in layer {layer}" in answer.done.error
    for answer, expected in zip(ended, clean, strict=True):
        if answer not in errors:
            assert answer.tokens == expected


def test_a_truncated_expert_file_names_file_offset_and_bytes(converted: Converted, tmp_path: Path) -> None:
    model, prompt = tmp_path / "cut", prompt_of()
    shutil.copytree(converted(NAME, "int4"), model)
    with Ring(model, tmp_path) as ring:
        file = ring.engine.reads.sources.files[ring.spec.moe_layers[-2]]
        with file.path.open("r+b") as handle:  # it shrinks after it was opened and checked
            handle.truncate(file.offset_of(0))
        answer = ring.generate(prompt, 5)
        assert answer.done is not None
        assert (answer.done.reason, answer.done.error_code) == ("error", "expert_read_failed")
        for part in (str(file.path), "at offset", "expected", "received"):
            assert part in answer.done.error
        state = ring.store.state
        assert not state.visit
        assert not {SlotState.HELD, SlotState.AWAITED} & {slot.state for slot in state.table.slots}


def _forget_checksum(model: Path, layer: int, expert: int, record: bytes) -> None:
    import msgspec

    from native.memory import hash64

    index = msgspec.json.decode((model / "colibri.json").read_bytes())
    index["experts"][str(layer)]["checksums"][expert] = f"{hash64(record):016x}"
    (model / "colibri.json").write_bytes(msgspec.json.encode(index))


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([1] * 256, "context_length_exceeded"),
        ([1] * 5000, "context_length_exceeded"),
        ([999], "invalid_token"),
    ],
)
def test_impossible_prompts_are_refused_with_numbers(
    prompt: list[int], code: str, converted: Converted, tmp_path: Path
) -> None:
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        ring.submit("r", prompt, max_tokens=4)
        ring.run()
        refused = ring.answers["r"].refused
        assert refused is not None and refused.code == code
        assert ring.generate([1] * 255, 4).tokens, "context - 1 tokens fit"
        done = ring.answers[list(ring.answers)[-1]].done
        assert done is not None and (done.reason, done.n_generated) == ("length", 1)


def test_what_the_router_writes_for_its_next_step_does_not_reach_the_one_in_flight(
    converted: Converted, tmp_path: Path
) -> None:
    """After an abort the frame is filled anew while attention and drafter are still at the step before."""
    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path, n_drafts=2) as ring:
        expected = ring.generate(prompt, 9)
    with Ring(model, tmp_path, n_drafts=2) as ring:

        def scribble(sender: str, receiver: str, msg: object) -> bool:
            if isinstance(msg, Mixed | EmbedReady):
                frame = ring.frame(0 if receiver == "attention" else 1)
                for field in (frame.position, frame.seq, frame.block_table):
                    field[:] = -7
            return True

        ring.on_deliver = scribble
        got = ring.generate(prompt, 9)
    assert got.tokens == expected.tokens
    assert got.done and expected.done and got.done.n_accepted == expected.done.n_accepted


def test_counters_of_a_new_expert_io_go_on(converted: Converted, tmp_path: Path) -> None:
    model, prompt = converted(NAME, "int4"), prompt_of()
    with Ring(model, tmp_path, n_slots=7) as ring:
        ring.generate(prompt, 3)
        before = ring.counters("expert_io")
        ring.kill("expert_io")
        ring.start("expert_io")
        ring.generate(prompt[:3], 1)
        after = ring.counters("expert_io")
    for name in ("bytes_demand", "reads", "evictions", "io_busy_ns"):
        assert after[name] > before[name] > 0, name


def test_steps_of_a_new_router_are_newer_whatever_the_clock_says(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        ring.generate([1, 2, 3], 3)
        before = ring.next_step
        monkeypatch.setattr(time, "time_ns", lambda: 1)
        ring.kill("router")
        ring.start("router")
        assert ring.next_step > before


def test_a_submission_to_a_dead_router_is_not_taken_by_the_next_one(converted: Converted, tmp_path: Path) -> None:
    """It lay in the socket; the gateway submits again, and a second one with the same id would be refused."""
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        ring.submit("r", [1, 2, 3], max_tokens=2, router=7)
        assert ring.is_idle
        ring.submit("r", [1, 2, 3], max_tokens=2, ignore_eos=True, router=1)
        ring.run()
        assert len(ring.answers["r"].tokens) == 2
        assert ring.answers["r"].refused is None


@pytest.mark.parametrize("service", ["router", "attention", "expert_io", "drafter"])
def test_an_unknown_message_is_an_error_that_says_so(service: str, converted: Converted, tmp_path: Path) -> None:
    with (
        Ring(converted(NAME, "int4"), tmp_path, n_drafts=1) as ring,
        pytest.raises(SchemaError, match=f"{service} got RequestDone from gateway"),
    ):
        ring.tell(service, RequestDone("r", FinishReason.STOP, 1, 1, ""))
