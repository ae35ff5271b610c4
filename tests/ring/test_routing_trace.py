"""--record-routing: the trace is what the gates chose, for every row of prompt, decode and draft steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shared.experts.traces import TraceReader
from shared.step.stages import StepKind
from tests.oracle import oracle_array
from tests.support.ring import Ring

Converted = Callable[[str, str], Path]


def test_every_row_of_every_layer_is_in_the_trace(converted: Converted, tmp_path: Path) -> None:
    model = converted("glm_moe_dsa", "int8")
    prompt = oracle_array("glm_moe_dsa", "prompt_ids").tolist()
    chosen: list[tuple[int, int, bytes]] = []
    path = tmp_path / "trace"
    with Ring(model, tmp_path, record_routing=str(path), prefill_chunk=7, n_drafts=2) as ring:

        def watch(sender: str, receiver: str, msg: object) -> bool:
            if type(msg).__name__ == "ExpertsWanted":
                frame = ring.frame(msg.frame)  # type: ignore[attr-defined]
                ids = frame.gate_id[: msg.n_rows].astype("<u2").tobytes()  # type: ignore[attr-defined]
                chosen.append((msg.step, msg.layer, ids))  # type: ignore[attr-defined]
            return True

        ring.on_deliver = watch
        answer = ring.generate(prompt, 6)
        spec = ring.spec
    reader = TraceReader(path)
    steps = list(reader)
    assert reader.header.layers == tuple(spec.moe_layers) and reader.header.n_experts == spec.n_experts
    assert [(s.step, c.layer, c.ids.tobytes()) for s in steps for c in s.layers] == chosen
    assert all(sum(span.n_rows for span in s.spans) == len(c.ids) for s in steps for c in s.layers)
    prefill = [s for s in steps if s.kind is StepKind.PREFILL]
    assert [span.position for s in prefill for span in s.spans] == list(range(0, len(prompt), 7))
    assert sum(s.n_prefill for s in prefill) == len(prompt)
    decode = [s for s in steps if s.kind is StepKind.DECODE]
    assert all(s.n_prefill == 0 for s in decode) and sum(len(s.spans) for s in decode) >= len(answer.tokens) / 3 - 1
    assert {c.layer for s in steps if s.kind is StepKind.DRAFT for c in s.layers} == {spec.mtp_layer}
