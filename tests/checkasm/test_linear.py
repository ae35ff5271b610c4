"""cb_linear: every rung gives the reference's bits, and the reference means what the layout says."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from native import kernels
from native.library import ISAS, NativeError, available_isas, dispatch_text
from native.matrix import ACT_F32, ACT_Q8, absent_matrix, matrix, scale_bytes, weight_bytes
from tests.checkasm.kit import (
    F32_EPS,
    FORMAT_ACTS,
    HALVES,
    RUNGS,
    SCALED,
    Output,
    Packed,
    Rung,
    activations,
    assert_same,
    guarded_copy,
    quantised,
    random_matrix,
    run_linear,
    same_bits,
)
from tests.support.sweeps import sparse

SEED = 20250101
ROWS = sparse((1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64), (1, 2, 3, 4, 6, 9, 16, 17, 33))
INS = sparse((1, 24, 63, 64, 65, 136, 2048), (1, 63, 65, 136, 2048))
OUTS = sparse((1, 15, 16, 17, 144, 560), (1, 16, 17, 144))
NAMES = {(fmt, act): f"{fmt}-{'q8' if act else 'f32'}" for fmt, act in FORMAT_ACTS}
each_format = pytest.mark.parametrize(("fmt", "act"), NAMES, ids=NAMES.values())
# VNNI and AMX replace the int8 kernels only; the others are those of the rung below
KERNELS = [(rung, *f) for rung in RUNGS for f in NAMES if not (rung.endswith(("vnni", "amx")) and f[1] == ACT_F32)]
each_kernel = pytest.mark.parametrize(
    ("rung", "fmt", "act"), KERNELS, ids=[f"{r}-{NAMES[f, a]}" for r, f, a in KERNELS], indirect=["rung"]
)


@each_kernel
def test_bits_equal_reference_at_all_sizes(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED)
    for in_ in INS:
        for out in OUTS:
            if out > 144 and in_ > 136:  # more row blocks than a kernel holds at once need no long rows
                continue
            packed = random_matrix(rng, fmt, act, out, in_)
            x = activations(rng, max(ROWS), in_)
            want = run_linear(ref, packed, x)
            assert not np.isnan(want).any()
            for rows in ROWS:
                if in_ * out * rows > 4e6 and rows not in (1, 9):  # the largest size once in full is enough
                    continue
                got = run_linear(rung, packed, guarded_copy(x[:rows]))
                assert_same(got, want[:rows], f"{rung} {fmt} act {act} [{out}, {in_}] rows {rows} seed {SEED}")
            assert_same(run_linear(rung, packed, x), want, f"{rung} {fmt} act {act} [{out}, {in_}] seed {SEED}")


@each_kernel
def test_bits_equal_reference_at_extremes(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED + 1)
    in_, out, rows = 200, 33, 18
    specials: dict[str, np.ndarray] = {
        "usual": rng.standard_normal((rows, in_)),
        "huge": rng.choice([-3e38, 3e38], (rows, in_)),
        "denormal": rng.choice([-1e-42, 1e-45, 0.0], (rows, in_)),
        "just above denormal": rng.choice([-2e-38, 3e-37, 0.0], (rows, in_)),
        "all the same": np.full((rows, in_), -0.37),
        "zero": np.zeros((rows, in_)),
        "minus zero": np.full((rows, in_), -0.0),
        "mixed magnitudes": rng.standard_normal((rows, in_)) * np.exp2(rng.integers(-60, 60, (rows, in_))),
        "ties": rng.integers(-254, 255, (rows, in_)) / 2.0,
    }
    fills: list[int | None] = [None, 0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F] if fmt in SCALED else [None]
    for fill in fills:
        for zero_scale in (False, True) if fmt in SCALED else (False,):
            packed = random_matrix(rng, fmt, act, out, in_, fill)
            if zero_scale and packed.scale is not None:
                packed.scale[: packed.scale.size // 2] = 0
            for name, values in specials.items():
                x = guarded_copy(values.astype(np.float32))
                want, got = run_linear(ref, packed, x), run_linear(rung, packed, x)
                assert_same(got, want, f"{rung} {fmt} act {act} fill {fill} zero_scale {zero_scale} {name}")


@each_kernel
def test_non_finite_stays_in_its_row(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED + 2)
    packed = random_matrix(rng, fmt, act, 40, 130)
    clean = activations(rng, 18, 130)
    x = guarded_copy(clean)
    x[1, 7], x[4, 129], x[6, 64] = np.nan, np.inf, -np.inf
    want, got = run_linear(ref, packed, x), run_linear(rung, packed, x)
    assert_same(got, want, f"{rung} {fmt} act {act}")
    assert not np.isfinite(want[[1, 4, 6]]).any(), "a NaN or infinity must reach every output of its row"
    others = [t for t in range(18) if t not in (1, 4, 6)]
    assert_same(got[others], run_linear(rung, packed, clean)[others], "rows beside a non-finite one")


@each_kernel
def test_wrong_weight_is_noticed(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    """The comparison is sharp: one weight off by 1 % (or by one code) fails it."""
    rng = np.random.default_rng(SEED + 3)
    packed = random_matrix(rng, fmt, act, 32, 192)
    x = activations(rng, 18, 192)
    x[:, 100] = np.abs(x).max(axis=1)  # the weight's own activation must not round to zero
    want = run_linear(ref, packed, x)
    if fmt == "f32":
        packed.weight.view(np.float32).reshape(2, 192, 16)[0, 100, 5] *= np.float32(1.01)
    elif fmt == "bf16":
        packed.weight.view(np.uint16).reshape(2, 192, 16)[0, 100, 5] ^= 2  # 0.8 to 1.6 %
    elif fmt in ("q8", "q8g32"):
        packed.weight.reshape(2, 3, 16, 16, 4)[0, 1, 9, 5, 0] ^= 1
    else:
        packed.weight.reshape(2, 3, 8, 16, 4)[0, 1, 1, 5, 0] ^= 0x10  # input 64 + 32 + 4
    got = run_linear(rung, packed, x)
    assert not same_bits(got, want)
    changed = np.zeros(got.shape, bool)
    changed[:, 5] = True
    assert (changed == (got != want)).all()
    assert (run_linear(rung, packed, x[3:4]) == got[3:4]).all(), "one row takes the same change"


@each_kernel
def test_threads_and_neighbours_change_nothing(rung: Rung, fmt: str, act: int) -> None:
    rng = np.random.default_rng(SEED + 4)
    packed = random_matrix(rng, fmt, act, 1400, 192)
    x = activations(rng, 21, 192)
    alone = np.concatenate([run_linear(rung, packed, x[t : t + 1]) for t in range(len(x))])
    for n_threads in (1, 2, 4):
        assert_same(run_linear(rung, packed, x, n_threads), alone, f"{rung} {fmt} act {act} threads {n_threads}")


@each_format
def test_reference_against_float64(ref: Rung, fmt: str, act: int) -> None:
    """Error bound: one rounding per step of the chain, each relative to the sum of magnitudes."""
    rng = np.random.default_rng(SEED + 5)
    for out, in_ in ((17, 1), (33, 65), (144, 2048)):
        packed = random_matrix(rng, fmt, act, out, in_)
        x = activations(rng, 3, in_)
        got = run_linear(ref, packed, x).astype(np.float64)
        if act == ACT_Q8:
            codes, scale = quantised(x)
            plain = codes * np.repeat(scale, 64, axis=1)[:, :in_]
            steps = 4 + -(-in_ // packed.group)
        else:
            plain = x.astype(np.float64)
            steps = 66 + -(-in_ // packed.group)
        dense = packed.dense()
        bound = steps * F32_EPS * (np.abs(plain) @ np.abs(dense).T) * 1.1
        error = np.abs(got - plain @ dense.T)
        assert (error <= bound).all(), f"{fmt} act {act} [{out}, {in_}]: {np.max(error / bound):.2f} times the bound"
        if act == ACT_Q8:  # and quantising costs what 8 bits cost
            exact = x.astype(np.float64) @ dense.T
            size = np.sqrt(np.mean(exact**2))
            assert np.sqrt(np.mean((got - exact) ** 2)) < 0.02 * size


@pytest.mark.parametrize("act", [ACT_F32, ACT_Q8])
def test_every_power_of_two_of_mxfp4(rung: Rung, ref: Rung, act: int) -> None:
    """All 256 scales in one matrix: 2^-127 and what becomes of it times a half are denormal, 255 reads as infinity."""
    rng = np.random.default_rng(SEED + 8)
    packed = random_matrix(rng, "mxfp4", act, 16, 32 * 16 * 2)
    assert packed.scale is not None
    packed.scale[:256], packed.scale[256:] = np.arange(256), 127
    x = guarded_copy(np.exp2(rng.integers(-40, 40, (17, packed.in_))).astype(np.float32))
    want = run_linear(ref, packed, x)
    assert_same(run_linear(rung, packed, x), want, f"{rung} act {act}")
    for column in (0, 1, 250, 254, 255):
        alone = random_matrix(rng, "mxfp4", act, 16, 32, fill=0x11)
        assert alone.scale is not None
        alone.scale[:] = column
        one = run_linear(rung, alone, np.ones((1, 32), np.float32))
        assert_same(one, run_linear(ref, alone, np.ones((1, 32), np.float32)), f"{rung} scale {column}")
        if column < 254:
            assert np.allclose(one.astype(np.float64), 16.0 * 2.0 ** (column - 127), rtol=1e-6), (column, one[0, 0])
        else:  # 16 * 2^127 is beyond f32 already
            assert not np.isfinite(one).any(), (column, one[0, 0])


@pytest.mark.parametrize("fmt", HALVES)
def test_a_scale_belongs_to_32_inputs(rung: Rung, fmt: str) -> None:
    """Each half of a group by itself: a scale of zero takes out its half and nothing else."""
    rng = np.random.default_rng(SEED + 9)
    for act in (ACT_F32, ACT_Q8):
        packed = random_matrix(rng, fmt, act, 16, 128)
        assert packed.scale is not None
        x = activations(rng, 20, 128)
        for half in range(4):
            kept = packed.scale.copy()
            packed.scale.reshape(4, -1)[np.arange(4) != half] = 0
            found = run_linear(rung, packed, x)
            codes, scale = quantised(x)
            plain = x.astype(np.float64) if act == ACT_F32 else codes * np.repeat(scale, 64, axis=1)
            inputs = slice(half * 32, half * 32 + 32)
            want = plain[:, inputs] @ packed.dense()[:, inputs].T
            assert np.allclose(found, want, rtol=1e-4, atol=1e-4 * np.abs(want).max()), (act, half)
            packed.scale[:] = kept


def test_bytes_of_packed_matrices() -> None:
    assert weight_bytes("f32", 17, 3) == 2 * 3 * 16 * 4
    assert weight_bytes("bf16", 17, 3) == 2 * 3 * 16 * 2
    assert weight_bytes("q8", 17, 65) == 2 * 2 * 1024
    assert weight_bytes("q4", 17, 65) == 2 * 2 * 512
    assert scale_bytes("f32", 17, 65) == scale_bytes("bf16", 17, 65) == 0
    assert scale_bytes("q8", 17, 65) == 2 * 16 * 4
    assert scale_bytes("q4", 17, 65) == 2 * 2 * 16 * 2
    assert weight_bytes("q8g32", 17, 65) == weight_bytes("q8", 17, 65)
    assert weight_bytes("mxfp4", 17, 65) == weight_bytes("q4g32", 17, 65) == weight_bytes("q4", 17, 65)
    assert scale_bytes("q8g32", 17, 65) == scale_bytes("q4g32", 17, 65) == 2 * 2 * 2 * 16 * 2
    assert scale_bytes("mxfp4", 17, 65) == 2 * 2 * 2 * 16
    with pytest.raises(NativeError, match="format 'q5'"):
        weight_bytes("q5", 1, 1)
    with pytest.raises(NativeError, match="sizes must be"):
        weight_bytes("q4", 0, 64)


def test_wrong_arguments_are_refused(ref: Rung) -> None:
    rng = np.random.default_rng(SEED)
    packed = random_matrix(rng, "q4", ACT_Q8, 16, 64)
    weight, scale = packed.weight, packed.scale
    assert scale is not None
    with pytest.raises(NativeError, match="not a multiple of 64"):
        matrix(np.zeros(4096, np.uint8).ctypes.data | 4, scale, "q4", 16, 64)
    with pytest.raises(NativeError, match="expected 512 contiguous bytes"):
        matrix(weight[:100], scale, "q4", 16, 64)
    with pytest.raises(NativeError, match="scales of q4"):
        matrix(weight, None, "q4", 16, 64)
    with pytest.raises(NativeError, match="int8 activations need weights with scales"):
        matrix(random_matrix(rng, "f32", ACT_F32, 16, 64).weight, None, "f32", 16, 64, ACT_Q8)
    with ref.use() as pool:
        x, out = np.zeros((2, 64), np.float32), np.zeros((2, 16), np.float32)
        with pytest.raises(NativeError, match=r"linear: x: expected contiguous float32\[2, 64\], found float64"):
            kernels.linear(pool, packed.matrix, x.astype(np.float64), out)
        with pytest.raises(NativeError, match="not contiguous"):
            kernels.linear(pool, packed.matrix, np.zeros((2, 128), np.float32)[:, ::2], out)
        with pytest.raises(NativeError, match="linear: out"):
            kernels.linear(pool, packed.matrix, x, out[:1])
        with pytest.raises(NativeError, match="cb_linear"):
            kernels.linear(pool, absent_matrix(), np.zeros((1, 0), np.float32), np.zeros((1, 0), np.float32))


ROW_COUNTS = (*range(1, 41), 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512)


@each_kernel
def test_every_number_of_rows_gives_the_single_rows_bits(rung: Rung, ref: Rung, fmt: str, act: int) -> None:
    """Kernels change their shape with the number of rows (pairs, tiles, chunks, remainders); a row's bits may not."""
    rng = np.random.default_rng(SEED + 7)
    packed = random_matrix(rng, fmt, act, 36, 136)
    x = activations(rng, max(ROW_COUNTS), 136)
    want = run_linear(ref, packed, x)
    alone = np.concatenate([run_linear(rung, packed, guarded_copy(x[t : t + 1])) for t in range(64)])
    assert_same(alone, want[:64], f"{rung} {fmt} act {act}, rows alone")
    for rows in ROW_COUNTS:
        got = run_linear(rung, packed, guarded_copy(x[:rows]), n_threads=1 + rows % 3)
        assert_same(got, want[:rows], f"{rung} {fmt} act {act}, {rows} rows")


