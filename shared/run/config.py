"""Settings (what the user chose) and GroupConfig (what a running group is). Standard library and msgspec alone.

``colibri-up`` resolves the TOML file and the command line once (``load_settings``), computes the rest and writes the
frozen ``group.json`` into the run directory; services get its path and nothing else, and never change it. What a service
learns at run time goes into its ``Ready``.
"""

from __future__ import annotations

import fcntl
import os
import re
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ConfigError
from shared.files import read_file
from shared.kept import replace_file

FROZEN_NAME = "group.json"
BUDGET_NAME = "budget"
"""In the run directory: the memory budget, once it was changed while the group runs."""
LOCK_NAME = "lock"
"""In the run directory: held by colibri-up and the keeper as long as the group lives."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be chosen, in a TOML file or as a flag of ``colibri-up``. Zero or empty means: choose well for me."""

    model: str = ""
    """Model directory (a container); empty: the embedded model."""
    run_dir: str = ""
    """Where this group keeps sockets, logs and its frozen configuration; empty: the user's default directory."""
    host: str = "127.0.0.1"
    """Address the HTTP server listens on."""
    port: int = 8484
    """Port the HTTP server listens on; 0: any free one."""
    ram_bytes: int = 0
    """Memory for the whole group; 0: a share of what is available now. In TOML and as flag ``ram``, e.g. "12G"."""
    slots: Literal["all"] | int = 0
    """Expert slots in all, at least gate_k + 1; 0: what is left of the memory; "all": the same, and say what is missing."""
    threads: int = 0
    """Compute threads; 0: the CPUs this process may use."""
    kv_dtype: Literal["f32", "bf16"] = "bf16"
    """Precision of the KV cache."""
    prefill_chunk: int = 0
    """Prompt tokens per step; 0: as many as the memory allows, within reason."""
    pilot: Literal["on", "off", "random"] = "on"
    """Prefetch of experts: predicted, none, or (for tests) at random. Never changes the text."""
    cache_policy: Literal["next-use", "lfu", "slru", "lru"] = "next-use"
    """Which expert leaves its slot for another (docs/store.md). Never changes the text."""
    usage_history: bool = True
    """Whether the experts' usage is remembered from run to run, to fill the slots early. Never changes the text."""
    draft: Literal["auto", "off"] | int = "auto"
    """Speculative tokens per step. Never changes the text."""
    max_context: int = 0
    """Tokens per sequence, prompt and answer; 0: the model's own limit, if memory allows."""
    max_sequences: int = 0
    """Sequences that are computed at the same time; more wait; 0: 4."""
    record_logits: str = ""
    """For tests: append the logits of every step to this file."""
    record_routing: str = ""
    """Append the gates' choices to this trace file, for ``colibri cache-sim``."""
    direct_io: Literal["auto", "on", "off"] = "auto"
    """Whether experts are read past the page cache."""
    embedding: Literal["auto", "memory", "disk"] = "auto"
    """Where the embedding table lies; auto: on disk where its memory is better spent on expert slots."""
    mirror: tuple[str, ...] = ()
    """Directories on other drives that hold copies of expert files (docs/store.md)."""
    huge_dir: str = "auto"
    """Directory in a memory file system where weights survive a restart; "auto": one that gives huge pages; "off": none."""
    transport: Literal["auto", "zmq", "datagram"] = "auto"
    """How the engine's services reach each other (``shared.wire.links``); auto: datagrams on one host."""
    heartbeat_s: float = 1.0
    """Seconds between heartbeats."""
    drain_s: float = 30.0
    """Seconds that running requests get to finish when the group stops."""
    stall_s: float = 300.0
    """Seconds one stage of a service may last before the group calls it stalled; reading from a slow disk is no stall."""


class Line(msgspec.Struct, frozen=True):
    """One allocation of the ledger. ``owner`` is the process that holds it, or "shared" for segments that several map."""

    owner: str
    what: str
    bytes: int


class RequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model's makers give a request that does not say it. ``max_tokens`` None: all that the context leaves."""

    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    """By the names of the fields of ``Sampling``; those that are missing have no default of the model's."""
    max_tokens: int | None = None


class GroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A running group, complete: every process of it reads exactly this."""

    run_id: str
    run_dir: str
    model_dir: str
    host: str
    port: int
    ram_bytes: int
    n_slots: int
    slot_bytes: int
    n_threads: int
    kv_dtype: Literal["f32", "bf16"]
    prefill_chunk: int
    pilot: Literal["on", "off", "random"]
    n_drafts: int
    max_sequences: int
    max_context: int
    n_kv_blocks: int
    n_frames: int
    logit_rows: int
    record_logits: str | None = None
    record_routing: str | None = None
    cache_policy: Literal["next-use", "lfu", "slru", "lru"] = "next-use"
    usage_path: str | None = None
    """The usage history of this model; None: none is read or written."""
    model_name: str = ""
    """The name under which the API offers the model."""
    defaults: RequestDefaults = msgspec.field(default_factory=RequestDefaults)
    """Of the model, for requests."""
    fingerprint: str = ""
    """Of the container: KV blocks and slots of another model are never reused."""
    heartbeat_s: float = 1.0
    drain_s: float = 30.0
    stall_s: float = 300.0
    transport: Literal["auto", "zmq", "datagram"] = "auto"
    direct_io: Literal["auto", "on", "off"] = "auto"
    """off also where measuring or the kind of file system spoke against it; then ``read_note`` says why."""
    read_engine: Literal["threads", "uring"] = "threads"
    read_depth: int = 4
    """Pieces in flight."""
    read_piece_bytes: int = 2 << 20
    read_note: str = ""
    drive_bytes_s: int = 0
    """What the model's drive was measured to give; 0: not measured."""
    reserved_slots: int = 0
    """As many slots have an address: what the budget may be raised to while the group runs. 0: ``n_slots``."""
    n_experts: int = 0
    """Experts of all layers in use: more slots than that are of no use."""
    memory: tuple[Line, ...] = ()
    """The ledger without the expert slots."""
    mirrors: tuple[str, ...] = ()
    """Directories with further copies of expert files."""
    huge_dir: str | None = None
    """Directory of the named memory; None: every process keeps its weights in private memory."""
    embedding_on_disk: bool = False
    """attention reads the embedding's rows from the container when it needs them."""


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B?|(B))?\s*", re.IGNORECASE | re.ASCII)
_FACTORS = {"K": 10, "M": 20, "G": 30, "T": 40}
_MAX_BYTES = 1 << 60
_LEAST_BYTES = 1 << 20
"""A smaller number without a unit is asked back: nobody means 24 bytes."""


def parse_bytes(text: str | int, key: str) -> int:
    """``"12G"``, ``"1.5GiB"``, ``"800M"``, or a number of bytes from a MiB on; K, M, G, T are powers of 1024.

    0 is 0. Raises ConfigError with ``key``, the setting or flag, in front: not a size, a small number that lacks a unit, or
    more than there is.
    """
    match = _SIZE.fullmatch(str(text)) if isinstance(text, (str, int)) and not isinstance(text, bool) else None
    if match is None:
        if isinstance(text, int) and text < 0:
            raise ConfigError(f"{key} = {text}: allowed are 0 to {_MAX_BYTES:,} bytes, for example 12G or 800M")
        raise ConfigError(f"{key}: {text!r} is not a size; write for example 12G or 800M")
    number = Decimal(match[1])
    has_unit = bool(match[2] or match[3])
    n_bytes = number * (1 << _FACTORS[match[2].upper()]) if match[2] else number
    if not has_unit and 0 < n_bytes < _LEAST_BYTES:
        raise ConfigError(
            f"{key}: {match[1]} bytes? Did you mean {match[1]}{'G' if number < 1024 else 'M'}? A size has a unit, "
            f"for example 12G or 800M; write {match[1]}B if bytes are meant."
        )
    if 0 < n_bytes < 1 or n_bytes > _MAX_BYTES:
        raise ConfigError(f"{key} = {text}: allowed are 0 to {_MAX_BYTES:,} bytes, for example 12G or 800M")
    return int(n_bytes)


