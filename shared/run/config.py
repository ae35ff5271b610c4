"""Settings (what the user chose) and GroupConfig (what a running group is). Standard library and msgspec alone.

``colibri-up`` resolves the TOML file and the command line once (``load_settings``), computes the rest and writes the
frozen ``group.json`` into the run directory; services get its path and nothing else, and never change it. What a service
learns at run time goes into its ``Ready``.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shared.errors import ConfigError
from shared.files import read_file
from shared.kept import replace_file
from shared.locks import try_lock
from shared.run.settings import Setting, checked, template

FROZEN_NAME = "group.json"
BUDGET_NAME = "budget"
"""In the run directory: the memory budget, once it was changed while the group runs."""
LOCK_NAME = "lock"
"""In the run directory: held by colibri-up and the keeper as long as the group lives."""


class Passed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that the services get as they were chosen: fields of ``Settings`` and of ``GroupConfig``."""

    kv_dtype: Annotated[
        Literal["f32", "bf16", "int8"],
        Setting("precision of the KV cache; int8: half the bytes of bf16"),
    ] = "bf16"
    pilot: Annotated[
        Literal["on", "off", "random"],
        Setting("prefetch of experts: predicted, none, or (for tests) at random; never changes the text"),
    ] = "on"
    cache_policy: Annotated[
        Literal["next-use", "lfu", "slru", "lru"],
        Setting("which expert leaves its slot for another (docs/store.md); never changes the text"),
    ] = "next-use"
    transport: Annotated[
        Literal["auto", "zmq", "datagram"],
        Setting("how the engine's services reach each other; auto: datagrams on one host; never changes the text"),
    ] = "auto"
    heartbeat_s: Annotated[float, Setting("seconds between heartbeats", low=0.05, high=60, has_flag=False)] = 1.0
    drain_s: Annotated[
        float, Setting("seconds that running requests get to finish at a stop", low=0, high=3600, has_flag=False)
    ] = 30.0
    stall_s: Annotated[
        float,
        Setting(
            "seconds one stage of a service may last before it is called stalled; reading from a slow disk is no stall",
            low=1, high=86_400, has_flag=False,
        ),
    ] = 300.0  # fmt: skip


class Settings(Passed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be chosen, in a TOML file or as a flag of ``colibri-up``. Zero or empty means: choose well for me.

    A declaration is all a setting needs: flag, help, checks, and ``deploy/colibri.toml`` (``make template``) follow from it.
    """

    model: Annotated[str, Setting("model directory (a container); empty: the embedded model", has_flag=False)] = ""
    run_dir: Annotated[
        str, Setting("sockets, logs and frozen configuration of this group; empty: one per user", metavar="DIR")
    ] = ""
    host: Annotated[str, Setting("address the HTTP server listens on", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, Setting("port the HTTP server listens on; 0: any free one", low=0, high=65_535)] = 8484
    ram_bytes: Annotated[
        int,
        Setting(
            'memory for the whole group, e.g. "12G"; 0: a share of what is available', is_size=True, metavar="SIZE"
        ),
    ] = 0
    slots: Annotated[
        Literal["all"] | int,
        Setting(
            "expert slots in all, at least gate_k + 1; 0: as many as fit; all: the same, and say what is missing",
            low=0, high=1 << 24,
        ),
    ] = 0  # fmt: skip
    threads: Annotated[int, Setting("compute threads; 0: the usable CPUs", low=0, high=1024)] = 0
    prefill_chunk: Annotated[
        int, Setting("prompt tokens per step; 0: as many as the memory allows, within reason", low=0, high=1 << 16)
    ] = 0
    usage_history: Annotated[
        bool,
        Setting("remember from run to run which experts are used, to fill the slots early; never changes the text"),
    ] = True
    draft: Annotated[
        Literal["auto", "off"] | int, Setting("speculative tokens per step; never changes the text", low=0, high=8)
    ] = "auto"
    max_context: Annotated[
        int,
        Setting("tokens per sequence, prompt and answer; 0: the model's limit, if memory allows", low=0, high=1 << 24),
    ] = 0
    max_sequences: Annotated[
        int, Setting("sequences computed at the same time, more wait; 0: 4", low=0, high=256)
    ] = 0  # fmt: skip
    record_logits: Annotated[
        str, Setting("append the logits of every step to this file (for tests)", metavar="FILE")
    ] = ""
    record_routing: Annotated[
        str, Setting("append which experts are chosen to this file, for `colibri cache-sim`", metavar="FILE")
    ] = ""
    direct_io: Annotated[
        Literal["auto", "on", "off"], Setting("read experts past the page cache", has_flag=False)
    ] = "auto"  # fmt: skip
    embedding: Annotated[
        Literal["auto", "memory", "disk"],
        Setting("where the embedding table lies; auto: on disk where slots need the memory more", has_flag=False),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "dense"],
        Setting(
            "dense: attend to all keys where a container lacks its sparse indexer, also beyond what that would choose from"
        ),
    ] = "auto"
    mirror: Annotated[
        tuple[str, ...],
        Setting("also read experts from the copies in this directory, on another drive (`colibri mirror stage`); repeatable",
                metavar="DIR"),
    ] = ()  # fmt: skip
    huge_dir: Annotated[
        str,
        Setting("where weights survive a restart: a directory of a memory file system, auto (one with huge pages) or off",
                metavar="DIR|auto|off"),
    ] = "auto"  # fmt: skip


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


class GroupConfig(Passed, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    prefill_chunk: int
    n_drafts: int
    max_sequences: int
    max_context: int
    n_kv_blocks: int
    n_frames: int
    logit_rows: int
    record_logits: str | None = None
    record_routing: str | None = None
    usage_path: str | None = None
    """The usage history of this model; None: none is read or written."""
    model_name: str = ""
    """The name under which the API offers the model."""
    defaults: RequestDefaults = msgspec.field(default_factory=RequestDefaults)
    """Of the model, for requests."""
    fingerprint: str = ""
    """Of the container: KV blocks and slots of another model are never reused."""
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


_TOML_LIMIT_BYTES = 1 << 20
_FROZEN_LIMIT_BYTES = 16 << 20
_BUDGET_LIMIT_BYTES = 1 << 10


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
    return Settings(**checked(Settings, values, overrides or {}))


def passed_on(settings: Settings) -> dict[str, Any]:
    """The fields of a ``GroupConfig`` that are settings as they were chosen."""
    return {name: getattr(settings, name) for name in Passed.__struct_fields__}


def settings_template() -> str:
    """The text of ``deploy/colibri.toml``."""
    return template(
        Settings,
        "All settings of colibri-up with their defaults. Copy, uncomment, change, and start with `colibri-up --config FILE`.\n"
        "Flags win over this file. An unknown key is an error. Written by `make template` from shared/run/config.py.",
    )


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
    """Whether a group lives in this run directory, or is about to. Raises LocksMissing."""
    path = run_dir / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(fd, path, is_shared=True)
    finally:
        os.close(fd)


def read_budget(config: GroupConfig) -> int:
    """The group's budget in bytes: what it was started with, or what ``colibri ram`` made of it since."""
    try:
        return int(read_file(Path(config.run_dir) / BUDGET_NAME, _BUDGET_LIMIT_BYTES))
    except (OSError, ValueError):
        return config.ram_bytes


def write_budget(config: GroupConfig, n_bytes: int) -> None:
    """Another budget from now on, also for a service that is started again."""
    replace_file(Path(config.run_dir) / BUDGET_NAME, str(n_bytes).encode())


if __name__ == "__main__":  # make template
    replace_file(Path("deploy/colibri.toml"), settings_template().encode(), mode=0o644)
