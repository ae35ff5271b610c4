"""Converting needs memory for pieces, not for shards."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from conversion.checkpoint import Checkpoint
from conversion.convert import Conversion
from shared.container.reader import Container
from tests.oracle import Raw, oracle_config, oracle_dir, read_tensors, write_checkpoint

MIB = 1 << 20


def anonymous_bytes() -> int:
    """Private memory of this process: mapped files are the page cache's business."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_one_large_shard_needs_a_fraction_of_itself(tmp_path: Path) -> None:
    config = oracle_config("deepseek_v3")
    tensors = read_tensors(oracle_dir("deepseek_v3"))
    vocab, hidden = 1_000_000, config["hidden_size"]
    row = (np.arange(hidden, dtype=np.uint16) + np.uint16(0x3F00)).tobytes()
    large: Raw = ("BF16", (vocab, hidden), row * vocab)
    kept = {key: value for key, value in tensors.items() if "embed_tokens" not in key and "head" not in key.split(".")}
    kept = {key: value for key, value in kept.items() if key != "lm_head.weight"}
    shard = {"lm_head.weight": large, "model.embed_tokens.weight": large, **kept}
    source = write_checkpoint(tmp_path / "in", {**config, "vocab_size": vocab}, {"model.safetensors": shard})
    del large, shard, row
    assert (source / "model.safetensors").stat().st_size > 380_000_000
    before, peak = anonymous_bytes(), 0

    def watch(_: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    Conversion(source, "int4").run(tmp_path / "out", watch)
    assert peak - before < 200 * MIB
    assert Container.open(tmp_path / "out").spec.vocab == vocab


@pytest.mark.parametrize(("start", "stop"), [(0, 136), (0, 1), (100, 136), (127, 129), (128, 136), (5, 130)])
def test_rows_of_an_fp8_matrix_in_pieces(start: int, stop: int) -> None:
    """Pieces that begin or end inside a block of 128 rows get the same values."""
    checkpoint = Checkpoint.open(oracle_dir("glm_moe_dsa_fp8"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.shape(name) == (136, 144)
    whole = checkpoint.rows(name)
    assert np.array_equal(checkpoint.rows(name, start, stop), whole[start:stop])
    checkpoint.close()
