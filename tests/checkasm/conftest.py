"""The rungs under test: those of this machine, and the AVX-512 ones that it lacks emulated."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.checkasm.kit import EMULATED_HERE, RUNGS, Rung, build_emulated, open_like, real_rungs


@pytest.fixture(scope="session")
def all_rungs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Rung]]:
    """Rungs by name; emulated ones only where a C compiler is at hand."""
    rungs = {str(rung): rung for rung in real_rungs()}
    if EMULATED_HERE and shutil.which("cc"):
        emulated = open_like(build_emulated(tmp_path_factory.mktemp("emulated")))
        rungs.update({f"emulated-{isa}": Rung(isa, True, emulated) for isa in EMULATED_HERE})
    yield rungs
    for rung in rungs.values():
        rung.close()


@pytest.fixture(params=RUNGS)
def rung(request: pytest.FixtureRequest, all_rungs: dict[str, Rung]) -> Rung:
    """Every rung above the reference in turn."""
    if request.param not in all_rungs:
        pytest.skip(f"{request.param}: no C compiler `cc` to build the emulation with")
    return all_rungs[request.param]


@pytest.fixture
def ref(all_rungs: dict[str, Rung]) -> Rung:
    """The definition."""
    return all_rungs["ref"]
