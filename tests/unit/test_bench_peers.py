"""The comparison with llama.cpp, without llama.cpp: sizes, the file's format, what the report says."""

from __future__ import annotations

import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from bench.group import Group
from bench.peers.gguf_file import random_blocks, write_gguf
from bench.peers.report import Comparison, Rates, as_json, as_text
from bench.peers.shapes import BLOCK_BYTES, Model, make_model
from bench.roofline import BenchError
from shared.errors import CapacityError, ConfigError


@pytest.fixture(scope="module")
def tiny() -> Model:
    return make_model("tiny", 3, 1, "q8_0")


@pytest.fixture(scope="module")
def written(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny)
    return path


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_both_engines_get_the_same_weights() -> None:
    """GLM-5.2's width, 1 dense and 3 MoE layers: counted by hand from its config.json."""
    model = make_model("glm-5.2", 4, 1, "q8_0")
    hidden, vocab, inner = 6144, 154880, 2048
    attention = (
        2048 * hidden + 64 * 256 * 2048 + 576 * hidden + 64 * 512 * 192 + 64 * 256 * 512 + hidden * 64 * 256
    )  # fmt: skip
    indexer = 32 * 128 * 2048 + 128 * hidden  # its weights_proj is f32
    expert, dense = 3 * hidden * inner, 3 * hidden * 12288
    q4 = 4 * attention + 3 * indexer + dense + 3 * expert  # the third is shared by the fourth layer
    experts = 3 * 256 * expert
    counts = {"Q4_0": 0, "Q8_0": 0}
    for tensor in model.tensors:
        if tensor.type in counts:
            counts[tensor.type] += int(np.prod(tensor.shape))
    assert counts == {"Q4_0": q4 + experts, "Q8_0": 2 * vocab * hidden}
    exact = sum(tensor.n_bytes for tensor in model.tensors if tensor.type == "F32")
    assert model.gguf_bytes == (q4 + experts) * 18 // 32 + 2 * vocab * hidden * 34 // 32 + exact
    routed = 3 * 8 * expert
    assert model.peer_bytes_per_token == (q4 + routed) * 18 // 32 + (vocab + 1) * hidden * 34 // 32 + exact
    ours = (q4 + routed) * 17 // 32 + (vocab + 1) * (hidden + 4) + exact
    assert model.our_bytes_per_token == pytest.approx(ours, rel=1e-3)  # records are rounded up to pages
    assert 0.9 < model.our_bytes_per_token / model.peer_bytes_per_token < 1


def test_a_four_bit_head_is_counted_as_such() -> None:
    equal, small = (make_model("glm-5.2", 4, 1, head) for head in ("q8_0", "q4_0"))
    assert equal.gguf_bytes - small.gguf_bytes == 2 * 154880 * 6144 * 16 // 32
    assert equal.our_bytes_per_token == small.our_bytes_per_token


def test_a_grouped_model_without_dense_layers() -> None:
    """Qwen3-30B-A3B, counted by hand: 30.5 billion weights, 3.3 billion of them read for a token, the embedding's row aside."""
    model = make_model("qwen3-30b-a3b", 0, None, "q8_0")
    attention, expert = 2048 * (2 * 4096 + 2 * 512), 3 * 2048 * 768
    exact = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    q4 = 48 * (attention + 128 * expert)
    assert model.gguf_bytes == q4 * 18 // 32 + 2 * 151936 * 2048 * 34 // 32 + 4 * exact
    read = 48 * (attention + 8 * expert)
    assert model.peer_bytes_per_token == read * 18 // 32 + (151936 + 1) * 2048 * 34 // 32 + 4 * exact
    assert {tensor.name for tensor in model.tensors if tensor.name.startswith("blk.47.")} == {
        f"blk.47.{part}.weight"
        for part in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output", "ffn_norm", "ffn_gate_inp",
            "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
        )
    }  # fmt: skip
    assert model.metadata["qwen3moe.attention.head_count_kv"] == 4
    with pytest.raises(ConfigError, match="qwen3-30b-a3b has no dense layers"):
        make_model("qwen3-30b-a3b", 0, 1, "q8_0")


@pytest.mark.parametrize(("layers", "dense"), [(1, 1), (4, 0), (4, 4), (4, -1)])
def test_impossible_numbers_of_layers_are_refused(layers: int, dense: int) -> None:
    with pytest.raises(ConfigError, match=r"at least (one of each kind is|2 are) needed"):
        make_model("tiny", layers, dense, "q8_0")


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "zero"), [("Q4_0", 8), ("Q8_0", 0)])
def test_random_weights_have_no_mean(kind: str, zero: int) -> None:
    blocks = random_blocks(kind, 0.1, 1 << 20, np.random.default_rng(1))
    assert blocks.shape[1] == BLOCK_BYTES[kind]
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    quants = blocks[:, 2:]
    values = np.concatenate([quants & 15, quants >> 4], 1) if kind == "Q4_0" else quants.view(np.int8)
    weights = (values.astype(np.float32) - zero) * scale
    assert weights.std() == pytest.approx(0.1, rel=0.01)
    assert abs(weights.mean()) < 0.001


