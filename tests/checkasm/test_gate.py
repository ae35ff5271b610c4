"""The gate against a plain model: choice, ties, groups, weights, rows that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from native.kernels import Gate, linear
from native.library import NativeError
from native.matrix import ACT_F32
from tests.checkasm.kit import Output, Packed, Rung, activations, assert_same, guarded_copy, random_matrix, same_bits

SEED = 20250104


def run_gate(rung: Rung, gate: Gate, h: np.ndarray, n_threads: int = 1) -> tuple[np.ndarray, np.ndarray, int]:
    ids, weights = np.full((len(h), gate.k), -1, np.int32), Output(len(h), gate.k)
    with rung.use(n_threads) as pool:
        bad = gate.forward(pool, h, ids, weights.array)
    return ids, weights.check(), bad


def scores(rung: Rung, packed: Packed, h: np.ndarray) -> np.ndarray:
    z = np.zeros((len(h), packed.out), np.float32)
    with rung.use() as pool:
        linear(pool, packed.matrix, h, z)
    return z


def model(
    z: np.ndarray, bias: np.ndarray, k: int, n_group: int, topk_group: int, norm: bool, scaling: float
) -> tuple[np.ndarray, np.ndarray]:
    """noaux_tc in float64, from given logits."""
    s = 1 / (1 + np.exp(-z.astype(np.float64)))
    c = s + bias
    if n_group > 1:
        groups = c.reshape(len(z), n_group, -1)
        best = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        keep = np.argsort(-best, axis=1, kind="stable")[:, :topk_group]
        masked = np.full_like(groups, -np.inf)
        for t in range(len(z)):
            masked[t, keep[t]] = groups[t, keep[t]]
        c = masked.reshape(c.shape)
    ids = np.sort(np.argsort(-c, axis=1, kind="stable")[:, :k], axis=1)
    w = np.take_along_axis(s, ids, axis=1)
    if norm:
        w = w / (w.sum(axis=1, keepdims=True) + 1e-20)
    return ids, w * scaling


CASES = [
    (256, 8, 1, 1, True, 2.5),
    (64, 6, 8, 3, True, 1.0),
    (48, 4, 4, 2, False, 1.8),
    (17, 3, 1, 1, True, 1.0),
    (8, 8, 1, 1, True, 1.0),
    (6, 2, 6, 2, True, 1.0),  # groups of one expert
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_against_model(ref: Rung, case: tuple[int, int, int, int, bool, float]) -> None:
    experts, k, n_group, topk_group, norm, scaling = case
    rng = np.random.default_rng(SEED)
    packed = random_matrix(rng, "f32", ACT_F32, experts, 72)
    packed.weight.view(np.float32)[:] *= np.float32(0.15)
    bias = rng.uniform(-0.3, 0.3, experts).astype(np.float32)
    h = guarded_copy(rng.standard_normal((50, 72)).astype(np.float32))
    gate = Gate(packed.matrix, bias, k, n_group, topk_group, norm, scaling)
    ids, weights, bad = run_gate(ref, gate, h)
    if n_group == experts:
        want_ids, want_weights = model_of_single_groups(scores(ref, packed, h), bias, k, topk_group, norm, scaling)
    else:
        want_ids, want_weights = model(scores(ref, packed, h), bias, k, n_group, topk_group, norm, scaling)
    assert bad == -1
    assert (ids == want_ids).all()
    assert np.abs(weights / want_weights - 1).max() < 2e-6


def model_of_single_groups(
    z: np.ndarray, bias: np.ndarray, k: int, topk_group: int, norm: bool, scaling: float
) -> tuple[np.ndarray, np.ndarray]:
    """A group of one expert scores that expert: choosing groups is choosing experts."""
    assert topk_group == k
    return model(z, bias, k, 1, 1, norm, scaling)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_bits(rung: Rung, ref: Rung, case: tuple[int, int, int, int, bool, float]) -> None:
    experts, k, n_group, topk_group, norm, scaling = case
    rng = np.random.default_rng(SEED + 1)
    packed = random_matrix(rng, "f32", ACT_F32, experts, 130)
    bias = guarded_copy(rng.uniform(-0.3, 0.3, experts).astype(np.float32))
    h = activations(rng, 33, 130)
    gate = Gate(packed.matrix, bias, k, n_group, topk_group, norm, scaling)
    want_ids, want_weights, _ = run_gate(ref, gate, h)
    for n_threads in (1, 4):
        ids, weights, bad = run_gate(rung, gate, h, n_threads)
        assert bad == -1
        assert (ids == want_ids).all()
        assert_same(weights, want_weights, f"{rung} gate {case}")
    alone = [run_gate(rung, gate, guarded_copy(h[t : t + 1])) for t in range(5)]
    assert all(
        (one[0] == want_ids[t]).all() and same_bits(one[1], want_weights[t : t + 1]) for t, one in enumerate(alone)
    )


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("case", [(64, 8), (17, 3), (128, 8), (64, 1)], ids=str)
def test_softmax_with_biased_logits_and_scaled_experts(rung: Rung, case: tuple[int, int], norm: bool) -> None:
    """Against float64, the same bits on every rung and with any neighbours; each of the vectors must matter."""
    experts, k = case
    rng = np.random.default_rng(SEED + 4)
    packed = random_matrix(rng, "f32", ACT_F32, experts, 72)
    packed.weight.view(np.float32)[:] *= np.float32(0.15)
    logit_bias, scale = (guarded_copy(rng.uniform(0.5, 1.5, experts).astype(np.float32)) for _ in range(2))
    h = guarded_copy(rng.standard_normal((50, 72)).astype(np.float32))

    def gate(**vectors: np.ndarray) -> Gate:
        return Gate(packed.matrix, None, k, 1, 1, norm, 1.5, "softmax", **vectors)

    ids, weights, bad = run_gate(rung, gate(logit_bias=logit_bias, expert_scale=scale), h, 2)
    z = scores(rung, packed, h).astype(np.float64) + logit_bias
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    want = np.sort(np.argsort(-p, axis=1, kind="stable")[:, :k], axis=1)
    share = np.take_along_axis(p, want, axis=1)
    share = share / share.sum(axis=1, keepdims=True) if norm else share
    assert bad == -1
    assert (ids == want).all()
    assert np.abs(weights / (share * 1.5 * scale[want]) - 1).max() < 3e-6
    alone = run_gate(rung, gate(logit_bias=logit_bias, expert_scale=scale), guarded_copy(h[7:8]))
    assert same_bits(alone[1], weights[7:8])
    for vectors in ({"logit_bias": logit_bias}, {"expert_scale": scale}):
        other = run_gate(rung, gate(**vectors), h)
        assert np.abs(other[1] - weights).max() > 0.01


def test_ties_choose_the_lower_id(rung: Rung) -> None:
    packed = random_matrix(np.random.default_rng(SEED), "f32", ACT_F32, 32, 16)
    packed.weight[:] = 0
    h = np.ones((2, 16), np.float32)
    ids, weights, _ = run_gate(rung, Gate(packed.matrix, None, 4, 1, 1, True, 1.0), h)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert (weights == 0.25).all()
    ids, _, _ = run_gate(rung, Gate(packed.matrix, None, 4, 4, 2, True, 1.0), h)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    bias = np.zeros(32, np.float32)
    bias[[30, 9]] = 0.5
    ids, weights, _ = run_gate(rung, Gate(packed.matrix, bias, 4, 1, 1, False, 3.0), h)
    assert ids.tolist() == [[0, 1, 9, 30]] * 2
    assert (weights == 1.5).all(), "the bias chooses and never weighs"
    bias[:] = -5.0  # negative scores: other groups are out, not zero
    bias[31] = -1.0
    ids, _, _ = run_gate(rung, Gate(packed.matrix, bias, 4, 4, 1, True, 1.0), h)
    assert ids.tolist() == [[24, 25, 26, 31]] * 2


def test_non_finite_rows_are_named(rung: Rung) -> None:
    rng = np.random.default_rng(SEED + 2)
    packed = random_matrix(rng, "f32", ACT_F32, 32, 48)
    gate = Gate(packed.matrix, None, 4, 1, 1, True, 1.0)
    clean = activations(rng, 20, 48)
    want_ids, want_weights, bad = run_gate(rung, gate, clean)
    assert bad == -1
    for value in (np.nan, np.inf, 3e38):
        h = guarded_copy(clean)
        h[5], h[17] = value, value
        ids, weights, bad = run_gate(rung, gate, h, 2)
        if value == 3e38 and bad == -1:  # the products may happen to stay finite
            continue
        assert bad == 5
        assert np.isnan(weights[[5, 17]]).all()
        assert ((ids >= 0) & (ids < 32)).all()
        others = np.delete(np.arange(20), [5, 17])
        assert (ids[others] == want_ids[others]).all()
        assert_same(weights[others], want_weights[others], "rows beside bad ones")
    nan_bias = np.zeros(32, np.float32)
    nan_bias[3] = np.nan
    assert run_gate(rung, Gate(packed.matrix, nan_bias, 4, 1, 1, True, 1.0), clean)[2] == 0


def test_contradictions_are_refused(ref: Rung) -> None:
    rng = np.random.default_rng(SEED + 3)
    packed = random_matrix(rng, "f32", ACT_F32, 32, 16)
    h = activations(rng, 1, 16)
    for k, n_group, topk_group in ((33, 1, 1), (0, 1, 1), (4, 5, 1), (4, 4, 5), (9, 4, 1), (4, 0, 0)):
        with pytest.raises(NativeError, match="cb_gate_forward"):
            run_gate(ref, Gate(packed.matrix, None, k, n_group, topk_group, True, 1.0), h)
    q8 = random_matrix(rng, "q8", 1, 32, 64)
    with pytest.raises(NativeError, match="f32 activations"):
        Gate(q8.matrix, None, 4, 1, 1, True, 1.0)
    with pytest.raises(NativeError, match="scoring"):
        Gate(packed.matrix, None, 4, 1, 1, True, 1.0, "softplus")
