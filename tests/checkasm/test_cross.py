"""The whole library for aarch64: it compiles without a warning, its rungs give the reference's bits, and these are x86's.

Python cannot load another architecture's library, so ``cross/driver.c`` makes the cases, compares the rungs and prints a
checksum per family of cases. It runs here as it is, and cross-compiled under qemu-user.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from native.library import available_isas, find_library
from tests.checkasm.kit import ROOT, SCALED
from tests.support.sweeps import IS_FULL

DRIVER = Path(__file__).resolve().parent / "cross" / "driver.c"
CROSS_CC, CROSS_ROOT, QEMU = "aarch64-linux-gnu-gcc", Path("/usr/aarch64-linux-gnu"), "qemu-aarch64"
PATH = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
MODE = ("full",) if IS_FULL else ()
CPUS = [("max", ["ref", "neon", "neondot"]), ("cortex-a72", ["ref", "neon"])]  # with dot products, and without
FAMILIES = ("linear", "experts", "rows", "attention", "gqa", "delta", "plain")


@dataclass
class Driven:
    """What one run of the driver said."""

    status: int
    text: str

    @property
    def rungs(self) -> list[str]:
        return next(line for line in self.text.splitlines() if line.startswith("rungs ")).split()[1].split(",")

    @property
    def checksums(self) -> dict[str, str]:
        lines = [line.split() for line in self.text.splitlines() if line.startswith("checksum ")]
        return {name: value for _, name, value in lines}

    def check(self) -> None:
        assert self.status == 0, self.text
        assert "FAIL" not in self.text
        assert tuple(self.checksums) == FAMILIES


def run(*command: str | Path) -> Driven:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600)
    return Driven(done.returncode, done.stdout + done.stderr)


def compile_driver(cc: str, library: Path, out: Path) -> Path:
    """The driver, finding the library where it lies."""
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    link = [f"-L{library.parent}", "-lcolibri_native", f"-Wl,-rpath,{library.parent}", "-lm"]
    subprocess.run([cc, *flags, f"-I{ROOT / 'native/include'}", str(DRIVER), "-o", str(out), *link], check=True)
    return out


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver for this machine, with the library that Python uses."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler `cc`")
    return compile_driver("cc", find_library(), tmp_path_factory.mktemp("here") / "driver")


@pytest.fixture(scope="session")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver for aarch64, with the library that CMake builds for it; a warning fails the build."""
    cmake = shutil.which("cmake", path=PATH)
    missing = [name for name in (CROSS_CC, QEMU) if not shutil.which(name)] + ([] if cmake else ["cmake"])
    if missing or not cmake:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: gcc-aarch64-linux-gnu, qemu-user, cmake)")
    base = tmp_path_factory.mktemp("aarch64")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_C_COMPILER={CROSS_CC}"]
    ours = ["-DCOLIBRI_WERROR=ON", f"-DCOLIBRI_LIBRARY_DIR={base / 'lib'}"]
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(base / "build"), *target, *ours],
        [cmake, "--build", str(base / "build"), "--parallel"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
        assert done.returncode == 0, done.stdout + done.stderr
    return compile_driver(CROSS_CC, base / "lib" / "libcolibri_native.so", base / "driver")


@pytest.fixture(scope="session")
def said_here(here: Path) -> Driven:
    return run(here, *MODE)


def test_rungs_of_this_machine(said_here: Driven) -> None:
    said_here.check()
    assert said_here.rungs == available_isas()


def test_wrong_weights_are_noticed(here: Path) -> None:
    if len(available_isas()) == 1:
        pytest.skip("this machine offers no rung above the reference")
    wrong = run(here, "disturbed")
    assert wrong.status == 1
    scaled = [f"{fmt}-{act}" for fmt in SCALED for act in ("f32", "q8")]
    for kind in ("f32-f32", "bf16-f32", *scaled):
        assert f"FAIL {available_isas()[1]} {kind}" in wrong.text


@pytest.mark.parametrize(("cpu", "rungs"), CPUS if IS_FULL else CPUS[:1])
def test_aarch64_gives_the_same_bits(cpu: str, rungs: list[str], cross: Path, said_here: Driven) -> None:
    said = run(QEMU, "-cpu", cpu, "-L", CROSS_ROOT, cross, *MODE)
    said.check()
    assert said.rungs == rungs
    assert f"linear_q4={rungs[-1]}" in said.text.splitlines()[len(rungs)]
    assert said.checksums == said_here.checksums, f"other bits than on {platform.machine()}"