def test_no_rows_is_no_work(rung: Rung) -> None:
    packed = random_matrix(np.random.default_rng(SEED), "q8", ACT_Q8, 16, 64)
    assert run_linear(rung, packed, np.zeros((0, 64), np.float32)).shape == (0, 16)


def test_row_stride_leaves_other_columns_alone(rung: Rung, ref: Rung) -> None:
    """Strides are for callers in C (stacked heads): the bytes between rows are not ours."""
    rng = np.random.default_rng(SEED + 6)
    for fmt, act in FORMAT_ACTS:
        packed = random_matrix(rng, fmt, act, 20, 70)
        x = rng.standard_normal((5, 75)).astype(np.float32)
        want = run_linear(ref, packed, np.ascontiguousarray(x[:, :70]))
        out = Output(5, 23)
        with rung.use() as pool:
            status = rung.lib.cb_linear(pool.handle, packed.matrix, x.ctypes.data, 75, 5, out.array.ctypes.data, 23)
        assert status == 0
        assert_same(np.ascontiguousarray(out.check()[:, :20]), want, f"{rung} {fmt} act {act} strides")
        assert np.isnan(out.array[:, 20:]).all()


# ---- which rungs -----------------------------------------------------------------------------------------------------


def expected_isas() -> list[str]:
    """From the kernel's list of processor flags, which already leaves out what the system does not save."""
    text = Path("/proc/cpuinfo").read_text()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.split())
    isas = ["ref"]
    if {"avx2", "fma", "f16c"} <= flags:
        isas.append("avx2")
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            isas.append("avx512")
            if "avx512_vnni" in flags:
                isas.append("avx512vnni")
                asked = ctypes.CDLL(None).syscall(158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, tile data)
                if {"amx_tile", "amx_int8", "avx512vbmi"} <= flags and asked == 0:
                    isas.append("amx")
    return isas


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the processor flags of x86-64")
def test_rungs_match_the_processor() -> None:
    assert available_isas() == expected_isas()
    assert f"linear_q4={available_isas()[-1]}" in dispatch_text()


