"""Copies of a container's expert files in other directories, usually on other drives: the manifest, and what it may say.

A *mirror* holds some or all of ``experts-LLL.safetensors`` under the same names, with the same headers and offsets. Files made
by ``colibri mirror stage`` may lack records (holes in a sparse file); ``mirror.json`` says which are there. A directory
without ``mirror.json`` is one to which expert files were moved: each file that is there counts as whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path

import msgspec

from shared.container.format import Version
from shared.errors import ContainerError
from shared.files import read_file, strict_json
from shared.kept import replace_file

MANIFEST_NAME = "mirror.json"
MANIFEST_VERSION = 1
_MANIFEST_LIMIT_BYTES = 16 << 20


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its size, and the records it holds as hex digits, bit ``e % 8`` of byte ``e // 8``; None: all."""

    bytes: int
    held: str | None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``mirror.json``."""

    format_version: int
    fingerprint: str
    files: dict[str, ManifestFile]


class FileFacts(msgspec.Struct, frozen=True):
    """What the container says about one of its expert files."""

    n_bytes: int
    n_records: int


Held = frozenset[int] | None
"""The records of a file that a directory holds; None: all."""


def pack_held(held: Held, n_records: int) -> str | None:
    """The manifest's form of a set of records."""
    if held is None or len(held) == n_records:
        return None
    bits = bytearray(-(-n_records // 8))
    for record in held:
        bits[record // 8] |= 1 << record % 8
    return bits.hex()


def unpack_held(text: str | None, n_records: int) -> Held:
    """The set a manifest names. Raises ValueError when it is not of ``n_records`` records."""
    if text is None:
        return None
    bits = bytes.fromhex(text)
    found = frozenset(i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1)
    if len(bits) != -(-n_records // 8) or any(record >= n_records for record in found):
        raise ValueError(f"not a set of {n_records} records")
    return found


def read_manifest(directory: Path, fingerprint: str, files: Mapping[str, FileFacts]) -> Manifest | None:
    """The manifest of a mirror, checked against its container; None when there is none. Raises ContainerError.

    Every name in what is returned is one of ``files``, every set fits that file: nothing in it reaches the disk unchecked.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = read_file(path, _MANIFEST_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ContainerError(f"{path} can't be read: {error.strerror}.") from None
    again = f"Run `colibri mirror stage MODEL {directory}` into an empty directory."
    try:
        version = msgspec.json.decode(raw, type=Version).format_version
        if version != MANIFEST_VERSION:
            raise ContainerError(
                f"{path} has format version {version!r}, this program reads {MANIFEST_VERSION}. {again}"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
        strict_json(raw)  # msgspec takes the last of two keys
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ContainerError(f"{path} is malformed ({error}). {again}") from None
    if manifest.fingerprint != fingerprint:
        raise ContainerError(
            f"{directory} is a mirror of the container with fingerprint {manifest.fingerprint!r}, this model has "
            f"{fingerprint!r}. Name the right directory, or: {again}"
        )
    for name, file in manifest.files.items():
        if name not in files:
            raise ContainerError(f"{path} lists {name!r}, which this model does not have. {again}")
        if file.bytes != files[name].n_bytes:
            raise ContainerError(
                f"{path}: {name} should have {files[name].n_bytes:,} bytes, it is listed with {file.bytes:,}. {again}"
            )
        try:
            unpack_held(file.held, files[name].n_records)
        except ValueError:
            raise ContainerError(
                f"{path}: the records listed for {name} are not a set of {files[name].n_records}. {again}"
            ) from None
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replaces the manifest at once or not at all, on disk when it returns. Raises OSError."""
    replace_file(
        directory / MANIFEST_NAME,
        msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n",
        mode=0o666,
        is_durable=True,
        by_way_of=directory / f"{MANIFEST_NAME}.partial",
    )


def held_files(directory: Path, model_dir: Path, fingerprint: str, files: Mapping[str, FileFacts]) -> dict[str, Held]:
    """What ``directory`` holds of the container in ``model_dir``: file -> records. ContainerError when it is no mirror."""
    if not directory.is_dir():
        raise ContainerError(
            f"the mirror {directory} is not a directory; is its drive mounted? Mount it, or start without --mirror {directory}."
        )
    if os.path.samefile(directory, model_dir):
        raise ContainerError(f"the mirror {directory} is the model directory itself. Leave it out.")
    manifest = read_manifest(directory, fingerprint, files)
    if manifest is not None:
        return {name: unpack_held(file.held, files[name].n_records) for name, file in manifest.files.items()}
    held: dict[str, Held] = {name: None for name in files if os.path.lexists(directory / name)}
    if not held:
        raise ContainerError(
            f"{directory} is no mirror of {model_dir}: it has neither {MANIFEST_NAME} nor one of the model's expert files. "
            f"Run: colibri mirror stage {model_dir} {directory}"
        )
    return held


def drive_of(path: Path | str) -> int:
    """A number that two paths share exactly when their bytes come from one drive, as far as the kernel tells: partitions of
    one disk count as one."""
    device = os.stat(path).st_dev
    try:
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        if (block / "partition").exists():
            major, minor = (block.parent / "dev").read_text().split(":")
            return os.makedev(int(major), int(minor))
    except (OSError, ValueError):  # no block device of its own (overlay, network), or no /sys
        pass
    return device


def number_drives(places: Sequence[Path]) -> tuple[int, ...]:
    """For each directory the number of its drive, from 0 in order of appearance."""
    devices = [drive_of(place) for place in places]
    numbers = {device: i for i, device in enumerate(dict.fromkeys(devices))}
    return tuple(numbers[device] for device in devices)


def drives_words(n_drives: int, bytes_s: float) -> str:
    """What mirrors bring, for people; ``bytes_s``: of all together, 0 when not known."""
    if n_drives == 1:
        return "the same drive, that is no faster"
    return f"{n_drives} drives" + (f", {bytes_s / 1e9:.2f} GB/s together" if bytes_s else "")


def total_rate(rates: Sequence[float], shares: Mapping[frozenset[int], float]) -> float:
    """What drives give together when reads are divided as well as can be.

    ``shares``: drives that hold a copy -> share of the reads that find it there, 1 in all. Every set of drives must do alone
    what lies nowhere else, so the tightest set decides (max-flow, min-cut).
    """
    drives = range(len(rates))
    sets = chain.from_iterable(combinations(drives, n) for n in range(1, len(rates) + 1))
    limits = []
    for among in map(frozenset, sets):
        alone = sum(share for where, share in shares.items() if where <= among)
        if alone > 0:
            limits.append(sum(rates[drive] for drive in among) / alone)
    return min(limits, default=sum(rates))
