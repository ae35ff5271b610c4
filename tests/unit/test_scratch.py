"""A dry pool tells what the kernels' scratch will be: as much as the same calls take when they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conversion.presets import preset_config
from native.kernels import ExpertJobs, ffn, ffn_forward
from native.library import Pool
from native.matrix import matrix, scale_bytes, weight_bytes
from shared.container.reader import aligned_buffer
from shared.model.family import spec_of
from shared.model.spec import ModelSpec
from shared.model.tensors import PlannedTensor
from shared.planning import ledger
from tests.oracle import oracle_config

MANY_HEADS = {"num_attention_heads": 48, "num_key_value_heads": 8}
MODELS = {
    "latent, indexer": preset_config("tiny", 4, True) | MANY_HEADS | {"index_n_heads": 32},
    "latent": oracle_config("deepseek_v3") | MANY_HEADS,
    "grouped": oracle_config("qwen3_moe") | MANY_HEADS,
    "grouped, windows, norms": {
        "text_config": oracle_config("gemma4")["text_config"] | MANY_HEADS,
        "model_type": "gemma4",
    },
    "a state": {
        "text_config": oracle_config("qwen3_5_moe")["text_config"]
        | {"num_attention_heads": 48, "num_key_value_heads": 8, "linear_num_value_heads": 48},
        "model_type": "qwen3_5_moe",
    },
    "grouped, bias": oracle_config("glm4_moe") | MANY_HEADS,
}


class Real:
    """A tensor with memory behind it, all zeroes."""

    def __init__(self, planned: PlannedTensor) -> None:
        self.shape, self.format = planned.shape, "f32" if planned.role == "exact" else "q8"
        self.scale: Any = None
        if planned.kind == "vector":
            self.weight: Any = np.zeros(self.shape, np.float32)
            return
        self.weight = zeroes(planned.stack * weight_bytes(self.format, *self.shape))
        if self.format == "q8":
            self.scale = zeroes(planned.stack * scale_bytes(self.format, *self.shape))


def zeroes(n_bytes: int) -> np.ndarray:
    buffer = aligned_buffer(n_bytes)
    buffer[:] = 0
    return buffer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_attention_takes_what_was_measured(
    name: str, n_threads: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls with weights, caches and threads."""
    spec = spec_of(MODELS[name])
    n_rows, context = 130, 300
    cache = zeroes(max((-(-context // 64)) * 64 * 4096, 2 * n_rows * state_bytes(spec)))
    for attention in dict.fromkeys(spec.attention):
        with Pool(n_threads, is_dry=True) as dry:
            attention.measure(dry, n_rows, context, kv_dtype)
            wanted = dry.scratch_bytes
        with monkeypatch.context() as patch, Pool(n_threads) as pool:
            patch.setattr(
                "shared.model.attention.kind.stand_ins",
                lambda planned: {tensor.name: Real(tensor) for tensor in planned},
            )
            patch.setattr("shared.model.attention.kind.ALIGNMENT", cache.ctypes.data)
            attention.measure(pool, n_rows, context, kv_dtype)
            assert pool.scratch_bytes == wanted > 1 << 20


def state_bytes(spec: ModelSpec) -> int:
    return max(4 * attention.state.n_values if attention.state else 0 for attention in spec.attention)


def test_experts_take_what_was_measured() -> None:
    spec, rows, k = spec_of(oracle_config("deepseek_v3")), 200, 4
    hidden, inner = 512, 1024

    def part(out: int, in_: int) -> Any:
        return matrix(zeroes(weight_bytes("q8", out, in_)), zeroes(scale_bytes("q8", out, in_)), "q8", out, in_)

    weights = ffn(part(inner, hidden), part(inner, hidden), part(hidden, inner))
    h, parts = np.ones((rows, hidden), np.float32), np.zeros((rows * k, hidden), np.float32)
    with Pool(2, is_dry=True) as dry, Pool(2) as pool:
        spec.inner.measure_experts(dry, hidden, inner, rows, 512, 8)
        spec.inner.measure(dry, hidden, inner, rows)
        for n_jobs in (8, 1):
            jobs = ExpertJobs(n_jobs, rows * k)
            for places in np.array_split(np.arange(rows * k, dtype=np.int32), n_jobs):
                jobs.add(weights, places % rows, places)
            jobs.run(pool, h, parts)
        ffn_forward(pool, weights, h, parts[:rows], add=False)
        assert dry.scratch_bytes * 0.97 <= pool.scratch_bytes <= dry.scratch_bytes * 1.03


def test_a_dry_pool_computes_nothing() -> None:
    x, out = np.ones((3, 64), np.float32), np.full((3, 64), 7, np.float32)
    from native.kernels import rmsnorm

    with Pool(2, is_dry=True) as dry:
        rmsnorm(dry, x, np.ones(64, np.float32), 1e-5, out)
    assert (out == 7).all()


def test_more_rows_or_context_never_need_less() -> None:
    spec = spec_of(preset_config("glm-5.2", 4, True))
    sizes = [ledger.attention_work_bytes(spec, rows, 8192, 4, "bf16") for rows in (1, 8, 64, 512)]
    assert sizes == sorted(sizes)
    assert ledger.attention_work_bytes(spec, 64, 65536, 4, "bf16") >= sizes[2]
