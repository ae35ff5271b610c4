"""One example of every message with its bytes. ``make schema`` (this file as a script) rewrites ``messages.json``.

The bytes of a schema version never change; fields are appended, with defaults. Rewriting therefore fails unless
``SCHEMA_VERSION`` was raised, or only new messages came, or only trailing fields that a decoder may miss were added.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import msgspec

import shared.messages
from shared.messages import SCHEMA_VERSION
from shared.messages.base import Msg

PATH = Path(__file__).parent / "messages.json"


def all_structs() -> dict[str, type[Msg]]:
    """Every struct of ``shared.messages`` as ``module.Name``, nested ones included."""
    found: dict[str, type[Msg]] = {}
    for module_info in pkgutil.iter_modules(shared.messages.__path__):
        module = importlib.import_module(f"shared.messages.{module_info.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, Msg) and value is not Msg and value.__module__ == module.__name__:
                found[f"{module_info.name}.{name}"] = value
    return found


def tag_of(struct: type[Msg]) -> str | None:
    """The tag, None for a struct that travels only inside another."""
    tag = struct.__struct_config__.tag
    return tag if isinstance(tag, str) else None


def all_messages() -> dict[str, type[Msg]]:
    return {name: struct for name, struct in all_structs().items() if tag_of(struct)}


def example_of(struct: type[Msg]) -> Msg:
    """An instance whose fields all differ, so that two exchanged fields change the bytes."""
    counter = iter(range(1, 1000))
    return struct(**{f.name: _value(f.type, f.name, counter) for f in msgspec.inspect.type_info(struct).fields})  # type: ignore[attr-defined]


def _value(kind: Any, name: str, counter: Any) -> Any:
    info = msgspec.inspect
    if isinstance(kind, info.IntType):
        return next(counter)
    if isinstance(kind, info.FloatType):
        return next(counter) + 0.5
    if isinstance(kind, info.BoolType):
        return next(counter) % 2 == 0
    if isinstance(kind, info.EnumType):
        members = list(kind.cls)
        return members[next(counter) % len(members)]
    if isinstance(kind, info.StrType):
        return f"{name}{next(counter)}"
    if isinstance(kind, info.BytesType):
        return f"{name}{next(counter)}".encode()
    if isinstance(kind, info.VarTupleType):
        return (_value(kind.item_type, name, counter), _value(kind.item_type, name, counter))
    if isinstance(kind, info.TupleType):
        return tuple(_value(item, name, counter) for item in kind.item_types)
    if isinstance(kind, info.UnionType):
        return _value(next(item for item in kind.types if not isinstance(item, info.NoneType)), name, counter)
    if isinstance(kind, info.StructType):
        return kind.cls(**{f.name: _value(f.type, f.name, counter) for f in kind.fields})
    raise TypeError(f"{name}: {kind}")


def current() -> dict[str, str]:
    """message -> hex of its example."""
    return {name: msgspec.msgpack.encode(example_of(struct)).hex() for name, struct in sorted(all_messages().items())}


def stored() -> dict[str, Any]:
    return dict(json.loads(PATH.read_text())) if PATH.exists() else {"version": 0, "messages": {}}


def is_extension(name: str, old: str) -> bool:
    """Whether the new decoder still reads the old bytes, and old fields kept their places."""
    struct = all_messages()[name]
    try:
        msg = msgspec.msgpack.decode(bytes.fromhex(old), type=struct)
    except msgspec.MsgspecError:
        return False
    n_old = len(msgspec.msgpack.decode(bytes.fromhex(old)))
    return bool(
        msgspec.msgpack.decode(msgspec.msgpack.encode(msg))[:n_old] == msgspec.msgpack.decode(bytes.fromhex(old))
    )


def rewrite() -> str:
    """Writes the golden file; raises SystemExit when that would break the current version."""
    new, old = current(), stored()
    if old["version"] == SCHEMA_VERSION:
        broken = [name for name, hexed in old["messages"].items() if name not in new or not is_extension(name, hexed)]
        if broken:
            raise SystemExit(
                f"{', '.join(broken)} changed within schema version {SCHEMA_VERSION}. Raise SCHEMA_VERSION in "
                "shared/messages/__init__.py, or append fields with defaults only."
            )
    PATH.write_text(json.dumps({"version": SCHEMA_VERSION, "messages": new}, indent=1) + "\n")
    return f"{len(new)} messages of schema version {SCHEMA_VERSION} written to {PATH.name}"


if __name__ == "__main__":
    print(rewrite())
    sys.exit(0)
