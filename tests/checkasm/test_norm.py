"""RMSNorm, and exp and SiLU as they come out of the feed-forward kernel."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from native.kernels import ffn, ffn_forward, rmsnorm, soft_cap
from native.library import NativeError
from native.matrix import ACT_F32
from tests.checkasm.kit import ROOT, Output, Packed, Rung, activations, assert_same, guarded, guarded_copy

SEED = 20250102


def run_rmsnorm(rung: Rung, x: np.ndarray, w: np.ndarray, eps: float, n_threads: int = 1) -> np.ndarray:
    out = Output(*x.shape)
    with rung.use(n_threads) as pool:
        rmsnorm(pool, x, w, eps, out.array)
    return out.check()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 24, 31, 63, 64, 65, 136, 2048, 6144])
def test_rmsnorm_bits(rung: Rung, ref: Rung, n: int) -> None:
    rng = np.random.default_rng(SEED)
    w = guarded_copy(rng.standard_normal(n).astype(np.float32))
    x = activations(rng, 17, n)
    want = run_rmsnorm(ref, x, w, 1e-5)
    assert not np.isnan(want).any()
    for rows in (1, 9, 17):
        assert_same(run_rmsnorm(rung, guarded_copy(x[:rows]), w, 1e-5), want[:rows], f"{rung} rmsnorm {rows} x {n}")
    assert_same(run_rmsnorm(rung, x, w, 1e-5, 4), want, f"{rung} rmsnorm threads 4")


def test_rmsnorm_extremes(rung: Rung, ref: Rung) -> None:
    rng = np.random.default_rng(SEED + 1)
    x = rng.standard_normal((7, 77)).astype(np.float32)
    x[0] = 0
    x[1] *= 1e30  # the sum of squares overflows
    x[2] *= 1e-30
    x[3, 76] = np.nan
    x[4, 0] = np.inf
    x[5] = -0.0
    w = guarded_copy(np.ones(77, np.float32))
    want = run_rmsnorm(ref, guarded_copy(x), w, 1e-6)
    assert_same(run_rmsnorm(rung, guarded_copy(x), w, 1e-6), want, f"{rung} rmsnorm extremes")
    assert np.isnan(want[3]).all()
    assert np.isfinite(want[6]).all()


def test_rmsnorm_in_place_and_meaning(ref: Rung) -> None:
    rng = np.random.default_rng(SEED + 2)
    x, w = activations(rng, 3, 200), rng.standard_normal(200).astype(np.float32)
    got = run_rmsnorm(ref, x, w, 1e-6)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * w
    assert np.abs(got / want - 1).max() < 1e-6
    with ref.use() as pool:
        rmsnorm(pool, x, w, 1e-6, x)
        assert_same(x, got, "in place")
        with pytest.raises(NativeError, match="rmsnorm: w"):
            rmsnorm(pool, x, w[:10], 1e-6, x)


# ---- exp and SiLU ----------------------------------------------------------------------------------------------------


def identity(n: int) -> Packed:
    """The f32 matrix that passes its input on exactly."""
    blocks = -(-n // 16)
    weight = guarded(blocks * n * 64, 64)
    tiles = weight.view(np.float32).reshape(blocks, n, 16)
    for i in range(n):
        tiles[i // 16, i, i % 16] = 1
    return Packed("f32", ACT_F32, n, n, weight, None)


@pytest.mark.parametrize("shape", [(1, 1), (1, 257), (3, 4096), (2, 4099)])
def test_soft_cap_bits_and_meaning(rung: Rung, ref: Rung, shape: tuple[int, int]) -> None:
    x = (np.random.default_rng(SEED + 5).standard_normal(shape) * 60).astype(np.float32)
    x[0, 0] = np.nan
    found = []
    for one, n_threads in ((ref, 1), (rung, 1), (rung, 3)):
        found.append(guarded_copy(x))
        with one.use(n_threads) as pool:
            soft_cap(pool, 30.0, found[-1])
    assert_same(found[1], found[0], f"{rung} soft cap")
    assert_same(found[2], found[0], f"{rung} soft cap, 3 threads")
    assert np.isnan(found[0][0, 0])
    assert np.nanmax(np.abs(found[0] - 30 * np.tanh(x.astype(np.float64) / 30)), initial=0.0) < 2e-5


def test_soft_cap_without_a_cap_is_refused(ref: Rung) -> None:
    with ref.use(1) as pool, pytest.raises(NativeError, match="cap 0"):
        soft_cap(pool, 0.0, np.zeros((1, 3), np.float32))


def silu_squared(rung: Rung, x: np.ndarray) -> np.ndarray:
    """silu(x) * x of f32[T, n] through a feed-forward of identities."""
    one = identity(x.shape[1]).matrix
    out = Output(*x.shape)
    with rung.use() as pool:
        ffn_forward(pool, ffn(one, one, one), x, out.array, False)
    return out.check()


@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 37])
def test_silu_bits(rung: Rung, ref: Rung, n: int) -> None:
    rng = np.random.default_rng(SEED + 3)
    values = np.concatenate(
        [
            rng.uniform(-100, 100, 3000),
            rng.standard_normal(3000),
            (rng.integers(-127, 129, 1000) + 0.5) * np.log(2),  # where the exponent's rounding changes
            [0.0, -0.0, 87.3, -87.4, 87.5, -87.6, 88.4, 88.6, -88.6, 1e38, -1e38, 1e-45, -1e-40, 126.5, -3e38],
        ]
    ).astype(np.float32)
    x = guarded_copy(np.resize(values, (-(-values.size // n), n)))
    assert_same(silu_squared(rung, x), silu_squared(ref, x), f"{rung} silu n {n}")


def test_silu_meaning(ref: Rung) -> None:
    x = np.linspace(-30, 30, 6000, dtype=np.float32).reshape(-1, 40)
    wide = x.astype(np.float64)
    want = wide / (1 + np.exp(-wide)) * wide
    assert np.abs(silu_squared(ref, guarded_copy(x)) - want).max() / np.abs(want).max() < 1e-6
    relative = np.abs(silu_squared(ref, guarded_copy(x)) / np.where(want == 0, 1, want) - 1)
    assert relative[want != 0].max() < 6e-7


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """cbmath.h's inline functions behind a symbol."""
    directory = tmp_path_factory.mktemp("cbmath")
    source, out = directory / "cbmath.c", directory / "cbmath.so"
    source.write_text(
        '#include "cbmath.h"\n'
        "void each_exp(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = cb_exp(x[i]); }\n"
        "void each_f16(const uint16_t *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = cb_f16_f32(x[i]); }\n"
        "void each_bf16(const float *x, uint16_t *y, long n) { for (long i = 0; i < n; i++) y[i] = cb_f32_bf16(x[i]); }\n"
    )
    flags = ["-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'native/src'}"]
    try:
        subprocess.run(["cc", *flags, "-o", str(out), str(source), "-lm"], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler `cc`")
    return ctypes.CDLL(str(Path(out)))


def through(function: object, x: np.ndarray, dtype: type) -> np.ndarray:
    y = np.zeros(x.shape, dtype)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(x.size))  # type: ignore[operator]
    return y


