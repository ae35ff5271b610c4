"""A wheel installs everything under one name: beside a foreign package called ``shared`` both work, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = ("shared", "services", "native")


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listing(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.group
@pytest.mark.slow
def test_installed_beside_foreign_packages_of_the_same_names(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "wheel")]
    options += ["--config-settings=cmake.build-type=Debug"]  # compiled in half the time; nothing here asks for speed
    run(
        [*pip, "wheel", *options, "--config-settings=build-dir=" + str(tmp_path / "build"), str(ROOT)],
        tmp_path,
        PATH=path,
    )
    (wheel,) = (tmp_path / "wheel").iterdir()

    home = tmp_path / "home"
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # The packages we depend on, without the development install of ours: path files count in site directories only.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in FOREIGN:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"WHOSE = 'a stranger: {name}'\n")
    before, scripts = listing(site), listing(home / "bin")
    install = [*pip, "--python", str(home / "bin" / "python")]
    run([*install, "install", "--no-deps", str(wheel)], tmp_path)
    ours = {name.split("/")[0] for name in listing(site) - before}
    assert {name for name in ours if not name.endswith(".dist-info")} == {"colibri_moe"}

    run_dir = tmp_path / "run"
    answer = run([str(home / "bin" / "colibri"), "run", "--run-dir", str(run_dir), "--max-tokens", "4", "Hi"], tmp_path)
    assert answer.strip()
    up = [str(home / "bin" / "colibri-up"), "--run-dir", str(run_dir)]
    run([*up, "--port", "0", "--daemon"], tmp_path)
    run([*up, "--stop"], tmp_path)
    whose = run([str(home / "bin" / "python"), "-c", "import shared; print(shared.WHOSE)"], tmp_path)
    assert whose == "a stranger: shared\n"

    run([*install, "uninstall", "--yes", "colibri-moe"], tmp_path)
    assert listing(site) == before
    assert listing(home / "bin") == scripts
