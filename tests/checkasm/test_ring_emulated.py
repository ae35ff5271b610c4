"""Byte identity of whole answers with the rungs that this machine lacks: the engine's services over the emulated library.

``tests/ring/test_identity.py`` forces the rungs of this machine; here the same services compute with the emulated ones,
with chunks large enough for the kernels of many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkasm.kit import EMULATED_HERE, Rung
from tests.oracle import oracle_array
from tests.ring.test_identity import run

N_TOKENS = 3


@pytest.mark.skipif(not EMULATED_HERE, reason="this machine has every rung")
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_answers_are_the_references(
    precision: str, all_rungs: dict[str, Rung], converted: Callable[[str, str], Path], tmp_path: Path
) -> None:
    name = "deepseek_v32"
    model = converted(name, precision)
    prompt = oracle_array(name, "prompt_ids").tolist() * 2
    knobs = {"prefill_chunk": 64, "n_drafts": 1}
    with all_rungs["ref"].use():
        [want] = run(model, tmp_path, [prompt], N_TOKENS, knobs)
    for isa in EMULATED_HERE:
        rung = all_rungs.get(f"emulated-{isa}")
        if rung is None:
            pytest.skip("no C compiler `cc` to build the emulation with")
        with rung.use():
            [got] = run(model, tmp_path, [prompt], N_TOKENS, knobs)
        assert got[0] == want[0], f"tokens moved with {isa}"
        assert got[1] == want[1], f"logits moved with {isa}"