def parse_draft(text: str | int) -> str | int:
    """``auto``, ``off`` or a number of tokens."""
    if isinstance(text, str) and text not in ("auto", "off"):
        if not text.isdecimal():
            raise ConfigError(f"draft: {text!r} is neither auto, off nor a number of tokens")
        return int(text)
    return text


def parse_slots(text: str | int) -> str | int:
    """``all`` or a number."""
    if isinstance(text, str) and text != "all":
        if not text.isdecimal():
            raise ConfigError(f"slots: {text!r} is neither all nor a number of slots")
        return int(text)
    return text


_TOML_LIMIT_BYTES = 1 << 20
_FROZEN_LIMIT_BYTES = 16 << 20

_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "ram_bytes": (0, 1 << 60),
    "slots": (0, 1 << 24),
    "threads": (0, 1024),
    "prefill_chunk": (0, 1 << 16),
    "draft": (0, 8),
    "max_context": (0, 1 << 24),
    "max_sequences": (0, 256),
    "heartbeat_s": (0.05, 60),
    "drain_s": (0, 3600),
    "stall_s": (1, 86400),
}


def load_settings(toml_path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """The TOML file, then ``overrides`` (None values mean: not given). ConfigError names the key and what is allowed."""
    values: dict[str, Any] = {}
    if toml_path is not None:
        try:
            values = tomllib.loads(read_file(toml_path, _TOML_LIMIT_BYTES).decode("utf-8"))
        except OSError as error:
            raise ConfigError(f"configuration file {toml_path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"configuration file {toml_path}: not valid TOML: {error}") from None
    values |= {key: value for key, value in (overrides or {}).items() if value is not None}
    if "ram" in values:
        values["ram_bytes"] = parse_bytes(values.pop("ram"), "ram")
    if "draft" in values:
        values["draft"] = parse_draft(values["draft"])
    if "slots" in values:
        values["slots"] = parse_slots(values["slots"])
    allowed = [("ram" if name == "ram_bytes" else name) for name in Settings.__struct_fields__]
    for key in values:
        if key not in Settings.__struct_fields__:
            raise ConfigError(f"unknown setting {key!r}; the settings are: {', '.join(allowed)}")
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_our_words(str(error))) from None
    for key, (low, high) in _RANGES.items():
        value = getattr(settings, key)
        if isinstance(value, (int, float)) and not low <= value <= high:
            name = "ram" if key == "ram_bytes" else key
            raise ConfigError(f"{name} = {value}: allowed are {low:,} to {high:,}")
    return settings


def _in_our_words(text: str) -> str:
    """msgspec's sentence, with the key in front and the allowed values of an enumeration."""
    match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", text)
    if match is None:
        return text
    problem, key = match.groups()
    hint = str(Settings.__annotations__.get(key, ""))
    choices = re.findall(r"""['"]([\w-]+)['"]""", hint)
    allowed = f"; allowed are {', '.join(choices)}{' or a number' if 'int' in hint else ''}" if choices else ""
    return f"{key}: {problem}{allowed}"


def freeze(config: GroupConfig, path: Path) -> None:
    """Writes the configuration, readable by the user alone, at once or not at all."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")


def load_frozen(path: str | Path) -> GroupConfig:
    """The configuration of a running group. Raises ConfigError."""
    try:
        return msgspec.json.decode(read_file(path, _FROZEN_LIMIT_BYTES), type=GroupConfig)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; is the group still running?") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} was not written by this version of colibri-up: {error}") from None


def is_locked(run_dir: Path) -> bool:
    """Whether a group lives in this run directory, or is about to."""
    try:
        fd = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_budget(config: GroupConfig) -> int:
    """The group's budget in bytes: what it was started with, or what ``colibri ram`` made of it since."""
    try:
        return int((Path(config.run_dir) / BUDGET_NAME).read_text())
    except (OSError, ValueError):
        return config.ram_bytes


def write_budget(config: GroupConfig, n_bytes: int) -> None:
    """Another budget from now on, also for a service that is started again."""
    path = Path(config.run_dir) / BUDGET_NAME
    new = path.with_name(f".{BUDGET_NAME}")
    new.write_text(str(n_bytes))
    new.replace(path)
