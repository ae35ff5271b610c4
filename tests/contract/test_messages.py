"""What travels between processes: bytes that never change within a version, routes that are written down."""

from __future__ import annotations

import importlib
import itertools
import re

import msgpack
import msgspec
import pytest

from shared.messages import SCHEMA_VERSION
from shared.messages.base import Msg
from shared.wire.endpoints import SENDS_TO, SERVICES
from tests.contract import golden

MESSAGES = golden.all_messages()
ROLES = {
    "Gateway": "gateway",
    "Router": "router",
    "Attention": "attention",
    "ExpertIO": "expert_io",
    "Drafter": "drafter",
}
ROUTE = re.compile(r"([A-Z]\w+(?:(?:, | or )[A-Z]\w+)*) -> ([A-Z]\w+(?:(?:, | or | and )[A-Z]\w+)*)")
CLASSES = {
    "gateway": "services.gateway.service:GatewayService",
    "router": "services.router.service:RouterService",
    "attention": "services.attention.service:AttentionService",
    "expert_io": "services.expert_io.service:ExpertIoService",
    "drafter": "services.drafter.service:DrafterService",
}


def routes(struct: type[Msg]) -> list[tuple[set[str], set[str]]]:
    """[(senders, receivers)] from the first line(s) of the docstring."""
    text = (struct.__doc__ or "").split(":")[0].replace("\n", " ")
    found = []
    for senders, receivers in ROUTE.findall(text):
        found.append((set(re.split(r", | or | and ", senders)), set(re.split(r", | or | and ", receivers))))
    return found


def receives(service: str) -> tuple[type[Msg], ...]:
    module, name = CLASSES[service].split(":")
    return tuple(getattr(importlib.import_module(module), name).receives)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_bytes_are_those_of_this_schema_version(name: str) -> None:
    stored = golden.stored()
    assert stored["version"] == SCHEMA_VERSION, "run `make schema`"
    assert name in stored["messages"], f"{name} is new: run `make schema`"
    assert golden.current()[name] == stored["messages"][name], f"{name} changed: see `make schema`"


def test_no_message_disappeared() -> None:
    assert sorted(golden.stored()["messages"]) == sorted(MESSAGES)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_an_independent_library_reads_the_same(name: str) -> None:
    example = golden.example_of(MESSAGES[name])
    raw = msgspec.msgpack.encode(example)
    decoded = msgpack.unpackb(raw, strict_map_key=False)
    assert decoded[0] == golden.tag_of(MESSAGES[name])
    assert len(decoded) == 1 + len(MESSAGES[name].__struct_fields__)
    assert msgspec.msgpack.decode(raw, type=MESSAGES[name]) == example


def test_golden_bytes_notice_exchanged_fields() -> None:
    """The comparison can fail: every pair of neighbouring fields of the same type has different example values."""
    for name, struct in MESSAGES.items():
        fields = msgspec.to_builtins(golden.example_of(struct))[1:]
        for left, right in itertools.pairwise(fields):
            if type(left) is type(right) and not isinstance(left, bool):
                assert left != right, f"{name}: neighbours with equal examples"


def test_appending_within_a_version_is_allowed_and_changing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {name: msgspec.msgpack.encode(golden.example_of(struct)).hex() for name, struct in MESSAGES.items()}
    assert all(golden.is_extension(name, hexed) for name, hexed in old.items())

    class Swapped(Msg, tag="mixed", frozen=True, array_like=True, gc=False):
        layer: str
        step: int

    monkeypatch.setattr(golden, "all_messages", lambda: {"layer.Mixed": Swapped})
    assert not golden.is_extension("layer.Mixed", old["layer.Mixed"])


def test_every_struct_is_a_frozen_array_without_dict_payload() -> None:
    for name, struct in golden.all_structs().items():
        config = struct.__struct_config__
        assert config.frozen, name
        assert config.array_like, name
        assert not config.gc, name
        assert "dict" not in str(struct.__annotations__), name


def test_tags_are_unique() -> None:
    tags = [golden.tag_of(struct) for struct in MESSAGES.values()]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize("name", sorted(name for name in MESSAGES if not name.startswith("control.")))
def test_docstring_names_the_route_and_services_agree(name: str) -> None:
    struct = MESSAGES[name]
    found = routes(struct)
    assert found, f"{name}: the first docstring line must read 'Sender -> Receiver: ...'"
    for senders, receivers in found:
        assert senders <= set(ROLES), (name, senders)
        assert receivers <= set(ROLES), (name, receivers)
        for receiver in receivers:
            assert struct in receives(ROLES[receiver]), f"{receiver} does not list {name} in `receives`"
            for sender in senders - {receiver}:
                assert ROLES[receiver] in SENDS_TO[ROLES[sender]], f"{sender} has no socket to {receiver}"


@pytest.mark.parametrize("name", sorted(name for name in MESSAGES if name.startswith("control.")))
def test_control_messages_name_their_route(name: str) -> None:
    assert routes(MESSAGES[name]), name


@pytest.mark.parametrize("service", SERVICES)
def test_services_are_told_nothing_that_is_not_written_down(service: str) -> None:
    for struct in receives(service):
        receivers = {ROLES[receiver] for _, found in routes(struct) for receiver in found}
        assert service in receivers, f"{struct.__name__} says it goes to {sorted(receivers)}, {service} receives it"


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_layer_messages_are_small(name: str) -> None:
    if name.split(".")[0] in ("layer", "attention"):
        struct = MESSAGES[name]
        if "str" not in str(struct.__annotations__.values()):
            assert len(msgspec.msgpack.encode(golden.example_of(struct))) < 64
