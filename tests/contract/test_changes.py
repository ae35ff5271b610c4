"""What a typical change touches stays as little as it is: the rows of the table in ARCHITECTURE.md, where a test can hold them.

Held elsewhere: an expert engine by ``tests/ring/test_engines.py`` (a second one, known to the registry alone), a message by
``test_messages.py`` and ``test_documents.py``, error codes and the settings' template by ``test_documents.py``, that nothing
else names a family by ``test_families.py``.
"""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import numpy as np
import pytest

from cli.main import COMMANDS
from native.matrix import FORMATS, scale_bytes, weight_bytes
from services.gateway.bodies import Common
from shared.container import pack
from shared.container.format import PRECISIONS, plan_container
from shared.experts import residency
from shared.messages.router import Sampling
from shared.model import families, family
from shared.model.family import load_spec
from shared.run.config import Passed, Settings
from shared.wire.links import TRANSPORTS
from tests.oracle import oracle_dir

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_sampling_field_is_declared_bounded_and_used_in_one_file_each(field: str) -> None:
    """The message, the body's range, the sampler; docs/api.md is the fourth."""
    files = [path for room in ("services", "shared") for path in (ROOT / room).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if re.search(rf"\b{field}\b", path.read_text())} == {
        "shared/messages/router.py",
        "services/gateway/bodies.py",
        "services/router/sampler.py",
    }


def test_a_client_can_name_every_sampling_field() -> None:
    assert set(Sampling.__struct_fields__) <= set(Common.__struct_fields__)


def words_of(setting: str) -> set[str]:
    """The texts that a setting may be."""
    hint = typing.get_type_hints(Settings)[setting]
    return set(typing.get_args(hint))


def test_a_policy_is_a_class_and_its_name() -> None:
    assert words_of("cache_policy") == set(residency.POLICIES)
    files = [path for room in ("services", "shared", "cli", "deploy") for path in (ROOT / room).rglob("*.py")]
    for name in set(residency.POLICIES) - {Passed().cache_policy, residency.Lru.name}:  # the default, and a yardstick
        naming = {str(path.relative_to(ROOT)) for path in files if f'"{name}"' in path.read_text()}
        assert naming == {"shared/experts/residency.py", "shared/run/config.py"}


def test_a_transport_is_one_link_and_its_name() -> None:
    assert words_of("transport") == set(TRANSPORTS)


def test_a_setting_is_declared_once() -> None:
    """Flags, ranges, help and template follow: no other file of ours spells a flag that exists for the setting alone."""
    for name, flag in (
        ("cache_policy", "--cache-policy"),
        ("huge_dir", "--huge-dir"),
        ("max_sequences", "--max-sequences"),
    ):
        assert name in Settings.__struct_fields__
        for path in (ROOT / "deploy").rglob("*.py"):
            assert flag not in path.read_text(), path


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_of_the_library_can_be_packed_and_planned(fmt: str) -> None:
    """Sizes come from the library alone: what is packed is as large as the kernels and the ledger say."""
    weight, scale = pack.pack_matrix(np.ones((40, 130), np.float32), fmt)
    assert weight.nbytes == weight_bytes(fmt, 40, 130)
    assert (0 if scale is None else scale.nbytes) == scale_bytes(fmt, 40, 130)


def naming(pattern: str, *but: str) -> set[str]:
    """Files of ours that hold ``pattern``, but those that begin with one of ``but``."""
    rooms = ("services", "shared", "cli", "deploy", "conversion", "bench", "native")
    found = {
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    return {name for name in found if not name.startswith(but)}


@pytest.mark.parametrize(
    "kind", [path.stem for path in (ROOT / "shared/model/attention").glob("[!_]*.py") if path.stem != "kind"]
)
def test_a_kind_of_attention_is_a_module(kind: str) -> None:
    """Families choose it and nobody else asks which kind a layer is; two readers of foreign formats know what they read."""
    foreign = ("shared/container/c_engine.py", "bench/peers/")
    assert not naming(rf"attention\.{kind}\b|attention import {kind}\b", "shared/model/", *foreign)


@pytest.mark.parametrize("word", ["clamped", "swiglu", "gelu", "softmax", "sigmoid"])
def test_gates_and_inner_functions_are_told_apart_in_one_module(word: str) -> None:
    """Their own, the kernels' binding, and what maps a config.json or GGUF's keys."""
    where = "shared/model/gate.py" if word in ("softmax", "sigmoid") else "shared/model/inner.py"
    maps = ("shared/model/families/", "shared/model/mapping.py", "conversion/gguf/", "conversion/presets.py")
    assert naming(f'"{word}"', *maps) == {where, "native/kernels.py"}


def test_a_command_is_one_module_and_one_line() -> None:
    modules = {place.partition(":")[0] for place, _ in COMMANDS.values()}
    assert len(modules) == len(COMMANDS)
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


NEW_FAMILY = """
from shared.model.config_reader import ConfigReader
from shared.model.families import olmoe
from shared.model.spec import ModelSpec
import msgspec


def spec(read: ConfigReader) -> ModelSpec:
    return msgspec.structs.replace(olmoe.spec(read), family="newcomer")
"""


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worked example: a file among the families is a family, and its checkpoints have a plan."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "newcomer.py").write_text(NEW_FAMILY)
    config = json.loads((oracle_dir("olmoe") / "config.json").read_text()) | {"model_type": "newcomer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    family.names.cache_clear()
    try:
        spec = load_spec(tmp_path)
        assert spec.family == "newcomer" and spec.n_experts == config["num_experts"]
        assert plan_container(spec, PRECISIONS["int4"]).experts
    finally:
        family.names.cache_clear()
