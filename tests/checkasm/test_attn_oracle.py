"""Attention against traces of the reference implementation: every layer of the oracle checkpoints, each from the
reference's own input, so that an error can be pinned to a layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conversion.checkpoint import Checkpoint
from native.attention import INDEX_KINDS, AttnLayer
from native.library import Pool
from shared.model.attention.latent import Latent
from shared.model.family import load_spec
from shared.model.spec import ModelSpec
from tests.checkasm.attn_cases import Cache, Dims, Result, packed, run

ORACLES = Path(__file__).parents[1] / "oracles"
LATENT_EPS = 1e-6  # the traces come from an implementation that fixes it
BOUND = 3e-5  # the reference itself is f32; largest error seen 9.1e-6


def weights(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return np.ascontiguousarray(checkpoint.rows(name), np.float32)


def index_kind(mla: Latent) -> str:
    return "none" if mla.indexer is None else "full" if mla.owns_indexer else "shared"


def attn_struct(checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> AttnLayer:
    """One layer straight from the checkpoint's tensors, in f32."""
    prefix = f"model.layers.{layer}."
    attn = prefix + "self_attn."
    mla = spec.attention[layer]
    block = mla.nope + mla.v_dim
    kv_b = weights(checkpoint, attn + "kv_b_proj.weight").reshape(mla.n_heads, block, mla.kv_rank)

    def matrix_named(name: str) -> object:
        return packed(weights(checkpoint, f"{attn}{name}.weight"), "f32")

    def vector(name: str) -> np.ndarray:
        return weights(checkpoint, name).reshape(-1)

    index = {}
    if mla.indexer:
        index = {
            "index_heads": mla.indexer.n_heads,
            "index_dim": mla.indexer.dim,
            "index_topk": mla.indexer.topk,
            "index_rope_interleave": int(mla.indexer.rope.is_interleaved),
        }
    if mla.owns_indexer:
        index |= {
            "index_wq_b": matrix_named("indexer.wq_b"),
            "index_wk": matrix_named("indexer.wk"),
            "index_weights": matrix_named("indexer.weights_proj"),
            "index_k_norm_w": vector(attn + "indexer.k_norm.weight"),
            "index_k_norm_b": vector(attn + "indexer.k_norm.bias"),
        }
    return AttnLayer(
        hidden=spec.hidden, n_heads=mla.n_heads, q_rank=mla.q_rank or 0, kv_rank=mla.kv_rank, nope=mla.nope,
        rope=mla.rope.dim, v_dim=mla.v_dim, rope_interleave=int(mla.rope.is_interleaved), rms_eps=spec.rms_eps,
        latent_eps=LATENT_EPS, softmax_scale=mla.softmax_scale, index_kind=index_kind(mla),
        inv_freq=np.array(mla.rope.inv_freq(), np.float32), rope_amplitude=mla.rope.amplitude, index_norm_eps=1e-6,
        input_norm=vector(prefix + "input_layernorm.weight"), q_a_norm=vector(attn + "q_a_layernorm.weight"),
        kv_a_norm=vector(attn + "kv_a_layernorm.weight"), post_norm=vector(prefix + "post_attention_layernorm.weight"),
        q_a=matrix_named("q_a_proj"), q_b=matrix_named("q_b_proj"), kv_a=matrix_named("kv_a_proj_with_mqa"),
        k_b=packed(np.ascontiguousarray(kv_b[:, : mla.nope].transpose(0, 2, 1)), "f32"),
        v_b=packed(np.ascontiguousarray(kv_b[:, mla.nope :]), "f32"), o=matrix_named("o_proj"), **index,
    )  # fmt: skip