def test_exp_within_two_ulp(scalar: ctypes.CDLL) -> None:
    rng = np.random.default_rng(SEED + 4)
    x = np.concatenate(
        [rng.uniform(-87.3, 88.5, 400_000), rng.uniform(-1, 1, 200_000), np.linspace(-0.35, 0.35, 100_000)]
    )
    x = x.astype(np.float32)
    want = np.exp(x.astype(np.float64))
    ulp = np.spacing(want.astype(np.float32)).astype(np.float64)
    error = np.abs(through(scalar.each_exp, x, np.float32) - want) / ulp
    assert error.max() <= 2, f"worst {error.max():.3f} ulp at {x[error.argmax()]!r}, average {error.mean():.3f}"
    assert error.mean() < 0.3


def test_exp_at_its_ends(scalar: ctypes.CDLL) -> None:
    x = np.array([0.0, -0.0, 1000, np.inf, -1000, -np.inf, np.nan], np.float32)
    y = through(scalar.each_exp, x, np.float32)
    assert (y[:2] == 1).all()
    assert (y[2:4] == np.float32(np.exp(88.5))).all() or np.abs(y[2:4] / np.exp(88.5) - 1).max() < 3e-7
    assert np.isfinite(y[2:4]).all()
    assert (y[4:6] > 0).all()
    assert (y[4:6] < 1.1e-38).all()
    assert np.isnan(y[6])


def test_half_formats_against_numpy(scalar: ctypes.CDLL) -> None:
    every = np.arange(65536, dtype=np.uint16)
    got, want = through(scalar.each_f16, every, np.float32), every.view(np.float16).astype(np.float32)
    assert_same(got, want, "f16 to f32")
    x = np.random.default_rng(SEED + 5).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    rounded = through(scalar.each_bf16, x, np.uint16).astype(np.uint32) << 16
    back = rounded.view(np.float32).astype(np.float64)
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    finite = np.isfinite(back) & np.isfinite(below)
    step = np.abs(((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64) - below)
    assert (np.abs(back - x)[finite] <= step[finite] / 2).all()
