"""Warm sets: the named memory of a group that has ended, kept under its model's name until the next start adopts it.

``colibri-up --stop --keep-warm`` renames the files of the run (``keep``), a start renames them to its own run (``adopt``). What
a group left that was killed as a whole counts like a warm set for the next start of the same model and is removed by any other.
Of other users' files nothing is believed and nothing touched. The services look into the files themselves
(``shared/memory/named_file.py``): here they are only counted, named and removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from native.library import NativeError
from shared.memory.huge_pages import candidate_dirs
from shared.memory.named_file import (
    FINGERPRINT,
    KINDS,
    Found,
    Unfit,
    is_in_use,
    open_own_file,
    parse_name,
    read_found,
    run_path,
    warm_path,
    write_label,
)
from shared.memory.segments import is_run_alive


@dataclass
class WarmSet:
    """Files of one model in one directory. ``run_id``: of a group that died; empty for a set that was kept."""

    directory: Path
    fingerprint: str
    run_id: str = ""
    files: dict[str, Path] = field(default_factory=dict)
    n_bytes: int = 0
    """Memory in use, holes not counted."""
    kept_at: int = 0
    label: str = ""

    @property
    def is_kept(self) -> bool:
        return not self.run_id

    def describe(self) -> str:
        """One line for people."""
        name = self.label or self.fingerprint
        size = (
            f"{self.n_bytes / (1 << 30):.1f} GiB" if self.n_bytes >= 1 << 30 else f"{self.n_bytes / (1 << 20):.0f} MiB"
        )
        if not self.is_kept:
            return f"{size} in {self.directory} left by run {self.run_id} of model {name}, which was killed"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.kept_at)) if self.kept_at else "an unknown time"
        return f"{size} in {self.directory} kept warm for model {name} since {since}"


def known_dirs(huge_dir: str) -> list[Path]:
    """Where warm sets may lie: the directory that was asked for, and all that could give huge pages."""
    asked = [] if huge_dir in ("auto", "off") else [Path(os.path.expanduser(huge_dir)).absolute()]
    return list(dict.fromkeys([*asked, *candidate_dirs()]))


def find_sets(directories: Iterable[Path]) -> list[WarmSet]:
    """All sets of this user that no process uses, kept ones first, the oldest first. Files without a use are removed."""
    found: dict[tuple[Path, str, str], WarmSet] = {}
    for directory in directories:
        for path in _files(directory):
            name = parse_name(path.name)
            if name is None or name.uid != os.getuid() or (name.run_id and is_run_alive(name.run_id)):
                continue
            header = _usable(path)
            if header is None:
                continue
            key = (directory, header.head.fingerprint, name.run_id)
            warm = found.setdefault(key, WarmSet(directory, header.head.fingerprint, name.run_id))
            warm.files[name.kind] = path
            with contextlib.suppress(FileNotFoundError):
                warm.n_bytes += path.stat().st_blocks * 512
            warm.kept_at = warm.kept_at or header.kept_at
            warm.label = warm.label or header.label
    return sorted(found.values(), key=lambda warm: (not warm.is_kept, warm.kept_at, str(warm.directory), warm.run_id))


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.glob(f"colibri-{os.getuid()}-*+*"))
    except OSError:
        return []


def _usable(path: Path) -> Found | None:
    """The header of a file that nobody uses. What is ours and can never be used is removed; None."""
    try:
        os.close(open_own_file(path, os.O_RDONLY))
    except (Unfit, FileNotFoundError):
        _remove_if_own_link(path)
        return None
    if is_in_use(path):
        return None
    try:
        found = read_found(path)
        name = parse_name(path.name)
        assert name is not None
        if name.kind == found.head.kind and name.fingerprint in ("", found.head.fingerprint) and found.is_usable:
            return found
    except (Unfit, FileNotFoundError, OSError):
        pass
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _remove_if_own_link(path: Path) -> None:
    """A link or a file with wrong rights under one of our names: gone if it is ours, left alone if it is another user's."""
    with contextlib.suppress(OSError):
        if path.lstat().st_uid == os.getuid():
            path.unlink()


def adopt(warm: WarmSet, run_id: str) -> None:
    """The files belong to this run from now on; what another start has taken meanwhile is missing."""
    for kind, path in warm.files.items():
        with contextlib.suppress(OSError):
            path.rename(run_path(warm.directory, run_id, kind))


def keep(directory: Path, run_id: str, fingerprint: str, label: str) -> list[str]:
    """Renames what a run that has ended leaves; returns the kinds kept. A set that the model had before gives way."""
    kept: list[str] = []
    if not FINGERPRINT.fullmatch(fingerprint):
        return kept
    for kind in KINDS:
        path = run_path(directory, run_id, kind)
        with contextlib.suppress(Unfit, OSError, NativeError):
            if read_found(path).is_usable:
                write_label(path, label, int(time.time()))
                path.rename(warm_path(directory, fingerprint, kind))
                kept.append(kind)
    return kept


def drop(warm: WarmSet) -> None:
    """The memory goes back to the system."""
    for path in warm.files.values():
        with contextlib.suppress(OSError):
            path.unlink()


def drop_run(directory: Path, run_id: str) -> None:
    """Removes what a run has in the directory."""
    for kind in KINDS:
        with contextlib.suppress(OSError):
            run_path(directory, run_id, kind).unlink()