def mlp(checkpoint: Checkpoint, prefix: str, h: np.ndarray) -> np.ndarray:
    gate, up, down = (
        weights(checkpoint, f"{prefix}{part}_proj.weight").astype(np.float64) for part in ("gate", "up", "down")
    )
    g = h @ gate.T
    return (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T


def ffn(checkpoint: Checkpoint, layer: int, h: np.ndarray, trace: dict[str, np.ndarray]) -> np.ndarray:
    """The layer's other half in float64, with the experts that the trace chose."""
    prefix = f"model.layers.{layer}.mlp."
    if f"router_idx_{layer:02d}" not in trace:
        return mlp(checkpoint, prefix, h)
    out = mlp(checkpoint, prefix + "shared_experts.", h)
    ids, share = trace[f"router_idx_{layer:02d}"], trace[f"router_w_{layer:02d}"].astype(np.float64)
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        out[rows] += share[rows, slots, None] * mlp(checkpoint, f"{prefix}experts.{expert}.", h[rows])
    return out


OF_INT8 = 0.03  # of a layer's largest change; largest seen 0.019


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm_moe_dsa_fp8", "deepseek_v3", "deepseek_v32"])
def test_an_int8_cache_stays_close_to_the_trace(family: str) -> None:
    """What attention adds to the residual stream, each layer from the reference's own input and with its selection."""
    folder = ORACLES / family
    spec, trace, checkpoint = load_spec(folder), dict(np.load(folder / "trace.npz")), Checkpoint.open(folder)
    try:
        n = len(trace["resid_00"])
        for layer in range(spec.n_layers):
            mla = spec.attention[layer]
            index = mla.indexer
            topk = index.topk if index else 1
            dims = Dims(
                hidden=spec.hidden, n_heads=mla.n_heads, kv_rank=mla.kv_rank, rope=mla.rope.dim,
                index_kind="shared" if index else "none", index_dim=1, index_topk=topk,
            )  # fmt: skip
            x, position, struct = (
                trace[f"resid_{layer:02d}"].astype(np.float32),
                np.arange(n),
                attn_struct(checkpoint, spec, layer),
            )
            selection = None
            if index:
                owner = max(i for i in range(layer + 1) if spec.attention[i].owns_indexer)
                allowed = trace[f"index_sel_{owner:02d}"].astype(bool)
                chosen = np.full((n, topk), -1, np.int32)
                counts = np.where(np.arange(n) < topk, -1, topk).astype(np.int32)
                for t in range(topk, n):
                    chosen[t] = np.nonzero(allowed[t])[0]
                selection = Result(x, x, chosen, counts)
                struct.index_kind = INDEX_KINDS["shared"]
            with Pool(2) as pool:
                found, exact = (
                    run(pool, struct, Cache(dims, fmt, 1, n), x, position, selection=selection).x
                    for fmt in ("int8", "f32")
                )
            error = np.abs(found - exact).max() / np.abs(exact - x).max()
            assert 0 < error < OF_INT8, f"{family} layer {layer}: {error}"
    finally:
        checkpoint.close()


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm_moe_dsa_fp8", "deepseek_v3", "deepseek_v32"])
def test_every_layer_of_the_trace(family: str, chunk: int) -> None:
    folder = ORACLES / family
    spec = load_spec(folder)
    trace = dict(np.load(folder / "trace.npz"))
    checkpoint = Checkpoint.open(folder)
    try:
        n = len(trace["resid_00"])
        position = np.arange(n)
        selection: Result | None = None
        for layer in range(spec.n_layers):
            mla = spec.attention[layer]
            kind, index = index_kind(mla), mla.indexer
            dims = Dims(
                hidden=spec.hidden, n_heads=mla.n_heads, kv_rank=mla.kv_rank, rope=mla.rope.dim, index_kind=kind,
                index_dim=index.dim if index else 1, index_topk=index.topk if index else 1,
            )  # fmt: skip
            x = trace[f"resid_{layer:02d}"].astype(np.float32)
            with Pool(2) as pool:
                found = run(pool, attn_struct(checkpoint, spec, layer), Cache(dims, "f32", 1, n), x, position,
                            chunk=chunk, selection=selection)  # fmt: skip
            if kind == "full":
                selection = found
                for t, allowed in enumerate(trace[f"index_sel_{layer:02d}"].astype(bool)):
                    chosen = np.arange(t + 1) if found.n_selected[t] < 0 else found.selected[t, : found.n_selected[t]]
                    assert np.array_equal(chosen, np.nonzero(allowed)[0]), (
                        f"{family} layer {layer}: selection of row {t}"
                    )
            after = found.x + ffn(checkpoint, layer, found.hidden.astype(np.float64), trace)
            error = np.abs(after - trace[f"resid_{layer + 1:02d}"]).max()
            assert error < BOUND, f"{family} layer {layer}: {error}"
    finally:
        checkpoint.close()
