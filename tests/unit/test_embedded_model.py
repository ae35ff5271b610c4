"""Without a model named, the embedded one is found: in the source tree as in an installed wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

from deploy.launch import model_dir_of
from shared.container.reader import Container
from shared.run.config import Settings

ROOT = Path(__file__).parents[2]


def test_it_is_found_and_whole() -> None:
    container = Container.open(model_dir_of(Settings()))
    assert container.spec.n_mtp == 1
    assert [complaint for _, _, complaint in container.verify() if complaint] == []


def test_the_wheel_carries_it() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert "models" in build["wheel"]["packages"].values()
    assert not any(pattern.startswith("models/fledgling") for pattern in build["wheel"]["exclude"])


def test_it_has_the_shape_it_demonstrates() -> None:
    spec = Container.open(model_dir_of(Settings())).spec
    assert spec.family == "glm_moe_dsa"
    indexers = [attention.indexer for attention in spec.main_attention]
    assert {True, False} == {indexer.is_owner for indexer in indexers}
    assert indexers[0].topk < spec.max_context, "the indexer must have something to choose from"
    assert spec.n_shared == 1 and spec.layer_kinds[0] == "dense"