def test_the_file_has_a_header_and_every_byte(tiny: Model, written: Path) -> None:
    data = written.read_bytes()
    magic, version, n_tensors, n_pairs = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, n_tensors, n_pairs) == (b"GGUF", 3, len(tiny.tensors), len(tiny.metadata))
    assert tiny.gguf_bytes <= len(data) < tiny.gguf_bytes + 64 * len(tiny.tensors) + 16384
    assert len(data) % 32 == 0
    assert not written.with_suffix(".part").exists()


def test_an_independent_reader_finds_the_same_tensors(tiny: Model, written: Path) -> None:
    import gguf

    quants = pytest.importorskip("gguf.quants")
    reader = gguf.GGUFReader(str(written))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert set(found) == {tensor.name for tensor in tiny.tensors}
    for tensor in tiny.tensors:
        read = found[tensor.name]
        assert tuple(int(n) for n in read.shape[::-1]) == tensor.shape
        assert read.tensor_type.name == tensor.type
        assert read.n_bytes == tensor.n_bytes
        values = quants.dequantize(read.data, read.tensor_type)
        assert np.isfinite(values).all()
        if tensor.role == "expert":
            assert values.std() == pytest.approx(tensor.shape[-1] ** -0.5, rel=0.05)
            assert not np.array_equal(values[0], values[1])
    for key, value in tiny.metadata.items():
        assert reader.fields[key].contents() == (pytest.approx(value) if isinstance(value, float) else value)


def test_a_full_disk_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: type("Stat", (), {"f_bavail": 1, "f_frsize": 4096})())
    with pytest.raises(CapacityError, match="4,096 are free"):
        write_gguf(tmp_path / "x.gguf", make_model("tiny", 3, 1, "q8_0"))
    assert not list(tmp_path.iterdir())


# ---- the report ------------------------------------------------------------------------------------------------------


def comparison() -> Comparison:
    return Comparison(
        shape="tiny", head_type="q8_0", n_threads=2, n_prompt=512, n_tokens=16, peer_version="1", bandwidth_bytes_s=20e9,
        peer_bytes_per_token=2_000_000_000, our_bytes_per_token=1_000_000_000,
        rates={
            "llama.cpp mmap": Rates([10.0, 30.0, 20.0], [1.0, 3.0, 2.0]),
            "colibri": Rates([200.0, 240.0, 220.0], [9.0, 10.0, 11.0]),
            "llama.cpp none": Rates([25.0], [1.5]),
        },
    )  # fmt: skip


def test_ratios_are_of_medians_to_the_best_setting() -> None:
    found = comparison()
    assert found.best_peer("prefill") == "llama.cpp none"
    assert found.best_peer("decode") == "llama.cpp mmap"
    assert found.ratio("prefill") == pytest.approx(220 / 25)
    assert found.ratio("decode") == pytest.approx(10 / 2)
    document = as_json(found)
    assert document["engines"]["colibri"]["decode_share"] == pytest.approx(10 / 20)
    assert document["engines"]["llama.cpp mmap"]["decode_share"] == pytest.approx(2 / 10)


def test_the_text_names_bits_bounds_and_ratios() -> None:
    text = as_text(comparison())
    assert "head q8_0" in text
    assert "prefill 8.80 x, decode 5.00 x" in text
    assert "2.50 x" in text  # half the bytes: half of the lead is not the kernels'


# ---- our side of it --------------------------------------------------------------------------------------------------


class Stream(BaseHTTPRequestHandler):
    """Answers every prompt with five tokens in three events: two at once, then two and one, half a second later."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for pause, ids in ((0.0, [1, 2]), (0.3, [3, 4]), (0.2, [5])):
            time.sleep(pause)
            chunk = {"choices": [{"token_ids": ids, "text": ""}], "seed": 1}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_tokens_that_came_with_the_first_are_not_counted_as_later_ones() -> None:
    with HTTPServer(("127.0.0.1", 0), Stream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        group = Group(f"http://127.0.0.1:{server.server_port}", 100)
        rate = group.decode(4, 1)
        with pytest.raises(BenchError, match="5 tokens instead of 3"):
            group.decode(2, 1)
        server.shutdown()
    assert rate < 3 / 0.5  # three tokens in half a second at least, not four
