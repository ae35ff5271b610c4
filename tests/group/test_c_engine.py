"""``colibri-up`` on a directory of the C engine: it answers, says what is missing, and leaves the directory as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.group.harness import Group
from tests.oracle import oracle_config
from tests.support.c_container import write_c_container

StartGroup = Callable[..., Group]
TOPK = oracle_config("glm_moe_dsa")["index_topk"]


def test_it_runs_as_it_lies(start_group: StartGroup, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_c_container(model)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()}
    refused = subprocess.run(
        [sys.executable, "-m", "deploy.up", str(model), "--run-dir", str(tmp_path / "refused"), "--max-context", "64"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 78 and f"at most {TOPK} tokens" in refused.stderr
    group = start_group(model, attention="dense", max_context=64, draft=1, slots=9)
    for words in ("container of the C engine", "no checksums", "sparse indexer is not there"):
        assert words in group.said
    body = {"prompt": [5, 9, 2, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    answers = [group.post("/v1/completions", body | {"stream": False}) for _ in range(2)]
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    first, second = (answer.json() for answer in answers)
    assert first["usage"]["completion_tokens"] == 30 and first["choices"] == second["choices"]
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()} == before
