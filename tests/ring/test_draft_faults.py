"""Drafts never change an answer, whatever fails: an error counts where accepted tokens reach its row, and not before.

Guesses are put into the drafter's mouth: right ones, so that rows with faults are reached within a step, and wrong ones, so
that faults lie in rows that are rejected. The answer without drafts is the measure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native.library import NativeError
from native.memory import hash64
from shared.container.entries import ExpertFile
from shared.container.reader import Container
from shared.messages.layer import LayerFailed
from shared.messages.router import DraftReady, LogitsReady
from tests.oracle import oracle_array
from tests.support.ring import Answer, Ring

Converted = Callable[[str, str], Path]
NAME = "glm_moe_dsa"
N_TOKENS = 10
VOCAB = 256
NAN_F16, NAN_F32 = b"\x00\x7e", b"\x00\x00\xc0\x7f"


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = oracle_array(NAME, "prompt_ids").tolist()
    return ids


@pytest.fixture(scope="module")
def clean(converted: Converted, prompt: list[int], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The tokens of the sound model."""
    with Ring(converted(NAME, "int4"), tmp_path_factory.mktemp("clean")) as ring:
        return ring.generate(prompt, N_TOKENS).tokens


@pytest.fixture(scope="module")
def broken(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which one expert's scale is NaN."""
    model = tmp_path_factory.mktemp("models") / "broken"
    shutil.copytree(converted(NAME, "int4"), model)
    spoil_experts(model, next(iter(Container.open(model).experts)), [5])
    return model


def spoil_experts(model: Path, layer: int, experts: list[int]) -> None:
    """Scales of the experts' down projections become NaN; checksums are those of the new bytes."""
    import msgspec

    file = Container.open(model).experts[layer]
    data = bytearray(file.path.read_bytes())
    index = msgspec.json.decode((model / "colibri.json").read_bytes())
    for expert in experts:
        record = memoryview(data)[file.offset_of(expert) :][: file.record_bytes]
        record[down_scales(file)] = (NAN_F16 * 16) if file.format == "q4" else (NAN_F32 * 8)
        index["experts"][str(layer)]["checksums"][expert] = f"{hash64(bytes(record)):016x}"
    file.path.write_bytes(data)
    (model / "colibri.json").write_bytes(msgspec.json.encode(index))


def down_scales(file: ExpertFile) -> slice:
    first = file.layout.down_s
    assert first is not None
    return slice(first, first + 32)


def what_came(answer: Answer) -> tuple[Any, ...]:
    done = answer.done
    assert done is not None
    return answer.tokens, answer.text, done.reason, done.error_code, done.error, done.n_generated


def guesser(right: list[int], n: int, n_right: int, seed: int = 0) -> Callable[[str, int], list[int]]:
    """n guesses: what really follows, but for those from the ``n_right``-th on."""

    def guess(request: str, n_had: int) -> list[int]:
        real = right[n_had : n_had + n] + [0] * n
        return [real[i] if i < n_right else (real[i] + 1 + 37 * (seed + n_had + i)) % VOCAB for i in range(n)]

    return guess


def watch_faults(ring: Ring) -> list[LayerFailed]:
    seen: list[LayerFailed] = []

    def watch(sender: str, receiver: str, msg: Any) -> bool:
        if isinstance(msg, LayerFailed):
            seen.append(msg)
        return True

    ring.on_deliver = watch
    return seen


# ---- an expert that is not finite ---------------------------------------------------------------------------------


def test_a_nan_expert_ends_the_same_requests_with_and_without_drafts(
    broken: Path, converted: Converted, tmp_path: Path
) -> None:
    """Many prompts: some never use the expert, some do after a few tokens, some in their prompt."""
    prompts = [[t, 255 - t] for t in range(0, 250, 19)]
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        sound = [ring.generate(p, N_TOKENS).tokens for p in prompts]
    with Ring(broken, tmp_path) as ring:
        expected = [what_came(ring.generate(p, N_TOKENS)) for p in prompts]
    kinds = {(reason, 0 < len(tokens) < N_TOKENS) for tokens, _, reason, *_ in expected}
    assert kinds >= {("length", False), ("error", True), ("error", False)}, "the prompts try too little"
    for n in range(4):
        n_ignored = n_accepted = 0
        for n_right in {0, n}:
            with Ring(broken, tmp_path, n_drafts=n, shuffle=n_right or None) as ring:
                for i, (prompt, tokens) in enumerate(zip(prompts, sound, strict=True)):
                    seen = watch_faults(ring)
                    ring.guess = guesser(tokens, n, n_right, i)
                    answer = ring.generate(prompt, N_TOKENS)
                    assert what_came(answer) == expected[i], f"{n} drafts of which {n_right} right, prompt {prompt}"
                    assert answer.done
                    n_accepted += answer.done.n_accepted
                    n_ignored += bool(seen) and answer.done.reason != "error"
        assert n == 0 or (n_ignored and n_accepted), "no fault fell into a rejected row, or no draft was ever right"


def test_neighbours_of_a_request_that_ends_go_on(broken: Path, converted: Converted, tmp_path: Path) -> None:
    """All at once, prompts in chunks beside decoding rows: each answer is what it is alone and without drafts."""
    prompts = [[t, 255 - t, t // 2, 9] for t in range(0, 250, 11)]
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        sound = [ring.generate(p, N_TOKENS).tokens for p in prompts]
    with Ring(broken, tmp_path) as ring:
        expected = [what_came(ring.generate(p, N_TOKENS)) for p in prompts]
    for n, shuffle in ((0, None), (2, None), (3, 5)):
        with Ring(broken, tmp_path, n_drafts=n, shuffle=shuffle, prefill_chunk=3, n_slots=7) as ring:
            rights = {f"r{i}": guesser(sound[i], n, i % (n + 1), i) for i in range(len(prompts))}
            ring.guess = lambda request, n_had, rights=rights: rights[request](request, n_had)  # type: ignore[misc]
            for i, prompt in enumerate(prompts):
                ring.submit(f"r{i}", prompt, max_tokens=N_TOKENS, ignore_eos=True)
            ring.run()
            assert [what_came(ring.answers[f"r{i}"]) for i in range(len(prompts))] == expected


def test_a_fault_that_is_told_late_still_counts(broken: Path, tmp_path: Path) -> None:
    """It comes from expert_io, the logits from attention: nothing keeps the one before the other."""
    prompts = [[t, 255 - t] for t in range(0, 250, 11)]
    with Ring(broken, tmp_path) as ring:
        expected = [what_came(ring.generate(p, N_TOKENS)) for p in prompts]
    with Ring(broken, tmp_path) as ring:
        for prompt, right in zip(prompts, expected, strict=True):
            late: list[LayerFailed] = []

            def hold(sender: str, receiver: str, msg: Any, late: list[LayerFailed] = late) -> bool:
                if isinstance(msg, LogitsReady) and late:
                    ring.tell("router", msg, sender)
                    while late:
                        ring.tell("router", late.pop(0), "expert_io")
                    return False
                if isinstance(msg, LayerFailed):
                    late.append(msg)
                    return False
                return True

            ring.on_deliver = hold
            assert what_came(ring.generate(prompt, N_TOKENS)) == right


# ---- one token's row that fails, in every way ---------------------------------------------------------------------


class TokenFails:
    """Rows whose input is ``token`` have no true result. One way of failing per method; each is a context."""

    def __init__(self, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.token = token
        self.n_failed = 0
        self._patch = monkeypatch

    def embedding_is_nan(self, ring: Ring) -> None:
        def spoilt(embed: Callable[..., Any], tokens: np.ndarray, out: np.ndarray) -> Any:
            faults = embed(tokens, out)
            out[tokens == self.token] = np.nan
            self.n_failed += int((tokens == self.token).sum())
            return faults

        ring.wrap("embed", lambda embed: partial(spoilt, embed))

    def logits_are_nan(self, ring: Ring) -> None:
        def spoilt(head: Callable[..., None], frame: Any, final: np.ndarray, n_logits: int) -> None:
            head(frame, final, n_logits)
            bad = frame.token[frame.logit_row[:n_logits]] == self.token
            frame.logits[:n_logits][bad] = np.nan
            self.n_failed += int(bad.sum())

        ring.wrap("head", lambda head: partial(spoilt, head))

    def kernel_refuses(self, ring: Ring) -> None:
        """The step as a whole can't be computed while the row is in it."""

        def refuse(advance: Callable[..., None], run: Any, frame: Any) -> None:
            if run.layer > 0 and self.token in frame.token[: run.plan.n_rows]:
                self.n_failed += 1
                raise NativeError("cb_attn_forward: no memory")
            advance(run, frame)

        ring.wrap("advance", lambda advance: partial(refuse, advance))

    def embedding_is_unreadable(self, ring: Ring) -> None:
        place, preadv = ring.embedding_place(self.token), os.preadv

        def read(fd: int, buffers: Any, offset: int) -> int:
            if (fd, offset) == place:
                self.n_failed += 1
                raise OSError(5, "Input/output error")
            return preadv(fd, buffers, offset)

        self._patch.setattr("os.preadv", read)

    def expert_io_dies(self, ring: Ring) -> None:
        """Whoever computes the row crashes."""

        def die(sender: str, receiver: str, msg: Any) -> bool:
            is_row = type(msg).__name__ == "ExpertsWanted" and msg.frame == 0
            if is_row and self.token in ring.frame(0).token[: msg.n_rows]:
                self.n_failed += 1
                ring.kill("expert_io")
                ring.start("expert_io")
                return False
            return True

        ring.on_deliver = die


WAYS = ["embedding_is_nan", "logits_are_nan", "kernel_refuses", "embedding_is_unreadable", "expert_io_dies"]


@pytest.fixture(params=WAYS)
def fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Ring, int], TokenFails]:
    """fail(ring, token): from now on, rows of this token fail in one way."""

    def arm(ring: Ring, token: int) -> TokenFails:
        fails = TokenFails(token, monkeypatch)
        getattr(fails, request.param)(ring)
        return fails

    return arm


def test_a_token_that_only_a_rejected_draft_has_ends_nothing(
    fail: Callable[[Ring, int], TokenFails],
    converted: Converted,
    prompt: list[int],
    clean: list[int],
    tmp_path: Path,
) -> None:
    token = next(t for t in range(VOCAB) if t not in {*clean, *prompt})
    for n in (1, 3):
        with Ring(converted(NAME, "int4"), tmp_path, n_drafts=n, embedding_on_disk=True) as ring:
            fails = fail(ring, token)
            guess = guesser(clean, n, n - 1)
            ring.guess = lambda request, n_had, guess=guess: [*guess(request, n_had)[:-1], token]  # type: ignore[misc]
            answer = ring.generate(prompt, N_TOKENS)
            assert fails.n_failed, "nothing failed"
            assert answer.done and answer.done.reason == "length" and answer.tokens == clean


def test_a_token_that_fails_ends_the_answer_where_it_does_without_drafts(
    fail: Callable[[Ring, int], TokenFails],
    converted: Converted,
    prompt: list[int],
    clean: list[int],
    tmp_path: Path,
) -> None:
    place = next(i for i in range(5, N_TOKENS) if clean[i] not in {*prompt, *clean[:i]})
    with Ring(converted(NAME, "int4"), tmp_path, embedding_on_disk=True) as ring:
        fail(ring, clean[place])
        expected = what_came(ring.generate(prompt, N_TOKENS))
        assert expected[0] == clean[: place + 1] and expected[2] == "error"
    for n, n_right in ((1, 1), (3, 3), (3, 2)):
        with Ring(converted(NAME, "int4"), tmp_path, n_drafts=n, embedding_on_disk=True) as ring:
            ring.guess = guesser(clean, n, n_right)
            fail(ring, clean[place])
            answer = ring.generate(prompt, N_TOKENS)
            assert what_came(answer) == expected
            assert answer.done and answer.done.n_accepted


def test_a_token_that_fails_in_a_prompt_ends_that_request_only(
    fail: Callable[[Ring, int], TokenFails],
    converted: Converted,
    prompt: list[int],
    clean: list[int],
    tmp_path: Path,
) -> None:
    """It comes into a batch where others decode."""
    token = next(t for t in range(VOCAB) if t not in {*clean, *prompt})
    with Ring(
        converted(NAME, "int4"),
        tmp_path,
        n_drafts=2,
        embedding_on_disk=True,
        prefill_chunk=9,
        record_logits=str(tmp_path / "l"),
    ) as ring:
        fails = fail(ring, token)
        ring.guess = guesser(clean, 2, 1)
        ring.submit("before", prompt, max_tokens=N_TOKENS, ignore_eos=True)
        while len(ring.answers.setdefault("before", Answer()).tokens) < 3:
            ring.step()
        ring.submit("broken", [*prompt, token, *prompt[:3], token], max_tokens=N_TOKENS, ignore_eos=True)
        ring.submit("behind", prompt, max_tokens=N_TOKENS, ignore_eos=True)
        ring.run()
        assert fails.n_failed
        done = ring.answers["broken"].done
        assert done is not None and done.reason == "error" and not ring.answers["broken"].tokens
        for name in ("before", "behind"):
            assert ring.answers[name].tokens == clean, name


def test_what_rejected_drafts_left_in_the_cache_reaches_nobody(
    converted: Converted, prompt: list[int], clean: list[int], tmp_path: Path
) -> None:
    """Latents and index keys of every place that was not written by an accepted row are NaN, in both caches."""
    with Ring(converted(NAME, "int4"), tmp_path, n_drafts=3) as ring:
        ring.fill_segment("kv", 0xFF)
        ring.fill_segment("mtp_kv", 0xFF)
        ring.guess = guesser(clean, 3, 1)
        answer = ring.generate(prompt, N_TOKENS)
        assert answer.tokens == clean and answer.done and answer.done.n_accepted


# ---- reads --------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_counts_for_rows_that_were_accepted(
    converted: Converted, clean: list[int], tmp_path: Path
) -> None:
    """One expert of a layer can't be read."""
    model = tmp_path / "damaged"
    shutil.copytree(converted(NAME, "int4"), model)
    file = next(iter(Container.open(model).experts.values()))
    data = bytearray(file.path.read_bytes())
    data[file.offset_of(5)] ^= 1
    file.path.write_bytes(data)
    prompts = [[t, 255 - t] for t in range(0, 250, 22)]
    with Ring(converted(NAME, "int4"), tmp_path) as ring:
        sound = [ring.generate(p, N_TOKENS).tokens for p in prompts]
    with Ring(model, tmp_path) as ring:
        expected = [what_came(ring.generate(p, N_TOKENS)) for p in prompts]
    assert {code for *_, code, _, _ in expected} == {None, "expert_checksum_mismatch"}
    for n_right in (0, 2):
        n_ignored = 0
        with Ring(model, tmp_path, n_drafts=2) as ring:
            for i, prompt in enumerate(prompts):
                seen = watch_faults(ring)
                ring.guess = guesser(sound[i], 2, n_right, i)
                answer = ring.generate(prompt, N_TOKENS)
                assert what_came(answer) == expected[i]
                n_ignored += bool(seen) and answer.done is not None and answer.done.reason != "error"
        assert n_right or n_ignored, "no fault fell into a rejected row"


# ---- the drafter's own rows ---------------------------------------------------------------------------------------


MTP_WAYS = ["experts", "projection", "embedding_unreadable", "head"]


@pytest.mark.parametrize("way", MTP_WAYS)
def test_nothing_in_the_mtp_layer_ends_a_request(
    way: str, converted: Converted, prompt: list[int], clean: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(NAME, "int4")
    if way == "experts":
        model = tmp_path / "mtp"
        shutil.copytree(converted(NAME, "int4"), model)
        spec = Container.open(model).spec
        spoil_experts(model, spec.mtp_layer, list(range(spec.n_experts)))
    with Ring(model, tmp_path, n_drafts=2, embedding_on_disk=True, max_sequences=2) as ring:
        if way == "projection":
            ring.spoil_mtp_projection()
        if way == "embedding_unreadable":
            preadv, is_helping = os.preadv, [False]

            def helping(help_drafter: Callable[..., None], msg: Any) -> None:
                is_helping[0] = True
                help_drafter(msg)
                is_helping[0] = False

            def read(fd: int, buffers: Any, offset: int) -> int:
                if is_helping[0]:
                    raise OSError(5, "Input/output error")
                return preadv(fd, buffers, offset)

            ring.wrap("help_drafter", lambda plain: partial(helping, plain))
            monkeypatch.setattr("os.preadv", read)
        if way == "head":

            def spoilt(head: Callable[..., None], frame: Any, final: np.ndarray, n_logits: int) -> None:
                head(frame, final, n_logits)
                if final is ring.frame(1, "attention").final:
                    frame.logits[:n_logits] = np.nan

            ring.wrap("head", lambda head: partial(spoilt, head))
        n_passes = []

        def watch(sender: str, receiver: str, msg: Any) -> bool:
            if isinstance(msg, DraftReady):
                n_passes.append(msg)
            return True

        ring.on_deliver = watch
        for name in ("a", "b"):
            ring.submit(name, prompt, max_tokens=N_TOKENS, ignore_eos=True)
        ring.run()
        for name in ("a", "b"):
            done = ring.answers[name].done
            assert done is not None and (done.reason, done.error) == ("length", "")
            assert ring.answers[name].tokens == clean
            assert done.n_draft == 0, "what is no number was taken for a guess"
        assert len(n_passes) <= 4, "the drafter is asked although it can't guess"