@pytest.mark.parametrize("isa", available_isas())
def test_environment_limits_the_rung(isa: str) -> None:
    code = "import native.library as l; print(l.isa_current(), l.dispatch_text())"
    env = {**os.environ, "COLIBRI_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{isa} ")
    if isa == "ref":
        assert "avx" not in done.stdout


@pytest.mark.parametrize("isa", ["sse9", "AVX2", *(isa for isa in ISAS if isa not in available_isas())])
def test_environment_with_a_wrong_rung_is_an_error(isa: str) -> None:
    env = {**os.environ, "COLIBRI_ISA": isa}
    done = subprocess.run([sys.executable, "-c", "import native.library"], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"COLIBRI_ISA={isa}" in done.stderr


def test_kit_unpacks_what_it_packs() -> None:
    """The float64 model's own reading of the layout, on one matrix small enough to check by hand."""
    weight = np.full(weight_bytes("q4", 2, 40), 0x88, np.uint8)
    weight.reshape(8, 16, 4)[2, 1, 3] = 0xF1  # row 1: input 11 = 1 - 8; input 43 is padding
    weight.reshape(8, 16, 4)[0, 0, 2] = 0x3A  # row 0: input 2 = 10 - 8; input 34 = 3 - 8
    packed = Packed("q4", ACT_Q8, 2, 40, weight, np.zeros(scale_bytes("q4", 2, 40), np.uint8))
    codes = packed.codes()
    assert codes[1, 11] == -7
    assert codes[0, 2] == 2
    assert codes[0, 34] == -5
    assert np.count_nonzero(codes) == 3
