"""A container of the C engine computes what one of ours of equal precision does, and the same bits wherever experts are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conversion.convert import Conversion
from tests.oracle import MTP_ORACLES, oracle_array, oracle_config, oracle_dir, read_tensors, write_checkpoint
from tests.ring.test_identity import run
from tests.support.c_container import read_one, write_c_container
from tests.support.ring import Ring

ORACLE = "glm_moe_dsa"
N = 24


def config() -> dict[str, object]:
    """The indexer of our own container chooses all keys, as dense attention does."""
    return {**oracle_config(ORACLE), "index_topk": 4096}


def own_container(tmp_path: Path, plain: dict[str, np.ndarray], precision: str) -> Path:
    """Ours from the values that the C engine's tensors stand for."""
    original = read_tensors(oracle_dir(ORACLE))
    tensors = {name: ("F32", w.shape, np.ascontiguousarray(w, np.float32).tobytes()) for name, w in plain.items()}
    tensors |= {name: raw for name, raw in original.items() if name not in tensors}
    copies = (name for name in tensors if name.endswith(("8.embed_tokens.weight", "8.shared_head.head.weight")))
    for name in list(copies):
        source = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
        tensors[name] = tensors[source]
    source = write_checkpoint(tmp_path / "source", config(), {"model.safetensors": tensors})
    Conversion(source, precision).run(tmp_path / "own")
    return tmp_path / "own"


def prompts() -> list[list[int]]:
    return [oracle_array(ORACLE, "prompt_ids").reshape(-1).tolist()[:20], [5, 9, 2, 7, 1]]


@pytest.mark.parametrize("shuffle", [None, 3])
def test_int8_is_our_int8(tmp_path: Path, shuffle: int | None) -> None:
    """Both round a row in the same way, so tokens are equal and logits are up to the last bits of a scale."""
    plain = write_c_container(tmp_path / "c", ORACLE, "int8", config=config(), shuffle=shuffle)
    own = own_container(tmp_path, plain, "int8")
    ours, theirs = (run(model, tmp_path, prompts(), N, {"n_drafts": 2}) for model in (own, tmp_path / "c"))
    for (own_tokens, own_logits), (tokens, logits) in zip(ours, theirs, strict=True):
        assert tokens == own_tokens
        for position, row in own_logits.items():
            a, b = np.frombuffer(row, np.float32), np.frombuffer(logits[position], np.float32)
            assert np.abs(a - b).max() < 2e-3 * np.abs(a).max()


def test_int4_is_what_its_nibbles_say(tmp_path: Path) -> None:
    """Against ours in f32 of the same values: what is left is int8 of the activations, which may turn a close choice of an
    expert. Any other order of nibbles or scales gives correlations around 0."""
    plain = write_c_container(tmp_path / "c", ORACLE, "gs64", config=config())
    own = own_container(tmp_path, plain, "f32")
    (ours,), (theirs,) = (run(model, tmp_path, prompts()[:1], 8, {}) for model in (own, tmp_path / "c"))
    n_prompt = len(prompts()[0])
    rows = [[np.frombuffer(each[1][i], np.float32) for each in (ours, theirs)] for i in range(n_prompt - 1)]
    alike = [np.corrcoef(a, b)[0, 1] for a, b in rows]
    assert min(alike) > 0.9 and np.median(alike) > 0.99, alike


def test_placement_changes_no_bit(tmp_path: Path) -> None:
    write_c_container(tmp_path / "c", ORACLE, "gs64", config=config(), shuffle=4)
    variants = [
        {},
        {
            "n_slots": "least",
            "prefill_chunk": 7,
            "n_threads": 2,
            "pilot": "random",
            "embedding_on_disk": True,
            "shuffle": 2,
        },
        {"n_slots": "half", "n_drafts": 2, "direct_io": "off"},
    ]
    first, *others = [run(tmp_path / "c", tmp_path, prompts(), N, variant) for variant in variants]
    assert ORACLE in MTP_ORACLES
    for other in others:
        assert [tokens for tokens, _ in other] == [tokens for tokens, _ in first]
        for (_, logits), (_, wanted) in zip(other, first, strict=True):
            assert logits == wanted


def test_a_bad_scale_ends_the_request_with_a_sentence(tmp_path: Path) -> None:
    """There are no checksums, but a scale that is none is noticed. The others go on."""
    write_c_container(tmp_path / "c", ORACLE, "gs64", config=config())
    for path in (tmp_path / "c").glob("out-0*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if ".mlp.experts." in name and name.endswith(".qs"):
                at = begin + entry["data_offsets"][0]
                data[at : at + 4] = np.float32([np.inf]).tobytes()
        path.write_bytes(data)
    assert read_one(path)
    with Ring(tmp_path / "c", tmp_path) as ring:
        answer = ring.generate(prompts()[0], 4)
        assert answer.done is not None and answer.done.reason == "error"
        assert "a scale is NaN, infinite or too large for f16" in answer.done.error
