"""What the kernel tests share: rungs to test, memory that notices, packed matrices and their plain meaning.

A rung is used through the ordinary bindings: ``with rung.use() as pool: linear(pool, ...)``. Emulated rungs are AVX-512
and AMX sources compiled against tests/checkasm/emulate/immintrin.h: they prove arithmetic and bounds on any machine, not
instruction encoding. Where the processor has those instructions the compiled rung is tested too.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from native import kernels, library
from native.library import ISAS, Pool, available_isas, open_library
from native.matrix import ACT_F32, ACT_Q8, Matrix, matrix, scale_bytes, weight_bytes
from tests.support.sweeps import IS_FULL

ROOT = Path(__file__).resolve().parents[2]
EMULATE = Path(__file__).resolve().parent / "emulate"
EMULATED = ("avx512", "avx512vnni", "amx")
EMULATED_HERE = tuple(isa for isa in EMULATED if IS_FULL or isa not in available_isas())
"""In a full run those that this processor has as well."""
RUNGS = [*(isa for isa in available_isas() if isa != "ref"), *(f"emulated-{isa}" for isa in EMULATED_HERE)]
PAGE = mmap.PAGESIZE
SCALED = ("q8", "q4", "q8g32", "q4g32", "mxfp4")
HALVES = ("q8g32", "q4g32", "mxfp4")
"""Formats with scales, and those with one for each half of a group."""
FORMAT_ACTS = [(fmt, ACT_F32) for fmt in ("f32", "bf16", *SCALED)] + [(fmt, ACT_Q8) for fmt in SCALED]
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
F32_EPS = 2.0**-24  # half a unit in the last place, relative


# ---- rungs -----------------------------------------------------------------------------------------------------------


def build_emulated(directory: Path) -> Path:
    """Compile the library without AVX2, with the AVX-512 and AMX files against the emulated header."""
    out = directory / "libcolibri_emulated.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
    include = [f"-I{EMULATE}", f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src'}"]
    plain = [p for p in sorted((ROOT / "native/src").glob("*.c")) if p.name != "cpu.c"] + [EMULATE / "machine.c"]
    x86 = sorted((ROOT / "native/src/x86").glob("*_*.c"))
    wide = [p for p in x86 if not p.stem.startswith("probe_") and p.stem.split("_")[-1] in EMULATED]
    objects = []
    for source in plain + wide:
        objects.append(directory / f"{source.stem}.o")
        # the unrolled kernels over emulated lanes take an optimiser minutes
        level = "-O0" if source in wide else "-O1"
        subprocess.run(["cc", *flags, level, *include, "-c", str(source), "-o", str(objects[-1])], check=True)
    subprocess.run(["cc", "-shared", "-o", str(out), *map(str, objects), "-lpthread", "-lm", "-lrt"], check=True)
    return out


@dataclass
class Rung:
    """One rung of the ladder in one library: the compiled one, or the emulated one."""

    isa: str
    emulated: bool
    lib: ctypes.CDLL
    _pools: dict[int, Pool] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"emulated-{self.isa}" if self.emulated else self.isa

    @contextmanager
    def use(self, n_threads: int = 1) -> Iterator[Pool]:
        """Bindings call this rung; yields a pool of its library."""
        modules = [m for name, m in list(sys.modules.items()) if name.startswith("native.") and hasattr(m, "lib")]
        before = library.lib
        highest = self.lib.cb_isa_current()
        for module in modules:
            module.lib = self.lib  # type: ignore[attr-defined]
        try:
            assert self.lib.cb_isa_limit(ISAS.index(self.isa)) == library.OK
            if n_threads not in self._pools:
                self._pools[n_threads] = Pool(n_threads)
            yield self._pools[n_threads]
        finally:
            self.lib.cb_isa_limit(highest)
            for module in modules:
                module.lib = before  # type: ignore[attr-defined]

    def close(self) -> None:
        for pool in self._pools.values():
            self.lib.cb_pool_free(pool.handle)
        self._pools.clear()


def open_like(path: Path) -> ctypes.CDLL:
    """Another build of the library, with the same types declared as the bindings declared on the first."""
    opened = open_library(path)
    for name, function in vars(library.lib).items():
        if name.startswith("cb_"):
            other = getattr(opened, name)
            other.restype, other.argtypes = function.restype, function.argtypes
    return opened


def real_rungs() -> list[Rung]:
    """The rungs of this machine, `ref` first."""
    return [Rung(isa, False, library.lib) for isa in available_isas()]


# ---- memory that notices ---------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_maps: list[mmap.mmap] = []


def guarded(n_bytes: int, align: int = 4) -> np.ndarray:
    """u8[n_bytes] whose end lies against an inaccessible page (closer than `align` bytes): a read beyond it crashes."""
    size = -(-max(n_bytes, 1) // PAGE) * PAGE
    area = mmap.mmap(-1, size + PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert _libc.mprotect(base + size, PAGE, 0) == 0
    start = (size - n_bytes) // align * align
    array = np.frombuffer(area, np.uint8, n_bytes, start)
    return array


def guarded_copy(data: np.ndarray, align: int = 4) -> np.ndarray:
    """The same values against an inaccessible page."""
    data = np.ascontiguousarray(data)
    copy = guarded(data.nbytes, align).view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy


CANARY = np.float32(-123456.75)


class Output:
    """f32[rows, columns] of NaN with canaries before and behind."""

    def __init__(self, rows: int, columns: int) -> None:
        self._whole = np.full(rows * columns + 64, CANARY, np.float32)
        self.array = self._whole[32 : 32 + rows * columns].reshape(rows, columns)
        self.array[...] = np.nan

    def check(self) -> np.ndarray:
        n = self.array.size
        assert (self._whole[:32] == CANARY).all(), "wrote in front of the output"
        assert (self._whole[32 + n :] == CANARY).all(), "wrote behind the output"
        return self.array


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit; any NaN equals any NaN (which of two NaNs survives is the processor's choice)."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def assert_same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """`same_bits`, and on failure the first place and both values."""
    if same_bits(got, want):
        return
    differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    raise AssertionError(
        f"{what}: {differs.sum()} of {differs.size} differ, first at {at}: {got[at]!r}, reference {want[at]!r}"
    )


# ---- packed matrices -------------------------------------------------------------------------------------------------


@dataclass
class Packed:
    """A packed matrix and the bytes behind it."""

    fmt: str
    act: int
    out: int
    in_: int
    weight: np.ndarray  # u8
    scale: np.ndarray | None  # u8

    @property
    def matrix(self) -> Matrix:
        return matrix(self.weight, self.scale, self.fmt, self.out, self.in_, self.act)

    def codes(self) -> np.ndarray:
        """[out, in] values without scales, f64: written from the layout's description, not from the C code."""
        nb, ng = -(-self.out // 16), -(-self.in_ // 64)
        if self.fmt == "f32":
            tiles = self.weight.view(np.float32).reshape(nb, self.in_, 16).transpose(0, 2, 1).astype(np.float64)
        elif self.fmt == "bf16":
            bits = self.weight.view(np.uint16).astype(np.uint32) << 16
            tiles = bits.view(np.float32).reshape(nb, self.in_, 16).transpose(0, 2, 1).astype(np.float64)
        elif self.fmt in ("q8", "q8g32"):
            quads = self.weight.reshape(nb, ng, 16, 16, 4).astype(np.int64) - 128
            tiles = quads.transpose(0, 3, 1, 2, 4).reshape(nb, 16, ng * 64)
        else:
            quads = self.weight.reshape(nb, ng, 8, 16, 4).transpose(0, 3, 1, 2, 4).reshape(nb, 16, ng, 32)
            tiles = np.concatenate([quads & 15, quads >> 4], axis=3).astype(np.int64).reshape(nb, 16, ng * 64)
            tiles = np.array([*E2M1, *(-v for v in E2M1)])[tiles] if self.fmt == "mxfp4" else tiles - 8
        return tiles.reshape(nb * 16, -1)[: self.out, : self.in_].astype(np.float64)

    @property
    def group(self) -> int:
        """Inputs that share a scale; of a row scale, those that are summed together."""
        return 32 if self.fmt in HALVES else 64

    def scales(self) -> np.ndarray:
        """[out, groups] f64 (row scales repeated; ones where the format has none)."""
        nb, n = -(-self.out // 16), -(-self.in_ // 64) * (64 // self.group)
        if self.scale is None:
            return np.ones((self.out, n))
        if self.fmt == "q8":
            return np.repeat(self.scale.view(np.float32).astype(np.float64)[: self.out, None], n, axis=1)
        if self.fmt == "mxfp4":
            values = np.exp2(self.scale.astype(np.float64) - 127)
        else:
            values = self.scale.view(np.float16).astype(np.float64)
        return values.reshape(nb, n, 16).transpose(0, 2, 1).reshape(nb * 16, n)[: self.out]

    def dense(self) -> np.ndarray:
        """[out, in] f64: what the matrix means."""
        return self.codes() * np.repeat(self.scales(), self.group, axis=1)[:, : self.in_]


def random_matrix(rng: np.random.Generator, fmt: str, act: int, out: int, in_: int, fill: int | None = None) -> Packed:
    """A packed matrix with random (or constant `fill`) weight bytes, guarded behind."""
    weight = guarded(weight_bytes(fmt, out, in_), 64)
    scale: np.ndarray | None = None
    if fmt == "f32":
        weight.view(np.float32)[:] = rng.standard_normal(weight.size // 4)
    elif fmt == "bf16":
        weight.view(np.uint16)[:] = rng.standard_normal(weight.size // 2).astype(np.float32).view(np.uint32) >> 16
    else:
        weight[:] = rng.integers(0, 256, weight.size) if fill is None else fill
        scale = guarded(scale_bytes(fmt, out, in_), 64)
        if fmt == "q8":
            scale.view(np.float32)[:] = rng.uniform(0.01, 2, scale.size // 4)
        elif fmt == "mxfp4":
            scale[:] = rng.integers(118, 129, scale.size)  # 2^-9 .. 2
        else:
            n = scale.size // 2
            scale.view(np.float16)[:] = rng.uniform(0.01, 2, n) * rng.choice([-1, 1], n)
    return Packed(fmt, act, out, in_, weight, scale)


def activations(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """f32[rows, n], rows of different size, guarded behind."""
    x = rng.standard_normal((rows, n)) * np.exp2(rng.integers(-6, 7, (rows, 1)))
    return guarded_copy(x.astype(np.float32))


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations as docs/numerics.md quantises them: codes [rows, n] and scales [rows, ng]. Finite input only."""
    rows, n = x.shape
    ng = -(-n // 64)
    padded = np.zeros((rows, ng * 64), np.float32)
    padded[:, :n] = x
    groups = padded.reshape(rows, ng, 64)
    largest = np.abs(groups).max(axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    usable = np.isfinite(inverse)
    scale = np.where(usable, largest / np.float32(127), np.float32(0)).astype(np.float32)
    codes = np.clip(np.rint(groups * np.where(usable, inverse, 0)[:, :, None].astype(np.float32)), -127, 127)
    return codes.reshape(rows, -1)[:, :n].astype(np.float64), scale.astype(np.float64)


def run_linear(rung: Rung, packed: Packed, x: np.ndarray, n_threads: int = 1) -> np.ndarray:
    """x W^T on a rung, into an output that notices."""
    out = Output(len(x), packed.out)
    with rung.use(n_threads) as pool:
        kernels.linear(pool, packed.matrix, x, out.array)
    return out.check()
